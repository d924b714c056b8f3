"""The buffer is killed at any moment, started again, and nobody notices: real processes, real clients."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from random import Random

import msgspec
import pytest

from stillhouse.buffer import loop
from stillhouse.buffer.config import BufferConfig
from stillhouse.buffer.journal.database import StoreUnwritable
from stillhouse.buffer.journal.recovery import JournalError
from stillhouse.buffer.server import main
from stillhouse.protocol import messages as m
from stillhouse.protocol.client import Client
from tests.full_disk import fill, small_disk
from tests.patience import PATIENCE_S, eventually
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


@pytest.mark.parametrize("folder", [True, False])
def test_a_buffer_whose_journal_is_gone_does_not_begin_anew(tmp_path: Path, folder: bool) -> None:
    config = BufferConfig()
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


def test_a_run_waits_while_the_disk_is_full_and_a_kill_meanwhile_loses_nothing(disk: Path) -> None:
    config = BufferConfig(heartbeat_s=0.2, peer_timeout_s=PATIENCE_S, max_staleness=6, batch_rollouts=4)
    shape = Shape(n_tasks=100, group_size=1, segments=2, segment_tokens=200, step_s=0.1)
    process = BufferProcess(config, disk)
    try:
        address = process.start()
        run = SyntheticRun(address, shape, config)
        run.start()
        with launcher(address) as client:
            snapshot_when(client, lambda s: s.version.step >= 3)
        others = fill(disk)
        time.sleep(1.0)
        process.kill()
        assert process.start(disk_full=True) == address
        time.sleep(1.0)
        others.unlink()
        run.join()
        assert process.wait() == 0
        run.account.check(shape, process.final())
    finally:
        process.close()


def test_a_disk_that_stays_full_ends_the_run_which_says_so(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, with less patience."""
    monkeypatch.setattr(loop, "ROOM_S", 0.5)
    config = BufferConfig(heartbeat_s=0.1, peer_timeout_s=PATIENCE_S)
    ended: Queue[str] = Queue()

    def play() -> None:
        eventually((disk / "buffer.json").exists, "a buffer that listens")
        address = msgspec.json.decode((disk / "buffer.json").read_bytes())["address"]
        with launcher(address) as client:
            snapshot_when(client, lambda s: True)
            fill(disk)
            ended.put(told(client, m.Shutdown).reason)

    thread = threading.Thread(target=play)
    thread.start()
    with pytest.raises(StoreUnwritable, match="make room on the disk of the run's folder"):
        main(config=config, run_id=RUN, run_dir=disk)
    thread.join()
    said = ended.get(timeout=1.0)
    assert "could not be written" in said and any(words in said for words in FULL)


def launcher(address: str) -> Client:
    client = Client(address, m.Hello("launcher", "launcher-0", "first", RUN, ""), connect_timeout_s=WAIT_S)
    client.connect()
    return client
