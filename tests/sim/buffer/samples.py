"""Compares where the buffer thinks each sample is with what the simulated learner trained and received."""
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable

from stillhouse.buffer.state import BufferState
from tests.sim.buffer.peers import Sample, SimLearner


def audit_samples(state: BufferState, learner: SimLearner, owns: Callable[[int], bool] = lambda _: True) -> None:
    """A sample that the learner has offered and does not know as settled is open in the buffer, or on its way to the
    learner as settled; and one that it knows as settled is not open. `owns`: whether a task is this buffer's."""
    if state.phase != "running" or not learner.connected or learner.unacked or learner.batch is not None:
        return
    if state._life.versions.newest.epoch != learner.version.epoch:
        return  # it has not said yet what it goes on from
    stream, book = learner.stream, state._life.tasks
    open_here: set[Sample] = set()
    reported: set[Sample] = {(one.task_id, one.sample_index) for one in book.to_report()}
    for batch in state._batches.leased.values():
        reported |= {(one.task_id, one.sample_index) for one in batch.settled}
    for record in book.train_records:
        task_id = record.task.task_id
        open_here |= {(task_id, i) for i in record.to_issue}
        for slot in record.slots:
            (reported if slot.settled else open_here).add((task_id, slot.sample_index))
    not_offered = set(stream.offer_again)
    for task_id, task in [(task_id, task) for task_id, task in stream.outstanding.items() if owns(task_id)]:
        for sample in ((task_id, i) for i in range(task.group_size)):
            lost = sample not in stream.settled and sample not in open_here | reported and task_id not in not_offered
            assert not lost, f"sample {sample} is neither open nor settled: {state!r}"
    again = open_here & stream.settled.keys()
    assert not again, f"samples {sorted(again)[:5]} are settled, and open again"
