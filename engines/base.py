"""The interface of every inference engine. No torch here: a worker on SGLang never imports it.

An engine is driven by polling, from one thread: `submit` requests, then call `poll`, which does some work (the embedded
engine: one decode step) or returns what arrived meanwhile (a remote engine). Weights arrive in another thread. An
engine that holds them itself is a `TakesWeights`: it stages them, and swaps them in inside `poll`, between two decode
steps. An engine whose weights are on a server pauses while the server takes them.

Shapes: n = tokens of the item at hand. Log-probs are natural, float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from stillhouse.protocol.messages import Sampling, TopIdsWanted, VersionSpan, WeightsRef, WeightVersion
from stillhouse.protocol.payloads.expert_ids import ExpertIds
from stillhouse.protocol.payloads.kind import Float32s, Int32s, ScoreOptions, ScoreResult
from stillhouse.protocol.topk_layout import MAX_TOKENS_KEPT
from stillhouse.protocol.turns import SharesDevice

if TYPE_CHECKING:
    import torch

LOGPROBS_ONLY: Final = ScoreOptions()
UpdateMode: TypeAlias = Literal["in_place", "retract"]
"""Treatment of running requests at a weight swap: `in_place` keeps the KV cache, `retract` recomputes it."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Continue `prompt_ids` [n_prompt] until a stop token, or `max_new_tokens`."""

    request_id: str
    prompt_ids: Int32s
    sampling: Sampling
    max_new_tokens: int
    """Limit for this request; `sampling.max_new_tokens` is the limit for the whole rollout."""
    stop_token_ids: tuple[int, ...]
    """A sampled stop token ends the request and IS part of the output (it is scored like any other token)."""
    sample_offset: int = 0
    """Tokens of the rollout sampled by earlier requests; the random stream continues from there."""
    experts_from: int = 1
    """With `Sampling.experts`: the prompt's tokens from here on are asked for too; those before are known."""


@dataclass(frozen=True, slots=True)
class GenerationDelta:
    """New tokens of one request since the last delta; at least one token, or a finish reason."""

    request_id: str
    token_ids: Int32s
    """[n]"""
    logprobs: Float32s
    """[n] under the distribution really sampled from (temperature, top-p and top-k applied), as softmax log-probs."""
    spans: tuple[VersionSpan, ...]
    """Versions of these n tokens, offsets relative to this delta's first token; they cover [0, n)."""
    finish_reason: Literal["stop", "length", "aborted", "error"] | None = None
    error: str | None = None
    top_ids: tuple[Int32s, ...] | None = None
    """[n] With `Sampling.top_ids`: for each token the ids of the likeliest ones at its place, likeliest first. With
    `Sampling.kept` those that it was sampled from, ascending."""
    experts: ExpertIds | None = None
    """[n, layers, chosen] With `Sampling.experts`: for each token the choices of the forward pass that it was sampled
    from. None: the engine does not report them, and it may leave them out of single deltas."""
    prompt_experts: ExpertIds | None = None
    """[m, layers, chosen] The same for the last m tokens of the prompt, at most those from `experts_from` on: of the
    pass that would have predicted them. At most once per request."""


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Asks for log-probs of token_ids[start:end], each given all tokens before it; end = len(token_ids), start >= 1."""

    token_ids: Int32s
    start: int
    rollout_id: str = ""
    """Requests of one rollout mostly begin alike, so an engine may keep what it computed for the next one. Empty:
    nothing is kept."""
    last: bool = False
    """True if the engine need not expect another request of this rollout."""
    top_ids: Int32s | None = None
    """[end - start, k] Tokens whose log-probs at these positions are asked for, in place of the likeliest ones."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of a generation engine's state."""

    running: int
    queued: int
    free_slots: int
    sampled_tokens_total: int
    decode_steps_total: int
    busy_s_total: float
    weight_swaps_total: int
    version: WeightVersion
    weight_pauses_total: int = 0
    """Swaps during which requests stood still."""
    weight_pause_s_total: float = 0.0
    """Time of these."""
    extra: dict[str, float] = field(default_factory=dict[str, float])


