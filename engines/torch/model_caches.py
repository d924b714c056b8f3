"""Decoding over transformers' own caches, for architectures whose state is more than keys and values.

    slot -> (a cache, its row)        rows of one length share a forward pass: samples of one prompt, until they end

Recurrent and convolutional states, windows and indexers stay what transformers makes of them. A batch holds sequences
of one length only, so that nothing is padded or masked, and a cache is taken apart and put together by rows, whatever
its layers are made of. `engines.torch.decoders` compares that with plain forward passes.

Legend: R rows that decode, V vocabulary, B rows of a cache.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stillhouse.engines.torch.slot_experts import SlotExperts
from stillhouse.engines.torch.step import Int64s, Prefill
from stillhouse.models.packed import trunk

_NAMES = ("past_key_values", "cache_params")
"""What architectures call their cache, as argument and as field of the output."""


class _Held(NamedTuple):
    """A row of a cache."""

    cache: Any
    n_rows: int
    row: int


class ModelCaches:
    """The state of all slots of an engine. See `engines.torch.decoders.Slots`."""

    title = "transformers' own cache"
    shares_prompts = False  # a recurrent state has no beginning that could be copied

    def __init__(self, model: PreTrainedModel, *, batched: bool) -> None:
        """`batched=False`: one sequence at a time."""
        self._model = model
        self._batched = batched
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._held: dict[int, _Held] = {}
        self._name = ""
        self.memory_bytes = 0
        self.experts: SlotExperts | None = None

    def run(self, ids_R: Int64s, positions_R: Int64s, prefills: Sequence[Prefill]) -> Tensor:
        for prefill in prefills:
            cells = np.tile(np.arange(len(prefill.ids)), len(prefill.slots))
            with self._recording(np.repeat(prefill.slots, len(prefill.ids)), cells, cells):
                cache = self._cache_of(trunk(self._model)(input_ids=self._ids(prefill.ids[None]), use_cache=True))
            self._held.update((slot, _Held(cache, 1, 0)) for slot in prefill.slots)
        n_rows = len(ids_R)
        logits: list[Tensor | None] = [None] * n_rows
        for rows in self._groups(positions_R):
            # Nothing is before position 0, whatever the slot had.
            past = self._together(rows) if positions_R[rows[0]] else None
            more = {} if past is None else {self._name: past, **self._positions(positions_R[rows][:, None])}
            with self._recording(np.array(rows), positions_R[rows], None):
                output = self._model(input_ids=self._ids(ids_R[rows][:, None]), use_cache=True, **more)
            cache = self._cache_of(output)
            for i, row in enumerate(rows):
                self._held[row] = _Held(cache, len(rows), i)
                logits[row] = output.logits[i, -1]
        if n_rows:  # rows are slots 0 to n_rows - 1 then; others are free
            self._held = {row: held for row, held in self._held.items() if row < n_rows}
        self.memory_bytes = sum(map(_nbytes, {id(held.cache): held.cache for held in self._held.values()}.values()))
        return torch.stack(cast("list[Tensor]", logits)) if n_rows else torch.empty(0, device=self._model.device)

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int], n_tokens: int) -> None:
        """The sources must be free from now on; `n_tokens` is all that they have."""
        moved = [self._held.pop(source, None) for source in sources]
        self._held.update((target, held) for target, held in zip(targets, moved, strict=True) if held is not None)
        if self.experts is not None:
            self.experts.copy(sources, targets, n_tokens)

    def clear_slot(self, slot: int) -> None:
        self._held.pop(slot, None)

    def drop(self) -> None:
        self._held.clear()

    def refresh(self) -> None:
        """Does nothing: no copies of parameters are kept."""

    def _recording(
        self, slots_W: Int64s, positions_W: Int64s, sources_W: Int64s | None
    ) -> AbstractContextManager[None]:
        if self.experts is None:
            return nullcontext()
        sources = None if sources_W is None else torch.from_numpy(sources_W)
        return self.experts.recording(torch.from_numpy(slots_W), torch.from_numpy(positions_W), sources)

    def _ids(self, ids: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(ids, np.int64)).to(self._model.device)

    def _positions(self, positions_R1: Int64s) -> dict[str, Tensor]:
        """As an argument, where there is one: Bamba begins at 0 again without it."""
        return {"position_ids": self._ids(positions_R1)} if self._takes_positions else {}

    def _groups(self, positions_R: Int64s) -> list[list[int]]:
        if not self._batched:
            return [[row] for row in range(len(positions_R))]
        return [np.flatnonzero(positions_R == position).tolist() for position in np.unique(positions_R)]

    def _cache_of(self, output: Any) -> Any:
        self._name = self._name or next((name for name in _NAMES if getattr(output, name, None) is not None), "")
        if not self._name:
            raise ValueError(f"{type(self._model).__name__} returns no cache")
        return getattr(output, self._name)

    def _together(self, rows: Sequence[int]) -> Any:
        """A cache with these rows, in this order: the one that only they have, or a new one."""
        held = [self._held[row] for row in rows]
        cache, n_rows, _ = held[0]
        alike = len(rows) == n_rows and all(one.cache is cache and one.row == i for i, one in enumerate(held))
        if alike and sum(one.cache is cache for one in self._held.values()) == n_rows:
            return cache
        return _rows_of([one.cache for one in held], held)


def _rows_of(values: Sequence[Any], held: Sequence[_Held]) -> Any:
    """One value of those that caches have in the same place, with the row that each of `held` names. Numbers are alike
    in sequences of one length. Objects are copied, because a forward pass changes them in place."""
    first = values[0]
    if isinstance(first, Tensor):
        if first.ndim < 2 or any(value.shape[0] != one.n_rows for value, one in zip(values, held, strict=True)):
            return first.clone()  # of no row
        return torch.cat([value[one.row : one.row + 1] for value, one in zip(values, held, strict=True)])
    if isinstance(first, dict):
        return {key: _rows_of([value[key] for value in values], held) for key in cast("dict[Any, Any]", first)}
    if isinstance(first, list):
        return [_rows_of(parts, held) for parts in zip(*values, strict=True)]
    if not type(first).__module__.startswith("transformers.") or not hasattr(first, "__dict__"):
        return first
    if "config" in type(first).__module__:
        return first
    made = copy.copy(first)
    made.__dict__.update(_rows_of([vars(value) for value in values], held))
    return made


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(_nbytes, cast("dict[Any, Any]", value).values()))
    if isinstance(value, list):
        return sum(map(_nbytes, cast("list[Any]", value)))
    return sum(map(_nbytes, vars(value).values())) if type(value).__module__ == "transformers.cache_utils" else 0
