"""From a batch as it came off the wire to microbatches of packed 1-D arrays.

    tokens       p p p s s s e e s s e        p prompt, s sampled, e environment
    train mask   0 0 0 1 1 1 0 0 1 1 0
    input        p p p s s s e e s            up to the last trained token, which itself is only predicted
    predictors       ^ ^ ^     ^ ^            position t - 1 predicts token t
    targets            s s s     s s

Context behind the last trained token cannot influence the loss (attention is causal), so it is not computed. A rollout
with branches becomes several inputs, one per branch with something to train: each trained token is in one of them, and
in the others it is context. They stay one item, with one share of the loss, in one microbatch. Items are packed by the
length of their inputs, first-fit decreasing. An item longer than the budget gets a microbatch of its own; no item is
dropped. The teachers' payloads for the trained tokens become rows, one per token and teacher (learner.payloads).

Legend: L tokens of an item, T input tokens of a microbatch, N trained tokens of it, M teachers (of the item in
`TrainItem`, of the whole batch in `Microbatch`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from stillhouse.learner.payloads import NO_ROWS, KeptRows, join_rows
from stillhouse.models.divided import RankGroup, RankPart, RankPlaces
from stillhouse.models.packed_layout import balanced_packs
from stillhouse.protocol.branches import path_to
from stillhouse.protocol.messages import BatchItem
from stillhouse.protocol.payloads.aligned import AlignedRows
from stillhouse.protocol.payloads.expert_ids import ExpertRows
from stillhouse.protocol.payloads.kind import PayloadRows

FRAMES_PER_ITEM = 4
"""Frames of an item; one with top-k pieces has one more."""
_LOGPROB_ROUNDING = 1e-3
"""A log-prob above 0 by at most this is rounded; above that it is an error."""


class BatchError(ValueError):
    """A batch that must not be trained. Nothing was changed. `rollout_ids` are the rollouts at fault."""

    def __init__(self, message: str, rollout_ids: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.rollout_ids = tuple(rollout_ids)


class UnreadableScores(BatchError):
    """A teacher's payload for `rollout_ids` cannot be read; the rest of the batch is fine."""


class EmptyBatchError(BatchError):
    """The batch has no token to train. The buffer never sends such a batch: it settles items without a trainable token
    itself."""


class NonFiniteError(BatchError):
    """The forward or backward pass gave NaN or infinity, and the update was not made. `rollout_ids` are the rollouts
    that cause it alone; empty if only their sum does."""


class Inputs(NamedTuple):
    """What the model reads of one item: one sequence per branch with tokens to train, one behind the other."""

    ids_T: npt.NDArray[np.int32]
    lengths: tuple[int, ...]
    """Tokens of each sequence."""
    predictor_N: npt.NDArray[np.int64]
    """For each trained token of the item, in order: the position that predicts it."""
    next_T: npt.NDArray[np.int64]
    """Which token of the item each position predicts."""


