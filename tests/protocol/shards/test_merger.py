"""Several shards as one buffer: what each is sent, and what the learner sees of their answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from stillhouse.protocol import messages as m
from stillhouse.protocol.codec import Array, Received
from stillhouse.protocol.messages import WeightVersion
from stillhouse.protocol.shards.merger import REMEMBERED, Merger
from tests.protocol.shards.snapshots import snapshot

replace = msgspec.structs.replace


def v(step: int) -> WeightVersion:
    return WeightVersion(0, step)


def sent(merger: Merger, message: m.Message, arrays: Sequence[Array] = ()) -> dict[int, m.Message]:
    """What each shard is sent; each at most once."""
    parts = merger.outgoing(message, arrays)
    assert max(Counter(shard for shard, _, _ in parts).values(), default=0) <= 1
    return {shard: part for shard, part, _ in parts}


def item(task_id: int, n: int = 2) -> m.BatchItem:
    return m.BatchItem(f"train-{task_id}-0-0", task_id, 0, 1, "", ("default",), n, (), True, "stop", 1.0, 1)


def piece(batch_id: int, step: int, *task_ids: int, settled: Sequence[int] = ()) -> Received:
    """A shard's answer. Each array holds the task id, so that one that is mixed up is seen."""
    arrays = [
        array
        for task in task_ids
        for array in (
            np.full(2, task, np.int32),
            np.full(2, task, np.float32),
            np.ones(2, np.uint8),
            np.full((1, 2), task, np.float32),
        )
    ]
    batch = m.Batch(
        batch_id=batch_id,
        version=v(step),
        items=tuple(map(item, task_ids)),
        staleness={0: 2 * len(task_ids)} if task_ids else {},
        settled=tuple(m.Settled(task, 0, "trained") for task in settled or task_ids),
        snapshot=snapshot(trained=batch_id),
    )
    return Received(batch, tuple(arrays))


def batch_of(received: Received | None) -> m.Batch:
    assert received is not None and isinstance(received.message, m.Batch)
    return received.message


def test_a_batch_is_complete_when_every_shard_has_sent_its_piece() -> None:
    merger = Merger(3)
    assert sent(merger, m.BatchWanted(v(0))).keys() == {0, 1, 2}
    assert merger.incoming(2, piece(9, 0, 2, 5)) is None
    assert merger.incoming(0, piece(4, 0, 3)) is None
    assert sent(merger, m.BatchWanted(v(0))).keys() == {1}, "who has answered is not asked again"
    whole = merger.incoming(1, piece(1, 0, 7))
    batch = batch_of(whole)
    assert whole is not None and [one.task_id for one in batch.items] == [3, 7, 2, 5]
    for place, one in enumerate(batch.items):
        for array in (whole.arrays[4 * place], whole.arrays[4 * place + 1], whole.arrays[4 * place + 3]):
            assert (array == one.task_id).all(), "the arrays are those of the item"
    assert batch.staleness == {0: 8} and batch.version == v(0)
    assert {one.task_id for one in batch.settled} == {2, 3, 5, 7}
    assert batch.snapshot.ledger.tokens.trained == 9 + 4 + 1
    assert merger.incoming(0, piece(4, 0, 3)) is None, "a repeat is no other batch"

    trained = sent(merger, m.BatchTrained(batch.batch_id, v(1), ("train-5-0-0", "train-3-0-0")))
    assert trained == {
        0: m.BatchTrained(4, v(1), ("train-3-0-0",)),
        1: m.BatchTrained(1, v(1)),
        2: m.BatchTrained(9, v(1), ("train-5-0-0",)),
    }
    assert merger.incoming(0, Received(m.BatchTrainedAck(4, v(1)), ())) is None
    assert merger.incoming(0, Received(m.BatchTrainedAck(4, v(1)), ())) is None, "the same shard again"
    assert merger.incoming(2, Received(m.BatchTrainedAck(9, v(1)), ())) is None
    ack = merger.incoming(1, Received(m.BatchTrainedAck(1, v(1)), ()))
    assert ack is not None and ack.message == m.BatchTrainedAck(batch.batch_id, v(1))


def test_the_batch_of_the_next_step_is_put_together_while_this_one_is_trained() -> None:
    merger = Merger(2)
    merger.incoming(0, piece(1, 0, 0))
    first = batch_of(merger.incoming(1, piece(1, 0, 1)))
    assert sent(merger, m.BatchWanted(v(1))).keys() == {0, 1}
    merger.incoming(1, piece(2, 1, 3))
    assert sent(merger, m.BatchTrained(first.batch_id, v(1))).keys() == {0, 1}
    second = batch_of(merger.incoming(0, piece(2, 1, 2)))
    assert second.batch_id > first.batch_id and second.version == v(1)