class GenerationEngine(Protocol):
    """Samples a student's answers."""

    @property
    def version(self) -> WeightVersion:
        """Version of the weights that the next token will be sampled under."""
        ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def works_in_poll(self) -> bool:
        """True: work happens only inside `poll`, so call it again at once while requests run. False: the work is done
        elsewhere; wait until the engine's `wake` callback reports output."""
        ...

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Raises ValueError for an empty prompt, an id outside the vocabulary, a request id in use,
        or a prompt that leaves no room for a token in the context window."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request early; its last delta has finish_reason "aborted". Unknown ids are ignored (it just ended)."""
        ...

    def poll(self, timeout_s: float) -> list[GenerationDelta]:
        """Do one decode step, or wait up to `timeout_s` if there is nothing to decode."""
        ...

    def close(self) -> None: ...


class TakesWeights(Protocol):
    """An engine that holds its weights itself. Thread-safe."""

    @property
    def version(self) -> WeightVersion: ...

    def stage_weights(self, version: WeightVersion, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Stage a full set of named parameters (HF names), to be swapped in between two decode steps. Each tensor may
        be a view of memory that is reused for a later one, so an implementation copies it before it takes the next; and
        the iteration may raise, at its end too: then nothing of the set is used. A newer staging replaces one that is
        not swapped in yet. Raises ValueError for missing or unknown names or shapes, naming them; then nothing is
        swapped."""
        ...


class EngineLost(Exception):
    """The engine's server is away or stuck past all deadlines. The worker ends with ExitCode.SERVER_LOST, so that the
    server is started again."""


class EngineMismatch(ValueError):
    """The engine's server or model contradicts the configuration, and a restart would not help. The worker ends with
    ExitCode.USELESS."""


class BudgetSpent(Exception):
    """What the user allowed to be sent is spent. The worker ends with ExitCode.SPENT, and with it the run."""


class ScoringEngine(Protocol):
    """Scores tokens with a teacher model."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context(self) -> int: ...

    def score(self, requests: Sequence[ScoreRequest], options: ScoreOptions = LOGPROBS_ONLY) -> list[ScoreResult]:
        """Score a batch at temperature 1. Either no request has `top_ids`, or all have and `options.top_k` is 0. Raises
        ValueError for ids outside the vocabulary or start < 1."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class TakesSnapshots(Protocol):
    """A ScoringEngine whose weights can be replaced between two calls of `score`."""

    def load_snapshot(self, ref: WeightsRef) -> None:
        """Replace the weights. Raises weights.errors.SnapshotRefused when the file is missing, damaged, or of another
        architecture; the weights are then unchanged."""
        ...


@runtime_checkable
class ReportsFigures(Protocol):
    """A ScoringEngine with figures of its own for the teacher's heartbeat. Running totals end in `_total`."""

    @property
    def figures(self) -> Mapping[str, float]: ...


def shared_engine(engine: GenerationEngine | ScoringEngine) -> SharesDevice:
    """The engine, as what takes turns with others on its device. Raises EngineMismatch."""
    if not isinstance(engine, SharesDevice):
        raise EngineMismatch(
            f"{type(engine).__name__} cannot give its device back (protocol.turns.SharesDevice); expected an engine "
            "that can, or launch.share = together"
        )
    return engine


def likeliest(ids_RK: Int32s, probs_RK: npt.NDArray[np.floating[Any]], wanted: TopIdsWanted) -> list[Int32s]:
    """The sets of R positions that an engine is to report, from the K likeliest tokens of each, likeliest first."""
    counts_R = (probs_RK.cumsum(axis=1, dtype=np.float64) < wanted.mass).sum(axis=1) + 1
    counts_R = np.minimum(counts_R, wanted.k)
    return [ids_K[:count] for ids_K, count in zip(ids_RK, counts_R.tolist(), strict=True)]


def check_top_ids_wanted(sampling: Sampling) -> None:
    """Raises ValueError for sets that no engine reports."""
    wanted = sampling.top_ids
    if sampling.kept and (wanted is not None or sampling.temperature == 0 or not 1 < sampling.top_k <= MAX_TOKENS_KEPT):
        raise ValueError(
            f"kept ids of top_k = {sampling.top_k}, temperature = {sampling.temperature}, top_ids = {wanted}; expected "
            f"a top_k from 2 to {MAX_TOKENS_KEPT}, a temperature above 0, and no top_ids"
        )
    if wanted is None:
        return
    if wanted.k < 1 or not 0 < wanted.mass <= 1:
        raise ValueError(f"top_ids = {wanted}; expected a k of at least 1, and a mass in (0, 1]")
    if sampling.truncated:
        raise ValueError(
            f"top_ids with top_p = {sampling.top_p}, top_k = {sampling.top_k}, min_p = {sampling.min_p}: the likeliest "
            "tokens are reported of whole distributions only; expected top_p = 1, top_k = 0 and min_p = 0"
        )


def check_ids(what: str, ids_N: Int32s, vocab_size: int) -> None:
    """Raises ValueError for an id outside the vocabulary, which would kill a server or read past an embedding."""
    if int(ids_N.min()) < 0 or int(ids_N.max()) >= vocab_size:
        outside = ids_N[(ids_N < 0) | (ids_N >= vocab_size)]
        raise ValueError(f"{what}: token id {outside[0]} is outside the vocabulary [0, {vocab_size})")


def check_prompt(request: GenerationRequest, vocab_size: int) -> None:
    """Raises ValueError for a prompt that is empty or has ids outside the vocabulary, and for max_new_tokens < 1."""
    ids, what = request.prompt_ids, f"request {request.request_id!r}"
    if ids.ndim != 1 or not len(ids):
        raise ValueError(f"{what}: prompt of shape {ids.shape}; expected at least one token, [n]")
    check_ids(what, ids, vocab_size)
    if request.max_new_tokens < 1:
        raise ValueError(f"{what}: max_new_tokens {request.max_new_tokens}; expected at least 1")


def check_scoring(requests: Sequence[ScoreRequest], top_k: int, *, vocab_size: int, max_tokens: int) -> None:
    """Raises ValueError for ids outside the vocabulary, start outside [1, len], more than `max_tokens` tokens, or top_k
    outside [0, vocab_size]."""
    if not 0 <= top_k <= vocab_size:
        raise ValueError(f"top_k {top_k}; expected 0 (off) to {vocab_size} (vocabulary)")
    n_given = sum(request.top_ids is not None for request in requests)
    if n_given and (top_k or n_given < len(requests)):
        raise ValueError(f"{n_given} of {len(requests)} requests have top_ids, top_k is {top_k}; expected all, and 0")
    for index, request in enumerate(requests):
        ids, length = request.token_ids, len(request.token_ids)
        if ids.ndim != 1 or not 1 <= request.start <= length:
            raise ValueError(
                f"request {index}: start {request.start} with token ids of shape {ids.shape}; expected ids [end] and "
                "1 <= start <= end (the first token has no context)"
            )
        if length > max_tokens:
            raise ValueError(f"request {index}: {length} tokens; this teacher takes up to {max_tokens}")
        check_ids(f"request {index}", ids, vocab_size)
        top_ids = request.top_ids
        if top_ids is not None and (top_ids.ndim != 2 or len(top_ids) != length - request.start):
            raise ValueError(
                f"request {index}: top_ids of shape {top_ids.shape} for {length - request.start} tokens; expected one "
                "row each"
            )
        if top_ids is not None and top_ids.size:
            check_ids(f"top_ids of request {index}", top_ids, vocab_size)
