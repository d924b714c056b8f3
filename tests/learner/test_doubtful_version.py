"""After a failed round over NCCL, what servers say to have of that version is not believed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import pytest
import torch

from engines.group_operations import BackendName
from engines.weight_control import Answer, Joined, Ready
from learner.group_host import GroupHost
from learner.members import Members
from learner.publish_config import PublishConfig
from learner.roster import Seat
from learner.staged_weights import StagedWeights
from protocol.messages import WeightPlan, WeightVersion

SEAT = Seat("actor-0", "1")
V1 = WeightVersion(0, 1)


class Group:
    def join(self, timeout_s: float) -> None: ...

    def close(self) -> None: ...


class Says:
    """The control channel; the member has what it was sent."""

    endpoint = ""
    plan_keys = None
    status: Literal["staged", "broken"] = "staged"

    def __init__(self, host: GroupHost) -> None:
        self._host = host

    def begin(self, *_: object) -> None: ...

    def send(self, *_: object) -> None: ...

    def poll(self, timeout_s: float) -> list[Joined | Ready | Answer]:
        epoch, round_number = self._host.group_epoch, self._host._round  # pyright: ignore[reportPrivateUsage]
        return [Joined(epoch, 1, V1), Ready(epoch, 1), Answer(epoch, 1, round_number, self.status)]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[[Members, BackendName], tuple[GroupHost, Says]]:
    def nobody(seats: Iterable[Seat]) -> frozenset[Seat]:
        return frozenset()

    def make(members: Members, backend: BackendName) -> tuple[GroupHost, Says]:
        host = GroupHost(
            PublishConfig(), backend=backend, device="cpu", gone=nobody, closing=lambda: False, members=members
        )
        says = Says(host)
        host._control.close()  # pyright: ignore[reportPrivateUsage]
        monkeypatch.setattr(host, "_control", says)
        monkeypatch.setattr(host, "_make_group", lambda _: Group())  # pyright: ignore
        monkeypatch.setattr(host, "_broadcast", lambda *_: None)  # pyright: ignore
        return host, says

    return make


@pytest.mark.parametrize(
    ("members", "backend", "believed"),
    [
        (Members("servers"), "nccl", False),
        (Members("servers"), "gloo", True),  # there a broadcast is over when it is answered
        (Members("engines"), "nccl", True),  # these compare checksums
    ],
)
def test_a_version_whose_round_failed_is_sent_again_to_servers_that_say_they_have_it(
    make: Callable[[Members, BackendName], tuple[GroupHost, Says]],
    members: Members,
    backend: BackendName,
    believed: bool,
) -> None:
    host, says = make(members, backend)
    weights = StagedWeights(members)
    weights.fill(V1, [("w", torch.zeros(100))])
    plans: list[WeightPlan] = []
    assert not host.form((SEAT,), None, V1, plans.append).behind
    says.status = "broken"
    assert host.send(weights).error is not None
    says.status = "staged"
    assert host.form((SEAT,), None, V1, plans.append).behind is not believed
    assert host.send(weights).error is None
    assert not host.form((SEAT,), None, V1, plans.append).behind
