"""Settings of SGLang servers as engines, and of how they are started. No torch here, nor in what reads this."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

SwapMode: TypeAlias = Literal["in_place", "retract", "abort"]


class SGLangConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a worker talks to its SGLang server (`engines.sglang.engine`, `engines.sglang.scorer`)."""

    api_key_env: str = ""
    """Name of the environment variable that holds the bearer key of running servers (`urls`); empty = they ask for
    none. Servers that the launcher starts get a new key for each run by themselves."""
    max_concurrent: int = 64
    """Requests at the server at one time; the rest wait here."""
    stream_tokens: int = 16
    """Tokens per piece of a stream, where the server lets a request say so (else --stream-interval decides). What
    a piece costs the server hardly depends on its size, so one token at a time is dear."""
    update_mode: SwapMode = "abort"
    """Running requests at a weight swap. `abort`: they are ended, and go on as new ones that recompute their KV cache;
    `in_place`: the same, but they find their old KV cache again; `retract`: the server itself recomputes it, and what
    it samples behind the swap is held back until the request ends, for only then does it say which weights sampled
    which token (SGLang 0.5.21 and later). Log-probs are those that tokens were sampled with in any mode. `abort` costs
    the prefill of all running requests per version; `in_place` saves it where the objective weighs by importance
    ratios: behind a swap its tokens come from no single version. Not for max_staleness = 0."""
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
        for name in ("max_concurrent", "stream_tokens", "breaker_failures"):
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


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The SGLang servers that the launcher starts, one per worker. Not used with `urls`."""

    python: str = ""
    """Interpreter that has SGLang; empty: .venv-sglang of this project if there is one, else the one that runs this."""
    args: tuple[str, ...] = ()
    """Further arguments of sglang.launch_server, e.g. --mem-fraction-static,0.8; they win over ours."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where they run; auto: cuda when there is a GPU. With `urls` it is what the running servers say."""
    gpus: tuple[int, ...] = ()
    """GPUs of these servers, `tp` for each in turn; one GPU may be named several times. Empty: those that are left
    over, in order. Not used on a CPU."""
    tp: int = 1
    """GPUs per server (--tp-size)."""
    host: str = "127.0.0.1"
    """Address that they listen on."""
    port: int = 0
    """Of the first one, the next gets the next; 0: the system chooses."""
    start_timeout_s: float = 600.0
    """Until a started server answers; loading the model included."""

    def __post_init__(self) -> None:
        if self.tp < 1:
            raise ValueError(f"tp = {self.tp}; expected at least 1")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port = {self.port}; expected 0 to 65535 (0: the system chooses)")
        if any(gpu < 0 for gpu in self.gpus):
            raise ValueError(f"gpus = {list(self.gpus)}; expected numbers from 0 on, as in CUDA_VISIBLE_DEVICES")
        if not self.host:
            raise ValueError("host is empty; expected an address of this machine")
        if not self.start_timeout_s > 0:
            raise ValueError(f"start_timeout_s = {self.start_timeout_s}; expected more than 0 seconds")


def check_urls(urls: tuple[str, ...]) -> None:
    """Raises ValueError unless each is the base url of a server, and none comes twice."""
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"urls: got {url!r}; expected http://host:port of an SGLang server")
    if len(set(urls)) != len(urls):
        raise ValueError(f"urls: {', '.join(urls)}: one comes twice; each worker needs a server of its own")
