"""A sample is settled once on the branch of versions that is gone on with, against a count of every event."""

from __future__ import annotations

import json
from collections import Counter
from random import Random
from typing import Any

import msgspec
import pytest

from stillhouse.learner.prompts.sample_book import SampleBook, SettledTwice, TrainedSample
from stillhouse.protocol.messages import OpenTask, Settled


def restored(book: SampleBook, sizes: dict[int, int]) -> SampleBook:
    """By way of JSON, as a checkpoint holds it."""
    progress: Any = json.loads(json.dumps(msgspec.to_builtins(book.progress)))
    open_sizes = {task_id: sizes[task_id] for task_id in book.open}
    return SampleBook.restored(book.next_task_id, open_sizes, msgspec.convert(progress, tuple[OpenTask, ...]))


def test_samples_that_the_step_left_out_are_masked_unless_some_of_them_was_trained_before() -> None:
    book = SampleBook()
    book.begin(2)
    book.step([TrainedSample(0, 1, "train-0-1-0", 2)], [])
    foreseen = [Settled(0, 0, "trained"), Settled(0, 1, "trained")]
    account = book.step([], foreseen, left_out={(0, 0), (0, 1)})
    assert account.settled == (Settled(0, 0, "masked", "non_finite"), Settled(0, 1, "trained", "non_finite"))


def test_a_sample_settled_ahead_of_the_stream_is_not_offered_again() -> None:
    book = SampleBook()
    book.step([], [Settled(0, 0, "trained"), Settled(0, 1, "trained"), Settled(2, 1, "trained")])
    assert [book.begin(2), book.begin(2), book.begin(2)] == [None, 1, 2]
    assert book.progress == (OpenTask(1), OpenTask(2, (1,)))
    with pytest.raises(SettledTwice, match="sample 0 of task 0 is settled twice, now as dropped"):
        book.step([], [Settled(0, 0, "dropped", "late")])


@pytest.mark.parametrize("again", [[1, 1], [1, 0]])
def test_a_step_that_settles_twice_changes_nothing(again: list[int]) -> None:
    book = SampleBook()
    book.begin(3)
    book.step([], [Settled(0, 0, "trained")])
    before = book.progress
    with pytest.raises(SettledTwice):
        book.step([TrainedSample(0, 2, "train-0-2-0", 1)], [Settled(0, i, "dropped") for i in again])
    assert book.progress == before


@pytest.mark.parametrize("seed", range(20))
def test_killed_anywhere_each_sample_is_settled_once(seed: int) -> None:
    """Against a plain list of what was settled, which a kill cuts back to what the checkpoint had."""
    random = Random(seed)
    sizes: dict[int, int] = {}
    book, settled = SampleBook(), list[tuple[int, int]]()
    saved = restored(book, sizes), 0
    for _ in range(300):
        match random.randrange(5):
            case 0:
                size = sizes.setdefault(book.next_task_id, random.randint(1, 3))
                book.begin(size)
            case 1 | 2:
                ahead = {t: s for t, s in sizes.items() if t >= book.next_task_id}
                candidates = {**{t: sizes[t] for t in book.open}, **ahead}
                samples = {(t, i) for t, s in candidates.items() for i in range(s)} - set(settled)
                chosen = random.sample(sorted(samples), min(len(samples), random.randint(0, 2)))
                book.step([], [Settled(task_id, i, "trained") for task_id, i in chosen])
                settled += chosen
            case 3:
                saved = restored(book, sizes), len(settled)
            case _:
                if random.random() < 0.3:
                    book, settled = restored(saved[0], sizes), settled[: saved[1]]
    assert set(Counter(settled).values()) <= {1}
    still_open = {(t.task_id, i) for t in book.progress for i in range(sizes[t.task_id]) if i not in t.settled}
    every = {(task_id, i) for task_id in range(book.next_task_id) for i in range(sizes[task_id])}
    assert every <= set(settled) | still_open and not set(settled) & still_open
