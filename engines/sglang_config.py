"""Settings of SGLang servers as engines. No torch here, nor in anything that reads this."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

SwapMode: TypeAlias = Literal["in_place", "retract", "abort"]


class SGLangConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One SGLang server that a worker generates or scores on (`engines.sglang_engine`, `engines.sglang_scorer`)."""

    url: str = "http://127.0.0.1:30000"
    """Of the running server."""
    api_key_env: str = ""
    """Name of the environment variable that holds the server's bearer key; empty = it asks for none."""
    max_concurrent: int = 64
    """Requests at the server at one time; the rest wait here."""
    update_mode: SwapMode = "retract"
    """Running requests at a weight swap: `retract` recomputes their KV cache, `in_place` keeps it, `abort` ends them
    and sends what they have so far as new requests. The first two hold a request's tokens back from the swap until it
    ends, for only then does the server say which weights sampled which token; `abort` goes on streaming, and is what
    is done where a server does not say it at all."""
    connect_timeout_s: float = 60.0
    """Until the server answers and its features are known."""
    control_timeout_s: float = 10.0
    """Of one short call: health, abort, pause."""
    start_timeout_s: float = 30.0
    """How long a request is offered to a server that is away or refuses for load, before it fails."""
    stall_timeout_s: float = 60.0
    """Longest silence of a running request, or of a score, before it fails. A pause for new weights does not count."""
    pause_timeout_s: float = 120.0
    """Longest pause for new weights before the requests that wait for its end fail."""
    health_every_s: float = 1.0
    """Between two looks at /model_info."""
    breaker_failures: int = 3
    """Failures in a row after which nothing is sent until the server answers a health check again."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url = {self.url!r}; expected http://host:port of an SGLang server")
        for name in ("max_concurrent", "breaker_failures"):
            value: int = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} = {value}; expected at least 1")
        for name in (
            *("connect_timeout_s", "control_timeout_s", "start_timeout_s"),
            *("stall_timeout_s", "pause_timeout_s", "health_every_s"),
        ):
            seconds: float = getattr(self, name)
            if not seconds > 0:
                raise ValueError(f"{name} = {seconds}; expected more than 0 seconds")


def vocabulary_size(model_path: str | Path) -> int:
    """Rows of a checkpoint's embedding, from its config.json: ids from here on kill a server. Raises ValueError."""
    path = Path(model_path) / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: {error}; expected the config.json of a checkpoint folder") from error
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    if not isinstance(size, int):
        raise ValueError(f"{path} has no vocab_size; expected one at its top or in text_config")
    return size
