"""Packing against a loop over items and tokens; what it must refuse."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from stillhouse.learner.batch import BatchError, EmptyBatchError, PackedBatch, TrainItem, pack, train_items
from stillhouse.protocol.messages import Branch
from tests.learner.conftest import make_item


def _mixed() -> list[TrainItem]:
    return [
        make_item("a", [0, 0, 1, 1, 1]),
        make_item("b", [0, 1, 1, 0, 0, 1, 0, 0], teachers=("math", "style")),  # an environment's tokens in the middle
        make_item("c", [0, 0, 0]),  # nothing to train
        make_item("d", [0] * 10 + [1] * 20, teachers=("style",)),
        make_item("e", [0, 1], teachers=()),  # no teacher
        make_item("f", [0, 0, 0, 0, 1, 0]),
    ]


def _tokens(batch: PackedBatch) -> list[Any]:
    """One row per trained token of the packed batch: (item, context ids up to the predictor, target, mu, q by name)."""
    rows: list[Any] = []
    for micro in batch.microbatches:
        ends = np.cumsum(micro.lengths)
        for n, predictor in enumerate(micro.predictor_N):
            sequence = int(np.searchsorted(ends, predictor, side="right"))
            context = micro.ids_T[ends[sequence] - micro.lengths[sequence] : predictor + 1]
            scores = {
                name: float(micro.teacher_MN[m, n]) for m, name in enumerate(batch.teachers) if micro.routed_MN[m, n]
            }
            target, behaviour = int(micro.target_N[n]), float(micro.behaviour_N[n])
            rows.append((int(micro.item_N[n]), context.tolist(), target, behaviour, scores))
    return sorted(rows, key=lambda row: (row[0], len(row[1])))


@pytest.mark.parametrize("pack_tokens", [1, 7, 12, 1000])
def test_every_trained_token_arrives_once_with_its_own_context(pack_tokens: int) -> None:
    items = _mixed()
    expected: list[Any] = []
    for index, train_item in enumerate(items):
        for t in range(train_item.item.end):
            if train_item.train_mask_L[t]:
                scores = {name: float(train_item.teacher_ML[m, t]) for m, name in enumerate(train_item.item.teachers)}
                context, target = train_item.tokens_L[:t].tolist(), int(train_item.tokens_L[t])
                expected.append((index, context, target, float(train_item.behaviour_L[t]), scores))
    batch = pack(items, pack_tokens)
    assert _tokens(batch) == expected
    assert batch.n_trained == len(expected) and batch.n_items_idle == 1
    for micro in batch.microbatches:
        assert len(micro.ids_T) == sum(micro.lengths)
        assert sum(micro.lengths) <= pack_tokens or len(micro.lengths) == 1


def _branched(random: np.random.Generator) -> tuple[TrainItem, list[int]]:
    """An item with branches, and for each token the one that it is read behind (-1: none)."""
    end = int(random.integers(6, 30))
    mask, before = random.integers(0, 2, end), list(range(-1, end - 1))
    mask[0] = 0
    branches: list[Branch] = []
    for start in sorted(random.choice(np.arange(2, end), size=int(random.integers(0, 4)), replace=False).tolist()):
        branches.append(Branch(start, int(random.integers(0, start))))
        before[start] = branches[-1].follows - 1
        mask[start] *= before[start] >= 0
    train_item = make_item(f"r{end}", mask.tolist(), vocab=1000)
    item = msgspec.structs.replace(train_item.item, branches=tuple(branches))
    frames = (train_item.tokens_L, train_item.behaviour_L, mask.astype(np.uint8), train_item.teacher_ML)
    return train_items([item], frames)[0], before


@pytest.mark.parametrize("seed", range(40))
def test_tokens_of_a_branch_arrive_once_behind_the_tokens_of_their_branch(seed: int) -> None:
    random = np.random.default_rng(seed)
    made = [_branched(random) for _ in range(4)]
    if not any(train_item.n_trained for train_item, _ in made):
        return
    expected: list[Any] = []
    for index, (train_item, before) in enumerate(made):
        for t in np.flatnonzero(train_item.train_mask_L):
            path, at = [], before[t]
            while at >= 0:
                path.append(int(train_item.tokens_L[at]))
                at = before[at]
            scores = {"default": float(train_item.teacher_ML[0, t])}
            expected.append((index, path[::-1], int(train_item.tokens_L[t]), float(train_item.behaviour_L[t]), scores))
    batch = pack([train_item for train_item, _ in made], int(random.choice([1, 30, 1000])))
    assert _tokens(batch) == sorted(expected, key=lambda row: (row[0], len(row[1])))
    in_one = [{int(i) for i in micro.item_N} for micro in batch.microbatches]
    assert sum(map(len, in_one)) == len(set().union(*in_one)), "an item in two microbatches"
    numbers = np.concatenate([micro.token_N for micro in batch.microbatches])
    assert sorted(numbers.tolist()) == list(range(batch.n_trained))


def test_branches_that_contradict_each_other_and_a_trained_root_are_refused() -> None:
    train_item = make_item("a", [0, 1, 1, 1, 1])
    for branches, message in (
        ((Branch(3, 1), Branch(2, 1)), "expected ascending starts below 5"),
        ((Branch(2, 2),), "expected ascending starts below 5"),
        ((Branch(5, 2),), "expected ascending starts below 5"),
        ((Branch(2, 0),), "its token 2 is to be trained; the first token has no context"),
    ):
        item = msgspec.structs.replace(train_item.item, branches=branches)
        with pytest.raises(BatchError, match=message):
            train_items([item], _frames(train_item))


def test_batch_with_nothing_to_train_is_an_error_that_names_its_rollouts() -> None:
    with pytest.raises(EmptyBatchError, match="none of the 2 items") as caught:
        pack([make_item("a", [0, 0]), make_item("b", [0])], 100)
    assert caught.value.rollout_ids == ("a", "b")
    with pytest.raises(EmptyBatchError):
        pack([], 100)


def _frames(train_item: TrainItem) -> list[Any]:
    mask_L = train_item.train_mask_L.astype(np.uint8)
    return [train_item.tokens_L, train_item.behaviour_L.copy(), mask_L, train_item.teacher_ML.copy()]


@pytest.mark.parametrize("missing", range(4))
def test_missing_frame_stops_the_batch(missing: int) -> None:
    """Student or teacher log-probs that did not come are never skipped over."""
    train_item = make_item("a", [0, 1, 1])
    frames = _frames(train_item)
    with pytest.raises(BatchError, match="3 frames for 1 items; expected 4: token ids"):
        train_items([train_item.item], frames[:missing] + frames[missing + 1 :])
    frames[missing] = frames[missing][..., :-1]
    with pytest.raises(
        BatchError, match=r"rollout 'a': frames of shape .* expected three of \[3\] and one of \[1, 3\]"
    ):
        train_items([train_item.item], frames)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 0.5])
@pytest.mark.parametrize(("frame", "name"), [(1, "behaviour"), (3, "default")])
def test_number_that_is_no_logprob_stops_the_batch_only_where_it_is_trained(bad: float, frame: int, name: str) -> None:
    train_item = make_item("a", [0, 1, 0, 1])
    frames = _frames(train_item)
    frames[frame][..., 2] = bad  # not trained: any number may stand there
    train_items([train_item.item], frames)
    frames[frame][..., 3] = bad
    with pytest.raises(BatchError, match=f"rollout 'a': 1 log-probs of '{name}' .* the first at offset 3") as caught:
        train_items([train_item.item], frames)
    assert caught.value.rollout_ids == ("a",)


def test_first_token_cannot_be_trained() -> None:
    with pytest.raises(BatchError, match="token 0 is to be trained"):
        make_item("a", [1, 1])


def test_read_only_frames_from_the_wire_are_taken_as_they_are() -> None:
    train_item = make_item("a", [0, 1, 1])
    frames = _frames(train_item)
    for frame in frames:
        frame.flags.writeable = False
    assert pack(train_items([train_item.item], frames), 10).n_trained == 2
