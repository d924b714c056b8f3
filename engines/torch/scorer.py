"""The embedded teacher: scores tokens with a Hugging Face model, packed, with logits only for the requested tokens.

    requests --folded--> runs --first-fit to max_batch_tokens--> packs --packed_hidden--> [T, H] --asked rows--> head

The log-prob of token t needs the hidden state of token t - 1, so the last token of a request is never an input.

A growing rollout comes back with a longer prefix each time. Its keys and values are kept, so that a run has only the
tokens that are new (`engines.torch.prefix_cache`); and segments of one rollout that come together share one run.

Legend: T input tokens of a pack, A tokens to score in it, H hidden size, K top tokens, n tokens of one request.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stillhouse.engines.base import LOGPROBS_ONLY, Int32s, ScoreRequest, ScoreResult, check_scoring
from stillhouse.engines.config import GPU_PREFIX_CACHE_BYTES, ScorerSettings, chunk_rows
from stillhouse.engines.torch.prefix_cache import PrefixCache
from stillhouse.models.description import resolve_dtype
from stillhouse.models.loading import load_causal_lm, resolve_device
from stillhouse.models.logprobs import TokenScores, lm_head, token_scores
from stillhouse.models.packed import PackingError, context_window, packed_hidden, probe_past
from stillhouse.models.packed_layout import first_fit_decreasing
from stillhouse.models.past import CacheUse, Cells, Past
from stillhouse.models.rotary import switching_rope
from stillhouse.models.transfer import upload
from stillhouse.protocol.messages import WeightsRef
from stillhouse.protocol.payloads.hidden import Bits
from stillhouse.protocol.payloads.kind import ScoreOptions
from stillhouse.weights.errors import SnapshotRefused
from stillhouse.weights.parked import Parked
from stillhouse.weights.snapshot import read_snapshot

_FREE_SHARE: Final = {"cpu": 1 / 16, "cuda": 1 / 4}
"""Most that the prefix cache takes by default, as a share of the memory that is free once the model is loaded. The main
memory has many users, other teachers among them; a GPU has few."""

log = logging.getLogger(__name__)


class TorchScorer:
    """A ScoringEngine (engines.base) on a model loaded with attention="packed". Not thread-safe."""

    def __init__(
        self, model: PreTrainedModel, *, max_batch_tokens: int = 4096, prefix_cache: PrefixCache | None = None
    ) -> None:
        """`prefix_cache`: an empty one of this scorer's own; None: prefixes are computed anew each time."""
        self._prefixes = prefix_cache
        self._computed_tokens = 0
        self._model: PreTrainedModel | None = model
        self._parked = Parked(model.parameters)
        self._head = lm_head(model)
        self._vocab_size = self._head.weight_VH.shape[0]
        self._max_context = context_window(model.config)
        self._folds = not switching_rope(model.config)
        self._max_batch_tokens = max_batch_tokens
        self._chunk_tokens = chunk_rows(self._vocab_size, self._head.weight_VH.device.type)

    @classmethod
    def load(cls, path: str | Path, config: ScorerSettings) -> TorchScorer:
        """Load a teacher. Raises models.loading.ModelError or models.packed.PackingError with the reason."""
        device = resolve_device(config.device)
        model = load_causal_lm(
            path,
            device=device,
            dtype=resolve_dtype(config.dtype, device),
            attention="packed",
            quantize=config.quantize,
        )
        return cls(
            model,
            max_batch_tokens=config.max_batch_tokens,
            prefix_cache=make_prefix_cache(model, config.prefix_cache_mb),
        )

    @property
    def vocab_size(self) -> int:
        """Rows of the LM head; a checkpoint may pad them past the tokenizer's last id."""
        return self._vocab_size

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def hidden_size(self) -> int:
        """See protocol.payloads.hidden.GivesHiddenStates."""
        return self._head.weight_VH.shape[1]

    @property
    def head_identity(self) -> int:
        """See protocol.payloads.hidden.GivesHiddenStates."""
        return self._head.identity

    @property
    def figures(self) -> Mapping[str, float]:
        """See engines.base.ReportsFigures."""
        kept = {} if self._prefixes is None else self._prefixes.stats
        return {"computed_tokens_total": float(self._computed_tokens), **kept}

    @torch.inference_mode()
    def score(self, requests: Sequence[ScoreRequest], options: ScoreOptions = LOGPROBS_ONLY) -> list[ScoreResult]:
        """Score a batch at temperature 1. Results are in the order of the requests, regardless of packing.

        A request with start == len(token_ids) gets empty arrays. Raises ValueError for ids outside the vocabulary,
        start outside [1, len], more than max_context tokens, top_k outside [0, vocab_size].
        """
        # The last token is never an input, so a request may be one token longer than the context window.
        top_k = options.top_k
        check_scoring(requests, top_k, vocab_size=self._vocab_size, max_tokens=self._max_context + 1)
        size = self.hidden_size if options.hidden else None
        results = [ScoreResult.empty(top_k if one.top_ids is None else one.top_ids.shape[1], size) for one in requests]
        runs = fold(requests, together=self._folds)
        try:
            self._look_up(runs)
            for pack in first_fit_decreasing([run.n_inputs for run in runs], self._max_batch_tokens):
                for i, result in self._score_pack([runs[p] for p in pack], requests, options):
                    results[i] = result
        except BaseException:
            self._forget()  # cells may lack values; and where memory was short, room is worth more than prefixes
            raise
        if self._prefixes is not None:
            for request in requests:
                if request.last:
                    self._prefixes.release(request.rollout_id)
        return results

    def load_snapshot(self, ref: WeightsRef) -> None:
        """See engines.base.TakesSnapshots. The file is memory-mapped, so that no second full copy is made."""
        model = self._model
        if model is None:
            raise RuntimeError("the scorer is closed; load a new one")
        parameters = dict(model.named_parameters())
        named = dict(read_snapshot(ref))
        differing = sorted(
            name
            for name in named.keys() | parameters.keys()
            if name not in named or name not in parameters or named[name].shape != parameters[name].shape
        )
        if differing:
            raise SnapshotRefused(
                f"{ref.path}: {len(differing)} of its {len(named)} tensors do not fit this teacher's "
                f"{len(parameters)}, e.g. {differing[:4]}; expected a snapshot of the same architecture"
            )
        self._forget()  # before the first change: what was kept belongs to the former weights
        self._head = lm_head(model)  # with another identity
        with torch.no_grad():
            for name, tensor in named.items():
                parameters[name].copy_(tensor)

    def give_back(self) -> None:
        """See protocol.turns.SharesDevice."""
        self._forget()
        self._parked.leave()

    def take_again(self, *, weights_only: bool = False) -> None:
        self._parked.come_back()

    def close(self) -> None:
        """Drop the model. Scoring afterwards raises RuntimeError. Idempotent."""
        self._model = None
        self._forget()

    def _forget(self) -> None:
        if self._prefixes is not None:
            self._prefixes.clear()

    def _look_up(self, runs: Sequence[ScoringRun]) -> None:
        """Find what is kept of each run, and decide what will be. First all are looked up: cells that are added here
        have no values before their pack is run."""
        cache = self._prefixes
        if cache is None:
            return
        cache.begin_round()
        kept = [run for run in runs if run.rollout_id]
        for run in kept:
            run.past = cache.find(run.rollout_id, run.inputs, limit=run.start - 1)
        for run in kept:
            if not run.last and (added := cache.add(run.rollout_id, run.inputs)) is not None:
                run.cells, run.keep_last = added

    def _score_pack(
        self, runs: Sequence[ScoringRun], requests: Sequence[ScoreRequest], options: ScoreOptions
    ) -> list[tuple[int, ScoreResult]]:
        """Score one pack in one forward pass: (index of the request, result) of each of its members."""
        model = self._model
        if model is None:
            raise RuntimeError("the scorer is closed; load a new one")
        lengths = [run.n_inputs for run in runs]
        firsts = np.cumsum([0, *lengths[:-1]])
        members = [(run, int(first), one) for run, first in zip(runs, firsts, strict=True) for one in run.members]
        rows_A = np.concatenate(
            [np.arange(one.start - 1, one.end - 1) + first - run.n_past for run, first, one in members]
        )
        targets_A = np.concatenate([run.ids[one.start : one.end] for run, _, one in members])
        given_AK = _given([requests[one.request].top_ids for _, _, one in members])
        ids_T = np.concatenate([run.inputs[run.n_past :] for run in runs])
        device = self._head.weight_VH.device
        uses = [CacheUse(run.past, run.cells, run.keep_last) for run in runs]
        hidden_TH = packed_hidden(model, upload(ids_T.astype(np.int64), device), lengths, uses)
        self._computed_tokens += len(ids_T)
        predictors_AH = hidden_TH.index_select(0, upload(rows_A, device))
        scores = token_scores(
            self._head,
            predictors_AH,
            upload(targets_A.astype(np.int64), device),
            chunk_tokens=self._chunk_tokens,
            top_k=options.top_k,
            given_TK=None if given_AK is None else upload(given_AK, device),
        )
        states_AH = _bits(predictors_AH) if options.hidden else None
        results = _split(scores, states_AH, [requests[one.request] for _, _, one in members])
        return [(one.request, result) for (_, _, one), result in zip(members, results, strict=True)]


