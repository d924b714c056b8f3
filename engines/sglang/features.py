"""A server's features, measured once at connect, never inferred from its version number."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, Final, Literal, TypeAlias

import msgspec

from stillhouse.engines.config import ServerLinkConfig
from stillhouse.engines.http.link import RequestRefused, ServerLink
from stillhouse.engines.http.stream import StreamChunk, StreamError, decode_chunk
from stillhouse.engines.provider import ServerFacts
from stillhouse.engines.sglang.config import SGLangConfig
from stillhouse.engines.sglang.http import SGLangLink
from stillhouse.weights.checks import Precision

LogprobTemperature: TypeAlias = Literal["as_sampled", "one"]

_PROMPT: Final = [1, 2, 3]
"""Ids that exist in every vocabulary."""
_STREAM_TOKENS: Final = 16
_PROBE_TEMPERATURE: Final = 2.0
_SAME_NATS: Final = 1e-2
NEUTRAL: Final[dict[str, Any]] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "min_new_tokens": 0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "ignore_eos": False,
    "n": 1,
}
"""Said in each request, because a server may have defaults of its own (--preferred-sampling-params)."""
SCORED: Final[dict[str, Any]] = NEUTRAL | {"max_new_tokens": 0, "temperature": 0}
"""The sampling of a request that is only scored."""
_SAID: Final = {*NEUTRAL, "temperature", "max_new_tokens", "stop_token_ids", "skip_special_tokens", "stream_interval"}


class ServerInfo(msgspec.Struct, frozen=True):
    """The fields used of /get_server_info; None where a version lacks one."""

    version: str = "unknown"
    max_req_input_len: int | None = None
    max_running_requests: int | None = None
    incremental_streaming_output: bool | None = None
    tp_size: int = 1
    device: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    enable_lora: bool | None = None
    max_lora_rank: int | None = None
    kv_cache_dtype: str | None = None
    preferred_sampling_params: dict[str, Any] | str | None = None

    @property
    def precision(self) -> Precision:
        if self.quantization or (self.kv_cache_dtype or "").startswith("fp8"):
            return "quantized"
        if self.dtype in ("float32", "float"):
            return "float16" if (self.device or "cuda").startswith("cuda") else "float32"
        return "float16" if self.dtype in ("float16", "half") else "bfloat16"  # auto: either; the wider one holds


class ListedModel(msgspec.Struct, frozen=True):
    """The student, or an adapter that the server has loaded."""

    max_model_len: int | None
    """None for an adapter."""
    id: str = ""
    root: str = ""
    """Folder that it was loaded from."""


class ListedModels(msgspec.Struct, frozen=True):
    """The answer of /v1/models."""

    data: list[ListedModel]


class _TopMeta(msgspec.Struct, frozen=True):
    output_top_logprobs: list[list[tuple[float, int, Any]]]
    weight_versions: list[Any] | None = None


class _TopReply(msgspec.Struct, frozen=True):
    meta_info: _TopMeta


class Features(msgspec.Struct, frozen=True, kw_only=True):
    """The measured features of one server."""

    version: str
    """For display only; no decision depends on it."""
    weights_label: str
    """The current label of its weights."""
    max_context: int
    """Tokens of prompt and answer together."""
    max_prompt: int
    """Tokens of a prompt."""
    max_running: int | None
    device: Literal["cpu", "cuda"]
    """Device of its model."""
    tp_size: int
    """Processes that each hold a part of the model; each is a rank in a weight group."""
    update_sessions: bool
    """Weight updates go between /begin_weight_update and /end_weight_update."""
    pausing: bool
    """Has /pause_generation and /continue_generation."""
    labels_settable: bool
    """Has /update_weight_version."""
    checksums: bool
    """Has /weights_checker."""
    version_spans: bool
    """The last chunk says which weights sampled each token."""
    incremental_stream: bool
    """A chunk has only the new tokens, not all tokens so far."""
    stream_interval: bool
    """A request may set the number of tokens per chunk."""
    logprob_temperature: LogprobTemperature
    """Log-probs of sampled tokens are those of softmax(logits / temperature) (`as_sampled`), or at temperature 1
    (`one`)."""
    greedy_logprobs_at_one: bool
    """At temperature 0 log-probs are those of temperature 1."""
    sampling_mask: bool = False
    """Returns the ids that a token was sampled from, and its log-prob among them."""
    routed_experts: bool = False
    """Returns the experts that its routers chose."""
    precision: Precision = "bfloat16"
    """Precision of its computation."""
    adapter_rank: int = 0
    """Largest rank of the adapters that it loads; 0: it loads none."""

    @property
    def facts(self) -> ServerFacts:
        """What the launcher needs to know."""
        table = self.table(weights=False)
        return ServerFacts(
            device=self.device,
            tp=self.tp_size,
            label=self.weights_label,
            text=table,
            adapter_rank=self.adapter_rank,
        )

    def table(self, *, weights: bool = True) -> str:
        """A table for the log, one line per feature. `weights`: include the label of its weights."""
        rows = {
            "SGLang": self.version,
            **({"weights": self.weights_label} if weights else {}),
            "context": f"{self.max_context} tokens, prompts up to {self.max_prompt}",
            "running requests": "not said" if self.max_running is None else f"up to {self.max_running}",
            "device": f"{self.device}, {self.tp_size} process{'' if self.tp_size == 1 else 'es'}, {self.precision}",
            "weight updates": "in sessions" if self.update_sessions else "without sessions",
            "pause and continue": "yes" if self.pausing else "no",
            "checksums": "yes" if self.checksums else "no",
            **({"experts": "says which its routers choose"} if self.routed_experts else {}),
            **({"adapters": f"up to rank {self.adapter_rank}"} if self.adapter_rank else {}),
            "versions of tokens": "spans" if self.version_spans else "no spans: requests are cut at every swap",
            "stream": ("incremental" if self.incremental_stream else "cumulative")
            + (", in pieces as asked for" if self.stream_interval else ", in pieces of --stream-interval"),
            "log-probs": "of the temperature sampled at" if self.logprob_temperature == "as_sampled" else "at T = 1",
            "top-k, top-p, min-p": "with what they keep" if self.sampling_mask else "not in training",
            "greedy log-probs": "at T = 1" if self.greedy_logprobs_at_one else "not at T = 1: greedy is refused",
        }
        width = max(map(len, rows))
        return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows.items())


def probe_server(url: str, config: ServerLinkConfig, *, api_key: str = "") -> Features:
    """Measure a server's features before a run. Raises as `detect_features` does."""
    link = SGLangLink(url, config, api_key=api_key)
    try:
        return link.run(detect_features(link), timeout_s=2 * config.connect_timeout_s)
    finally:
        link.close()


