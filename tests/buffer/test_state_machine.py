"""Hypothesis drives the simulated peers: any order of arrivals, deaths, lies, timeouts, version bumps and restarts.

The checks after every event are those of `tests.sim.buffer.world`: ledger, independent model, audit. A failing sequence
is shrunk. At the end everybody works together (batches must come) and the run finishes (nothing may be left).
"""

from __future__ import annotations

import os
import secrets
from random import Random

from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from stillhouse.buffer.config import BufferConfig, Release
from tests.sim.buffer import actions as act
from tests.sim.buffer import learner, workers
from tests.sim.buffer.world import World

SEEDS = st.integers(0, 10_000)
ACTOR_WORKS = [workers.actor_reads, workers.actor_writes, workers.actor_resends, workers.actor_updates]
ACTOR_TROUBLE = [workers.actor_lies, workers.actor_fails, workers.actor_leaves, workers.actor_returns]
TEACHER_TROUBLE = [workers.teacher_fails, workers.teacher_leaves, workers.teacher_returns]
RELEASES: list[Release] = ["rollout", "segment", "deadline"]


class BufferMachine(RuleBasedStateMachine):
    """One rule per kind of thing that happens; those that make progress are listed more often."""

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None

    @initialize(
        staleness=st.integers(0, 4),
        batch=st.integers(1, 4),
        release=st.sampled_from(RELEASES),
        attempts=st.integers(1, 3),
        score_attempts=st.integers(1, 3),
        held=st.integers(0, 3),
        two_pools=st.booleans(),
        group=st.integers(1, 3),
        actors=st.integers(1, 3),
        dynamic=st.booleans(),
        mask_truncated=st.booleans(),
    )
    def begin(
        self,
        staleness: int,
        batch: int,
        release: Release,
        attempts: int,
        score_attempts: int,
        held: int,
        two_pools: bool,
        group: int,
        actors: int,
        dynamic: bool,
        mask_truncated: bool,
    ) -> None:
        dynamic = dynamic and release == "rollout" and (staleness + 1) * batch > 1
        config = BufferConfig(
            max_staleness=staleness,
            batch_rollouts=batch,
            release=release,
            dynamic_sampling=10 if dynamic else 0,
            mask_truncated=mask_truncated and release == "rollout",
            max_attempts=attempts,
            max_score_attempts=score_attempts,
            max_held_segments=held,
            lease_s=30.0,
            ticket_timeout_s=100.0,
            idle_release_s=1.0,
            task_queue=4,
        )
        self.world = World(
            config,
            n_actors=actors,
            pools=(("default", 1), ("other", 2)) if two_pools else (("default", 2),),
            task_teachers=(("default",), ("other", "default"), ()) if two_pools else (("default",),),
            group_sizes=(2, min(3, (staleness + 1) * batch)) if dynamic else (1, min(group, (staleness + 1) * batch)),
        )

    def _do(self, action: act.Action, seed: int) -> None:
        assert self.world is not None
        action(self.world, Random(seed))

    @rule(
        seed=SEEDS,
        action=st.sampled_from(ACTOR_WORKS),
    )
    def an_actor_works(self, seed: int, action: act.Action) -> None:
        self._do(action, seed)

    @rule(seed=SEEDS)
    def an_actor_writes(self, seed: int) -> None:
        self._do(workers.actor_writes, seed)

    @rule(
        seed=SEEDS,
        action=st.sampled_from(ACTOR_TROUBLE),
    )
    def an_actor_is_trouble(self, seed: int, action: act.Action) -> None:
        self._do(action, seed)

    @rule(seed=SEEDS, action=st.sampled_from([workers.teacher_reads, workers.teacher_scores]))
    def a_teacher_works(self, seed: int, action: act.Action) -> None:
        self._do(action, seed)

    @rule(seed=SEEDS, action=st.sampled_from(TEACHER_TROUBLE))
    def a_teacher_is_trouble(self, seed: int, action: act.Action) -> None:
        self._do(action, seed)

    @rule(seed=SEEDS, action=st.sampled_from([learner.offers, learner.asks, learner.trains]))
    def the_learner_works(self, seed: int, action: act.Action) -> None:
        self._do(action, seed)

    @rule(
        seed=SEEDS,
        action=st.sampled_from([learner.repeats, learner.publishes, learner.evaluates]),
    )
    def the_learner_tells_more(self, seed: int, action: act.Action) -> None:
        self._do(action, seed)

    @rule(
        seed=SEEDS,
        action=st.sampled_from([learner.is_cut_off, learner.returns, learner.restarts]),
    )
    def the_learner_is_trouble(self, seed: int, action: act.Action) -> None:
        self._do(action, seed)

    @rule(seed=SEEDS)
    def everybody_works_for_a_while(self, seed: int) -> None:
        """Lets short sequences reach batches, forks and stale tokens."""
        assert self.world is not None
        act.work_together(self.world, Random(seed), batches=1)

    @rule(seed=SEEDS)
    def time_passes(self, seed: int) -> None:
        self._do(act.time_passes, seed)

    def teardown(self) -> None:
        if self.world is not None:
            act.work_together(self.world, Random(0), batches=2)
            act.finish(self.world, Random(0))


TestBuffer = BufferMachine.TestCase
TestBuffer.settings = settings(
    max_examples=25,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


SEED = int(os.environ.get("STILLHOUSE_TEST_SEED") or secrets.randbelow(2**32))


def test_the_same_from_a_seed_that_differs_with_every_session() -> None:
    """The one above is derandomized: it finds nothing that it did not find yesterday."""
    print(f"again with STILLHOUSE_TEST_SEED={SEED}")
    machine = seed(SEED)(type("SeededMachine", (BufferMachine,), {}))
    run_state_machine_as_test(machine, settings=settings(TestBuffer.settings, derandomize=False, database=None))