@dataclass(frozen=True)
class TrainItem:
    """One BatchItem and its frames, checked."""

    item: BatchItem
    tokens_L: npt.NDArray[np.int32]
    behaviour_L: npt.NDArray[np.float32]
    train_mask_L: npt.NDArray[np.bool_]
    teacher_ML: npt.NDArray[np.float32]
    payloads: npt.NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    """Payloads of `item.top_k`, concatenated."""
    top: Mapping[str, PayloadRows] = field(default_factory=dict[str, PayloadRows])
    """Teacher -> payload rows of the trained tokens, once decoded; empty if the objective does not use them."""
    kept: KeptRows | None = None
    """What the trained tokens were sampled from, once decoded; None: the whole vocabulary."""
    experts: ExpertRows | None = None
    """By token, what the engine's routers chose, once decoded; None: routers choose freely."""

    @property
    def n_trained(self) -> int:
        return int(self.train_mask_L.sum())

    @cached_property
    def before(self) -> npt.NDArray[np.int64]:
        """[N] For each trained token, which of the trained ones is the last before it on its path; -1 if none is."""
        trained = np.flatnonzero(self.train_mask_L)
        before_N = np.arange(len(trained)) - 1
        starts = [branch.start for branch in self.item.branches]
        entered: list[int] = []  # by branch: the last trained token before its first one
        for branch in self.item.branches:
            behind = bisect_left(starts, branch.follows) - 1  # the branch of the token that it follows; -1: the first
            last = int(np.searchsorted(trained, branch.follows)) - 1
            if behind >= 0 and (last < 0 or trained[last] < starts[behind]):
                last = entered[behind]
            entered.append(last)
            first = int(np.searchsorted(trained, branch.start))
            before_N[first : first + 1] = last
        return before_N

    @cached_property
    def inputs(self) -> Inputs:
        """All tokens of each branch before its last trained one."""
        trained = np.flatnonzero(self.train_mask_L)
        if not self.item.branches or not len(trained):
            n = int(trained[-1]) if len(trained) else 0
            return Inputs(self.tokens_L[:n], (n,) if n else (), trained - 1, np.arange(1, n + 1))
        predictor_N = np.full(len(trained), -1, np.int64)
        parts: list[npt.NDArray[np.int64]] = []
        n_before = 0
        while (left := np.flatnonzero(predictor_N < 0)).size:
            # The branch of the last token that is in no input yet. Offsets rise along a branch.
            path_P = np.concatenate([np.arange(*r) for r in path_to(self.item.branches, int(trained[left[-1]]) + 1)])
            here = left[np.isin(trained[left], path_P, assume_unique=True)]
            predictor_N[here] = n_before + np.searchsorted(path_P, trained[here]) - 1
            parts.append(path_P)
            n_before += len(path_P) - 1
        read_T, next_T = (np.concatenate([path_P[which] for path_P in parts]) for which in (slice(-1), slice(1, None)))
        return Inputs(self.tokens_L[read_T], tuple(len(path_P) - 1 for path_P in parts), predictor_N, next_T)


@dataclass(frozen=True)
class Microbatch:
    """One packed forward and backward pass."""

    ids_T: npt.NDArray[np.int64]
    lengths: tuple[int, ...]
    predictor_N: npt.NDArray[np.int64]
    """Row of T whose hidden state predicts the token."""
    target_N: npt.NDArray[np.int64]
    behaviour_N: npt.NDArray[np.float32]
    teacher_MN: npt.NDArray[np.float32]
    routed_MN: npt.NDArray[np.bool_]
    item_N: npt.NDArray[np.int64]
    """Index of the token's item in the batch."""
    token_N: npt.NDArray[np.int64]
    """Index of the token among the trained tokens of the batch, in the order of the items."""
    before_N: npt.NDArray[np.int64]
    """Which token of the microbatch (of the whole, if it is divided) is the last before it on its path; -1: none."""
    top: tuple[PayloadRows, ...]
    """Per teacher, the payload rows of the tokens that `routed_MN` gives it; no rows if they were not decoded."""
    kept: KeptRows | None = None
    """What the N tokens were sampled from; None: all from the whole vocabulary."""
    experts: ExpertRows | None = None
    """What the engine's routers chose at the T positions; None: routers choose freely."""
    span_N: npt.NDArray[np.int64] | None = None
    """The first token of each one's span, from teachers with another tokenizer (protocol.payloads.aligned). None: all
    spans have one token, and in a rank's part of a microbatch."""
    compared_MN: npt.NDArray[np.bool_] | None = None
    """Which tokens have rows in `top`. None: those of `routed_MN`."""
    rest_MN: npt.NDArray[np.bool_] | None = None
    """Tokens whose span has more than its first token's set says (`AlignedRows.rest`). None: none."""
    shared: Shared | None = None
    """If this is a rank's part of a microbatch that is divided over ranks. Then T and N are those of the part."""

    def rows_at(self, m: int) -> npt.NDArray[np.int64]:
        """The tokens that the rows of a teacher belong to."""
        return np.flatnonzero((self.routed_MN if self.compared_MN is None else self.compared_MN)[m])

    @property
    def counts(self) -> bool:
        """False if there is no trained token in it, but one for show."""
        return self.shared is None or len(self.shared.own_N) > 0


class Shared(NamedTuple):
    """A microbatch and a rank's part of it (models.divided)."""

    whole: Microbatch
    part: RankPart
    trained: RankPlaces
    """Which trained tokens of the whole each rank has: those whose predictor is among its tokens."""
    own_N: npt.NDArray[np.int64]
    """Those of this rank."""


