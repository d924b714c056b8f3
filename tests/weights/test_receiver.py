"""The weight receiver, in this process, against the learner's real end: joining, receiving, leaving."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any, cast

import msgspec
import pytest
import torch
from torch import Tensor

from stillhouse.engines.base import EngineStats, GenerationDelta, GenerationRequest
from stillhouse.engines.torch.weights import EmbeddedWeights
from stillhouse.protocol.messages import WeightPlan, WeightsRef, WeightVersion
from stillhouse.weights.config import WeightsConfig
from stillhouse.weights.control import ControlHost
from stillhouse.weights.control_messages import Agreed, Go, Leave, MemberAnswer, Round, WeightCheck
from stillhouse.weights.group_operations import host_store
from stillhouse.weights.receiver import WeightReceiver, WeightReceiverFailed
from stillhouse.weights.roster import GroupSeat
from stillhouse.weights.sink import Receipt
from stillhouse.weights.staged_weights import StagedWeights
from stillhouse.weights.transport import TransportSetup
from stillhouse.weights.transports.collective import CollectiveTransport, WeightGroup
from tests.patience import PATIENCE_S, eventually

WAIT_S = PATIENCE_S
NAME = "actor-0"
SEAT = GroupSeat(NAME, "1")
CONFIG = WeightsConfig(
    bucket_bytes=4_096, join_timeout_s=PATIENCE_S, broadcast_timeout_s=PATIENCE_S, answer_grace_s=1.0
)
V0, V1, V2, V3 = (WeightVersion(0, step) for step in range(4))


def weights(step: int) -> dict[str, Tensor]:
    return {"embed": torch.full((70, 40), float(step)), "norm": torch.full((33,), step, dtype=torch.bfloat16)}


class MemoryEngine:
    """Holds what it was last given."""

    def __init__(self) -> None:
        self._version = V0
        self.held: dict[str, Tensor] = {}
        self.versions: list[WeightVersion] = []

    @property
    def version(self) -> WeightVersion:
        return self._version

    @property
    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0, 0, 0, 0.0, len(self.versions), self._version)

    def stage_weights(self, version: WeightVersion, tensors: Iterable[tuple[str, Tensor]]) -> None:
        held = {name: tensor.clone() for name, tensor in tensors}
        if held.keys() != weights(0).keys():
            raise ValueError(f"got {sorted(held)}, expected {sorted(weights(0))}")
        self.held = held
        self.versions.append(version)
        self._version = version

    def submit(self, request: GenerationRequest) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def poll(self, timeout_s: float) -> list[GenerationDelta]:
        return []

    def close(self) -> None: ...


@pytest.fixture
def engine() -> MemoryEngine:
    return MemoryEngine()


@pytest.fixture
def receiver(engine: MemoryEngine) -> Iterator[WeightReceiver]:
    receiver = WeightReceiver(EmbeddedWeights(engine), name=NAME)
    receiver.start()
    yield receiver
    receiver.close()
    assert "weight-receiver" not in [thread.name for thread in threading.enumerate()]


def make_host(config: WeightsConfig = CONFIG) -> CollectiveTransport:
    def nobody(seats: Iterable[GroupSeat]) -> frozenset[GroupSeat]:
        return frozenset()

    return CollectiveTransport(TransportSetup(config, "gloo", "cpu", nobody, lambda: False))


@pytest.fixture
def host() -> Iterator[CollectiveTransport]:
    host = make_host()
    yield host
    host.close()


def staged(version: WeightVersion) -> StagedWeights:
    weights_of_step = StagedWeights()
    weights_of_step.fill(version, weights(version.step).items())
    return weights_of_step


def test_a_new_learner_is_followed_after_the_former_vanished_without_a_word(
    engine: MemoryEngine, receiver: WeightReceiver
) -> None:
    former = make_host()
    assert former.form((SEAT,), None, receiver.handle_plan).error is None
    successor = make_host()
    assert successor.form((SEAT,), None, receiver.handle_plan).error is None
    assert successor.publish(staged(V1)).error is None
    assert engine.versions == [V1]
    former.close()
    successor.close()


def test_a_plan_of_a_learner_that_is_gone_is_given_up_and_the_next_one_followed(
    engine: MemoryEngine, receiver: WeightReceiver, host: CollectiveTransport
) -> None:
    plans: list[WeightPlan] = []
    gone = make_host(msgspec.structs.replace(CONFIG, join_timeout_s=0.1))
    assert gone.form((SEAT,), None, plans.append).error is not None
    with_closed_port = msgspec.structs.replace(plans[0], port=1)
    receiver.handle_plan(with_closed_port)
    eventually(lambda: receiver.stats["weight_groups_broken_total"] == 1, "a broken group")
    assert host.form((SEAT,), None, receiver.handle_plan).error is None
    assert host.publish(staged(V1)).error is None
    assert engine.versions == [V1]
    gone.close()


def test_a_round_under_a_manifest_that_was_not_agreed_upon_is_refused(
    engine: MemoryEngine, receiver: WeightReceiver, host: CollectiveTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes would be taken for tensors that they are not."""
    assert host.form((SEAT,), None, receiver.handle_plan).error is None
    assert host.publish(staged(V1)).error is None
    header = CollectiveTransport._header  # pyright: ignore[reportPrivateUsage]

    def other(host: CollectiveTransport, *args: Any) -> Any:
        layout, sent = header(host, *args)
        return layout, msgspec.structs.replace(sent, manifest_digest="00" * 32)

    monkeypatch.setattr(CollectiveTransport, "_header", other)
    assert host.publish(staged(V2)).lost == {SEAT: "refused"}
    assert engine.versions == [V1]


