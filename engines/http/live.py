"""A generation request at a server: its checks, and its state while it runs. No I/O."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Protocol

from stillhouse.engines.base import EngineStats, GenerationRequest, check_prompt, check_top_ids_wanted
from stillhouse.engines.config import StudentLinkConfig
from stillhouse.engines.http.link import ServerLink
from stillhouse.engines.http.stream import FinishReason
from stillhouse.protocol.messages import WeightVersion


class Limits(Protocol):
    """What a server accepts."""

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer together."""
        ...

    @property
    def max_prompt(self) -> int:
        """Tokens of a prompt."""
        ...


def check_request(request: GenerationRequest, limits: Limits, vocab_size: int) -> None:
    """Raises ValueError for requests that the server would refuse or crash on."""
    check_prompt(request, vocab_size)
    name, length = request.request_id, len(request.prompt_ids)
    if length > limits.max_prompt:
        raise ValueError(f"request {name!r}: a prompt of {length} tokens; the server takes up to {limits.max_prompt}")
    outside = [token for token in request.stop_token_ids if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(f"request {name!r}: stop token {outside[0]} is outside the vocabulary [0, {vocab_size})")
    check_top_ids_wanted(request.sampling)
    if request.sampling.top_ids is not None and request.sampling.top_ids.k > vocab_size:
        raise ValueError(
            f"request {name!r}: the likeliest {request.sampling.top_ids.k} of {vocab_size} ids are asked for"
        )


def tokens_left(request: GenerationRequest, n_answered: int, limits: Limits) -> int:
    """Tokens that may still be sampled after `n_answered` tokens of the answer, which then belong to the prompt."""
    n_prompt = len(request.prompt_ids) + n_answered
    if n_prompt > limits.max_prompt:
        return 0
    return max(0, min(request.max_new_tokens - n_answered, limits.max_context - n_prompt))


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request, from submit to its last delta. Belongs to the event loop."""

    request: GenerationRequest
    ids: list[int] = field(default_factory=list[int])
    """Reported tokens of the answer; a restart continues after them."""
    cache_key: str = ""
    """In mode in_place: the label of the weights it began under, under which the prefix cache has its past."""
    task: asyncio.Task[None] | None = None
    adapter: str = ""
    """Name of the adapter that it was sent with; empty: none."""
    rid: str = ""
    """Request id at the server while a stream is open, else empty."""
    heard_s: float = 0.0
    aborting_since_s: float | None = None
    restarting: bool = False
    """Ended for new weights; continues as a new request after them."""
    given_up: str = ""
    """The reason why this engine cancelled it."""


def ended_anyway(live: LiveRequest, limits: Limits) -> FinishReason | None:
    """The finish reason of a request that was cut for new weights after its final token; None: it continues."""
    if live.ids and live.ids[-1] in live.request.stop_token_ids:
        return "stop"
    return None if tokens_left(live.request, len(live.ids), limits) else "length"


def why_give_up(live: LiveRequest, link: StudentLinkConfig, now_s: float, paused_s: float | None) -> str:
    """The reason to cancel a silent or long-paused request, else empty. `paused_s`: start of the pause, if any."""
    if paused_s is None:
        silent = live.rid and now_s - live.heard_s > link.stall_timeout_s
        return f"no token for {link.stall_timeout_s:g} s (stall_timeout_s)" if silent else ""
    if now_s - paused_s > link.pause_timeout_s:
        return f"paused for new weights for more than {link.pause_timeout_s:g} s (pause_timeout_s)"
    return ""


@dataclass(slots=True)
class EngineTotals:
    """Running totals of one engine."""

    sampled_tokens: int = 0
    chunks: int = 0
    swaps: int = 0
    restarts: int = 0
    cached_tokens: int = 0
    busy_s: float = 0.0
    busy_since_s: float = 0.0
    pauses: int = 0
    pause_s: float = 0.0

    def stats(
        self, server: ServerLink, *, n_open: int, running: int, slots: int, version: WeightVersion
    ) -> EngineStats:
        return EngineStats(
            running=running,
            queued=max(0, n_open - running),
            free_slots=max(0, slots - n_open),
            sampled_tokens_total=self.sampled_tokens,
            decode_steps_total=self.chunks,
            busy_s_total=self.busy_until_now_s(),
            weight_swaps_total=self.swaps,
            version=version,
            weight_pauses_total=self.pauses,
            weight_pause_s_total=self.pause_s,
            extra={
                "http_requests_total": float(server.requests_total),
                "http_received_bytes_total": float(server.received_bytes_total),
                "restarted_requests_total": float(self.restarts),
                "breaker_opened_total": float(server.breaker.opened_total),
                "breaker_open": float(server.breaker.is_open),
                "prompt_tokens_cached_total": float(self.cached_tokens),
            },
        )

    def busy_until_now_s(self) -> float:
        return self.busy_s + (time.monotonic() - self.busy_since_s if self.busy_since_s else 0.0)

    def idle(self) -> None:
        """The last request has ended."""
        self.busy_s, self.busy_since_s = self.busy_until_now_s(), 0.0
