"""One request's stream of JSON chunks: which tokens are new, and which weights sampled them. No I/O.

A server's weights are labelled `RUN/EPOCH.STEP`, so that another run's weights are never mistaken for ours. What a
server says about versions: every chunk is *stamped* with the version that was live when the chunk was put together,
which may be later than when its tokens were sampled; the last chunk may carry *spans*, which are per token. New weights
sample only after the stamp has changed (requests run on only when the update was acknowledged). So a token lies between
`floor`, the version known to be live when the request was sent, and its chunk's stamp:

    stamp == floor      the token's version is known; it leaves at once
    stamp != floor      held back, with all that follow, until the spans come with the last chunk
    no spans come       an error: a version is never guessed
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from stillhouse.engines.base import Int32s, likeliest
from stillhouse.protocol.messages import ExpertShape, TopIdsWanted, VersionSpan, WeightVersion
from stillhouse.protocol.payloads.expert_ids import ExpertIds, why_unfit

START_LABEL: Final = "default"
"""A server's default label for the weights that it was started with."""
_VERSION: Final = re.compile(r"(\d+)\.(\d+)")


class Labels:
    """The labels of one run."""

    def __init__(self, run_id: str) -> None:
        self._prefix = f"{run_id}/" if run_id else ""

    def of(self, version: WeightVersion) -> str:
        """The label of a version in an update request."""
        return f"{self._prefix}{version}"

    def updating(self, version: WeightVersion) -> str:
        """The label of a paused server's weights until its update is done. If the updater dies, the weights are
        unknown, and `parse` returns None for this label."""
        return f"{self._prefix}{version}+"

    def parse(self, label: str) -> WeightVersion | None:
        """The version that a label names; None for another run's or an unreadable label. A server's default label
        counts as version (0, 0), the student that every run starts from."""
        if label == START_LABEL:
            return WeightVersion(0, 0)
        match = _VERSION.fullmatch(label.removeprefix(self._prefix)) if label.startswith(self._prefix) else None
        return WeightVersion(int(match[1]), int(match[2])) if match is not None else None


class UnderAdapter(Labels):
    """The label of the student's own weights, under which an adapter is used. `weight_version` says nothing about
    adapters, but a request keeps the one that it was sent with, so all its tokens have that adapter's version, as long
    as the weights below it stay."""

    def __init__(self, version: WeightVersion, base: str) -> None:
        super().__init__("")
        self._version = version
        self._base = base

    def parse(self, label: str) -> WeightVersion | None:
        return self._version if label == self._base else None


class StreamError(ValueError):
    """A server's answer is unusable."""


class SpanSaid(msgspec.Struct, frozen=True):
    """Output tokens [start, end) were sampled under the weights labelled `version`."""

    version: str
    start: int
    end: int


class FinishSaid(msgspec.Struct, frozen=True):
    type: str
    message: str | None = None
    status_code: int | None = None
    """HTTP status of an abort by the server."""


class MetaInfo(msgspec.Struct, frozen=True):
    """The fields used of meta_info; the decoder skips the rest."""

    weight_version: str = ""
    finish_reason: FinishSaid | None = None
    output_token_logprobs: list[tuple[float | None, int, Any]] = msgspec.field(
        default_factory=list[tuple[float | None, int, Any]]
    )
    output_top_logprobs: list[list[tuple[float | None, int, Any]] | None] = msgspec.field(
        default_factory=list[list[tuple[float | None, int, Any]] | None]
    )
    output_token_sampling_mask: list[list[int]] = msgspec.field(default_factory=list[list[int]])
    """With return_sampling_mask: the ids that each token was sampled from..."""
    output_token_sampling_logprobs: list[float | None] = msgspec.field(default_factory=list[float | None])
    """...and its log-prob among these."""
    routed_experts: str | None = None
    """With return_routed_experts, in the last chunk: what `experts_said` reads."""
    weight_versions: list[SpanSaid] | None = None
    completion_tokens: int = 0
    cached_tokens: int = 0


class StreamChunk(msgspec.Struct, frozen=True):
    """One `data:` line of /generate."""

    output_ids: list[int]
    meta_info: MetaInfo


_DECODER: Final = msgspec.json.Decoder(StreamChunk)


def decode_chunk(text: bytes) -> StreamChunk:
    """Decode one line. Raises StreamError for anything else, including an error message of the server."""
    try:
        return _DECODER.decode(text)
    except msgspec.DecodeError as error:
        raise StreamError(f"{error}; the server said {text[:300]!r}") from error


