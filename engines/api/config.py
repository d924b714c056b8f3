"""Settings of a teacher behind an OpenAI-style completions API. No torch here."""

from __future__ import annotations

from typing import ClassVar, Final, Literal, TypeAlias
from urllib.parse import urlsplit

import msgspec

from stillhouse.protocol.addresses import is_local
from stillhouse.protocol.settings import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Settings

Form: TypeAlias = Literal["auto", "prompt_logprobs", "echo"]
Send: TypeAlias = Literal["auto", "ids", "text"]
MILLION: Final = 1_000_000


class ApiConfig(Settings, frozen=True, kw_only=True):
    """A teacher that somebody else serves (`engines.api.scorer`)."""

    given_by: ClassVar[str] = "url"

    url: str = ""
    """Address with the version in it, e.g. https://api.fireworks.ai/inference/v1; requests go to URL/completions."""
    model: str = ""
    """Name of the model there. Empty: the only one that URL/models lists."""
    key_env: str = ""
    """Name of the environment variable that holds the bearer key. Empty: the API needs none."""
    form: Form = "auto"
    """How log-probs of a given text are asked for. prompt_logprobs: a key of vLLM's, whose answer names ids, and the
    likeliest tokens for teacher.top_k. echo: echo and logprobs, as SGLang, Fireworks and Together have them. auto: the
    first of them whose answer can be used."""
    send: Send = "auto"
    """ids: token ids, so that the API scores the very tokens that were sampled. text: for an API that takes no ids;
    where its tokens of the text are others, they are masked. auto: ids where the API takes them."""
    max_concurrent: PositiveInt = 16
    """Requests at one time, of each teacher."""
    timeout_s: PositiveFloat = 50.0
    """Longest time for one batch of requests, waits for rate limits and further tries included. Below buffer.lease_s,
    or what is late is asked and paid for twice."""
    budget_tokens: NonNegativeInt = 0
    """Most tokens that the run sends, over all starts; then it ends with a checkpoint. A growing rollout is sent whole
    for each segment. 0: no limit."""
    price: NonNegativeFloat = 0.0
    """Money for a million tokens, in any currency."""
    budget: NonNegativeFloat = 0.0
    """Most money that the run spends, by `price`; then it ends with a checkpoint. 0: no limit."""
    reference: str = ""
    """Folder with the same weights. At the start the API's log-probs of one text must be those that they give, computed
    here on the CPU. Empty: they are not compared."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.url:
            for field in msgspec.structs.fields(type(self)):
                if (got := getattr(self, field.name)) != field.default:
                    raise ValueError(f"{field.name}: got {got!r} without api.url, expected an address, too")
            return
        parts = urlsplit(self.url)
        plain = bool(parts.hostname) and not (parts.query or parts.fragment or "@" in self.url)
        if parts.scheme not in ("http", "https") or not plain:
            shown = self.url.partition("?")[0] if "@" not in self.url else "an address with a password"
            raise ValueError(f"url: got {shown!r}, expected http(s)://HOST/v1; a key goes into the variable of key_env")
        if parts.scheme == "http" and not is_local(parts.hostname or ""):
            raise ValueError(
                f"url: got {self.url}, where the key and all texts can be read on the way; expected https://, or an "
                "address of this machine"
            )
        if self.budget and not self.price:
            raise ValueError(f"price: got 0 with budget = {self.budget:g}, expected the price of a million tokens")

    @property
    def most_tokens(self) -> float:
        """The tokens that both budgets allow."""
        by_money = self.budget / self.price * MILLION if self.budget else float("inf")
        return min(by_money, self.budget_tokens or float("inf"))