def test_a_shard_without_tasks_is_asked_only_when_the_batch_that_others_filled_is_trained() -> None:
    merger = Merger(2)
    merger.incoming(0, piece(0, 4, settled=[2]))
    first = batch_of(merger.incoming(1, piece(5, 4, 1)))
    assert [one.task_id for one in first.items] == [1] and {one.task_id for one in first.settled} == {1, 2}
    assert sent(merger, m.BatchWanted(v(5))).keys() == {1}, "a request would move the clock of shard 0"
    told = sent(merger, m.BatchTrained(first.batch_id, v(5)))
    assert told == {0: m.BatchWanted(v(5)), 1: m.BatchTrained(5, v(5))}
    assert merger.incoming(1, piece(6, 5, 3)) is None, "shard 0 has not said that it knows of version 5"
    assert [one.task_id for one in batch_of(merger.incoming(0, piece(0, 5))).items] == [3]


def test_nothing_is_left_when_every_shard_says_so() -> None:
    merger = Merger(2)
    for _ in range(2):  # however often the learner asks
        assert sent(merger, m.BatchWanted(v(4))).keys() == {0, 1}
        assert merger.incoming(1, piece(0, 4)) is None
        last = batch_of(merger.incoming(0, piece(0, 4)))
        assert last.batch_id == 0 and not last.items and last.version == v(4)


def test_a_batch_that_was_never_given_out_or_lacks_a_rollout_is_refused() -> None:
    merger = Merger(2)
    merger.incoming(0, piece(1, 0, 0))
    batch = batch_of(merger.incoming(1, piece(1, 0, 1)))
    with pytest.raises(ValueError, match="none of the last"):
        merger.outgoing(m.BatchTrained(batch.batch_id + 1, v(1)))
    with pytest.raises(ValueError, match="does not have them"):
        merger.outgoing(m.BatchTrained(batch.batch_id, v(1), ("train-9-0-0",)))


def test_tasks_go_to_their_shards_with_their_prompts_and_the_end_of_the_stream_to_all() -> None:
    merger = Merger(2)
    tasks = tuple(m.Task(i, "train", 1, m.Sampling()) for i in (4, 6, 7))
    prompts = [np.array([task.task_id], np.int32) for task in tasks]
    parts = merger.outgoing(m.TasksOffered(tasks), prompts)
    assert [(shard, [int(p[0]) for p in frames]) for shard, _, frames in parts] == [(0, [4, 6]), (1, [7])]
    assert sent(merger, m.TasksOffered(tasks[:1], last=True), prompts[:1]) == {
        0: m.TasksOffered(tasks[:1], last=True),
        1: m.TasksOffered((), last=True),
    }
    assert sent(merger, m.TasksOffered(())).keys() == {0, 1}


def test_as_many_tasks_are_wanted_as_the_shards_want_without_those_on_their_way() -> None:
    merger = Merger(2)

    def wanted(shard: int, n: int) -> int:
        told = merger.incoming(shard, Received(m.TasksAck((), "train", n), ()))
        assert told is not None and isinstance(told.message, m.TasksAck)
        return told.message.tasks_wanted

    assert (wanted(0, 4), wanted(1, 4)) == (4, 8)
    tasks = tuple(m.Task(i, "train", 1, m.Sampling()) for i in range(8))
    merger.outgoing(m.TasksOffered(tasks), [np.zeros(1, np.int32)] * 8)
    assert wanted(0, 0) == 0, "four tasks are on their way to shard 1"
    assert wanted(1, 1) == 1


def test_a_learner_that_goes_on_tells_each_shard_of_its_own_tasks() -> None:
    tasks = tuple(m.OpenTask(i, (0,)) for i in (1, 4, 5, 9))
    started = m.LearnerStarted(v(3), v(3), 9, tasks)
    assert sent(Merger(3), started) == {
        0: replace(started, open=(tasks[3],)),
        1: replace(started, open=(tasks[0], tasks[1])),
        2: replace(started, open=(tasks[2],)),
    }


