"""Single actions of simulated actors and teachers."""

from __future__ import annotations

from random import Random

from stillhouse.buffer.ledger import RejectReason
from stillhouse.protocol import messages as m
from tests.sim.buffer.model import teacher_logprob
from tests.sim.buffer.peers import (
    Array,
    SimActor,
    SimRollout,
    SimSegment,
    SimTeacher,
    make_segment,
    poisonous,
    spoil,
    spoil_scores,
)
from tests.sim.buffer.world import World

_NO_FAULT_OF_THE_SEGMENT = (
    RejectReason.ROLLOUT_ENDED,
    RejectReason.UNKNOWN_ROLLOUT,
    RejectReason.AFTER_FINAL,
    RejectReason.WRONG_ACTOR,
    RejectReason.OUT_OF_ORDER,
    RejectReason.RUN_OVER,
)


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
            world.send("actor", actor.name, m.RolloutFailed(rollout_id, "engine_error"))


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


def teacher_reads(world: World, rng: Random) -> None:
    """Take work from the inbox, and say how much more may come."""
    teacher = _some_teacher(world, rng)
    if teacher is None:
        return
    if rng.random() < 0.8:
        teacher.read()
    teacher.seq += 1
    tokens = 0 if teacher.leaving else rng.choice((0, 5, 40, 200))
    world.send("teacher", teacher.name, m.ScoreCredit(tokens, teacher.seq, teacher.received_total))


def teacher_scores(world: World, rng: Random) -> None:
    """Scores of some items; now and then bad ones, or the same again. Or what its mood makes of it."""
    teacher = _some_teacher(world, rng)
    if teacher is None or not teacher.items or teacher.mood == "stuck":
        return
    if teacher.mood == "slow" and rng.random() < 0.8:
        return
    if teacher.mood == "sick" and rng.random() < 0.95:
        _send_failure(world, teacher, rng.choice(list(teacher.items)), "sick")
        return
    poison = [lease for lease, (item, _) in teacher.items.items() if poisonous(item.rollout_id)]
    if poison and rng.random() < 0.9:
        _send_failure(world, teacher, poison[0], "too much for anybody")
        return
    leases = rng.sample(list(teacher.items), rng.randint(1, min(3, len(teacher.items))))
    arrays: list[Array] = []
    bad: list[bool] = []
    for lease in leases:
        item, ids = teacher.items.pop(lease)
        scores = teacher_logprob(teacher.pool, ids[item.start + item.shift :])
        bad.append(rng.random() < 0.04)
        arrays.append(spoil_scores(scores, rng) if bad[-1] else scores)
    ack = _send_scores(world, teacher, tuple(leases), tuple(arrays))
    for is_bad, status in zip(bad, ack.statuses, strict=True):
        assert status in (("rejected", "expired") if is_bad else ("accepted", "expired")), ack
    world.model.rejected.update(reason for reason in ack.reasons if reason is not None)
    _leave_if_done(world, teacher)
    if rng.random() < 0.1 and teacher.connected:
        repeated = _send_scores(world, teacher, tuple(leases), tuple(arrays))
        assert repeated.statuses == ack.statuses, f"{repeated} after {ack}"


def teacher_fails(world: World, rng: Random) -> None:
    teacher = _some_teacher(world, rng)
    if teacher is not None and teacher.items and rng.random() < 0.5:
        _send_failure(world, teacher, rng.choice(list(teacher.items)), "out of memory")


def teacher_changes(world: World, rng: Random) -> None:
    """It falls ill, or gets well."""
    teacher = _some_teacher(world, rng)
    if teacher is not None and (teacher.mood != "well" or rng.random() < 0.5):
        teacher.mood = "well" if teacher.mood != "well" else rng.choice(("slow", "slow", "sick", "stuck"))


def teacher_drains(world: World, rng: Random) -> None:
    """It was asked to leave: no more work, please; it goes when it has answered all."""
    teacher = _some_teacher(world, rng)
    if teacher is None or teacher.leaving or rng.random() < 0.5:
        return
    teacher.seq += 1
    world.send("teacher", teacher.name, m.ScoreCredit(0, teacher.seq, teacher.received_total))
    teacher.leaving = True
    _leave_if_done(world, teacher)


def buffer_restarts(world: World, rng: Random) -> None:
    if not world.over and rng.random() < 0.5:
        world.restart_buffer()


def teacher_leaves(world: World, rng: Random) -> None:
    teacher = _some_teacher(world, rng)
    if teacher is None or rng.random() < 0.5:
        return
    world.tally.deaths += 1
    teacher.connected = False
    world.teacher_lost(teacher)
    if rng.random() < 0.5:
        teacher.inbox.clear()
    world.lose("teacher", teacher.name)


def teacher_returns(world: World, rng: Random) -> None:
    gone = [teacher for teacher in world.teachers.values() if not teacher.connected]
    if not gone:
        return
    teacher = rng.choice(gone)
    teacher.connected = True
    if teacher.leaving or rng.random() < 0.5:
        teacher = world.teachers[teacher.name] = SimTeacher(teacher.name, world.incarnation(), teacher.pool)
        world.teacher_lost(teacher, new_process=True)
    world.join("teacher", teacher.name, teacher.incarnation, teacher.pool)


def _send_failure(world: World, teacher: SimTeacher, lease: int, reason: str) -> None:
    del teacher.items[lease]
    if not world.over:
        world.teacher_failed(teacher, lease)
    world.send("teacher", teacher.name, m.ScoreFailed((lease,), reason))
    _leave_if_done(world, teacher)


def _leave_if_done(world: World, teacher: SimTeacher) -> None:
    if teacher.leaving and not teacher.items and not teacher.inbox:
        world.tally.drains += 1
        teacher.connected = False
        world.teacher_lost(teacher)
        world.send("teacher", teacher.name, m.Goodbye("asked to leave"))


def _some_teacher(world: World, rng: Random) -> SimTeacher | None:
    here = [teacher for teacher in world.teachers.values() if teacher.connected]
    return rng.choice(here) if here else None


def _send_scores(world: World, teacher: SimTeacher, leases: tuple[int, ...], arrays: tuple[Array, ...]) -> m.ScoresAck:
    out = world.send("teacher", teacher.name, m.Scores(leases), arrays)
    return next(o.message for o in out if isinstance(o.message, m.ScoresAck))


def finish_all(world: World, actor: SimActor, rng: Random) -> None:
    """Every rollout at once, honestly."""
    actor.read()
    actor.version = max(actor.version, world.broadcast)
    for rollout in list(actor.running.values()):
        assert rollout.ticket.min_version <= actor.version, f"{rollout.ticket} waits for weights that do not exist"
        actor.file(rollout, make_segment(actor, rollout, rng, final=True, newest=world.broadcast))
    for segment in list(actor.unacked.values()):
        _send_segment(world, actor, segment, rng)
    actor.seq += 1
    world.send("actor", actor.name, m.TicketCredit(actor.capacity, actor.seq, actor.received_total))


def score_all(world: World, teacher: SimTeacher) -> None:
    """Everything at once, honestly."""
    teacher.read()
    if teacher.items:
        leases = tuple(teacher.items)
        pairs = [teacher.items.pop(lease) for lease in leases]
        scores = tuple(teacher_logprob(teacher.pool, ids[item.start + item.shift :]) for item, ids in pairs)
        _send_scores(world, teacher, leases, scores)
    teacher.mood, teacher.leaving = "well", False  # it may stay after all
    teacher.seq += 1
    world.send("teacher", teacher.name, m.ScoreCredit(10_000, teacher.seq, teacher.received_total))