@dataclass(frozen=True)
class PackedBatch:
    microbatches: tuple[Microbatch, ...]
    """Those of this rank. Of those that are divided over ranks, its parts."""
    n_passes: int
    """Passes that each rank makes: microbatches of the rank that has most. The others fill up with `idle`."""
    n_microbatches: int
    """Number of microbatches, those of all ranks together."""
    teachers: tuple[str, ...]
    """Names of the M teachers, sorted."""
    n_trained: int
    """Trained tokens of all microbatches, of all ranks."""
    n_inputs: int
    n_items_idle: int
    """Items without a trained token, for which nothing is computed."""

    @cached_property
    def idle(self) -> Microbatch:
        """Two tokens that are in no rollout, for a pass whose result is not used. Sharded parameters are gathered and
        reduced by all ranks together, so each must make as many passes as any other."""
        teachers, zero_1 = len(self.teachers), np.zeros(1, np.int64)
        return Microbatch(
            ids_T=np.zeros(2, np.int64),
            lengths=(2,),
            predictor_N=zero_1,
            target_N=zero_1,
            behaviour_N=np.zeros(1, np.float32),
            teacher_MN=np.zeros((teachers, 1), np.float32),
            routed_MN=np.zeros((teachers, 1), np.bool_),
            item_N=zero_1,
            token_N=zero_1,
            before_N=zero_1 - 1,
            top=(NO_ROWS,) * teachers,
        )

    @property
    def counted(self) -> list[Microbatch]:
        """The microbatches whose results count, in the order of the passes."""
        return [microbatch for microbatch in self.microbatches if microbatch.counts]

    @property
    def passes(self) -> Iterator[tuple[Microbatch, bool]]:
        """(microbatch, whether its result counts) of each pass of this rank."""
        yield from ((microbatch, microbatch.counts) for microbatch in self.microbatches)
        yield from ((self.idle, False) for _ in range(self.n_passes - len(self.microbatches)))


def train_items(items: Sequence[BatchItem], arrays: Sequence[np.ndarray[Any, Any]]) -> list[TrainItem]:
    """Pair the items of a Batch with their frames (four or five each, see protocol.messages.BatchItem) and check them.

    Raises BatchError: a frame missing or of the wrong shape, the first token to be trained (nothing predicts it), a
    log-prob of a trained token that is not finite or not a log-prob, a teacher named without its scores.
    """
    counts = [FRAMES_PER_ITEM + bool(item.top_k) for item in items]
    if len(arrays) != sum(counts):
        raise BatchError(
            f"{len(arrays)} frames for {len(items)} items; expected {sum(counts)}: token ids, behaviour log-probs, "
            "train mask and teacher log-probs of each, and its top-k payloads where it has some"
        )
    left = iter(arrays)
    paired: list[TrainItem] = []
    for item, n_frames in zip(items, counts, strict=True):
        tokens, behaviour, mask, teacher, *rest = islice(left, n_frames)
        shapes = (tokens.shape, behaviour.shape, mask.shape, teacher.size)
        if shapes != ((item.end,), (item.end,), (item.end,), len(item.teachers) * item.end):
            raise _bad(
                item,
                f"frames of shape {shapes[:3]} and {teacher.shape}; expected three of [{item.end}] and one of "
                f"[{len(item.teachers)}, {item.end}] for the teachers {item.teachers}",
            )
        teacher_ML = teacher.reshape(len(item.teachers), item.end)
        payloads = rest[0] if rest else np.zeros(0, np.uint8)
        paired.append(TrainItem(item, tokens, behaviour, mask.astype(np.bool_), teacher_ML, payloads))
        _check(paired[-1])
    return paired


def divide(items: Sequence[TrainItem], pack_tokens: int, n_ranks: int = 1) -> list[list[list[int]]]:
    """For each rank its microbatches, each a list of indices of items with trained tokens, of at most `pack_tokens`
    input tokens. The input tokens of the ranks are balanced. Raises EmptyBatchError."""
    busy = [i for i, train_item in enumerate(items) if train_item.n_trained]
    if not busy:
        raise EmptyBatchError(
            f"none of the {len(items)} items has a token to train; expected at least one trained token in a batch",
            [train_item.item.rollout_id for train_item in items],
        )
    divided = balanced_packs([len(items[i].inputs.ids_T) for i in busy], pack_tokens, n_ranks)
    return [[[busy[p] for p in members] for members in packs] for packs in divided]