def test_an_evaluation_is_over_when_it_is_on_all_shards_that_have_tasks_of_it() -> None:
    merger = Merger(3)
    tasks = tuple(m.Task(i, "eval", 2, m.Sampling(), eval_id="e") for i in (0, 3, 2))
    merger.outgoing(m.TasksOffered(tasks), [np.zeros(1, np.int32)] * 3)
    asked = sent(merger, m.EvalWanted("e", ("eval-2-0-0", "eval-3-1-0")))
    assert asked == {0: m.EvalWanted("e", ("eval-3-1-0",)), 2: m.EvalWanted("e", ("eval-2-0-0",))}

    def result(shard: int, failed: int, outstanding: int) -> tuple[int, int]:
        told = merger.incoming(shard, Received(m.EvalResult("e", (), failed, outstanding), ()))
        assert told is not None and isinstance(told.message, m.EvalResult)
        return told.message.failed, told.message.outstanding

    assert result(0, 1, 0) == (1, 2), "two rollouts of shard 2 are still to come"
    assert result(2, 0, 1) == (1, 1)
    assert result(2, 1, 0) == (2, 0)


def test_any_number_of_evaluations_go_on_at_once_and_those_that_are_over_are_forgotten() -> None:
    merger = Merger(2)
    names = [f"set-{i}" for i in range(5 * REMEMBERED)]

    def outstanding(name: str, shard: int, left: int) -> int:
        told = merger.incoming(shard, Received(m.EvalResult(name, (), 0, left), ()))
        assert told is not None and isinstance(told.message, m.EvalResult)
        return told.message.outstanding

    for i, name in enumerate(names):
        tasks = tuple(m.Task(2 * i + k, "eval", 3, m.Sampling(), eval_id=name) for k in range(2))
        merger.outgoing(m.TasksOffered(tasks), [np.zeros(1, np.int32)] * 2)
    for name in names:
        assert sent(merger, m.EvalWanted(name, ())) == dict.fromkeys((0, 1), m.EvalWanted(name, ()))
    for name in reversed(names):
        assert (outstanding(name, 0, 0), outstanding(name, 1, 2)) == (3, 2)
    for name in names:
        assert outstanding(name, 1, 0) == 0
        assert sent(merger, m.EvalWanted(name, ())).keys() == {0, 1}, "what was lost on the way is asked for again"
    assert sum(bool(merger.outgoing(m.EvalWanted(name, ()))) for name in reversed(names)) <= REMEMBERED + 1


def test_the_learner_hears_of_members_when_all_shards_have_named_theirs() -> None:
    merger = Merger(2)
    assert merger.incoming(1, Received(m.Membership(("b",), ("2",)), ())) is None
    both = merger.incoming(0, Received(m.Membership(("a",), ("1",)), ()))
    assert both is not None and both.message == m.Membership(("a", "b"), ("1", "2"))
    fewer = merger.incoming(1, Received(m.Membership((), ()), ()))
    assert fewer is not None and fewer.message == m.Membership(("a",), ("1",))


def test_a_snapshot_is_an_answer_of_every_shard_to_the_last_request() -> None:
    merger = Merger(2)
    assert sent(merger, m.SnapshotWanted()).keys() == {0, 1}
    assert merger.incoming(0, Received(snapshot(trained=1), ())) is None
    merger.outgoing(m.SnapshotWanted())
    assert merger.incoming(1, Received(snapshot(trained=10), ())) is None, "shard 0 has not answered this request"
    whole = merger.incoming(0, Received(snapshot(trained=2), ()))
    assert whole is not None and isinstance(whole.message, m.Snapshot)
    assert whole.message.ledger.tokens.trained == 12


def test_the_run_is_over_when_all_say_so_or_one_has_failed() -> None:
    ok, failed = Received(m.Shutdown(True, "done"), ()), Received(m.Shutdown(False, "broke"), ())
    assert [Merger(2).incoming(1, failed)] == [failed]
    merger = Merger(2)
    assert [merger.incoming(1, ok), merger.incoming(1, ok), merger.incoming(0, ok)] == [None, None, ok]
    assert Merger(2, waits_for_all=False).incoming(1, ok) == ok, "a launcher starts to end the run"


def test_other_messages_go_to_all_and_come_from_any() -> None:
    merger = Merger(3)
    for message in (m.VersionPublished(v(2)), m.RunFinished(True, "done"), m.SnapshotWanted()):
        assert sent(merger, message) == dict.fromkeys(range(3), message)
    other = Received(m.CancelRollout("train-1-0-0", "actor_lost"), ())
    assert merger.incoming(1, other) is other