class RunRequest(NamedTuple):
    """A request of a run: the tokens [start, end) that it asks for."""

    request: int
    """Its index."""
    start: int
    end: int


@dataclass(slots=True)
class ScoringRun:
    """Tokens that go through the model once, for one request or for several of one rollout."""

    ids: Int32s
    rollout_id: str
    start: int
    """The first token that a member asks for."""
    members: list[RunRequest]
    last: bool
    past: Past | None = None
    cells: Cells | None = None
    keep_last: int = 0
    """Number of inputs whose keys and values go into `cells`; they are the last ones."""

    @property
    def inputs(self) -> Int32s:
        """What the model reads: nothing follows the last token."""
        return self.ids[:-1]

    @property
    def n_past(self) -> int:
        return 0 if self.past is None else self.past.n_tokens

    @property
    def n_inputs(self) -> int:
        """Tokens that this run computes."""
        return len(self.ids) - 1 - self.n_past


def fold(requests: Sequence[ScoreRequest], *, together: bool = True) -> list[ScoringRun]:
    """One run for all requests of a rollout of which each begins the next one and reaches up to its start. Requests
    without a token to score are in none. `together=False`: one run each, for a model in which a longer text changes
    what was before."""
    runs: list[ScoringRun] = []
    by_rollout: dict[str, list[ScoringRun]] = {}
    for index in sorted(range(len(requests)), key=lambda i: -len(requests[i].token_ids)):
        request = requests[index]
        ids, end = request.token_ids, len(request.token_ids)
        if request.start == end:
            continue
        its = by_rollout.setdefault(request.rollout_id, []) if request.rollout_id and together else []
        run = next((run for run in its if end >= run.start and np.array_equal(run.ids[:end], ids)), None)
        if run is None:
            run = ScoringRun(ids, request.rollout_id, request.start, [], request.last)
            its.append(run)
            runs.append(run)
        run.members.append(RunRequest(index, request.start, end))
        run.start = min(run.start, request.start)
        run.last |= request.last
    return runs