def pack(items: Sequence[TrainItem], pack_tokens: int) -> PackedBatch:
    """The microbatches of a learner of one rank. Raises EmptyBatchError."""
    return pack_share(items, divide(items, pack_tokens), 0)


def pack_share(
    items: Sequence[TrainItem],
    divided: Sequence[Sequence[Sequence[int]]],
    rank: int,
    group: RankGroup | None = None,
) -> PackedBatch:
    """The microbatches of one rank, or its part of each, if a group of ranks divides them. `divided`: from `divide`."""
    teachers = tuple(sorted({name for train_item in items for name in train_item.item.teachers}))
    ends = np.cumsum([train_item.n_trained for train_item in items])
    busy = [train_item for train_item in items if train_item.n_trained]
    microbatches = (_microbatch(members, items, teachers, ends) for members in divided[rank])
    return PackedBatch(
        microbatches=tuple(made if group is None else part_of(made, group.rank, group.size) for made in microbatches),
        n_passes=max(map(len, divided)),
        n_microbatches=sum(map(len, divided)),
        teachers=teachers,
        n_trained=int(ends[-1]),
        n_inputs=sum(len(train_item.inputs.ids_T) for train_item in busy),
        n_items_idle=len(items) - len(busy),
    )


def _microbatch(
    members: Sequence[int], items: Sequence[TrainItem], teachers: Sequence[str], ends: npt.NDArray[np.int64]
) -> Microbatch:
    """`ends`: cumulative number of trained tokens, per item."""
    inputs = [items[i].inputs for i in members]
    trained = [np.flatnonzero(items[i].train_mask_L) for i in members]
    firsts = np.cumsum([0, *(len(one.ids_T) for one in inputs[:-1])])
    n_trained = sum(len(offsets) for offsets in trained)
    teacher_MN = np.zeros((len(teachers), n_trained), np.float32)
    routed_MN = np.zeros((len(teachers), n_trained), np.bool_)
    compared_MN, rest_MN = routed_MN.copy(), routed_MN.copy()
    before: list[npt.NDArray[np.int64]] = []
    span_N = np.arange(n_trained)
    column = 0
    for i, offsets in zip(members, trained, strict=True):
        place = slice(column, column + len(offsets))
        before.append(np.where(items[i].before < 0, -1, items[i].before + column))
        for row, name in enumerate(items[i].item.teachers):
            teacher_MN[teachers.index(name), place] = items[i].teacher_ML[row, offsets]
            routed_MN[teachers.index(name), place] = compared_MN[teachers.index(name), place] = True
            if isinstance(rows := items[i].top.get(name), AlignedRows):
                routed_MN[teachers.index(name), place] = rows.scored
                compared_MN[teachers.index(name), place] = rows.compared
                rest_MN[teachers.index(name), place] = rows.rest
                span_N[place] = np.minimum(span_N[place], rows.firsts + column)
        column += len(offsets)
    return Microbatch(
        ids_T=np.concatenate([one.ids_T for one in inputs]).astype(np.int64),
        lengths=tuple(length for one in inputs for length in one.lengths),
        predictor_N=np.concatenate([one.predictor_N + first for one, first in zip(inputs, firsts, strict=True)]),
        target_N=_select(items, members, trained, "tokens_L").astype(np.int64),
        behaviour_N=_select(items, members, trained, "behaviour_L"),
        teacher_MN=teacher_MN,
        routed_MN=routed_MN,
        item_N=np.repeat(np.array(members, np.int64), [len(offsets) for offsets in trained]),
        token_N=np.concatenate([np.arange(ends[i] - len(o), ends[i]) for i, o in zip(members, trained, strict=True)]),
        before_N=np.concatenate(before),
        top=tuple(_rows_of(name, [items[i] for i in members]) for name in teachers),
        span_N=None if np.array_equal(span_N, np.arange(n_trained)) else span_N,
        compared_MN=compared_MN,
        rest_MN=rest_MN if rest_MN.any() else None,
        kept=KeptRows.joined([items[i].kept for i in members], [len(offsets) for offsets in trained]),
        experts=_experts([items[i] for i in members]),
    )


def _experts(members: Sequence[TrainItem]) -> ExpertRows | None:
    rows = [one.experts.at(one.inputs.next_T) for one in members if one.experts is not None]
    return ExpertRows.joined(rows) if rows else None


