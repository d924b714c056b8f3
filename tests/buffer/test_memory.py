"""What the buffer holds does not grow with the rollouts that have passed through it."""

from __future__ import annotations

import gc
from collections import Counter, deque
from random import Random
from typing import Any

import numpy as np
import pytest

from stillhouse.buffer.config import Release
from stillhouse.buffer.core import Core
from stillhouse.buffer.history import Runs
from stillhouse.buffer.journal.image import make_image
from stillhouse.buffer.rollouts import HeldSegment, RolloutState, ScoreJob
from stillhouse.protocol import messages as m
from tests.buffer.driver import Driver, v
from tests.buffer.shadow import new_book

GROUP, SEGMENTS, BATCH = 2, 3, 8
EXCEPTIONS = ("_answers", "_series[]")
"""What may have a few entries, up to a bound, for each rollout that failed."""


class LongRun(Driver):
    """Whole rounds: tasks, tickets, segments in any order of rollouts, scores, batches. Keeps nothing of its own."""

    def __init__(self, release: Release, seed: int, **settings: Any) -> None:
        self.rng = Random(seed)
        self.rollouts = self.failures = self.stalled = 0
        self.step = self.next_task = self.seq = 0
        self.tickets_received = self.items_received = 0
        super().__init__(staleness=2, batch=BATCH, release=release, task_queue=32, **settings)
        self.want(0)

    def round(self) -> None:
        n = max(0, 32 - self.snapshot.queues["tasks_queued"])
        self.offer(*range(self.next_task, self.next_task + n), group=GROUP)
        self.next_task += n
        running = list(self.tickets)
        self.tickets_received += len(running)
        self.rng.shuffle(running)
        for rollout_id in running:
            self.write_whole(rollout_id)
        self.seq += 1
        self.send("actor", "a", m.TicketCredit(100, 2 + self.seq, self.tickets_received))
        self.items_received += len(self.work)
        self.score()
        self.send("teacher", "t", m.ScoreCredit(1_000_000, 2 + self.seq, self.items_received))
        self.train()
        self.wait(0.1)
        self.sent.clear()

    def write_whole(self, rollout_id: str) -> None:
        """One in twenty fails half way, and is tried again."""
        self.rollouts += 1
        fails = self.rng.random() < 0.05
        for index in range(SEGMENTS):
            self.write(rollout_id, 2, final=index == SEGMENTS - 1, step=self.step)
            if fails and index == 1:
                self.failures += 1
                self.send("actor", "a", m.RolloutFailed(rollout_id, "engine_error"))
                break
        for notes in (self.tickets, self.holder, self.written):
            notes.pop(rollout_id, None)

    def train(self) -> None:
        while (batch := self.batch()) is not None:
            self.trained(batch)
            self.step += 1
            self.send("learner", "learner", m.VersionPublished(v(self.step)))
            self.send("learner", "learner", m.BatchWanted(v(self.step)))

    def run_until(self, n_rollouts: int) -> None:
        while (before := self.rollouts) < n_rollouts:
            self.round()
            self.stalled = 0 if self.rollouts > before else self.stalled + 1
            assert self.stalled < 50, f"the run came to a stand: {self.state!r}"


def entries(root: object) -> dict[str, int]:
    """How much there is in each container that can be reached from `root`, by the way to it."""
    found: dict[str, int] = {}
    seen: set[int] = set()

    def walk(at: object, way: str) -> None:
        if id(at) in seen or isinstance(at, (str, bytes, int, float, np.ndarray, type)) or callable(at):
            return
        seen.add(id(at))
        if isinstance(at, Runs):
            found[way] = found.get(way, 0) + at.n_runs
        elif isinstance(at, (dict, list, set, deque, tuple)):
            members: list[Any] = list(at.values()) if isinstance(at, dict) else list(at)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
            found[way] = found.get(way, 0) + len(members)
            for member in members:
                walk(member, f"{way}[]")
        else:
            slots = [name for kind in type(at).__mro__ for name in getattr(kind, "__slots__", ())]
            for name in [*slots, *getattr(at, "__dict__", ())]:
                walk(getattr(at, name, None), f"{way}.{name}")

    walk(root, "")
    return found


