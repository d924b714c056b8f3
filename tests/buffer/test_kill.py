"""The buffer is killed at any moment, started again, and nobody notices: real processes, real clients."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from stillhouse.buffer.config import BufferConfig
from stillhouse.buffer.journal.recovery import JournalError
from stillhouse.buffer.server import main
from stillhouse.protocol import messages as m
from stillhouse.protocol.client import Client
from stillhouse.protocol.errors import HandshakeRefused
from tests.full_disk import fill, small_disk
from tests.patience import PATIENCE_S
from tests.sim.synthetic_run import RUN, VOCAB, WAIT_S, BufferProcess, Shape, SyntheticRun

FULL = ("No space left", "Input/output error")
"""What LMDB says of a disk that is full: the second when it could write a part of a page."""
SHAPE = Shape(n_tasks=150, group_size=2, segments=3, segment_tokens=6, pause_s=0.01)


@pytest.mark.parametrize(("seed", "log_mb"), [(1, 256), (2, 1)])
def test_a_run_whose_buffer_is_killed_again_and_again_loses_and_repeats_nothing(
    tmp_path: Path, seed: int, log_mb: int
) -> None:
    config = BufferConfig(
        heartbeat_s=0.2,
        peer_timeout_s=PATIENCE_S,
        max_staleness=2,
        batch_rollouts=8,
        journal_log_mb=log_mb,
    )
    rng = Random(seed)
    process = BufferProcess(config, tmp_path)
    try:
        address = process.start()
        run = SyntheticRun(address, SHAPE, config, seed=seed)
        run.start()
        while not run.finished and process.starts <= 8:
            time.sleep(rng.uniform(0.05, 0.5))
            if not process.kill():
                break
            assert process.start() == address
        run.join()
        assert process.wait() == 0
        run.account.check(SHAPE, process.final())
        assert process.starts > 3
        assert not (tmp_path / "journal").exists()
    finally:
        process.close()


def test_a_buffer_killed_after_the_end_says_how_the_run_ended_however_often_it_is_started(tmp_path: Path) -> None:
    config = BufferConfig(heartbeat_s=0.1, peer_timeout_s=1.0)
    process = BufferProcess(config, tmp_path)
    try:
        address = process.start()
        learner = connected(address, "learner")
        actor = connected(address, "actor")
        learner.send(m.RunFinished(True, "enough"))
        assert told(learner, m.Shutdown) == told(actor, m.Shutdown) == m.Shutdown(True, "enough")
        learner.close("done")
        assert process.kill(), "it waits for the actor's goodbye"
        process.start()
        assert process.wait() == 0
        assert process.final().phase == "finished"
        process.start(disk_full=True)  # once more, by mistake
        assert process.wait() == 0
        actor.close("done")
    finally:
        process.close()


@pytest.mark.parametrize("journal", [True, False])
@pytest.mark.parametrize("folder", [True, False])
def test_a_buffer_whose_journal_is_gone_does_not_begin_anew(tmp_path: Path, folder: bool, journal: bool) -> None:
    config = BufferConfig(journal=journal)
    process = BufferProcess(config, tmp_path)
    try:
        process.start()
        process.kill()
    finally:
        process.close()
    shutil.rmtree(tmp_path / "journal", ignore_errors=True)
    if folder:
        (tmp_path / "journal").mkdir()
    for _ in range(2):
        with pytest.raises(JournalError, match="resume the run from its last checkpoint"):
            main(config=config, run_id=RUN, run_dir=tmp_path)


def connected(address: str, role: m.Role) -> Client:
    hello = m.Hello(role, f"{role}-0", "first", RUN, "" if role == "launcher" else VOCAB)
    client = Client(address, hello, connect_timeout_s=WAIT_S)
    client.connect()
    return client


def told(client: Client, kind: type[m.Shutdown]) -> m.Shutdown:
    while True:
        received = client.recv(WAIT_S)
        assert received is not None, f"no {kind.__name__} came"
        if isinstance(received.message, kind):
            return received.message


# ----------------------------------------------------------------------------------------------------- full disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """16 MiB."""
    with small_disk(tmp_path / "disk", 16 << 20) as folder:
        yield folder


def snapshot_when(client: Client, wanted: Callable[[m.Snapshot], bool]) -> m.Snapshot:
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        client.send(m.SnapshotWanted())
        received = client.recv(1.0)
        if received is not None and isinstance(received.message, m.Snapshot) and wanted(received.message):
            return received.message
        time.sleep(0.02)
    raise AssertionError("it never came to that")


def test_a_full_disk_stops_intake_not_training_and_a_kill_meanwhile_loses_nothing(disk: Path) -> None:
    config = BufferConfig(
        heartbeat_s=0.2, peer_timeout_s=PATIENCE_S, max_staleness=6, batch_rollouts=4, journal_reserve_mb=2
    )
    shape = Shape(n_tasks=100, group_size=1, segments=2, segment_tokens=200, step_s=0.3)
    process = BufferProcess(config, disk)
    try:
        address = process.start()
        run = SyntheticRun(address, shape, config)
        run.start()
        hello = m.Hello("launcher", "launcher-0", "first", RUN, "")
        with Client(address, hello, connect_timeout_s=WAIT_S) as launcher:
            launcher.connect()
            snapshot_when(launcher, lambda s: s.version.step >= 3)
            os.kill(process.pid, signal.SIGSTOP)  # or the space of the reserve would be filled up as well
            others = fill(disk)
            os.kill(process.pid, signal.SIGCONT)
            stopped = snapshot_when(launcher, lambda s: bool(s.intake_trouble))
            assert any(words in stopped.intake_trouble for words in FULL)
            later = snapshot_when(launcher, lambda s: s.version.step > stopped.version.step)
            assert later.ledger.segments.accepted == stopped.ledger.segments.accepted, "nothing new was taken in"
            process.kill()
            assert process.start(disk_full=True) == address
            restored = snapshot_when(launcher, lambda s: s.version >= later.version)
            assert restored.intake_trouble
            assert restored.ledger.segments.accepted == stopped.ledger.segments.accepted
            others.unlink()
            snapshot_when(launcher, lambda s: not s.intake_trouble)
        run.join()
        assert process.wait() == 0
        run.account.check(shape, process.final())
    finally:
        process.close()


def test_a_buffer_killed_while_it_could_write_nothing_refuses_who_knows_more_and_lets_in_others(disk: Path) -> None:
    """What it sent last was never written: to go on with that peer would be to do it twice."""
    config = BufferConfig(
        heartbeat_s=0.2, peer_timeout_s=PATIENCE_S, max_staleness=6, batch_rollouts=4, journal_reserve_mb=0
    )
    process = BufferProcess(config, disk)
    try:
        address = process.start()
        hello = m.Hello("launcher", "launcher-0", "first", RUN, "")
        with Client(address, hello, connect_timeout_s=WAIT_S) as launcher:
            launcher.connect()
            snapshot_when(launcher, lambda s: True)
            others = fill(disk)
            snapshot_when(launcher, lambda s: bool(s.intake_trouble))
            snapshot_when(launcher, lambda s: bool(s.intake_trouble))
            process.kill()
            others.unlink()
            assert process.start() == address
            with pytest.raises(HandshakeRefused, match="resume the run from its last checkpoint") as refused:
                snapshot_when(launcher, lambda s: False)
            assert refused.value.refused.code == "peer_ahead"
        with connected(address, "actor") as actor:
            restored = snapshot_when(actor, lambda s: True)
            assert restored.ledger.rejected["peer_ahead"] == 1
    finally:
        process.close()