def make_prefix_cache(model: PreTrainedModel, megabytes: int | None) -> PrefixCache | None:
    """An empty cache for this model, loaded with attention="packed"; None where it is turned off or impossible.
    `megabytes`: None is the default of `teacher.prefix_cache_mb`."""
    if megabytes == 0:
        return None
    try:
        bytes_per_token = probe_past(model)
    except PackingError as error:
        log.warning("prefixes of growing rollouts are computed anew each time: %s", error)
        return None
    max_bytes = _default_cache_bytes(model.device) if megabytes is None else megabytes * 2**20
    log.info("prefix cache: up to %d MiB, %d tokens", max_bytes // 2**20, max_bytes // bytes_per_token)
    return PrefixCache(max_bytes, bytes_per_token)


def _default_cache_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return min(GPU_PREFIX_CACHE_BYTES, int(torch.cuda.mem_get_info(device)[0] * _FREE_SHARE["cuda"]))
    return int(psutil.virtual_memory().available * _FREE_SHARE["cpu"])


def _given(sets: Sequence[Int32s | None]) -> npt.NDArray[np.int64] | None:
    """[A, K] The tokens that the requests ask for, padded with 0 to the most of one; None if they ask for none."""
    asked = [one for one in sets if one is not None]
    if not asked:
        return None
    given_AK = np.zeros((sum(map(len, asked)), max(one.shape[1] for one in asked)), np.int64)
    row = 0
    for one in asked:
        given_AK[row : row + len(one), : one.shape[1]] = one
        row += len(one)
    return given_AK


def _bits(states_AH: Tensor) -> Bits:
    return states_AH.bfloat16().view(torch.int16).cpu().numpy().view(np.uint16)


def _split(scores: TokenScores, states_AH: Bits | None, requests: Sequence[ScoreRequest]) -> list[ScoreResult]:
    logprobs_A = scores.logprobs_T.float().cpu().numpy()
    top_ids_AK = None if scores.top_ids_TK is None else scores.top_ids_TK.int().cpu().numpy()
    top_logprobs_AK = None if scores.top_logprobs_TK is None else scores.top_logprobs_TK.float().cpu().numpy()
    results: list[ScoreResult] = []
    start = 0
    for request in requests:
        count = len(request.token_ids) - request.start
        k = None if request.top_ids is None else request.top_ids.shape[1]
        part = slice(start, start + count)
        results.append(
            ScoreResult(
                logprobs=logprobs_A[part].copy(),  # not a view that would keep the whole pack alive
                top_ids=None if top_ids_AK is None else top_ids_AK[part, :k].copy(),
                top_logprobs=None if top_logprobs_AK is None else top_logprobs_AK[part, :k].copy(),
                hidden=None if states_AH is None else states_AH[part].copy(),
            )
        )
        start += count
    return results
