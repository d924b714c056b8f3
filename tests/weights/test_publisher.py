"""The publisher against real actor processes: what happens to versions when actors come, die, hang and come back.

Actors receive only plans. The weights an actor got are compared by a digest of names, dtypes, shapes and bytes.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stillhouse.protocol.messages import Membership, WeightPlan
from stillhouse.weights import deadlines
from stillhouse.weights.publisher import PublisherFailed, PublishTimeout
from tests.patience import PATIENCE_S, eventually
from tests.sim.weights.weight_actors import ActorFleet, Fault
from tests.weights.fleet_learner import FleetLearner, version

NAMES = ("actor-0", "actor-1", "actor-2")
WAIT_S = PATIENCE_S
LONG_S = PATIENCE_S / 4
"""Deadlines that no test waits for."""


def weights(step: int) -> list[tuple[str, Tensor]]:
    """0.4 MB in three dtypes; one tensor is larger than four buckets."""
    generator = torch.Generator().manual_seed(step)
    return [
        ("embed", torch.randn(300, 256, generator=generator)),
        ("half", torch.randn(100, 200, generator=generator).bfloat16()),
        ("norm", torch.randn(256, generator=generator)),
        ("steps", torch.tensor(step)),
    ]


@pytest.fixture
def learner(tmp_path: Path) -> Iterator[FleetLearner]:
    """Sends several buckets per version."""
    limits = {"join_timeout_s": LONG_S, "broadcast_timeout_s": LONG_S, "rejoin_delay_s": 60.0, "bucket_bytes": 1 << 16}
    with (
        ActorFleet() as fleet,
        closing(FleetLearner(fleet, tmp_path / "weights", "collective", weights, **limits)) as learner,
    ):
        yield learner


def test_every_member_gets_every_version_and_each_is_announced_once(learner: FleetLearner) -> None:
    publisher = learner.start()
    learner.fleet.start(NAMES)
    publisher.membership(learner.fleet.membership())
    for step in range(1, 5):
        learner.publish(step)
        assert publisher.wait_idle(WAIT_S)
        learner.delivered(step)
    assert learner.announced == [version(step) for step in range(1, 5)]
    stats = publisher.stats
    assert (stats.members, stats.rebuilds_total, stats.skipped_versions_total) == (3, 1, 0)
    assert stats.broadcast_bytes == sum(tensor.nbytes for _, tensor in weights(1))


def test_training_may_change_the_weights_as_soon_as_publish_returns(learner: FleetLearner) -> None:
    publisher = learner.start()
    learner.fleet.start(NAMES[:1])
    publisher.membership(learner.fleet.membership())
    named = weights(1)
    publisher.publish(version(1), named)
    for _, tensor in named:
        tensor.zero_()
    assert publisher.wait_idle(WAIT_S)
    learner.delivered(1)


def test_without_any_actor_a_version_is_announced_at_once_and_who_comes_later_gets_it_by_broadcast(
    learner: FleetLearner,
) -> None:
    publisher = learner.start()
    learner.publish(1)
    assert publisher.wait_idle(WAIT_S)
    assert learner.announced == [version(1)]
    learner.fleet.start(NAMES)
    publisher.membership(learner.fleet.membership())
    assert publisher.wait_idle(WAIT_S)
    learner.delivered(1)
    assert learner.announced == [version(1)], "once"
    assert publisher.stats.broadcasts_total == 1 and not learner.folder.exists()


def test_a_late_joiner_gets_the_newest_version_before_the_next_is_published(learner: FleetLearner) -> None:
    publisher = learner.start()
    learner.fleet.start(NAMES[:2])
    publisher.membership(learner.fleet.membership())
    learner.publish(1)
    learner.publish(2)
    assert publisher.wait_idle(WAIT_S)
    n_broadcasts = publisher.stats.broadcasts_total
    learner.fleet.start(NAMES[2:])
    publisher.membership(learner.fleet.membership())
    assert publisher.wait_idle(WAIT_S)
    learner.delivered(2)
    for name in NAMES[:2]:
        staged = [one.version for one in learner.fleet.actors[name].staged]
        assert staged.count(version(2)) == 1, "who has it receives it, and does not stage it again"
    assert publisher.stats.broadcasts_total == n_broadcasts + 1
    learner.publish(3)
    learner.delivered(3)
    assert learner.fleet.plans[-1].members == NAMES
    assert not learner.folder.exists(), "nobody reads a file"


def test_a_group_of_members_that_all_have_the_newest_version_sends_nothing(learner: FleetLearner) -> None:
    publisher = learner.start()
    learner.begin(NAMES)
    publisher.membership(learner.fleet.membership(without=NAMES[:1]))
    assert publisher.wait_idle(WAIT_S)
    assert (publisher.stats.rebuilds_total, publisher.stats.broadcasts_total) == (2, 1)
    assert learner.fleet.plans[-1].members == NAMES[1:]


def test_while_actors_join_and_leave_only_announced_versions_are_staged(learner: FleetLearner) -> None:
    """The learner goes on publishing meanwhile."""
    publisher = learner.start()
    learner.fleet.start(NAMES[:1])
    step = 0
    for present in (NAMES[:1], NAMES[:2], NAMES[1:2], NAMES[1:], NAMES):
        learner.fleet.start(name for name in present if name not in learner.fleet.actors)
        publisher.membership(learner.fleet.membership(without=[name for name in NAMES if name not in present]))
        for _ in range(4):
            step += 1
            learner.publish(step)
            time.sleep(0.02)
        assert publisher.wait_idle(WAIT_S)
        learner.delivered(step, *present)
    assert publisher.stats.failed_groups_total == 0
    for name in NAMES:
        staged = [one.version for one in learner.fleet.actors[name].staged]
        assert staged == sorted(set(staged)) and set(staged) <= set(learner.announced), name


@pytest.mark.parametrize("victim", NAMES[1:])  # one that passes bytes on, and one that does not
def test_a_member_killed_inside_a_broadcast_is_left_out_and_the_others_go_on(
    learner: FleetLearner, victim: str
) -> None:
    """The learner finds out by itself: the buffer tells it nothing, and its deadline of ten seconds is not awaited."""
    publisher = learner.start()
    learner.begin(NAMES)
    learner.fleet.order(victim, Fault(signal.SIGKILL, at_operation=2))
    survivors = [name for name in NAMES if name != victim]
    learner.publish(2)
    learner.delivered(2, *survivors)
    assert publisher.wait_idle(WAIT_S)
    assert publisher.stats.dropped_total == {"no_answer": 1}
    assert learner.fleet.actors[victim].process.exitcode == -signal.SIGKILL
    learner.publish(3)
    learner.delivered(3, *survivors)
    assert learner.fleet.plans[-1].members == tuple(survivors)


def test_a_member_that_the_buffer_reports_lost_is_not_waited_for(learner: FleetLearner) -> None:
    publisher = learner.start(broadcast_timeout_s=WAIT_S, answer_grace_s=WAIT_S)
    learner.begin(NAMES)
    learner.fleet.signal(NAMES[1], signal.SIGSTOP)
    learner.publish(2)
    publisher.membership(learner.fleet.membership(without=NAMES[1:2]))
    learner.delivered(2, NAMES[0], NAMES[2])
    assert publisher.wait_idle(WAIT_S)
    assert publisher.stats.dropped_total == {"disconnected": 1}


def test_a_stopped_member_is_left_out_after_the_deadline_and_comes_back_later_with_the_newest(
    learner: FleetLearner,
) -> None:
    publisher = learner.start(broadcast_timeout_s=1.0, rejoin_delay_s=1.0)
    learner.begin(NAMES)
    learner.fleet.order(NAMES[2], Fault(signal.SIGSTOP, at_operation=2))
    learner.publish(2)
    learner.delivered(2, *NAMES[:2])
    eventually(lambda: publisher.stats.dropped_total == {"no_answer": 1}, "a member that did not answer")
    learner.fleet.signal(NAMES[2], signal.SIGCONT)
    learner.delivered(2)
    assert publisher.wait_idle(WAIT_S)
    learner.publish(3)
    learner.delivered(3)
    assert publisher.stats.members == 3


def test_a_stopped_member_does_not_keep_a_new_group_from_being_made(learner: FleetLearner) -> None:
    publisher = learner.start(join_timeout_s=1.0)
    learner.fleet.start(NAMES)
    learner.fleet.report(NAMES[0])
    learner.fleet.signal(NAMES[0], signal.SIGSTOP)
    publisher.membership(learner.fleet.membership())
    learner.publish(1)
    learner.delivered(1, *NAMES[1:])
    assert publisher.wait_idle(WAIT_S)
    assert publisher.stats.dropped_total == {"no_join": 1}
    assert learner.fleet.plans[-1].members == NAMES[1:]


def test_an_actor_that_was_left_out_joins_at_once_when_it_is_restarted(learner: FleetLearner) -> None:
    publisher = learner.start(join_timeout_s=1.0, rejoin_delay_s=300.0)
    learner.fleet.start(NAMES[:2])
    learner.fleet.signal(NAMES[0], signal.SIGSTOP)
    publisher.membership(learner.fleet.membership())
    learner.publish(1)
    assert publisher.wait_idle(WAIT_S)
    assert publisher.stats.members == 1
    learner.fleet.signal(NAMES[0], signal.SIGKILL)
    learner.fleet.start(NAMES[:1])
    publisher.membership(learner.fleet.membership())
    learner.delivered(1)
    assert publisher.wait_idle(WAIT_S)
    assert publisher.stats.members == 2


def test_a_member_whose_engine_refuses_the_tensors_is_left_out_and_says_why(learner: FleetLearner) -> None:
    publisher = learner.start()
    learner.begin(NAMES)
    learner.fleet.order(NAMES[1], "no such parameter: embed")
    learner.fleet.report(NAMES[1])
    learner.publish(2)
    learner.delivered(2, NAMES[0], NAMES[2])
    assert publisher.wait_idle(WAIT_S)
    assert publisher.stats.dropped_total == {"refused": 1}
    eventually(lambda: learner.fleet.report(NAMES[1]).failure is not None, "its failure")  # told before it ends
    failure = learner.fleet.report(NAMES[1]).failure
    assert failure is not None and "no such parameter: embed" in failure


class Gate:
    """Stops the publisher's thread in `post_plan` until `open` is set."""

    def __init__(self, learner: FleetLearner, names: tuple[str, ...], **changes: Any) -> None:
        """Version 1 is published while there are no actors. So when the thread stops at the first plan, it has taken
        that version, however slow this machine is, and nothing waits."""
        self.fleet = learner.fleet
        self.open, reached = threading.Event(), threading.Event()

        def post_plan(plan: WeightPlan) -> None:
            reached.set()
            assert self.open.wait(WAIT_S)
            self.fleet.post_plan(plan)

        self.publisher = learner.start(post_plan=post_plan, **changes)
        learner.publish(1)
        assert self.publisher.wait_idle(WAIT_S)
        self.fleet.start(names)
        self.publisher.membership(self.fleet.membership())
        assert reached.wait(WAIT_S)


