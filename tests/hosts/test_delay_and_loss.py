"""50 ms each way and every hundredth frame lost, and then deaths of every role and partitions that heal before and
after each limit. Judged by the ledger, by the rows of the learner, and by the audit of the record."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from stillhouse.protocol.context import WorkerRole
from stillhouse.tools.audit.run import audit
from tests.hosts.conftest import HostRun, hosts_or_skip
from tests.hosts.network import Network

HOSTS: Final = ("buffer", "learner", "actor-a", "actor-b", "teacher")
PLACES: Final[dict[str, tuple[WorkerRole, int]]] = {
    "buffer": ("buffer", 0),
    "learner": ("learner", 0),
    "teacher": ("teacher", 0),
    "actor-a": ("actor", 0),
    "actor-b": ("actor", 1),
}
STEPS: Final = 40
SETTINGS: Final = (
    f"--steps={STEPS}",
    "--learner.lr=1e-4",
    "--buffer.batch_rollouts=8",
    "--buffer.heartbeat_s=0.5",
    "--buffer.lease_s=20",
    "--actor.segment_tokens=32",
    "--learner.tasks.group_size=4",
    "--learner.tasks.max_new_tokens=64",
    "--learner.eval_every=0",
    "--learner.checkpoint_every=3",
    "--weights.dtype=bfloat16",
    "--weights.rejoin_delay_s=1",
    "--actors=2",
    "--teachers=1",
    "--max-staleness=2",
)


class Cut(NamedTuple):
    """A host that is cut off for a while."""

    host: str
    for_s: float


class Kill(NamedTuple):
    """A process that dies, and another one in its place."""

    host: str


class Case(NamedTuple):
    peer_timeout_s: float
    broadcast_timeout_s: float
    events: tuple[Cut | Kill, ...]
    silent: tuple[str, ...] = ()
    """Peers that the buffer counts as lost for their silence."""


CASES: Final = {
    "deaths": Case(30, 30, (Kill("teacher"), Kill("actor-b"), Kill("buffer"), Kill("learner"))),
    "silence of peers": Case(
        6,
        30,
        (
            *(Cut(host, 2) for host in ("teacher", "actor-b", "learner", "buffer")),
            *(Cut(host, 9) for host in ("teacher", "actor-b", "learner", "buffer")),
        ),
        ("teacher-0", "actor-1", "learner-0"),
    ),
    "confirmation of weights": Case(60, 6, tuple(Cut(host, s) for host in ("actor-b", "learner") for s in (2, 20))),
}
"""Each limit has partitions that heal well before it and well after it."""


@pytest.fixture
def network() -> Iterator[Network]:
    with hosts_or_skip(*HOSTS, delay_ms=50.0, loss=0.01) as made:
        yield made


@pytest.mark.parametrize("name", CASES)
def test_what_happens_over_a_bad_network_loses_and_repeats_nothing(network: Network, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    limits = (
        f"--buffer.peer_timeout_s={case.peer_timeout_s:g}",
        f"--weights.broadcast_timeout_s={case.broadcast_timeout_s:g}",
        f"--learner.record={tmp_path / 'record'}",
    )
    run = HostRun(network, tmp_path / "run", [*SETTINGS, *limits])
    try:
        run.start("buffer", "buffer")
        run.until((run.run_dir / "buffer.json").exists, "a buffer that listens")
        for host in HOSTS[1:]:
            run.start(host, *PLACES[host])
        run.until(lambda: len(run.steps()) >= 2, "the first steps")
        for event in case.events:
            before = newest_step(run)
            strike(run, network, event)
            run.until(lambda before=before: newest_step(run) > before + 1, f"steps after {event}")
        run.until(lambda: all(p.poll() == 0 for p in run.processes.values()), "a good end of all")
        judge(run, case)
    finally:
        run.close()


def newest_step(run: HostRun) -> int:
    return max((int(row["step"]) for row in run.steps()), default=0)


def strike(run: HostRun, network: Network, event: Cut | Kill) -> None:
    if isinstance(event, Cut):
        network.cut_off(event.host)
        time.sleep(event.for_s)
        network.connect(event.host)
        return
    role, index = PLACES[event.host]
    run.kill(f"{role}-{index}")
    run.start(event.host, role, index, resume=role != "buffer")


def judge(run: HostRun, case: Case) -> None:
    final = run.final()
    assert final.phase == "finished" and final.ledger.balanced, final
    assert max(final.staleness_hist) <= final.max_staleness
    kept = {int(row["step"]): row["train/tokens"] for row in run.steps()}
    assert sorted(kept) == list(range(1, STEPS + 1))
    assert sum(final.staleness_hist.values()) == final.ledger.tokens.trained
    report = audit(run.run_dir)
    assert report.clean, str(report)
    assert report.steps_kept == STEPS
    for peer in case.silent:
        assert f"{peer} is gone: silent" in run.log("buffer-0"), peer
    refused = [line for line in run.log("learner-0").splitlines() if "refused (" in line]
    if any(isinstance(event, Cut) for event in case.events):  # one was cut off between its connection and its key
        refused = [line for line in refused if "(no_key)" not in line]
    assert not refused, refused  # nobody but the run's own came to the port for weights
