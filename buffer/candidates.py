"""What each train sample could release, kept up to date: how much there is, and the oldest first.

Samples are filed in *bins*. All samples of a bin may leave under the same condition, so that another batch, or the end
of the learner's patience, opens or closes bins and not samples:

    WHOLE       rollouts (release `rollout`: groups) that are whole
    PREFIX      scored prefixes, where their age does not matter (release `segment`)
    versions    scored prefixes by the versions of their tokens, which tell how old each is (release `deadline`)

Tokens and rollouts are summed up by bin, as whole numbers. An event changes one sample in O(log n), of n held."""

from __future__ import annotations

from collections.abc import Callable, Generator
from heapq import heapify, heappop, heappush, merge
from typing import Final, NamedTuple, TypeAlias

from stillhouse.buffer.rollouts import Slot
from stillhouse.protocol.messages import WeightVersion

Key: TypeAlias = str | tuple[WeightVersion, ...]
WHOLE: Final = "whole"
PREFIX: Final = "prefix"

_GARBAGE: Final = 64
"""Entries of a heap that may be out of date in any case."""


class Offer(NamedTuple):
    """What one sample (release `rollout`: one group) could release."""

    key: Key
    rollouts: int
    """Whole rollouts of which nothing has left."""
    tokens: int
    """Open tokens of other pieces."""
    max_new_tokens: int
    """Length limit of its rollouts, which stands for their mean length as long as that is unknown."""


class Sums:
    """Total of some offers."""

    __slots__ = ("rollouts", "tokens", "tokens_by_limit")

    def __init__(self) -> None:
        self.rollouts = 0
        self.tokens = 0
        self.tokens_by_limit: dict[int, int] = {}
        """Tokens by `max_new_tokens`."""

    def add(self, offer: Offer, sign: int) -> None:
        """Add an offer (`sign` 1) or take it away (-1)."""
        self.rollouts += sign * offer.rollouts
        self.tokens += sign * offer.tokens
        if offer.tokens:
            tokens = self.tokens_by_limit.get(offer.max_new_tokens, 0) + sign * offer.tokens
            self.tokens_by_limit[offer.max_new_tokens] = tokens
            if not tokens:
                del self.tokens_by_limit[offer.max_new_tokens]

    def weight(self, mean_tokens: float | None) -> float:
        """Number of rollouts, where any other piece counts as a fraction. `mean_tokens`: mean length of a rollout."""
        if mean_tokens is not None:
            return self.rollouts + self.tokens / mean_tokens
        return self.rollouts + sum(tokens / limit for limit, tokens in self.tokens_by_limit.items())


class Bin:
    """Samples that may leave under the same condition."""

    __slots__ = ("_orders", "slots", "sums")

    def __init__(self) -> None:
        self.sums = Sums()
        self.slots: dict[int, Slot] = {}
        """By order."""
        self._orders: list[int] = []
        """A heap of all their orders. Those that have left are removed when they come up, and some may be in it
        twice."""

    def put(self, order: int, slot: Slot) -> None:
        if order not in self.slots:
            heappush(self._orders, order)
        self.slots[order] = slot

    def remove(self, order: int) -> None:
        del self.slots[order]
        if len(self._orders) > 2 * len(self.slots) + _GARBAGE:
            self._orders = list(self.slots)
            heapify(self._orders)

    def oldest_first(self) -> Generator[int]:
        """Orders, ascending. Nothing may be put or removed before the generator is closed."""
        popped: list[int] = []
        try:
            while self._orders:
                order = heappop(self._orders)
                if order in self.slots and (not popped or popped[-1] != order):
                    popped.append(order)
                    yield order
        finally:
            for order in popped:
                heappush(self._orders, order)


class Candidates:
    """All offers. `is_open(key)`: whether samples of this bin may leave now."""

    def __init__(self) -> None:
        self._offers: dict[int, Offer] = {}
        """By order."""
        self._bins: dict[Key, Bin] = {}
        self._open: dict[Key, None] = {}
        """Keys of bins from which samples may leave, since `open_where`."""
        self._sums = Sums()
        """Total of the open bins."""

    def __repr__(self) -> str:
        return f"Candidates({len(self._offers)} samples in {len(self._bins)} bins, {len(self._open)} of them open)"

    @property
    def any_open(self) -> bool:
        """Return True if something may leave."""
        return bool(self._open)

    def weight(self, mean_tokens: float | None) -> float:
        """Weight of all that may leave."""
        return self._sums.weight(mean_tokens)

    def open_where(self, is_open: Callable[[Key], bool]) -> None:
        """Open and close bins, because another batch is wanted, or more may leave. Costs a call for each bin."""
        self._open = {key: None for key in self._bins if is_open(key)}
        self._sums = Sums()
        for key in self._open:
            sums = self._bins[key].sums
            self._sums.rollouts += sums.rollouts
            self._sums.tokens += sums.tokens
            for limit, tokens in sums.tokens_by_limit.items():
                self._sums.tokens_by_limit[limit] = self._sums.tokens_by_limit.get(limit, 0) + tokens

    def put(self, order: int, slot: Slot, offer: Offer | None, is_open: Callable[[Key], bool]) -> None:
        """Enter what a sample could release now, in place of what it could before. None: nothing. `order`: of the slot
        (release `rollout`: of its group)."""
        former = self._offers.get(order)
        if former == offer:
            return
        if former is not None:
            self._remove(order, former, leaves=offer is None or offer.key != former.key)
        if offer is None:
            return
        self._offers[order] = offer
        bin_ = self._bins.get(offer.key)
        if bin_ is None:
            bin_ = self._bins[offer.key] = Bin()
            if is_open(offer.key):
                self._open[offer.key] = None
        bin_.put(order, slot)
        bin_.sums.add(offer, 1)
        if offer.key in self._open:
            self._sums.add(offer, 1)

    def oldest_first(self) -> Generator[Slot]:
        """The samples that may leave, in order. Close it (`contextlib.closing`) before `put` is called again."""
        bins = [self._bins[key] for key in self._open]
        orders = [bin_.oldest_first() for bin_ in bins]
        try:
            for order in merge(*orders):
                yield self._bins[self._offers[order].key].slots[order]
        finally:
            for one in orders:
                one.close()

    def clear(self) -> None:
        """Forget everything."""
        self._offers.clear()
        self._bins.clear()
        self._open.clear()
        self._sums = Sums()

    def _remove(self, order: int, offer: Offer, *, leaves: bool) -> None:
        """Take an offer out of its sums, and its sample out of its bin if it leaves that."""
        del self._offers[order]
        bin_ = self._bins[offer.key]
        bin_.sums.add(offer, -1)
        if offer.key in self._open:
            self._sums.add(offer, -1)
        if leaves:
            bin_.remove(order)
            if not bin_.slots:
                del self._bins[offer.key]
                self._open.pop(offer.key, None)
