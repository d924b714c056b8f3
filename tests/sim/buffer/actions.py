"""Everything that happens in the simulation: `ACTIONS`, with how often each does, and how a run is brought to an end.

An action makes at least one event or none (when it is not possible now). All randomness comes from its `rng`.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from stillhouse.buffer.pools import LONGEST_BACKOFF
from stillhouse.protocol import messages as m
from tests.sim.buffer import learner, workers
from tests.sim.buffer.world import World

Action = Callable[[World, Random], None]


def time_passes(world: World, rng: Random) -> None:
    """Advance the clock, usually a little; sometimes past the deadlines of leases and tickets."""
    config = world.config
    longer = rng.choice((config.idle_release_s, config.lease_s, config.ticket_timeout_s))
    world.tick(longer if rng.random() < 0.1 else 0.05)


ACTIONS: tuple[tuple[Action, float], ...] = (
    (workers.actor_reads, 10),
    (workers.actor_writes, 30),
    (workers.actor_resends, 4),
    (workers.actor_lies, 0.7),
    (workers.actor_fails, 0.5),
    (workers.actor_leaves, 0.6),
    (workers.actor_returns, 2),
    (workers.actor_updates, 4),
    (workers.teacher_reads, 12),
    (workers.teacher_scores, 16),
    (workers.teacher_fails, 0.6),
    (workers.teacher_leaves, 0.6),
    (workers.teacher_returns, 2),
    (workers.teacher_changes, 0.3),
    (workers.teacher_drains, 0.4),
    (workers.buffer_restarts, 0.1),
    (learner.offers, 4),
    (learner.asks, 5),
    (learner.trains, 5),
    (learner.repeats, 1),
    (learner.publishes, 2),
    (learner.is_cut_off, 0.2),
    (learner.returns, 1),
    (learner.restarts, 0.6),
    (learner.evaluates, 1),
    (time_passes, 4),
)


def work_together(world: World, rng: Random, batches: int) -> None:
    """Everybody is there, honest and quick: `batches` more batches must come, or the buffer is stuck."""
    while any(not actor.connected for actor in world.actors.values()):
        workers.actor_returns(world, rng)
    while any(not teacher.connected for teacher in world.teachers.values()):
        workers.teacher_returns(world, rng)
    learner.returns(world, rng)
    world.tick(world.config.ticket_timeout_s + world.config.lease_s)  # what was lost on the way comes back
    world.tick(LONGEST_BACKOFF * world.config.breaker_backoff_s)  # a teacher that let one run out is tried again
    last = world.learner.version.step + batches
    for _ in range(50 * batches):
        if world.learner.version.step >= last:
            return
        learner.asks(world, rng)
        for _ in range(20):
            learner.offers(world, rng)
        for actor in world.actors.values():
            workers.finish_all(world, actor, rng)
        for teacher in world.teachers.values():
            workers.score_all(world, teacher)
        learner.trains(world, rng)
        learner.repeats(world, rng)
        world.tick(0.05)
    raise AssertionError(f"no batch though everybody works: {world.state!r}")


def finish(world: World, rng: Random) -> None:
    """RunFinished: nothing may be left, everybody is sent home, and late messages are still answered."""
    learner.returns(world, rng)
    learner.repeats(world, rng)
    world.deliver_all()
    world.over = True
    out = world.send("learner", "learner", m.RunFinished(True, "done"))
    dismissed = {(o.role, o.name) for o in out if isinstance(o.message, m.Shutdown)}
    here = {("actor", a.name) for a in world.actors.values() if a.connected}
    here |= {("teacher", t.name) for t in world.teachers.values() if t.connected} | {("learner", "learner")}
    assert dismissed == here, f"{here - dismissed} were not sent home"
    snapshot = world.state.snapshot(world.now_s)
    ledger = snapshot.ledger
    assert snapshot.queues["rollouts_live"] == snapshot.queues["tasks_queued"] == 0, snapshot.queues
    for counts in (ledger.rollouts, ledger.segments, ledger.tokens, ledger.eval_tokens):
        assert counts.waiting == counts.in_flight == 0 and counts.balanced, ledger
    for action in (
        workers.actor_writes,
        workers.teacher_scores,
        workers.actor_returns,
        workers.teacher_returns,
        learner.asks,
        time_passes,
    ):
        action(world, rng)
    assert world.state.snapshot(world.now_s).ledger.tokens == ledger.tokens