def why_unfit(features: Features, config: SGLangConfig) -> str | None:
    """The reason why an actor cannot use the server with this configuration, and what to do; None: it can."""
    if config.update_mode != "retract":
        return None
    if not features.pausing:
        lacks = "cannot be paused"
    elif not features.version_spans:
        lacks = "does not say which weights sampled which token of a request that went on under new ones"
    else:
        return None
    return (
        f"SGLang {features.version} {lacks}, and update_mode is retract; use abort, which recomputes the KV cache as "
        "well, or an SGLang that can (0.5.23 could when it was tried)"
    )


async def detect_features(link: ServerLink) -> Features:
    """Wait until the server answers, then measure. Raises ServerUnavailable past connect_timeout_s, StreamError for
    unusable answers."""
    await link.wait_until_up()
    model = await link.model_info()
    info = msgspec.json.decode(await link.get("/get_server_info"), type=ServerInfo)
    listed = msgspec.json.decode(await link.get("/v1/models"), type=ListedModels).data
    max_context = next((model.max_model_len for model in listed if model.max_model_len is not None), None)
    if max_context is None:
        raise StreamError("the server does not say how long a sequence may be (max_model_len of /v1/models)")
    if names := unasked(info.preferred_sampling_params):
        raise StreamError(
            f"--preferred-sampling-params sets {', '.join(names)}, which changes every answer of this server; start it "
            "without"
        )
    at_one, spans = await _top_two(link, 1.0)
    at_probe, _ = await _top_two(link, _PROBE_TEMPERATURE)
    incremental, interval, greedy = await _probe_stream(link, info)
    return Features(
        version=info.version,
        weights_label=model.weight_version,
        max_context=max_context,
        # A prompt of max_req_input_len tokens is refused already (0.5.23).
        max_prompt=min(info.max_req_input_len or max_context, max_context) - 1,
        max_running=info.max_running_requests,
        device="cuda" if (info.device or "").startswith("cuda") else "cpu",
        tp_size=info.tp_size,
        update_sessions=await link.has_endpoint("/begin_weight_update"),
        pausing=await link.has_endpoint("/pause_generation"),
        labels_settable=await link.has_endpoint("/update_weight_version"),
        checksums=await link.has_endpoint("/weights_checker"),
        version_spans=spans,
        incremental_stream=incremental,
        stream_interval=interval,
        logprob_temperature=_logprob_temperature(at_one, at_probe),
        greedy_logprobs_at_one=abs(greedy - at_one[0]) < _SAME_NATS,
        sampling_mask=await _returns_masks(link),
        routed_experts=await _returns_experts(link),
        precision=info.precision,
        adapter_rank=(info.max_lora_rank or 0) if info.enable_lora else 0,
    )