@dataclass(slots=True)
class NewTokens:
    """Tokens whose version is known; spans cover [0, len(ids))."""

    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    spans: list[VersionSpan] = field(default_factory=list[VersionSpan])
    top_ids: list[Int32s] = field(default_factory=list[Int32s])
    """One set per token if the request asks for them (`Sampling.top_ids`), else none."""
    experts: list[ExpertIds | None] = field(default_factory=list[ExpertIds | None])
    """By token: [layers, chosen]; None where the server did not say."""
    prompt_experts: ExpertIds | None = None

    def extend(self, other: NewTokens) -> None:
        """Append, merging adjacent spans of one version."""
        offset = len(self.ids)
        self.ids += other.ids
        self.logprobs += other.logprobs
        self.top_ids += other.top_ids
        self.experts += other.experts
        self.prompt_experts = other.prompt_experts if self.prompt_experts is None else self.prompt_experts
        for span in other.spans:
            start = offset + span.start
            if self.spans and self.spans[-1].version == span.version:
                start = self.spans.pop().start
            self.spans.append(VersionSpan(span.version, start, offset + span.end))


FinishReason: TypeAlias = Literal["stop", "length", "aborted", "error"]


class ExpertsAsked(NamedTuple):
    """A request for experts: of the tokens from `start` on, of which those before `n_prompt` are in its prompt."""

    shape: ExpertShape
    start: int
    n_prompt: int


class TokenStream:
    """Reads the chunks of one request, in order."""

    def __init__(
        self,
        *,
        incremental: bool,
        floor: WeightVersion,
        labels: Labels,
        top_ids: TopIdsWanted | None = None,
        kept: bool = False,
        experts: ExpertsAsked | None = None,
    ) -> None:
        """`experts`: they come with the last chunk, so that all tokens are held back until then."""
        self._incremental = incremental
        self._floor = floor
        self._labels = labels
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._wanted = top_ids
        self._kept = kept
        self._experts = experts
        self._top_ids: list[Int32s] = []
        self._n_given = 0
        self._holding = False
        self.finish: FinishSaid | None = None

    @property
    def n_seen(self) -> int:
        """Number of tokens received so far, including those held back."""
        return len(self._ids)

    def take(self, chunk: StreamChunk) -> NewTokens:
        """Tokens whose version is known after this chunk. Raises StreamError."""
        meta = chunk.meta_info
        self._append(chunk)
        self.finish = meta.finish_reason
        new = self._known(meta)
        if self._experts is None or not new.ids:
            return new
        if meta.routed_experts is None:
            return replace(new, experts=[None] * len(new.ids))
        rows_RLK = experts_said(meta.routed_experts, self._experts, len(self._ids))
        n_before = len(rows_RLK) - len(self._ids)
        return replace(new, experts=list(rows_RLK[n_before:]), prompt_experts=rows_RLK[:n_before])

    def _known(self, meta: MetaInfo) -> NewTokens:
        if meta.finish_reason is not None and meta.weight_versions is not None:
            return self._settle(meta.weight_versions)
        if len(self._ids) == self._n_given:
            return NewTokens()
        self._holding |= self._labels.parse(meta.weight_version) != self._floor
        if self._experts is not None and meta.finish_reason is None:
            return NewTokens()
        if not self._holding:
            return self._give([VersionSpan(self._floor, self._n_given, len(self._ids))])
        if meta.finish_reason is not None:
            raise StreamError(
                f"sampled between weights {self._floor} and {meta.weight_version}, and this server does not say which "
                "token under which; swap weights with update_mode abort"
            )
        return NewTokens()

    def _append(self, chunk: StreamChunk) -> None:
        ids, entries, top = chunk.output_ids, chunk.meta_info.output_token_logprobs, chunk.meta_info.output_top_logprobs
        masks, of_kept = chunk.meta_info.output_token_sampling_mask, chunk.meta_info.output_token_sampling_logprobs
        if not self._incremental:
            if ids[: len(self._ids)] != self._ids:
                raise StreamError(f"a cumulative stream changed its first {len(self._ids)} tokens")
            known = len(self._ids)
            ids, entries, top = ids[known:], entries[known:], top[known:]
            masks, of_kept = masks[known:], of_kept[known:]
        if chunk.meta_info.finish_reason is not None and chunk.meta_info.finish_reason.type == "abort":
            ids = ids[: len(entries)]  # a refused request is answered with a placeholder token
        if len(ids) != len(entries) or any(entry[1] != token for entry, token in zip(entries, ids, strict=True)):
            raise StreamError(f"{len(ids)} new tokens and {len(entries)} log-probs do not belong together")
        if self._kept and ids:
            self._top_ids += kept_sets(ids, masks)
            if len(of_kept) != len(ids):
                raise StreamError(f"{len(of_kept)} log-probs among the kept ids of {len(ids)} tokens")
        logprobs = of_kept if self._kept else [entry[0] for entry in entries]
        for token, logprob in zip(ids, logprobs, strict=False):
            if logprob is None or not math.isfinite(logprob):
                raise StreamError(f"the log-prob of token {token} is {logprob}; expected a finite number")
            self._logprobs.append(logprob)
        if self._wanted is not None and ids:
            self._top_ids += sets_of(top, len(ids), self._wanted)
        self._ids += ids

    def _settle(self, said: list[SpanSaid]) -> NewTokens:
        """Process the last chunk's spans of all tokens. Tokens returned before must agree with them."""
        spans = [VersionSpan(self._version(s.version), s.start, s.end) for s in said if s.end > s.start]
        end = 0
        for span in spans:
            if span.start != end:
                break
            end = span.end
        if end != len(self._ids):
            raise StreamError(f"version spans {said} do not cover the {len(self._ids)} tokens")
        for span in spans:
            if span.start < self._n_given and span.version != self._floor:
                raise StreamError(
                    f"tokens [{span.start}, {self._n_given}) were given as sampled under weights {self._floor}; now "
                    f"the server says {span.version}"
                )
        cut = [VersionSpan(s.version, max(s.start, self._n_given), s.end) for s in spans if s.end > self._n_given]
        return self._give(cut)

    def _version(self, label: str) -> WeightVersion:
        version = self._labels.parse(label)
        if version is None:
            raise StreamError(f"tokens were sampled under weights {label!r}, which are not of this run")
        return version

    def _give(self, spans: list[VersionSpan]) -> NewTokens:
        first, self._n_given = self._n_given, len(self._ids)
        relative = [VersionSpan(span.version, span.start - first, span.end - first) for span in spans]
        return NewTokens(self._ids[first:], self._logprobs[first:], relative, self._top_ids[first:])


