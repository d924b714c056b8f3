"""Host-side state of the generation engine's slots: what each running request has, needs and may still do.

Plain numpy arrays with one entry per slot, so that a decode step touches all rows at once and no row costs Python.
Running requests occupy rows 0..n_rows-1 without holes whenever a step runs. Rows of similar length attend together, so
that one long rollout does not make all others read its empty cells: they are kept in blocks of falling length class,
and a block attends over a window as long as its own longest row. No torch here.

Legend: S slots, C capacity in tokens, R rows in use, K stop ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from stillhouse.engines.base import GenerationDelta, GenerationRequest
from stillhouse.protocol.messages import VersionSpan, WeightVersion

_FIRST_CLASS_TOKENS = 64
_CLASSES = _FIRST_CLASS_TOKENS * 2 ** np.arange(24)
"""Longest row of each class. Classes double, so that a rollout changes its class, and perhaps its row, only a few
times."""
_WINDOW_STEP_TOKENS = 16
"""Windows grow in these steps, so that there are few distinct shapes."""
_BLOCK_COST_CELLS = 256
"""Cost of attention in one more block (calls into torch), in cells read by one row; measured on a CPU."""


class RowWindow(NamedTuple):
    """Rows [start, stop) attend to cells [0, window) of their slots."""

    start: int
    stop: int
    window: int


def length_classes(lengths_R: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The class of each row, 0 for the shortest. [R]"""
    return np.searchsorted(_CLASSES, lengths_R)


def row_windows(lengths_R: npt.NDArray[np.int64], max_context: int) -> list[RowWindow]:
    """Blocks over rows in order, cut where the class falls and the cut saves more than it costs. At least one block,
    which is empty when there are no rows."""
    n_rows = len(lengths_R)
    if n_rows == 0:
        return [RowWindow(0, 0, min(_WINDOW_STEP_TOKENS, max_context))]
    cuts = [0, *(np.flatnonzero(np.diff(length_classes(lengths_R))) + 1).tolist(), n_rows]
    blocks: list[RowWindow] = []
    for start, stop in pairwise(cuts):
        window = min(window_of(int(lengths_R[start:stop].max())), max_context)
        if blocks and (stop - start) * (blocks[-1].window - window) < _BLOCK_COST_CELLS:
            former = blocks.pop()
            start, window = former.start, max(former.window, window)
        blocks.append(RowWindow(start, stop, window))
    return blocks