def test_a_version_overtaken_while_it_waits_is_skipped_and_counted(learner: FleetLearner) -> None:
    gate = Gate(learner, NAMES[:2])
    for step in (2, 3, 4):
        learner.publish(step)
    assert gate.publisher.busy
    gate.open.set()
    assert gate.publisher.wait_idle(WAIT_S)
    learner.delivered(4)
    assert gate.publisher.stats.skipped_versions_total == 2
    assert learner.announced == [version(1), version(4)]


def test_with_every_version_none_is_skipped_and_publish_waits(learner: FleetLearner) -> None:
    gate = Gate(learner, NAMES[:2], every_version=True)
    learner.publish(2)
    third = threading.Thread(target=learner.publish, args=(3,))
    third.start()
    gate.open.set()
    third.join(WAIT_S)
    assert not third.is_alive()
    assert gate.publisher.wait_idle(WAIT_S)
    learner.delivered(3)
    assert learner.announced == [version(1), version(2), version(3)]
    assert gate.publisher.stats.skipped_versions_total == 0


def test_with_every_version_publish_gives_up_after_its_timeout(
    learner: FleetLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "PUBLISH_WAIT_S", 0.2)
    gate = Gate(learner, NAMES[:1], every_version=True, join_timeout_s=0.2, broadcast_timeout_s=0.2)
    learner.publish(2)
    with pytest.raises(PublishTimeout, match=r"version 0\.3"):
        learner.publish(3)
    gate.open.set()