def experts_said(said: str, asked: ExpertsAsked, n_tokens: int) -> ExpertIds:
    """[asked prompt tokens + n_tokens, layers, chosen]: by token, the choices at the place before it. The server sends
    int32 [places, all layers of the model, chosen] in base64 (SGLang's state_capturer.routed_experts). Raises
    StreamError."""
    shape, n_rows = asked.shape, asked.n_prompt + n_tokens - asked.start
    try:
        flat = np.frombuffer(base64.b64decode(said, validate=True), "<i4")
    except ValueError as error:
        raise StreamError(f"the experts of the routers are not base64 of int32: {error}") from error
    n_layers, rest = divmod(flat.size, n_rows * shape.chosen) if n_rows else (0, flat.size)
    if rest or n_layers <= max(shape.layers):
        raise StreamError(
            f"{flat.size} experts for {n_rows} tokens; expected {shape.chosen} for each of more than "
            f"{max(shape.layers)} layers"
        )
    rows_RLK = flat.reshape(n_rows, n_layers, shape.chosen)[:, list(shape.layers)]
    if wrong := why_unfit(rows_RLK, shape):
        raise StreamError(f"the server sent {wrong}")
    return rows_RLK.astype(np.uint16)


def kept_sets(ids: Sequence[int], masks: Sequence[Sequence[int]]) -> list[Int32s]:
    """What each token was sampled from, ascending. Raises StreamError for a set without its token, or with one
    twice."""
    if len(masks) != len(ids):
        raise StreamError(f"{len(masks)} sampling masks for {len(ids)} tokens; expected one each")
    sets = [sorted(set(mask)) for mask in masks]
    for token, mask, kept in zip(ids, masks, sets, strict=True):
        if len(kept) != len(mask) or token not in mask:
            raise StreamError(f"token {token} was sampled from {mask[:9]}...; expected distinct ids with it among them")
    return [np.array(kept, np.int32) for kept in sets]


def sets_of(
    rows: Sequence[list[tuple[float | None, int, Any]] | None], n_tokens: int, wanted: TopIdsWanted
) -> list[Int32s]:
    """The sets of `n_tokens` tokens, from the server's likeliest `wanted.k` at each. Raises StreamError."""
    complete = [row for row in rows if row is not None and len(row) == wanted.k]
    if len(complete) != n_tokens or len(rows) != n_tokens:
        raise StreamError(f"asked for the likeliest {wanted.k} of {n_tokens} tokens, got {len(complete)} such rows")
    ids_RK = np.array([[entry[1] for entry in row] for row in complete], np.int32)
    logprobs_RK = np.array([[np.nan if entry[0] is None else entry[0] for entry in row] for row in complete])
    if np.isnan(logprobs_RK).any() or (np.diff(logprobs_RK) > 0).any():
        raise StreamError("the log-probs of the likeliest tokens are not numbers in falling order")
    return likeliest(ids_RK, np.exp(logprobs_RK).astype(np.float32), wanted)
