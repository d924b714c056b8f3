"""Tasks, peers, snapshots and the end of a run."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from stillhouse.protocol import messages as m
from tests.buffer.driver import Driver, v

Make = type[Driver]


def test_the_queue_asks_for_tasks_as_it_runs_low(make: Make) -> None:
    driver = make(peers=False, task_queue=4, batch=100)
    driver.join("learner", "learner")
    assert driver.take(m.TasksAck) == [m.TasksAck((), "train", 4)]
    driver.offer(0, 1, 2, 3)
    assert driver.take(m.TasksAck) == [m.TasksAck((0, 1, 2, 3), "train", 0)]
    driver.actor(n=2)
    assert driver.take(m.TasksAck) == [], "two of four are left"
    driver.send("actor", "a", m.TicketCredit(1, 2, 2))
    assert driver.take(m.TasksAck) == [m.TasksAck((), "train", 3)]
    driver.wait(1.0)
    assert driver.take(m.TasksAck) == [], "it knows"
    driver.want(0)
    assert driver.take(m.TasksAck) == [m.TasksAck((), "train", 3)], "told again when it waits"


def test_train_and_evaluation_tasks_are_acknowledged_apart(make: Make) -> None:
    driver = make()
    tasks = (m.Task(0, "train", 1, m.Sampling()), m.Task(0, "eval", 1, m.Sampling(), eval_id="e"))
    driver.take(m.TasksAck)
    driver.send("learner", "learner", m.TasksOffered(tasks), *[np.array([1], np.int32)] * 2)
    assert [(ack.kind, ack.task_ids) for ack in driver.take(m.TasksAck)][:2] == [("train", (0,)), ("eval", (0,))]


@pytest.mark.parametrize(
    ("task", "prompt", "expected"),
    [
        (m.Task(0, "train", 0, m.Sampling()), [1], "1 or more"),
        (m.Task(0, "train", 1, m.Sampling(max_new_tokens=0)), [1], "1 or more"),
        (m.Task(0, "train", 1, m.Sampling()), [], "int32 [n_prompt], not empty"),
        (m.Task(0, "train", 1, m.Sampling()), [50], "0 up to 49"),
        (m.Task(0, "train", 1, m.Sampling(), teachers=("x", "x")), [1], "each pool once"),
        (m.Task(0, "train", 1, m.Sampling(), row=bytes(m.MAX_ROW_BYTES + 1)), [1], "1048576 or fewer"),
    ],
)
def test_a_task_that_cannot_be_run_is_refused_with_all_that_came_with_it(
    make: Make, task: m.Task, prompt: list[int], expected: str
) -> None:
    driver = make(vocab_size=50)
    good = m.Task(1, "train", 1, m.Sampling())
    driver.send("learner", "learner", m.TasksOffered((good, task)), np.array([1], np.int32), np.array(prompt, np.int32))
    (refused,) = driver.take(m.Refused)
    assert refused.expected == expected and not driver.tickets


def test_every_ticket_carries_the_row_of_its_task(make: Make) -> None:
    """The rollout keeps a ticket without it, because an image would hold it once for each rollout."""
    driver = make(batch=10)
    task = m.Task(5, "train", 2, m.Sampling(), row=b'{"a":1}')
    driver.send("learner", "learner", m.TasksOffered((task,)), np.array([1], np.int32))
    assert [ticket.row for ticket in driver.tickets.values()] == [b'{"a":1}'] * 2


def test_samples_of_a_task_differ_in_seed_only(make: Make) -> None:
    driver = make(batch=10)
    task = m.Task(5, "train", 3, m.Sampling(temperature=0.5, max_new_tokens=10, max_turns=2, seed=1))
    driver.send("learner", "learner", m.TasksOffered((task,)), np.array([1], np.int32))
    tickets = [driver.tickets[f"train-5-{i}-0"] for i in range(3)]
    assert len({ticket.sampling.seed for ticket in tickets}) == 3
    assert all(0 <= ticket.sampling.seed < 2**31 for ticket in tickets)
    assert {msgspec.structs.replace(ticket.sampling, seed=1) for ticket in tickets} == {task.sampling}


def test_who_may_not_send_a_message_is_told_so(make: Make) -> None:
    driver = make()
    driver.send("actor", "a", m.BatchWanted(v(0)))
    (refused,) = driver.take(m.Refused)
    assert (refused.code, refused.got) == ("role", "BatchWanted")
    driver.send("actor", "stranger", m.TicketCredit(1, 1, 0))
    (refused,) = driver.take(m.Refused)
    assert refused.code == "not_hello_first"


def test_a_weight_plan_goes_to_its_members_that_are_here(make: Make) -> None:
    driver = make()
    driver.actor("b")
    plan = m.WeightPlan(1, "host", 1, "gloo", ("a", "gone"), 3, 10.0)
    out = driver.send("learner", "learner", m.PostWeightPlan(plan))
    assert [(o.role, o.name, o.message) for o in out] == [("actor", "a", plan)]


def test_heartbeats_are_answered_and_shown(make: Make) -> None:
    driver = make()
    driver.send("learner", "learner", m.VersionPublished(v(2)))
    driver.now_s = 5.0
    driver.send("actor", "a", m.Heartbeat(v(1), {"busy": 0.5}))
    assert driver.take(m.HeartbeatReply) == [m.HeartbeatReply(v(2))]
    driver.now_s = 7.0
    view = next(peer for peer in driver.snapshot.peers if peer.name == "a")
    assert (view.version, view.stats, view.silent_s, view.alive) == (v(1), {"busy": 0.5}, 2.0, True)


def test_a_snapshot_tells_where_everything_is_and_what_everybody_did(make: Make) -> None:
    driver = make(batch=1, staleness=3)
    driver.offer(0, 1, 2, 3)
    driver.roll(0)
    batch = driver.batch_for(0)
    driver.trained(batch)
    driver.roll(1)
    driver.write("train-2-0-0", 3)
    driver.send("actor", "a", m.SnapshotWanted())
    (snapshot,) = driver.take(m.Snapshot, to="a")
    queues = snapshot.queues
    assert (queues["tokens_scored"], queues["tokens_scoring"], queues["tokens_unscored"]) == (2, 3, 0)
    assert (queues["tickets_outstanding"], queues["rollouts_waiting"], queues["tickets_free"]) == (2, 1, 1)
    assert snapshot.ledger.rollouts == m.LedgerCounts(3, 1, {}, {}, waiting=1, in_flight=1)
    did = {peer.name: (peer.held, peer.done_total, peer.tokens_total) for peer in snapshot.peers}
    assert did == {"a": (2, 2, 7), "t": (1, 2, 4), "learner": (0, 1, 2)}
    driver.join("actor", "a", incarnation="2")
    view = next(peer for peer in driver.snapshot.peers if peer.name == "a")
    assert (view.done_total, view.tokens_total, view.held) == (2, 7, 0), "totals go on, tickets do not"


@pytest.mark.parametrize("ok", [True, False])
def test_at_the_end_everything_left_is_dropped_and_all_are_sent_home(make: Make, ok: bool) -> None:
    driver = make(batch=1, staleness=3)
    driver.offer(0, 1, 2)
    driver.offer(7, kind="eval", eval_id="e")
    driver.roll(0)
    assert driver.want(0) is not None
    driver.roll(1)
    driver.write("train-2-0-0", 3)
    driver.write("eval-7-0-0", 1)
    out = driver.send("learner", "learner", m.RunFinished(ok, "enough"))
    told = {o.name for o in out if o.message == m.Shutdown(ok, "enough")}
    assert told == {"a", "t", "learner"}
    ledger = driver.ledger
    assert ledger.tokens.dropped == {"run_ended": 7} and ledger.rollouts.dropped == {"run_ended": 3}
    assert ledger.eval_tokens.dropped == {"run_ended": 1}
    assert all(c.waiting == c.in_flight == 0 for c in (ledger.rollouts, ledger.segments, ledger.tokens))
    assert driver.snapshot.phase == ("finished" if ok else "failed")
    assert driver.snapshot.phase_reason == "enough"


def test_after_the_end_late_messages_are_answered_and_change_nothing(make: Make) -> None:
    driver = make(batch=1, staleness=3)
    driver.offer(0, 1)
    driver.roll(0)
    batch = driver.batch_for(0)
    driver.trained(batch)
    driver.write("train-1-0-0", 1)
    driver.send("learner", "learner", m.RunFinished(True, "done"))
    before = driver.ledger
    driver.take(m.Shutdown)
    ack = driver.write("train-1-0-0", 1, actor="a")
    assert ack is not None and ack.reason == "run_over"
    (lease,) = driver.work
    assert driver.answer(lease).statuses == ("expired",)
    driver.trained(batch)
    assert len(driver.take(m.BatchTrainedAck)) == 2
    driver.send("learner", "learner", m.RunFinished(True, "done"))
    driver.join("actor", "late", "9")
    assert len(driver.take(m.Shutdown)) == 2
    driver.wait(10_000.0)
    assert driver.ledger.tokens == before.tokens


def test_a_run_goes_on_from_its_ledger_and_version(make: Make) -> None:
    first = make(batch=1, staleness=3)
    first.offer(0, 1)
    first.roll(0)
    batch = first.want(0)
    assert batch is not None
    first.trained(batch)
    first.write("train-1-0-0", 3)
    second = make(batch=1, staleness=3, start=v(1, epoch=1), carried=first.ledger)
    assert second.ledger.tokens == m.LedgerCounts(5, 2, {}, {"lost_at_restart": 3}, 0, 0)
    assert second.ledger.rollouts == m.LedgerCounts(2, 1, {}, {"lost_at_restart": 1}, 0, 0)
    second.offer(1)
    assert second.tickets["train-1-0-1000"].min_version == v(1, epoch=1)
    second.write("train-1-0-1000", 2, final=True, step=1, epoch=1)
    second.score()
    batch = second.want(1, epoch=1)
    assert batch is not None and batch.staleness == {0: 2}
    second.trained(batch)
    assert second.ledger.tokens.trained == 4


def test_weights_for_teachers_of_a_pool_go_to_all_of_them_and_to_one_that_comes_later(make: Make) -> None:
    driver = make()
    driver.join("teacher", "u", pool="self")
    driver.join("teacher", "x", pool="other")
    refs = [m.WeightsRef(v(step), f"/{step}", "ab") for step in (3, 6)]
    for ref in refs:
        driver.send("learner", "learner", m.TeacherWeights("self", ref))
    assert driver.take(m.TeacherWeights, to="u") == [m.TeacherWeights("self", ref) for ref in refs]
    assert driver.take(m.TeacherWeights, to="x") == []
    out = driver.join("teacher", "late", pool="self")
    assert [o.message for o in out if isinstance(o.message, m.TeacherWeights)] == [m.TeacherWeights("self", refs[-1])]
    driver.lose("teacher", "u")
    out = driver.join("teacher", "u", incarnation="2", pool="self")
    assert m.TeacherWeights("self", refs[-1]) in [o.message for o in out]
