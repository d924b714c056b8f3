"""What peers do in the simulation, one small thing at a time: `ACTIONS`, with how often each happens.

An action makes at least one event or none (when it is not possible now). All randomness comes from its `rng`.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np

from bench.buffer_model import teacher_logprob
from bench.buffer_peers import (
    VOCAB_SIZE,
    Array,
    SimActor,
    SimEvaluation,
    SimLearner,
    SimRollout,
    SimSegment,
    SimTeacher,
    make_segment,
    spoil,
    spoil_scores,
)
from bench.buffer_world import World
from buffer.ledger import RejectReason
from protocol import messages as m
from protocol.messages import WeightVersion

Action = Callable[[World, Random], None]

_NO_FAULT_OF_THE_SEGMENT = (
    RejectReason.ROLLOUT_ENDED,
    RejectReason.UNKNOWN_ROLLOUT,
    RejectReason.AFTER_FINAL,
    RejectReason.WRONG_ACTOR,
    RejectReason.OUT_OF_ORDER,
    RejectReason.RUN_OVER,
)

# ------------------------------------------------------------------------------------------------------- actors


def actor_reads(world: World, rng: Random) -> None:
    """Take tickets from the inbox, and say how much more may come."""
    actor = _some_actor(world, rng)
    if actor is None:
        return
    if rng.random() < 0.8:
        actor.read()
    actor.seq += 1
    free = max(0, actor.capacity - len(actor.running))
    world.send("actor", actor.name, m.TicketCredit(free, actor.seq, actor.received_total))
    if rng.random() < 0.1:  # an old one, late
        world.send("actor", actor.name, m.TicketCredit(99, actor.seq - 1, 0))


def actor_writes(world: World, rng: Random) -> None:
    """The next segment of a rollout; usually sent at once, sometimes late."""
    actor = _some_actor(world, rng)
    rollout = _runnable(actor, rng) if actor is not None else None
    if actor is None or rollout is None:
        return
    segment = make_segment(actor, rollout, rng, final=rng.random() < 0.4, newest=world.broadcast)
    actor.file(rollout, segment)
    if rng.random() < 0.9:
        _send_segment(world, actor, segment, rng)


def actor_resends(world: World, rng: Random) -> None:
    """Any segment that is not acknowledged, in any order."""
    actor = _some_actor(world, rng)
    if actor is not None and actor.unacked:
        _send_segment(world, actor, rng.choice(list(actor.unacked.values())), rng)


def actor_lies(world: World, rng: Random) -> None:
    """A segment that must be refused."""
    actor = _some_actor(world, rng)
    rollout = _runnable(actor, rng) if actor is not None else None
    if actor is None or rollout is None:
        return
    honest = make_segment(actor, rollout, rng, final=rng.random() < 0.3, newest=world.broadcast)
    segment = spoil(honest, rng)
    actor.file(rollout, segment)
    _send_segment(world, actor, segment, rng)


def actor_fails(world: World, rng: Random) -> None:
    actor = _some_actor(world, rng)
    if actor is not None and actor.running:
        rollout_id = rng.choice(list(actor.running))
        actor.end(rollout_id)
        for _ in range(rng.choice((1, 1, 2))):
            world.send("actor", actor.name, m.RolloutFailed(rollout_id, "engine"))


def actor_leaves(world: World, rng: Random) -> None:
    """It dies, says goodbye, or falls silent; what it has not read is lost, or not."""
    actor = _some_actor(world, rng)
    if actor is None or rng.random() < 0.5:
        return
    world.tally.deaths += 1
    actor.exact = False
    if rng.random() < 0.5:
        actor.inbox.clear()
    how = rng.random()
    if how < 0.3:  # back before anybody noticed
        _new_actor(world, actor)
        world.join("actor", actor.name, world.actors[actor.name].incarnation)
        return
    actor.connected = False
    if how < 0.5:
        world.send("actor", actor.name, m.Goodbye("restart"))
    else:
        world.lose("actor", actor.name)


def actor_returns(world: World, rng: Random) -> None:
    gone = [actor for actor in world.actors.values() if not actor.connected]
    if not gone:
        return
    actor = rng.choice(gone)
    actor.connected = True
    if rng.random() < 0.5:
        _new_actor(world, actor)
    world.join("actor", actor.name, world.actors[actor.name].incarnation)


def actor_updates(world: World, rng: Random) -> None:
    """New weights reach an actor, perhaps before the buffer hears of them."""
    actor = _some_actor(world, rng)
    if actor is not None:
        actor.version = max(actor.version, world.broadcast)


def _new_actor(world: World, actor: SimActor) -> None:
    world.actors[actor.name] = SimActor(actor.name, world.incarnation(), world.broadcast)


def _some_actor(world: World, rng: Random) -> SimActor | None:
    here = [actor for actor in world.actors.values() if actor.connected]
    return rng.choice(here) if here else None


def _runnable(actor: SimActor, rng: Random) -> SimRollout | None:
    able = [r for r in actor.running.values() if r.ticket.min_version <= actor.version]
    return rng.choice(able) if able else None


def _send_segment(world: World, actor: SimActor, segment: SimSegment, rng: Random) -> None:
    world.model.segment_sent(segment.message, segment.arrays)
    out = world.send("actor", actor.name, segment.message, segment.arrays)
    for ack in [o.message for o in out if isinstance(o.message, m.SegmentAck) and o.name == actor.name]:
        sent = actor.unacked.get((ack.rollout_id, ack.index))
        if sent is not None and ack.status == "accepted":
            assert sent.expected is None, f"{sent.message} was accepted, expected {sent.expected}"
        if sent is not None and ack.status == "rejected" and ack.reason not in _NO_FAULT_OF_THE_SEGMENT:
            assert ack.reason == sent.expected, f"{ack}, expected {sent.expected}: {sent.message}"
        if ack.status == "rejected":
            actor.end(ack.rollout_id)
        elif rng.random() < 0.85:  # else the acknowledgement is lost, and the segment will be sent again
            actor.unacked.pop((ack.rollout_id, ack.index), None)


# ----------------------------------------------------------------------------------------------------- teachers


def teacher_reads(world: World, rng: Random) -> None:
    """Take work from the inbox, and say how much more may come."""
    teacher = _some_teacher(world, rng)
    if teacher is None:
        return
    if rng.random() < 0.8:
        teacher.read()
    teacher.seq += 1
    credit = m.ScoreCredit(rng.choice((0, 5, 40, 200)), teacher.seq, teacher.received_total)
    world.send("teacher", teacher.name, credit)


def teacher_scores(world: World, rng: Random) -> None:
    """Scores of some items; now and then bad ones, or the same again."""
    teacher = _some_teacher(world, rng)
    if teacher is None or not teacher.items:
        return
    leases = rng.sample(list(teacher.items), rng.randint(1, min(3, len(teacher.items))))
    arrays: list[Array] = []
    bad: list[bool] = []
    for lease in leases:
        item, ids = teacher.items.pop(lease)
        scores = teacher_logprob(teacher.pool, ids[item.start : item.end])
        bad.append(rng.random() < 0.04)
        arrays.append(spoil_scores(scores, rng) if bad[-1] else scores)
    ack = _send_scores(world, teacher, tuple(leases), tuple(arrays))
    for is_bad, status in zip(bad, ack.statuses, strict=True):
        assert status in (("rejected", "expired") if is_bad else ("accepted", "expired")), ack
    world.model.rejected.update(reason for reason in ack.reasons if reason is not None)
    if rng.random() < 0.1:
        repeated = _send_scores(world, teacher, tuple(leases), tuple(arrays))
        assert repeated.statuses == ack.statuses, f"{repeated} after {ack}"


def teacher_fails(world: World, rng: Random) -> None:
    teacher = _some_teacher(world, rng)
    if teacher is not None and teacher.items and rng.random() < 0.5:
        lease = rng.choice(list(teacher.items))
        del teacher.items[lease]
        world.model.lease_over(lease)
        world.send("teacher", teacher.name, m.ScoreFailed((lease,), "out of memory"))


def teacher_leaves(world: World, rng: Random) -> None:
    teacher = _some_teacher(world, rng)
    if teacher is None or rng.random() < 0.5:
        return
    world.tally.deaths += 1
    teacher.connected = False
    for lease in teacher.leases:
        world.model.lease_over(lease)
    if rng.random() < 0.5:
        teacher.inbox.clear()
    world.lose("teacher", teacher.name)


def teacher_returns(world: World, rng: Random) -> None:
    gone = [teacher for teacher in world.teachers.values() if not teacher.connected]
    if not gone:
        return
    teacher = rng.choice(gone)
    teacher.connected = True
    if rng.random() < 0.5:
        teacher = world.teachers[teacher.name] = SimTeacher(teacher.name, world.incarnation(), teacher.pool)
    world.join("teacher", teacher.name, teacher.incarnation, teacher.pool)


def _some_teacher(world: World, rng: Random) -> SimTeacher | None:
    here = [teacher for teacher in world.teachers.values() if teacher.connected]
    return rng.choice(here) if here else None


def _send_scores(world: World, teacher: SimTeacher, leases: tuple[int, ...], arrays: tuple[Array, ...]) -> m.ScoresAck:
    out = world.send("teacher", teacher.name, m.Scores(leases), arrays)
    return next(o.message for o in out if isinstance(o.message, m.ScoresAck))


# ------------------------------------------------------------------------------------------------------ learner


def learner_offers(world: World, rng: Random) -> None:
    """Tasks for the queue, those of before a restart first; sometimes the same again."""
    learner = _learner(world)
    if learner is None or learner.tasks_wanted <= 0:
        return
    tasks = [_next_task(world, learner, rng) for _ in range(rng.randint(1, min(4, learner.tasks_wanted)))]
    prompts = tuple(_prompt(task) for task in tasks)
    for _ in range(2 if rng.random() < 0.1 else 1):
        world.send("learner", "learner", m.TasksOffered(tuple(tasks)), prompts)


def learner_asks(world: World, rng: Random) -> None:
    """For the batch of its step; also while it has it."""
    learner = _learner(world)
    if learner is not None:
        world.send("learner", "learner", m.BatchWanted(learner.version))
        if rng.random() < 0.05 and learner.version.step > 0:  # an old request, late
            late = WeightVersion(learner.version.epoch, learner.version.step - 1)
            if late.step >= learner.first_step:
                world.send("learner", "learner", m.BatchWanted(late))


def learner_trains(world: World, rng: Random) -> None:
    """Make the next version; tell actors and buffer, in any order."""
    learner = _learner(world)
    if learner is None or learner.batch is None:
        return
    batch, learner.batch = learner.batch, None
    learner.version = WeightVersion(learner.version.epoch, learner.version.step + 1)
    message = m.BatchTrained(batch.batch_id, learner.version)
    learner.unacked[batch.batch_id] = message
    learner.settled(batch.tasks_done)
    world.broadcast = learner.version
    if rng.random() < 0.5:
        actor_updates(world, rng)
    if rng.random() < 0.3:
        world.send("learner", "learner", m.VersionPublished(learner.version, None))
    if rng.random() < 0.7:
        learner_repeats(world, rng)
    if learner.version.step % 3 == 0 and not learner.unacked:
        world.checkpoints[learner.version.step] = learner.stream.copy()


def learner_repeats(world: World, rng: Random) -> None:
    """BatchTrained until it is acknowledged, and sometimes once more."""
    learner = _learner(world)
    if learner is None:
        return
    for message in list(learner.unacked.values()):
        for _ in range(rng.choice((1, 1, 1, 2))):
            world.send("learner", "learner", message)


def learner_publishes(world: World, rng: Random) -> None:
    learner = _learner(world)
    if learner is not None:
        ref = m.WeightsRef(learner.version, "weights", "0") if rng.random() < 0.5 else None
        world.send("learner", "learner", m.VersionPublished(learner.version, ref))


def learner_is_cut_off(world: World, rng: Random) -> None:
    """Silent for a while; the same process comes back and knows what it trained."""
    learner = _learner(world)
    if learner is not None and rng.random() < 0.5:
        learner.connected = False
        world.lose("learner", "learner")


def learner_returns(world: World, rng: Random) -> None:
    if not world.learner.connected and not world.over:
        world.learner.connected = True
        world.join("learner", "learner", world.learner.incarnation)


def learner_restarts(world: World, rng: Random) -> None:
    """It dies with whatever it had, and goes on from a checkpoint under a higher epoch."""
    if world.over or rng.random() < 0.5:
        return
    world.tally.restarts += 1
    if world.learner.connected and rng.random() < 0.5:
        world.learner.connected = False
        world.lose("learner", "learner")
    steps = [step for step in world.checkpoints if step <= world.learner.version.step]
    step = rng.choice(steps[-3:])
    version = WeightVersion(world.learner.version.epoch + rng.choice((1, 1, 1, 2)), step)
    for later in [s for s in world.checkpoints if s > step]:
        del world.checkpoints[later]
    world.learner = SimLearner(world.incarnation(), version, world.checkpoints[step].copy())
    world.model.learner_restarted()
    world.join("learner", "learner", world.learner.incarnation)
    world.broadcast = version
    world.model.tree.fork(version)
    if rng.random() < 0.7:
        world.send("learner", "learner", m.VersionPublished(version, None))
    else:
        world.send("learner", "learner", m.BatchWanted(version))


def learner_evaluates(world: World, rng: Random) -> None:
    """Offer a few evaluation tasks, or ask for results."""
    learner = _learner(world)
    if learner is None:
        return
    if len(learner.evaluations) < 2 and rng.random() < 0.3:
        world.n_evals += 1
        eval_id = f"eval-{world.n_evals}"
        teachers = rng.choice((*world.task_teachers, ()))
        group_size = rng.choice((1, 2))
        tasks = tuple(
            m.Task(1000 * world.n_evals + i, "eval", group_size, m.Sampling(), teachers=teachers, eval_id=eval_id)
            for i in range(rng.randint(1, 3))
        )
        world.model.tasks.update({("eval", task.task_id): task for task in tasks})
        learner.evaluations[eval_id] = SimEvaluation(group_size * len(tasks))
        world.send("learner", "learner", m.TasksOffered(tasks), tuple(_prompt(task) for task in tasks))
    for eval_id, evaluation in list(learner.evaluations.items()):
        known = tuple(rollout_id for rollout_id in evaluation.received if rng.random() < 0.9)
        world.send("learner", "learner", m.EvalWanted(eval_id, known))
        if evaluation.complete:
            del learner.evaluations[eval_id]


def _learner(world: World) -> SimLearner | None:
    return world.learner if world.learner.connected else None


def _next_task(world: World, learner: SimLearner, rng: Random) -> m.Task:
    stream = learner.stream
    while stream.offer_again:
        task_id = stream.offer_again.pop(0)
        if task_id in stream.outstanding:
            return stream.outstanding[task_id]
    task_id = stream.next_task_id
    stream.next_task_id += 1
    task = world.model.tasks.get(("train", task_id))
    if task is None:
        group_size, teachers = rng.choice(world.group_sizes), rng.choice(world.task_teachers)
        task = m.Task(task_id, "train", group_size, m.Sampling(seed=task_id), teachers=teachers)
        world.model.tasks["train", task_id] = task
    stream.outstanding[task_id] = task
    return task


def _prompt(task: m.Task) -> Array:
    return np.array([task.task_id % VOCAB_SIZE, 1, 2][: 1 + task.task_id % 3], np.int32)


# --------------------------------------------------------------------------------------------------------- time


def time_passes(world: World, rng: Random) -> None:
    """A little, usually; sometimes so much that leases or tickets run out."""
    config = world.config
    longer = rng.choice((config.idle_release_s, config.lease_s, config.ticket_timeout_s))
    world.tick(longer if rng.random() < 0.1 else 0.05)


ACTIONS: tuple[tuple[Action, float], ...] = (
    (actor_reads, 10),
    (actor_writes, 30),
    (actor_resends, 4),
    (actor_lies, 0.7),
    (actor_fails, 0.5),
    (actor_leaves, 0.6),
    (actor_returns, 2),
    (actor_updates, 4),
    (teacher_reads, 12),
    (teacher_scores, 16),
    (teacher_fails, 0.6),
    (teacher_leaves, 0.6),
    (teacher_returns, 2),
    (learner_offers, 4),
    (learner_asks, 5),
    (learner_trains, 5),
    (learner_repeats, 1),
    (learner_publishes, 2),
    (learner_is_cut_off, 0.2),
    (learner_returns, 1),
    (learner_restarts, 0.06),
    (learner_evaluates, 1),
    (time_passes, 4),
)


# ------------------------------------------------------------------------------------------------------ the end


def work_together(world: World, rng: Random, batches: int) -> None:
    """Everybody is there, honest and quick: `batches` more batches must come, or the buffer is stuck."""
    while any(not actor.connected for actor in world.actors.values()):
        actor_returns(world, rng)
    while any(not teacher.connected for teacher in world.teachers.values()):
        teacher_returns(world, rng)
    learner_returns(world, rng)
    world.tick(world.config.ticket_timeout_s + world.config.lease_s)  # what was lost on the way comes back
    learner = world.learner
    last = learner.version.step + batches
    for _ in range(50 * batches):
        if learner.version.step >= last:
            return
        learner_asks(world, rng)
        for _ in range(20):
            learner_offers(world, rng)
        for actor in world.actors.values():
            _finish_all(world, actor, rng)
        for teacher in world.teachers.values():
            _score_all(world, teacher)
        learner_trains(world, rng)
        learner_repeats(world, rng)
        world.tick(0.05)
    raise AssertionError(f"no batch though everybody works: {world.state!r}")


def finish(world: World, rng: Random) -> None:
    """RunFinished: nothing may be left, everybody is sent home, and late messages are still answered."""
    learner_returns(world, rng)
    learner_repeats(world, rng)
    world.over = True
    out = world.send("learner", "learner", m.RunFinished(True, "done"))
    told = {(o.role, o.name) for o in out if isinstance(o.message, m.Shutdown)}
    here = {("actor", a.name) for a in world.actors.values() if a.connected}
    here |= {("teacher", t.name) for t in world.teachers.values() if t.connected} | {("learner", "learner")}
    assert told == here, f"{here - told} were not sent home"
    ledger = world.state.snapshot(world.now_s).ledger
    for counts in (ledger.rollouts, ledger.segments, ledger.tokens, ledger.eval_tokens):
        assert counts.waiting == counts.in_flight == 0 and counts.balanced, ledger
    for action in (actor_writes, teacher_scores, actor_returns, teacher_returns, learner_asks, time_passes):
        action(world, rng)
    assert world.state.snapshot(world.now_s).ledger.tokens == ledger.tokens


def _finish_all(world: World, actor: SimActor, rng: Random) -> None:
    actor.read()
    actor.version = max(actor.version, world.broadcast)
    for rollout in list(actor.running.values()):
        assert rollout.ticket.min_version <= actor.version, f"{rollout.ticket} waits for weights that do not exist"
        actor.file(rollout, make_segment(actor, rollout, rng, final=True, newest=world.broadcast))
    for segment in list(actor.unacked.values()):
        _send_segment(world, actor, segment, rng)
    actor.seq += 1
    world.send("actor", actor.name, m.TicketCredit(actor.capacity, actor.seq, actor.received_total))


def _score_all(world: World, teacher: SimTeacher) -> None:
    teacher.read()
    if teacher.items:
        leases = tuple(teacher.items)
        pairs = [teacher.items.pop(lease) for lease in leases]
        scores = tuple(teacher_logprob(teacher.pool, ids[item.start : item.end]) for item, ids in pairs)
        _send_scores(world, teacher, leases, scores)
    teacher.seq += 1
    world.send("teacher", teacher.name, m.ScoreCredit(10_000, teacher.seq, teacher.received_total))
