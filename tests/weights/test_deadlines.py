"""Limits that grow with the bytes, and with misses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import pytest
import torch

from stillhouse.protocol.messages import WeightPlan, WeightsRef, WeightVersion
from stillhouse.weights.config import WeightsConfig
from stillhouse.weights.control_messages import Leave, Round, WeightCheck
from stillhouse.weights.deadlines import MOST_PATIENCE, RoundLimits, kind_of
from stillhouse.weights.roster import GroupSeat
from stillhouse.weights.staged_weights import StagedWeights
from stillhouse.weights.transport import TransportSetup
from stillhouse.weights.transports.collective import CollectiveTransport

CONFIG = WeightsConfig(
    bucket_bytes=1 << 16,
    join_timeout_s=30.0,
    broadcast_timeout_s=30.0,
    slowest_bytes_per_s=1e9,
    answer_grace_s=0.1,
)
V1 = WeightVersion(0, 1)
REF = WeightsRef(V1, "/nowhere", "00")
BY_CANARY, BY_RELOAD = WeightCheck(), WeightCheck(weights=REF)


def test_the_33_gb_of_a_checked_first_version_have_the_time_that_they_take() -> None:
    """Measured: sha256 of the file 24 s; with receiving, reading and hashing about a minute and a half."""
    limits = RoundLimits(WeightsConfig())
    assert limits.limit_s("reload", 33_000_000_000) > 2 * 90.0
    assert limits.limit_s("plain", 1_000_000) < 30.1


@pytest.mark.parametrize(("check", "passes"), [(None, 2), (BY_CANARY, 2), (BY_RELOAD, 6)])
def test_a_round_has_its_floor_and_a_pass_at_a_time(check: WeightCheck | None, passes: int) -> None:
    assert RoundLimits(CONFIG).limit_s(kind_of(check), 10_000_000_000) == 30.0 + passes * 10.0


def test_a_limit_that_was_missed_is_doubled_up_to_a_bound_and_one_that_is_not_needed_halved() -> None:
    limits = RoundLimits(CONFIG)
    for expected in (60.0, 120.0, 240.0, 480.0, 480.0):
        limit_s = limits.limit_s("reload", 0)
        limits.took("reload", limit_s, limit_s)
        assert limits.limit_s("reload", 0) == expected
    assert expected == 30.0 * MOST_PATIENCE
    assert limits.limit_s("plain", 0) == 30.0  # each kind has its own
    limits.took("reload", 480.0, 200.0)
    assert limits.limit_s("reload", 0) == 480.0  # it was needed
    for expected in (240.0, 120.0, 60.0, 30.0, 30.0):
        limits.took("reload", limits.limit_s("reload", 0), 1.0)
        assert limits.limit_s("reload", 0) == expected


def test_publish_waits_longer_than_a_group_and_a_checked_version_may_take() -> None:
    limits = RoundLimits(CONFIG)
    n_bytes = 33_000_000_000
    assert limits.publish_wait_s(n_bytes) > limits.limit_s("join", n_bytes) + limits.limit_s("reload", n_bytes)


@pytest.fixture
def host() -> Iterator[CollectiveTransport]:
    def nobody(seats: Iterable[GroupSeat]) -> frozenset[GroupSeat]:
        return frozenset()

    config = msgspec.structs.replace(CONFIG, join_timeout_s=0.02, broadcast_timeout_s=0.02, slowest_bytes_per_s=1e7)
    host = CollectiveTransport(TransportSetup(config, "gloo", "cpu", nobody, lambda: False))
    yield host
    host.close()


def test_joiners_have_the_time_to_load_the_student_and_more_the_next_time(host: CollectiveTransport) -> None:
    """Servers of another run do."""
    newest = StagedWeights()
    newest.fill(V1, [("w", torch.zeros(25_000))])
    plans: list[WeightPlan] = []
    for _ in range(3):
        assert host.form((GroupSeat("actor-0", "1"),), newest, plans.append).error is not None
    assert [round(plan.join_timeout_s, 3) for plan in plans] == [0.05, 0.1, 0.2]
    plans.clear()
    host.form((GroupSeat("actor-0", "1"),), None, plans.append)
    assert plans[0].join_timeout_s == pytest.approx(8 * 0.02)  # pyright: ignore[reportUnknownMemberType]


def test_a_round_tells_its_limit_and_a_miss_is_not_repeated_with_the_same_one(
    host: CollectiveTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group in which nobody answers, and rank 0's part succeeds at once."""

    class Group:
        def send(self, *_: object) -> None: ...

        def close(self) -> None: ...

    headers: list[Round | Leave] = []
    control = host._control  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(control, "send", lambda message: headers.append(message))  # pyright: ignore
    weights = StagedWeights()
    weights.fill(V1, [("w", torch.zeros(10_000))])
    for check in (None, None, BY_RELOAD):
        monkeypatch.setattr(host, "_group", Group())
        monkeypatch.setattr(host, "_seats", (GroupSeat("actor-0", "1"),))
        assert host.publish(weights, check).lost == {GroupSeat("actor-0", "1"): "no_answer"}
    said = [message.timeout_s for message in headers if isinstance(message, Round)]
    assert said == pytest.approx([0.028, 0.056, 0.044])  # pyright: ignore[reportUnknownMemberType]
