"""Publisher, receivers and servers' control over a process group that fails as NCCL's does: fault after fault, and
after each of them every member that lives has the newest version.

All in one process: members are threads with a real WeightReceiver and a real sink, embedded (EmbeddedWeights) or with
an HTTP server (ServerWeights and tests.sim.weights.fake_server). A member that dies, or whose server is lost, comes
again under a new incarnation, as the supervisor and the buffer would have it.
"""

from __future__ import annotations

import logging
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast
from unittest.mock import patch

import torch
from torch import Tensor

from stillhouse.engines.base import EngineStats
from stillhouse.engines.sglang.config import SGLangConfig
from stillhouse.engines.sglang.weights import ServerWeights
from stillhouse.engines.torch.weights import EmbeddedWeights
from stillhouse.protocol.messages import Membership, WeightPlan, WeightVersion
from stillhouse.weights.config import WeightsConfig
from stillhouse.weights.group_operations import BackendName
from stillhouse.weights.publisher import Publisher, PublisherFailed
from stillhouse.weights.receiver import WeightReceiver
from stillhouse.weights.roster import GroupMembers
from tests.patience import SLOWNESS
from tests.sim.weights.fake_server import Body, FakeServer, FakeServerEngine
from tests.sim.weights.nccl_like import Fabric, Fault, FaultKind

Kind: TypeAlias = Literal["engines", "servers"]
N_MEMBERS: Final = 3
OPERATIONS: Final = 6
"""Approximate number of operations in a round, at which a fault may strike."""
TURN_S: Final = 60.0 * SLOWNESS
"""Bound of one turn: from a version with its fault until all who live have it. Made of short limits (CONFIG): a round,
a new group, and another round, a few times over."""
CONFIG: Final = WeightsConfig(
    bucket_bytes=4_096,
    join_timeout_s=1.0 * SLOWNESS,
    broadcast_timeout_s=0.5 * SLOWNESS,
    answer_grace_s=0.4 * SLOWNESS,
    join_window_s=0.02,
    rejoin_delay_s=0.004,
)
SGLANG: Final = SGLangConfig(control_timeout_s=0.3 * SLOWNESS, health_every_s=60.0)
FAULTS: Final[dict[FaultKind, float]] = {
    "error": 4, "start_error": 2, "hang": 2, "delay": 2, "silent": 2, "death": 3, "init_error": 1, "init_hang": 1,
}  # fmt: skip
"""Relative frequency of each fault."""
LEFT_OUT: Final = "is left out of the weight group"


def weights(step: int) -> dict[str, Tensor]:
    """Of each tensor, every version changes a few places."""
    generator = torch.Generator().manual_seed(0)
    tensors = {f"layer.{index}": torch.randn(700, generator=generator) for index in range(6)}
    for tensor in tensors.values():
        tensor[step % 97 :: 97] = step
    return tensors


def version(step: int) -> WeightVersion:
    return WeightVersion(0, step)


