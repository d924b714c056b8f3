"""Hypothesis drives the simulated peers: any order of arrivals, deaths, lies, timeouts, version bumps and restarts.

The checks after every event are those of `bench.buffer_world`: ledger, independent model, audit. A failing sequence is
shrunk. At the end everybody works together (batches must come) and the run finishes (nothing may be left).
"""

from __future__ import annotations

from random import Random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from bench import buffer_actions as act
from bench.buffer_world import World
from buffer.config import BufferConfig, Release

SEEDS = st.integers(0, 10_000)
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
    ) -> None:
        config = BufferConfig(
            max_staleness=staleness,
            batch_rollouts=batch,
            release=release,
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
            group_sizes=(1, min(group, (staleness + 1) * batch)),
        )

    def _do(self, action: act.Action, seed: int) -> None:
        assert self.world is not None
        action(self.world, Random(seed))

    @rule(seed=SEEDS, action=st.sampled_from([act.actor_reads, act.actor_writes, act.actor_resends, act.actor_updates]))
    def an_actor_works(self, seed: int, action: act.Action) -> None:
        self._do(action, seed)

    @rule(seed=SEEDS)
    def an_actor_writes(self, seed: int) -> None:
        self._do(act.actor_writes, seed)

    @rule(seed=SEEDS, action=st.sampled_from([act.actor_lies, act.actor_fails, act.actor_leaves, act.actor_returns]))
    def an_actor_is_trouble(self, seed: int, action: act.Action) -> None:
        self._do(action, seed)

    @rule(seed=SEEDS, action=st.sampled_from([act.teacher_reads, act.teacher_scores]))
    def a_teacher_works(self, seed: int, action: act.Action) -> None:
        self._do(action, seed)

    @rule(seed=SEEDS, action=st.sampled_from([act.teacher_fails, act.teacher_leaves, act.teacher_returns]))
    def a_teacher_is_trouble(self, seed: int, action: act.Action) -> None:
        self._do(action, seed)

    @rule(seed=SEEDS, action=st.sampled_from([act.learner_offers, act.learner_asks, act.learner_trains]))
    def the_learner_works(self, seed: int, action: act.Action) -> None:
        self._do(action, seed)

    @rule(seed=SEEDS, action=st.sampled_from([act.learner_repeats, act.learner_publishes, act.learner_evaluates]))
    def the_learner_tells_more(self, seed: int, action: act.Action) -> None:
        self._do(action, seed)

    @rule(seed=SEEDS, action=st.sampled_from([act.learner_is_cut_off, act.learner_returns, act.learner_restarts]))
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