@pytest.mark.parametrize("release", ["rollout", "segment", "deadline"])
def test_no_container_of_the_state_grows_with_the_rollouts(release: Release) -> None:
    run = LongRun(release, seed=3)
    run.run_until(1_000)
    early = entries(run.state)
    early_image = len(make_image(Core(run.state), new_book(), run.now_s).body)
    run.run_until(5_000)
    assert run.step > 400, "too little was trained"
    grown = {
        way: (early.get(way, 0), n)
        for way, n in entries(run.state).items()
        if n > 2 * early.get(way, 0) + 50 + (3 * run.failures if way.endswith(EXCEPTIONS) else 0)
    }
    assert not grown, f"(after 1000 rollouts, after 5000): {grown}"
    late_image = len(make_image(Core(run.state), new_book(), run.now_s).body)
    assert late_image < early_image + 100 * 1024, "an image of little more, for the exceptions"


def test_rollouts_that_are_over_are_freed_without_the_garbage_collector() -> None:
    run = LongRun("deadline", seed=5)
    run.run_until(100)
    gc.collect()
    gc.disable()
    try:
        run.run_until(600)
        left = sum(type(each) in (RolloutState, HeldSegment, ScoreJob) for each in gc.get_objects())
    finally:
        gc.enable()
    held = run.ledger.rollouts.waiting + run.ledger.rollouts.in_flight + len(run.tickets)
    assert left <= held * (1 + 2 * SEGMENTS), f"{held} rollouts are not settled"


def test_after_thousands_of_others_a_first_segment_and_its_scores_are_still_known_for_duplicates() -> None:
    run = LongRun("deadline", seed=4)
    first = run.make("train-0-0-0", 2, step=0)
    run.written.clear()
    run.run_until(3_000)
    before = run.ledger
    ack = run.submit(*first, actor="a")
    assert ack is not None and ack.status == "duplicate"
    out = run.send("teacher", "t", m.Scores((1,)), np.full(4, -1.0, np.float32))
    assert [o.message for o in out if isinstance(o.message, m.ScoresAck)] == [m.ScoresAck((1,), ("accepted",), (None,))]
    out = run.send("learner", "learner", m.BatchTrained(1, v(1)))
    assert [o.message for o in out if isinstance(o.message, m.BatchTrainedAck)] == [m.BatchTrainedAck(1, v(1))]
    run.offer(0, 1, 2, group=GROUP)
    assert run.ledger == before, "nothing changed"
    assert not [t for t in run.tickets if t.split("-")[1] in ("0", "1", "2")], "no task is run again"


def test_those_who_only_looked_at_the_run_are_forgotten() -> None:
    driver = Driver()
    before = [peer.name for peer in driver.snapshot.peers]
    for i in range(100):
        driver.join("launcher", f"joiner-{i}")
        assert driver.snapshot.peers[-1].name == f"joiner-{i}"
        if i % 2:
            driver.send("launcher", f"joiner-{i}", m.Goodbye("done"))
        else:
            driver.lose("launcher", f"joiner-{i}")
    assert [peer.name for peer in driver.snapshot.peers] == before
    driver.join("launcher", "joiner-0")
    (shown,) = [o.message for o in driver.send("launcher", "joiner-0", m.SnapshotWanted())]
    assert isinstance(shown, m.Snapshot) and shown.peers[-1].alive, "it came back"


@pytest.mark.parametrize(
    ("release", "settings"),
    [("rollout", {}), ("rollout", {"mask_truncated": True, "dynamic_sampling": 10}), ("segment", {}), ("deadline", {})],
)
def test_what_is_let_go_is_in_no_cycle(release: Release, settings: dict[str, Any]) -> None:
    """The buffer's loop looks for cycles among young objects only."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        run = LongRun(release, seed=5, **settings)
        run.run_until(300)
        run.offer(0, 1, kind="eval", eval_id="e")
        run.restart_learner(run.step, 1, next_task_id=run.next_task)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = Counter(
            type(one).__name__ for one in gc.garbage if type(one).__module__.startswith("stillhouse.buffer.")
        )
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        if was_on:
            gc.enable()
    assert not found, f"only a search through everything would free these: {found}"