class MemoryEngine:
    """Holds what it was last given."""

    def __init__(self) -> None:
        self.version = version(0)
        self.held: dict[str, Tensor] = {}

    @property
    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0, 0, 0, 0.0, 0, self.version)

    def stage_weights(self, version: WeightVersion, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.held = {name: tensor.clone() for name, tensor in tensors}
        self.version = version


class EmbeddedAnywhere(EmbeddedWeights):
    """Also where the plan says nccl and the engine is on a CPU."""

    def check(self, plan: WeightPlan) -> None: ...


class Member:
    """An actor, as far as weights go."""

    def __init__(self, name: str, incarnation: int, kind: Kind) -> None:
        self.name = name
        self.incarnation = str(incarnation)
        self.server: FakeServer | None = None
        if kind == "engines":
            self._engine = MemoryEngine()
            sink: Any = EmbeddedAnywhere(cast("Any", self._engine))
        else:
            self.server = FakeServer(weights(0))
            self._server_engine = FakeServerEngine(self.server.url, SGLANG)
            sink = ServerWeights(cast("Any", self._server_engine), student="/nowhere", ours=True)
        self.receiver = WeightReceiver(sink, name=name)
        self.receiver.start()

    @property
    def held(self) -> dict[str, Tensor]:
        return self._engine.held if self.server is None else self.server.weights

    def has(self, step: int) -> bool:
        expected = weights(step)
        held = self.held
        return (
            self.receiver.version == version(step)
            and held.keys() == expected.keys()
            and all(torch.equal(held[name], expected[name]) for name in expected)
        )

    @property
    def dead(self) -> bool:
        try:
            self.receiver.raise_if_failed()
        except RuntimeError:
            return True
        return False

    def close(self) -> None:
        self.receiver.close(TURN_S)
        if self.server is not None:
            self._server_engine.close()
            self.server.close()


@dataclass
class Verdict:
    """Result of a campaign: good if there are no findings."""

    kind: Kind
    seed: int
    struck: Counter[FaultKind]
    turns: int = 0
    slowest_turn_s: float = 0.0
    restarted: int = 0
    dropped: dict[str, int] = field(default_factory=dict[str, int])
    rebuilds: int = 0
    failed_groups: int = 0
    announced: int = 0
    findings: list[str] = field(default_factory=list[str])

    def __str__(self) -> str:
        struck = ", ".join(f"{kind} {n}" for kind, n in sorted(self.struck.items()))
        dropped = ", ".join(f"{reason} {n}" for reason, n in sorted(self.dropped.items()))
        return (
            f"{self.kind}, seed {self.seed}: {self.struck.total()} faults in {self.turns} versions ({struck})\n"
            f"  announced {self.announced}, groups made {self.rebuilds}, broken {self.failed_groups}, members dropped "
            f"({dropped}), members started again {self.restarted}\n"
            f"  slowest turn {self.slowest_turn_s:.1f} s of {TURN_S:.0f} s\n"
            + "".join(f"  FOUND: {finding}\n" for finding in self.findings)
        )


class _Counts(logging.Handler):
    """Counts, by reason, the members that the publisher logs as left out, independently of its own count."""

    def __init__(self) -> None:
        super().__init__()
        self.left_out: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        if LEFT_OUT in str(record.msg):
            self.left_out[str(record.args[-1] if isinstance(record.args, tuple) else "")] += 1


class Campaign:
    """One publisher and its members."""

    def __init__(self, kind: Kind, seed: int, folder: Path, fabric: Fabric) -> None:
        self._kind: Kind = kind
        self._random = random.Random(seed)
        self._fabric = fabric
        self._incarnations = 0
        self._step = 0
        self._announced: list[WeightVersion] = []
        self.verdict = Verdict(kind, seed, fabric.struck)
        self._members = {name: self._start(name) for name in (f"actor-{index}" for index in range(N_MEMBERS))}
        self._publisher = Publisher(
            CONFIG,
            snapshot_dir=folder,
            post_plan=self._post_plan,
            published=self._published,
            expected_actors=N_MEMBERS,
            members=GroupMembers(kind),
        )

    def run(self, faults: int) -> Verdict:
        """Run until this many faults have struck, or until a finding makes it impossible to continue."""
        self._tell_membership()
        self._turn([])
        while self._fabric.struck.total() < faults and not self.verdict.findings:
            self._turn(self._draw())
        self._turn([])
        stats = self._publisher.stats
        self.verdict.dropped = {str(reason): n for reason, n in stats.dropped_total.items()}
        self.verdict.rebuilds, self.verdict.failed_groups = stats.rebuilds_total, stats.failed_groups_total
        self.verdict.announced = len(self._announced)
        if self._announced != sorted(set(self._announced)):
            self.verdict.findings.append("versions were not announced once each, in their order")
        if self._fabric.ended:
            self.verdict.findings.append(f"torch would have ended a process: {self._fabric.ended[:3]}")
        return self.verdict

    def close(self) -> None:
        self._publisher.close()
        self._fabric.end()
        for member in self._members.values():
            member.close()

    # ----------------------------------------------------------------------------------------------- a turn

    def _turn(self, faults: list[Fault]) -> None:
        self._fabric.arm(*faults)
        self._step += 1
        self.verdict.turns += 1
        began_s = time.monotonic()
        try:
            self._publisher.publish(version(self._step), weights(self._step).items())
            while not self._settled():
                if time.monotonic() - began_s > TURN_S:
                    raise TimeoutError(self._who_lacks())
                self._replace_the_dead()
                time.sleep(0.005)
        except (PublisherFailed, TimeoutError) as error:
            self.verdict.findings.append(f"version {self._step}, {faults}: {type(error).__name__}: {error}")
        self._fabric.arm()
        self.verdict.slowest_turn_s = max(self.verdict.slowest_turn_s, time.monotonic() - began_s)

    def _draw(self) -> list[Fault]:
        kind = self._random.choices(list(FAULTS), list(FAULTS.values()))[0]
        rank = self._random.randrange(1 + N_MEMBERS)
        if kind == "death":
            rank = max(rank, 1)
        if self._kind == "servers" and rank > 0 and self._random.random() < 0.1:
            self._hold_when_leaving(f"actor-{rank - 1}")
        fault = Fault(
            kind,
            rank,
            after=self._random.randrange(OPERATIONS),
            noticed=self._random.random() < 0.6,
            delay_s=self._random.choice((0.05, 0.2, 2.0)) * SLOWNESS,
        )
        faults = [fault]
        if kind in ("init_error", "init_hang"):  # these need a group that is made
            faults.append(Fault("error", self._random.randrange(1 + N_MEMBERS), noticed=True))
        if self._random.random() < 0.15:
            faults.append(Fault("abort_fails", rank))
        return faults

    def _hold_when_leaving(self, name: str) -> None:
        """The server does not come out of its group: it is lost."""
        server = self._members[name].server
        assert server is not None

        def hold(body: Body) -> None:
            server.closing.wait()

        server.before["/destroy_weights_update_group"] = hold

    def _settled(self) -> bool:
        return not self._publisher.busy and all(
            not member.dead and member.has(self._step) for member in self._members.values()
        )

    def _replace_the_dead(self) -> None:
        self._publisher.stats  # noqa: B018 - must never fail, whatever happens meanwhile
        if failed := [member for member in self._members.values() if member.dead]:
            for member in failed:
                member.close()
                self._members[member.name] = self._start(member.name)
                self.verdict.restarted += 1
            self._tell_membership()
        self._publisher.wait_idle(0.0)  # raises when its thread has failed

    def _who_lacks(self) -> str:
        lacking = {m.name: str(m.receiver.version) for m in self._members.values() if not m.has(self._step)}
        return f"after {TURN_S:.0f} s these have not the newest version: {lacking}; {self._publisher.stats}"

    # ------------------------------------------------------------------------------- the buffer's part

    def _start(self, name: str) -> Member:
        self._incarnations += 1
        return Member(name, self._incarnations, self._kind)

    def _tell_membership(self) -> None:
        members = sorted(self._members.values(), key=lambda member: member.name)
        self._publisher.membership(Membership(tuple(m.name for m in members), tuple(m.incarnation for m in members)))

    def _post_plan(self, plan: WeightPlan) -> None:
        for name in plan.members:
            self._members[name].receiver.handle_plan(plan)

    def _published(self, version: WeightVersion, seconds: float) -> None:
        self._announced.append(version)


def run_campaign(kind: Kind, faults: int, seed: int) -> Verdict:
    """See the module."""
    torch.set_num_threads(1)
    fabric = Fabric()
    counts = _Counts()
    with _nccl_like(fabric), _quiet(counts), tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(kind, seed, Path(folder), fabric)
        try:
            verdict = campaign.run(faults)
        finally:
            campaign.close()
        dropped = Counter(verdict.dropped)
        dropped.pop("disconnected", None)
        if dropped != counts.left_out:
            verdict.findings.append(f"counted as dropped {dict(dropped)}, said to be left out {dict(counts.left_out)}")
        verdict.findings += _left_behind()
    return verdict


def _left_behind() -> list[str]:
    """Threads that were stuck have come to their end, now that their peers are gone."""
    until_s = time.monotonic() + TURN_S
    while left := [t.name for t in threading.enumerate() if t.name.startswith(("weight-", "publisher"))]:
        if time.monotonic() > until_s:
            return [f"threads that do not end: {left}"]
        time.sleep(0.02)
    return []


@contextmanager
def _nccl_like(fabric: Fabric) -> Generator[None]:
    def choose(wanted: str, device: torch.device) -> BackendName:
        return "nccl"

    with (
        patch("torch.distributed.ProcessGroupNCCL", fabric.group_class(), create=True),
        patch("stillhouse.weights.publisher.choose_backend", choose),
        patch("stillhouse.weights.transports.servers.LATE_S", 0.2),
        patch("stillhouse.weights.receiver.SETTLE_S", 0.5 * SLOWNESS),
    ):
        yield


@contextmanager
def _quiet(counts: _Counts) -> Generator[None]:
    """Keep the hundreds of expected failures off the terminal."""
    root, publisher = logging.getLogger(), logging.getLogger("stillhouse.weights.publisher")
    level = root.level
    publisher.addHandler(counts)
    publisher.setLevel(logging.WARNING)
    publisher.propagate = False
    root.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        root.setLevel(level)
        publisher.propagate = True
        publisher.removeHandler(counts)