def test_an_error_in_the_thread_reaches_who_publishes(learner: FleetLearner) -> None:
    def post_plan(plan: WeightPlan) -> None:
        raise ConnectionError("the buffer is gone")

    publisher = learner.start(post_plan=post_plan)
    learner.fleet.start(NAMES[:1])
    publisher.membership(learner.fleet.membership())
    with pytest.raises(PublisherFailed, match="the buffer is gone"):
        publisher.wait_idle(WAIT_S)
    with pytest.raises(PublisherFailed, match="the buffer is gone"):
        learner.publish(1)


def test_tensors_other_than_before_are_an_error(learner: FleetLearner) -> None:
    publisher = learner.start()
    learner.begin(NAMES[:1])
    learner.publish(2)
    assert publisher.wait_idle(WAIT_S)
    publisher.publish(version(3), [("other", torch.zeros(3))])
    with pytest.raises(PublisherFailed, match="must stay the same"):
        publisher.wait_idle(WAIT_S)


def test_closing_while_a_member_hangs_inside_a_broadcast_ends_the_thread(learner: FleetLearner) -> None:
    publisher = learner.start(broadcast_timeout_s=WAIT_S)
    learner.begin(NAMES)
    learner.fleet.signal(NAMES[0], signal.SIGSTOP)
    learner.publish(2)
    eventually(lambda: publisher.busy, "a broadcast")
    publisher.close()
    assert "publisher" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(PublisherFailed, match="after close"):
        learner.publish(3)


def test_when_everybody_leaves_the_group_ends_and_versions_are_announced_at_once_again(learner: FleetLearner) -> None:
    publisher = learner.start()
    learner.begin(NAMES)
    publisher.membership(Membership((), ()))
    assert publisher.wait_idle(WAIT_S)
    learner.publish(2)
    assert publisher.wait_idle(WAIT_S)
    assert learner.announced == [version(1), version(2)]
    assert publisher.stats.members == 0