def unasked(preferred: dict[str, Any] | str | None) -> list[str]:
    """What a server's own defaults (a dictionary, or its JSON) set that no request says: it would change answers."""
    fields = msgspec.json.decode(preferred, type=dict[str, Any]) if isinstance(preferred, str) else preferred or {}
    return sorted(name for name, value in fields.items() if value and name not in _SAID)


def _body(temperature: float, n_tokens: int, interval: int = 0, **more: Any) -> dict[str, Any]:
    sampling: dict[str, Any] = NEUTRAL | {"temperature": temperature, "max_new_tokens": n_tokens, "ignore_eos": True}
    if interval:
        sampling["stream_interval"] = interval
    return {"input_ids": _PROMPT, "sampling_params": sampling, "return_logprob": True, **more}


async def _top_two(link: ServerLink, temperature: float) -> tuple[tuple[float, float], bool]:
    """Log-probs of the two likeliest next tokens, and True if the reply has version spans."""
    try:
        text = await link.post(
            "/generate", _body(temperature, 1, top_logprobs_num=2), timeout_s=link.config.stall_timeout_s
        )
    except RequestRefused as error:
        raise StreamError(f"the server refuses log-probs of generated tokens: {error}") from error
    meta = msgspec.json.decode(text, type=_TopReply).meta_info
    (first, *_), (second, *_) = meta.output_top_logprobs[0]
    return (first, second), meta.weight_versions is not None


async def _returns_masks(link: ServerLink) -> bool:
    """Older servers ignore the request, or refuse it."""
    body = _body(1.0, 1, return_sampling_mask=True)
    body["sampling_params"]["top_k"] = 2
    try:
        text = await link.post("/generate", body, timeout_s=link.config.stall_timeout_s)
        meta = msgspec.json.decode(text, type=StreamChunk).meta_info
    except (RequestRefused, msgspec.DecodeError):
        return False
    return [len(ids) for ids in meta.output_token_sampling_mask] == [2] and len(
        meta.output_token_sampling_logprobs
    ) == 1


async def _returns_experts(link: ServerLink) -> bool:
    """Only servers that were started with --enable-return-routed-experts do."""
    try:
        text = await link.post(
            "/generate", _body(1.0, 1, return_routed_experts=True), timeout_s=link.config.stall_timeout_s
        )
        return bool(msgspec.json.decode(text, type=StreamChunk).meta_info.routed_experts)
    except (RequestRefused, msgspec.DecodeError):
        return False


def _logprob_temperature(at_one: tuple[float, float], at_probe: tuple[float, float]) -> LogprobTemperature:
    """softmax(logits / T) divides every difference of log-probs by T. Where the difference is too small to measure, the
    likeliest log-prob decides, which T > 1 lowers."""
    gap_one, gap_probe = at_one[0] - at_one[1], at_probe[0] - at_probe[1]
    if abs(gap_one) > 10 * _SAME_NATS:
        return "as_sampled" if abs(gap_probe - gap_one / _PROBE_TEMPERATURE) < abs(gap_probe - gap_one) else "one"
    return "one" if abs(at_probe[0] - at_one[0]) < _SAME_NATS else "as_sampled"


async def _probe_stream(link: ServerLink, info: ServerInfo) -> tuple[bool, bool, float]:
    """(chunks are increments, a request may set their size, log-prob of the first greedy token). Servers refuse unknown
    sampling parameters."""
    may_set = True
    try:
        chunks = await _greedy_stream(link, interval=2)
    except RequestRefused:
        may_set = False
        chunks = await _greedy_stream(link, interval=0)
    entries = [entry for chunk in chunks for entry in chunk.meta_info.output_token_logprobs]
    if not entries or entries[0][0] is None:
        raise StreamError("the server's stream has no log-probs")
    incremental = chunks_are_increments(chunks)
    if incremental is None:
        incremental = bool(info.incremental_streaming_output)
    return incremental, may_set, entries[0][0]


async def _greedy_stream(link: ServerLink, interval: int) -> list[StreamChunk]:
    body = _body(0.0, _STREAM_TOKENS, interval, stream=True)
    async with asyncio.timeout(link.config.stall_timeout_s), aclosing(link.stream("/generate", body)) as texts:
        return [decode_chunk(text) async for text in texts]


def chunks_are_increments(chunks: Sequence[StreamChunk]) -> bool | None:
    """None when the chunks do not show it. The first chunk with tokens never does, because a busy server puts several
    steps into one chunk."""
    telling = [chunk for chunk in chunks if chunk.output_ids][1:]
    if not telling:
        return None
    return any(len(chunk.output_ids) < chunk.meta_info.completion_tokens for chunk in telling)
