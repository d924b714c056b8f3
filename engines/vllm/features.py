"""What a vLLM server is, asked once at connect. What decides over log-probs is measured, not read."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from stillhouse.engines.base import EngineMismatch
from stillhouse.engines.http.link import ServerLink
from stillhouse.engines.provider import ServerFacts
from stillhouse.engines.vllm.http import GENERATE
from stillhouse.engines.vllm.replies import Reply
from stillhouse.weights.checks import Precision

_PROMPT: Final = [1, 2, 3]
"""Ids that exist in every vocabulary."""
_PROBE_TEMPERATURE: Final = 2.0
_SAME_NATS: Final = 1e-2


class _Worker(msgspec.Struct, frozen=True):
    """The answer of one worker process (engines/vllm/worker)."""

    device: str
    dtype: str
    quantized: bool
    version: str


class _Workers(msgspec.Struct, frozen=True):
    results: list[_Worker]


class _Model(msgspec.Struct, frozen=True):
    max_model_len: int | None = None


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


class Features(msgspec.Struct, frozen=True, kw_only=True):
    """One server."""

    version: str
    """For display only; no decision depends on it."""
    weights_label: str
    """The current label of its weights."""
    max_context: int
    """Tokens of prompt and answer together."""
    device: Literal["cpu", "cuda"]
    tp_size: int
    """Worker processes; each is a rank in a weight group."""
    precision: Precision

    incremental_stream = True
    labels_settable = True

    @property
    def max_prompt(self) -> int:
        return self.max_context - 1

    @property
    def facts(self) -> ServerFacts:
        """What the launcher needs to know."""
        return ServerFacts(device=self.device, tp=self.tp_size, label=self.weights_label, text=self.table())

    def table(self) -> str:
        """A table for the log, one line per feature."""
        processes = f"{self.tp_size} process{'' if self.tp_size == 1 else 'es'}"
        return (
            f"  vLLM     {self.version}\n  context  {self.max_context} tokens\n"
            f"  device   {self.device}, {processes}, {self.precision}"
        )


async def detect_features(link: ServerLink) -> Features:
    """Raises ServerUnavailable, EngineMismatch when its log-probs are not those of what it samples from, and
    msgspec.DecodeError for unusable answers."""
    rpc = await link.post("/collective_rpc", {"method": "stillhouse_about"}, timeout_s=link.config.stall_timeout_s)
    workers = msgspec.json.decode(rpc, type=_Workers).results
    models = msgspec.json.decode(await link.get("/v1/models"), type=_Models).data
    max_context = next((model.max_model_len for model in models if model.max_model_len is not None), None)
    if max_context is None:
        raise EngineMismatch(f"{link.url}: it does not say how long a sequence may be (max_model_len of /v1/models)")
    await _measure_logprobs(link)
    worker = workers[0]
    return Features(
        version=worker.version,
        weights_label=(await link.model_info()).weight_version,
        max_context=max_context,
        device="cuda" if worker.device == "cuda" else "cpu",
        tp_size=len(workers),
        precision=_precision(worker),
    )


def _precision(worker: _Worker) -> Precision:
    if worker.quantized:
        return "quantized"
    if worker.dtype == "float32":
        return "float16" if worker.device == "cuda" else "float32"  # products on GPUs may be TF32
    return "float16" if worker.dtype == "float16" else "bfloat16"


async def _measure_logprobs(link: ServerLink) -> None:
    """softmax(logits / T) divides every difference of log-probs by T. Greedy log-probs must be those of T = 1."""
    at_one, at_probe, greedy = [await _top_two(link, temperature) for temperature in (1.0, _PROBE_TEMPERATURE, 0.0)]
    gap_one, gap_probe = at_one[0] - at_one[1], at_probe[0] - at_probe[1]
    lowered = abs(gap_probe - gap_one / _PROBE_TEMPERATURE) < abs(gap_probe - gap_one)
    if gap_one <= 10 * _SAME_NATS:  # too small to tell: a higher temperature lowers the likeliest log-prob
        lowered = at_probe[0] < at_one[0] - _SAME_NATS
    if not lowered or abs(greedy[0] - at_one[0]) > _SAME_NATS:
        raise EngineMismatch(
            f"{link.url}: the two likeliest log-probs are {at_one} at temperature 1, {at_probe} at "
            f"{_PROBE_TEMPERATURE:g} and {greedy} at 0; expected those of the distribution that is sampled from "
            "(--logprobs-mode processed_logprobs), and at 0 those of temperature 1"
        )


async def _top_two(link: ServerLink, temperature: float) -> tuple[float, float]:
    body: dict[str, Any] = {
        "token_ids": _PROMPT,
        "sampling_params": {"temperature": temperature, "max_tokens": 1, "logprobs": 3, "ignore_eos": True},
    }
    reply = msgspec.json.decode(await link.post(GENERATE, body, timeout_s=link.config.stall_timeout_s), type=Reply)
    (first, second, *_) = sorted(entry.logprob for entry in reply.choices[0].entries[0].top_logprobs)[::-1]
    return first, second