def _rows_of(teacher: str, members: Sequence[TrainItem]) -> PayloadRows:
    rows = [one.top[teacher] for one in members if teacher in one.top]
    rows = [one.own_sets if isinstance(one, AlignedRows) else one for one in rows]
    return join_rows([one for one in rows if one is not None])


def part_of(whole: Microbatch, rank: int, size: int) -> Microbatch:
    """A rank's part of a microbatch: some tokens, and the trained tokens that they predict."""
    own = RankPart.of(whole.lengths, size, rank)
    owner_T = np.empty(len(whole.ids_T), np.int64)
    for each, tokens_P in enumerate(own.places.of_ranks):
        owner_T[tokens_P] = each
    owner_N = owner_T[whole.predictor_N]
    trained = RankPlaces(tuple(np.flatnonzero(owner_N == each) for each in range(size)))
    own_N = trained.of_ranks[rank]
    chosen_N = own_N if len(own_N) else np.zeros(1, np.int64)  # for show: see `Microbatch.counts`
    is_own_N = np.isin(np.arange(len(owner_N)), chosen_N)
    rows = [np.flatnonzero(is_own_N[whole.rows_at(m)]) for m in range(len(whole.routed_MN))]
    return Microbatch(
        ids_T=whole.ids_T[own.tokens],
        lengths=whole.lengths,
        predictor_N=np.searchsorted(own.tokens, whole.predictor_N[own_N]) if len(own_N) else np.zeros(1, np.int64),
        target_N=whole.target_N[chosen_N],
        behaviour_N=whole.behaviour_N[chosen_N],
        teacher_MN=whole.teacher_MN[:, chosen_N],
        routed_MN=whole.routed_MN[:, chosen_N],
        item_N=whole.item_N[chosen_N],
        token_N=whole.token_N[chosen_N],
        before_N=whole.before_N[chosen_N],
        compared_MN=None if whole.compared_MN is None else whole.compared_MN[:, chosen_N],
        rest_MN=None if whole.rest_MN is None else whole.rest_MN[:, chosen_N],
        top=tuple(one.at(own_R) if one.n_rows else one for one, own_R in zip(whole.top, rows, strict=True)),
        kept=None if whole.kept is None else whole.kept.at(chosen_N),
        experts=None if whole.experts is None else whole.experts.at(own.tokens),
        shared=Shared(whole, own, trained, own_N),
    )


def _select(items: Sequence[TrainItem], members: Sequence[int], trained: Sequence[Any], field: str) -> Any:
    return np.concatenate([getattr(items[i], field)[offsets] for i, offsets in zip(members, trained, strict=True)])


def _check(train_item: TrainItem) -> None:
    """Check trained tokens only; values at other tokens are undefined."""
    item, mask_L = train_item.item, train_item.train_mask_L
    starts = [branch.start for branch in item.branches]
    if starts != sorted(starts) or any(not 0 <= b.follows < b.start < item.end for b in item.branches):
        raise _bad(
            item, f"branches {item.branches}; expected ascending starts below {item.end}, behind tokens before them"
        )
    if not mask_L.any():
        return
    roots = [0, *(branch.start for branch in item.branches if branch.follows == 0)]
    if mask_L[roots].any():
        root = next(at for at in roots if mask_L[at])
        raise _bad(item, f"its token {root} is to be trained; the first token has no context that predicts it")
    if len(set(item.teachers)) != len(item.teachers):
        raise _bad(item, f"a teacher is named twice in {item.teachers}")
    rows = [("behaviour", train_item.behaviour_L), *zip(item.teachers, train_item.teacher_ML, strict=True)]
    for name, logprobs_L in rows:
        wrong_L = mask_L & ~((logprobs_L <= _LOGPROB_ROUNDING) & np.isfinite(logprobs_L))
        if wrong_L.any():
            offset = int(np.flatnonzero(wrong_L)[0])
            raise _bad(
                item,
                f"{int(wrong_L.sum())} log-probs of {name!r} at tokens to be trained are not finite numbers of at most "
                f"0, the first at offset {offset}: {logprobs_L[offset]}",
            )


def _bad(item: BatchItem, what: str) -> BatchError:
    return BatchError(f"rollout {item.rollout_id!r}: {what}", [item.rollout_id])