def test_a_round_is_taken_once_and_a_check_by_loading_never_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that has the version already need not take it, unless a file is the check of what it has; and a round
    that is said again, as after another connection, is the same round."""
    file = WeightsRef(V1, "a file", "00")
    manifest = staged(V1).manifest
    rounds = [
        Round(1, number, V1, manifest.digest, Agreed(manifest, 4_096) if number == 1 else None, 1.0, 1.0, check)
        for number, check in (
            (1, None),
            (1, None),
            (2, WeightCheck(file)),
            (2, WeightCheck(file)),
            (3, WeightCheck()),
            (4, None),
        )
    ]
    said, taken, answers = iter((*rounds, Leave(1, "over"))), list[int](), list[tuple[int, str]]()

    class Sink:
        version: WeightVersion | None = None

        def take(self, header: Round, *_: Any) -> Receipt:
            taken.append(header.number)
            self.version = header.version
            return Receipt(1, 0.0, 0.0)

        def leave(self) -> None: ...

    class Control:
        def send(self, message: Any) -> None:
            if isinstance(message, MemberAnswer):
                answers.append((message.number, message.status))

        def recv(self, *_: Any) -> Any:
            return next(said)

    class Wire:
        def __init__(self, *_: Any, **_words: Any) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setattr("stillhouse.weights.receiver.WireMember", Wire)
    receiver = WeightReceiver(cast(Any, Sink()), name=NAME)
    plan = WeightPlan(1, "127.0.0.1", 1, "wire", (NAME,), 2, 1.0)
    receiver._take_part(cast(Any, Control()), plan, 0, 1.0)  # pyright: ignore[reportPrivateUsage]
    receiver.close()
    assert taken == [1, 2] and answers == [(n, "staged") for n in (1, 2, 3, 4)]


def test_tensors_that_the_engine_does_not_take_end_the_receiver_loudly(
    receiver: WeightReceiver, host: CollectiveTransport
) -> None:
    assert host.form((SEAT,), None, receiver.handle_plan).error is None
    other = StagedWeights()
    other.fill(V1, [("unknown", torch.zeros(3))])
    result = host.publish(other)
    assert result.lost == {SEAT: "refused"}
    eventually(lambda: "weight-receiver" not in [thread.name for thread in threading.enumerate()], "its end")
    with pytest.raises(WeightReceiverFailed, match="unknown"):
        receiver.raise_if_failed()


def test_a_plan_for_others_is_an_error(receiver: WeightReceiver) -> None:
    receiver.handle_plan(WeightPlan(1, "127.0.0.1", 1, "gloo", ("actor-7",), 2, 1.0))
    eventually(lambda: "weight-receiver" not in [thread.name for thread in threading.enumerate()], "its end")
    with pytest.raises(WeightReceiverFailed, match="actor-7"):
        receiver.raise_if_failed()


def test_a_plan_over_nccl_for_an_engine_on_a_cpu_says_what_to_set(receiver: WeightReceiver) -> None:
    receiver.handle_plan(WeightPlan(1, "127.0.0.1", 1, "nccl", (NAME,), 2, 1.0))
    eventually(lambda: "weight-receiver" not in [thread.name for thread in threading.enumerate()], "its end")
    with pytest.raises(WeightReceiverFailed, match=r"weights\.backend to gloo"):
        receiver.raise_if_failed()


def test_closing_ends_the_thread_while_it_waits_inside_a_collective(
    receiver: WeightReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 says go, and never makes its end of the process group: the receiver waits for its greeting."""
    waiting = threading.Event()
    finish = WeightGroup._finish_oldest  # pyright: ignore[reportPrivateUsage]

    def tell_and_finish(group: WeightGroup, deadline_s: float) -> None:
        waiting.set()
        finish(group, deadline_s)

    monkeypatch.setattr(WeightGroup, "_finish_oldest", tell_and_finish)
    store = host_store("127.0.0.1")
    control = ControlHost("127.0.0.1", 0)
    control.begin(1, (NAME,))
    receiver.handle_plan(
        WeightPlan(1, "127.0.0.1", store.port, "gloo", (NAME,), 2, 8.0, control.endpoint, control.plan_keys)
    )
    while not control.poll(1.0):
        pass
    control.send(Go(1, 8.0))
    assert waiting.wait(WAIT_S)
    receiver.close()
    assert "weight-receiver" not in [thread.name for thread in threading.enumerate()]
    control.close()