def window_of(length: int) -> int:
    """The smallest window that holds `length` cells."""
    return -(-length // _WINDOW_STEP_TOKENS) * _WINDOW_STEP_TOKENS


FinishReason = Literal["stop", "length", "aborted", "error"]


@dataclass(slots=True, eq=False)
class Running:
    """A request that has a slot."""

    request: GenerationRequest
    row: int
    emitted: int
    """Tokens of the sequence that are not to be reported: the prompt, and what was reported before."""
    prompt_key: bytes
    """Equal for requests with the same prompt."""
    top_ids: list[npt.NDArray[np.int32]] = field(default_factory=list[npt.NDArray[np.int32]])
    """With `Sampling.top_ids` the likeliest tokens at the place of each sampled token that was not reported yet, with
    `Sampling.kept` those that it was sampled from."""


class SlotTable:
    """The state of all slots."""

    def __init__(self, n_slots: int, capacity: int) -> None:
        self.n_slots = n_slots
        self.capacity = capacity
        self.running: list[Running | None] = [None] * n_slots
        self.n_running = 0
        self.ids = np.zeros((n_slots, capacity), np.int32)
        """[S, C] the sequence so far: prompt, then sampled tokens."""
        self.logprobs = np.zeros((n_slots, capacity), np.float32)
        """[S, C] log-probs of sampled tokens, at their place in the sequence."""
        self.uniforms = np.zeros((n_slots, capacity), np.float64)
        """[S, C] the random number that selects the token at each place."""
        self.in_use = np.zeros(n_slots, np.bool_)
        self.length = np.zeros(n_slots, np.int64)
        self.limit = np.zeros(n_slots, np.int64)
        """Length at which the request ends."""
        self.next_input = np.zeros(n_slots, np.int64)
        """The last token of the sequence: the next step's input."""
        self.stop_ids = np.full((n_slots, 1), -1, np.int64)
        """[S, K], padded with -1; grows with the longest list seen."""
        self.inverse_temperature = np.ones(n_slots, np.float32)
        self.top_k = np.zeros(n_slots, np.int64)
        self.top_p = np.ones(n_slots, np.float64)
        self.min_p = np.zeros(n_slots, np.float32)
        self.teacher_share = np.zeros(n_slots, np.float32)
        self.greedy = np.zeros(n_slots, np.bool_)
        self._rows = np.arange(n_slots)

    @property
    def free(self) -> int:
        return self.n_slots - self.n_running

    def at(self, row: int) -> Running:
        running = self.running[row]
        if running is None:
            raise LookupError(f"row {row} is free; {self.n_running} requests are running")
        return running

    def past(self, running: Running) -> npt.NDArray[np.int32]:
        """The tokens before the next input, whose keys and values are in the cache. A view, [n]."""
        return self.ids[running.row, : self.length[running.row] - 1]

    def place(self, request: GenerationRequest, uniforms: npt.NDArray[np.float64]) -> Running:
        """Give a request the lowest free row. `uniforms` [n] are for the tokens that it may sample, at most n."""
        row = self.running.index(None)
        n_prompt, sampling, stops = len(request.prompt_ids), request.sampling, request.stop_token_ids
        running = self.running[row] = Running(request, row, n_prompt, request.prompt_ids.tobytes())
        self.n_running += 1
        self.in_use[row] = True
        self.ids[row, :n_prompt] = request.prompt_ids
        self.length[row] = n_prompt
        self.limit[row] = n_prompt + len(uniforms)
        self.uniforms[row, n_prompt : n_prompt + len(uniforms)] = uniforms
        self.next_input[row] = request.prompt_ids[-1]
        if len(stops) > self.stop_ids.shape[1]:
            wider = np.full((self.n_slots, len(stops)), -1, np.int64)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(stops)] = stops
        greedy = sampling.temperature == 0
        self.greedy[row] = greedy
        self.inverse_temperature[row] = 1.0 if greedy else 1.0 / sampling.temperature
        self.top_k[row] = 0 if greedy else sampling.top_k
        self.top_p[row] = 1.0 if greedy else sampling.top_p
        self.min_p[row] = 0.0 if greedy else sampling.min_p
        self.teacher_share[row] = 0.0 if greedy else sampling.teacher_share
        return running

    def release(self, running: Running) -> None:
        self.running[running.row] = None
        self.in_use[running.row] = False
        self.n_running -= 1

    def arrange(self) -> tuple[list[int], list[int]]:
        """Close gaps and group rows by length class, longest first. Returns (from, to), which the KV cache must copy
        too. Only rows in another class's block, or after the last row, move."""
        classes_S = np.where(self.in_use, length_classes(self.length), -1)
        wanted_S = np.sort(classes_S)[::-1]
        wrong_S = classes_S != wanted_S
        if not wrong_S.any():
            return [], []
        out_of_place = np.flatnonzero(wrong_S & self.in_use)
        sources: list[int] = out_of_place[np.argsort(-classes_S[out_of_place], kind="stable")].tolist()
        targets: list[int] = np.flatnonzero(wrong_S & (wanted_S >= 0)).tolist()
        moved = [self.at(row) for row in sources]
        for row in sources:
            self.running[row] = None
        for running, row in zip(moved, targets, strict=True):
            self.running[row], running.row = running, row
        self.in_use[sources] = False
        self.in_use[targets] = True
        for array in (
            *(self.ids, self.logprobs, self.uniforms, self.length, self.limit, self.next_input, self.stop_ids),
            *(self.inverse_temperature, self.top_k, self.top_p, self.min_p, self.teacher_share, self.greedy),
        ):
            array[targets] = array[sources]
        return sources, targets

    def append(self, ids_R: npt.NDArray[np.int64], logprobs_R: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
        """Add one sampled token to each row; returns the rows that end with it."""
        n_rows = len(ids_R)
        rows, length = self._rows[:n_rows], self.length[:n_rows]
        self.ids[rows, length] = ids_R
        self.logprobs[rows, length] = logprobs_R
        self.next_input[:n_rows] = ids_R
        length += 1
        ended = (length >= self.limit[:n_rows]) | (self.stop_ids[:n_rows] == ids_R[:, None]).any(axis=1)
        return np.flatnonzero(ended)

    def take_delta(
        self, running: Running, version: WeightVersion, reason: FinishReason | None = None, error: str | None = None
    ) -> GenerationDelta | None:
        """All tokens of a request that were not reported yet, all sampled under `version`; None if there is nothing to
        report."""
        row, start, end = running.row, running.emitted, int(self.length[running.row])
        if start == end and reason is None:
            return None
        running.emitted = end
        spans = (VersionSpan(version, 0, end - start),) if end > start else ()
        ids, logprobs = self.ids[row, start:end].copy(), self.logprobs[row, start:end].copy()
        sets, running.top_ids = tuple(running.top_ids[: end - start]), []
        top_ids = sets if running.request.sampling.reports_ids else None
        return GenerationDelta(running.request.request_id, ids, logprobs, spans, reason, error, top_ids)

    def finish_reason(self, row: int) -> FinishReason:
        """The finish reason of a row that `append` returned."""
        return "stop" if self.next_input[row] in self.stop_ids[row] else "length"
