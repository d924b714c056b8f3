"""Single actions of the simulated learner."""

from __future__ import annotations

from random import Random

import numpy as np

from stillhouse.protocol import messages as m
from stillhouse.protocol.messages import WeightVersion
from tests.sim.buffer.peers import VOCAB_SIZE, Array, SimEvaluation, SimLearner, row_of
from tests.sim.buffer.workers import actor_updates
from tests.sim.buffer.world import World


def offers(world: World, rng: Random) -> None:
    """Tasks for the queue, those of before a restart first; sometimes the same again."""
    learner = _learner(world)
    if learner is None or learner.tasks_wanted <= 0:
        return
    tasks = [_next_task(world, learner, rng) for _ in range(rng.randint(1, min(4, learner.tasks_wanted)))]
    prompts = tuple(_prompt(task) for task in tasks)
    for _ in range(2 if rng.random() < 0.1 else 1):
        world.send("learner", "learner", m.TasksOffered(tuple(tasks)), prompts)


def asks(world: World, rng: Random) -> None:
    """For the batch of its step, also while it has it; then often for the next one, if anything may be stale."""
    learner = _learner(world)
    if learner is not None:
        world.send("learner", "learner", m.BatchWanted(learner.version))
        if learner.batch is not None and world.config.max_staleness and rng.random() < 0.5:
            learner.asked_ahead = WeightVersion(learner.version.epoch, learner.version.step + 1)
            world.send("learner", "learner", m.BatchWanted(learner.asked_ahead))
        if rng.random() < 0.05 and learner.version.step > 0:  # an old request, late
            late = WeightVersion(learner.version.epoch, learner.version.step - 1)
            if late.step >= learner.first_step:
                world.send("learner", "learner", m.BatchWanted(late))


def trains(world: World, rng: Random) -> None:
    """Make the next version; tell actors and buffer, in any order."""
    learner = _learner(world)
    if learner is None or learner.batch is None:
        return
    batch, arrays = learner.batch, learner.batch_arrays
    learner.batch, learner.batch_arrays = learner.ahead or (None, ())
    learner.ahead = None
    learner.version = WeightVersion(learner.version.epoch, learner.version.step + 1)
    masked = tuple(item.rollout_id for item in batch.items if rng.random() < 0.05)
    world.left_out.update(masked)
    message = m.BatchTrained(batch.batch_id, learner.version, masked)
    learner.unacked[batch.batch_id] = message
    learner.step(batch, arrays, masked)
    _check_wholly_trained(world, learner, batch, masked)
    world.broadcast = learner.version
    if rng.random() < 0.5:
        actor_updates(world, rng)
    if rng.random() < 0.3:
        world.send("learner", "learner", m.VersionPublished(learner.version))
    if rng.random() < 0.7:
        repeats(world, rng)
    if rng.random() < 0.5 and not learner.unacked:
        world.checkpoints[learner.version] = learner.stream.copy()


def _check_wholly_trained(world: World, learner: SimLearner, batch: m.Batch, masked: tuple[str, ...]) -> None:
    """Assert that a sample that settled as trained, without a reason, had every sampled token trained."""
    left_out = {(item.task_id, item.sample_index) for item in batch.items if item.rollout_id in masked}
    for one in batch.settled:
        sample = one.task_id, one.sample_index
        if one.fate != "trained" or one.reason or sample in left_out:
            continue
        rollout_id, offsets = learner.stream.trained[sample]
        rollout = world.model.rollouts.get(rollout_id) or world.model.forgotten[rollout_id]
        sampled = {at for at, version in enumerate(rollout.versions) if version is not None}
        missing = sampled - offsets
        assert not missing or rollout_id in world.left_out, f"{rollout_id}: {sorted(missing)} are lost without a reason"


def repeats(world: World, rng: Random) -> None:
    """BatchTrained until it is acknowledged, and sometimes once more."""
    learner = _learner(world)
    if learner is None:
        return
    for message in list(learner.unacked.values()):
        for _ in range(rng.choice((1, 1, 1, 2))):
            world.send("learner", "learner", message)


def publishes(world: World, rng: Random) -> None:
    learner = _learner(world)
    if learner is not None:
        world.send("learner", "learner", m.VersionPublished(learner.version))


def is_cut_off(world: World, rng: Random) -> None:
    """Silent for a while; the same process comes back and knows what it trained."""
    learner = _learner(world)
    if learner is not None and rng.random() < 0.5:
        learner.connected = False
        world.lose("learner", "learner")


def returns(world: World, rng: Random) -> None:
    if not world.learner.connected and not world.over:
        world.learner.connected = True
        world.join("learner", "learner", world.learner.incarnation)


def restarts(world: World, rng: Random) -> None:
    """It dies with whatever it had, and goes on from a checkpoint under a higher epoch."""
    if world.over or rng.random() < (0.2 if world.learner_dies_often else 0.95):
        return
    world.tally.restarts += 1
    if world.learner.connected and rng.random() < 0.5:
        world.learner.connected = False
        world.lose("learner", "learner")
    parent = rng.choice(list(world.checkpoints)[-3:])  # of a branch that was left, too: its files may be readable again
    version = WeightVersion(world.learner.version.epoch + rng.choice((1, 1, 1, 2)), parent.step)
    stream = world.checkpoints[parent].copy()
    world.learner = SimLearner(world.incarnation(), version, stream)
    world.model.learner_restarted()
    world.join("learner", "learner", world.learner.incarnation)
    world.broadcast = version
    world.learner_restarted(version, parent)
    world.send("learner", "learner", stream.started(version, parent))


def evaluates(world: World, rng: Random) -> None:
    """Offer a few evaluation tasks, or ask for results."""
    learner = _learner(world)
    if learner is None:
        return
    if len(learner.evaluations) < (2 if rng.random() < 0.9 else 8) and rng.random() < 0.3:
        world.n_evals += 1
        eval_id = f"eval-{world.n_evals}"
        teachers = rng.choice((*world.task_teachers, ()))
        group_size = rng.choice((1, 2))
        tasks = tuple(
            m.Task(
                number, "eval", group_size, m.Sampling(), teachers=teachers, eval_id=eval_id, row=row_of("eval", number)
            )
            for number in range(1000 * world.n_evals, 1000 * world.n_evals + rng.randint(1, 3))
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
        row = row_of("train", task_id)
        task = m.Task(task_id, "train", group_size, m.Sampling(seed=task_id), teachers=teachers, row=row)
        world.model.tasks["train", task_id] = task
    if all((task_id, i) in stream.settled for i in range(task.group_size)):
        return _next_task(world, learner, rng)  # all of it was trained from what the buffer still held
    stream.outstanding[task_id] = task
    return task


def _prompt(task: m.Task) -> Array:
    return np.array([task.task_id % VOCAB_SIZE, 1, 2][: 1 + task.task_id % 3], np.int32)
