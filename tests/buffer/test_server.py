"""The buffer's process with real clients: a whole small run over the wire, and every way in which it can end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np
import pytest
import zmq

import stillhouse.buffer.server
from stillhouse.buffer.config import BufferConfig
from stillhouse.buffer.journal.journal import Journal
from stillhouse.buffer.server import BufferAddress
from stillhouse.buffer.state import BufferState
from stillhouse.protocol import messages as m
from stillhouse.protocol.addresses import outgoing_ports
from stillhouse.protocol.client import Client
from stillhouse.protocol.codec import Received
from stillhouse.protocol.context import ExitCode
from stillhouse.protocol.server import PeerServer
from tests.patience import PATIENCE_S, eventually

RUN, VOCAB = "run-1", "ab" * 32
CONFIG = BufferConfig(heartbeat_s=0.1, peer_timeout_s=PATIENCE_S, max_staleness=0, batch_rollouts=2)
START = m.WeightVersion(0, 0)
WAIT_S = PATIENCE_S

Connect: TypeAlias = Callable[..., Client]
MessageT = TypeVar("MessageT")


def wait_for_address(run_dir: Path) -> str:
    """What the launcher does: the file is there at once as a whole, or not at all."""
    file = run_dir / "buffer.json"
    eventually(file.exists, "buffer.json")
    return msgspec.json.decode(file.read_bytes(), type=BufferAddress).address


def final_snapshot(run_dir: Path) -> m.Snapshot:
    return msgspec.json.decode((run_dir / "ledger.json").read_bytes(), type=m.Snapshot)


@pytest.fixture
def in_thread(tmp_path: Path) -> Iterator[Future[int]]:
    """The buffer, in a thread of this process."""
    threads = set(threading.enumerate())
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(
            stillhouse.buffer.server.main, config=CONFIG, run_id=RUN, run_dir=tmp_path, vocab_fingerprint=VOCAB
        )
    assert set(threading.enumerate()) == threads


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Connect]:
    clients: list[Client] = []

    def make(role: m.Role, pool: str = "") -> Client:
        hello = m.Hello(role, f"{role}-0", "first", RUN, "" if role == "launcher" else VOCAB, pool)
        clients.append(Client(wait_for_address(tmp_path), hello, connect_timeout_s=WAIT_S))
        clients[-1].connect()
        return clients[-1]

    yield make
    for client in clients:
        client.close("test over")


def receive(client: Client, kind: type[MessageT]) -> tuple[MessageT, Received]:
    """The next message of this kind; others are passed over."""
    while True:
        received = client.recv(WAIT_S)
        assert received is not None, f"no {kind.__name__} came"
        if isinstance(received.message, kind):
            return received.message, received


def end_run(learner: Client, *, ok: bool = True) -> None:
    learner.send(m.RunFinished(ok, "enough"))
    shutdown, _ = receive(learner, m.Shutdown)
    assert shutdown == m.Shutdown(ok, "enough")
    learner.close("done")


# ------------------------------------------------------------------------------------------------------- one run


def test_a_small_run_over_the_wire_trains_every_token_and_balances(
    in_thread: Future[int], connect: Connect, tmp_path: Path
) -> None:
    learner, actor, teacher = connect("learner"), connect("actor"), connect("teacher", "default")
    launcher = connect("launcher")
    prompt = np.array([5, 6, 7], np.int32)
    task = m.Task(0, "train", 2, m.Sampling(max_new_tokens=8))
    learner.send(m.TasksOffered((task,)), (prompt,))
    learner.send(m.BatchWanted(START))
    actor.send(m.TicketCredit(4, 0, 0))
    teacher.send(m.ScoreCredit(1000, 0, 0))
    tickets: list[m.Ticket] = []
    while len(tickets) < 2:
        message, received = receive(actor, m.Tickets)
        tickets += message.tickets
        np.testing.assert_array_equal(received.arrays[0], prompt)
    for ticket in tickets:
        spans = (m.VersionSpan(START, 3, 5),)
        segment = m.Segment(ticket.rollout_id, 0, 0, 5, spans, True, "stop")
        mask = np.array([0, 0, 0, 1, 1], np.uint8)
        actor.send(segment, (np.arange(5, 10, dtype=np.int32), np.where(mask, -0.5, 0.0).astype(np.float32), mask))
    scored = 0
    while scored < 2:
        work, _ = receive(teacher, m.ScoreWork)
        scored += len(work.items)
        scores = [np.full(item.end - item.start, -0.25, np.float32) for item in work.items]
        teacher.send(m.Scores(tuple(item.lease_id for item in work.items)), scores)
    batch, received = receive(learner, m.Batch)
    assert [item.rollout_id for item in batch.items] == [ticket.rollout_id for ticket in tickets]
    np.testing.assert_array_equal(received.arrays[2], [0, 0, 0, 1, 1])
    learner.send(m.BatchTrained(batch.batch_id, m.WeightVersion(0, 1)))
    receive(learner, m.BatchTrainedAck)
    launcher.send(m.SnapshotWanted())
    snapshot, _ = receive(launcher, m.Snapshot)
    assert snapshot.ledger.tokens.trained == 4
    end_run(learner)
    for worker in (actor, teacher, launcher):
        assert receive(worker, m.Shutdown)[0] == m.Shutdown(True, "enough")
        worker.close("done")
    assert in_thread.result(WAIT_S) == ExitCode.OK
    final = final_snapshot(tmp_path)
    assert final.phase == "finished"
    assert final.ledger.balanced
    assert (final.ledger.tokens.accepted, final.ledger.tokens.trained) == (4, 4)
    assert {peer.name for peer in final.peers} == {"learner-0", "actor-0", "teacher-0"}, "not who only looked"


def test_the_address_file_names_process_and_run(in_thread: Future[int], connect: Connect, tmp_path: Path) -> None:
    address = wait_for_address(tmp_path)
    told = msgspec.json.decode((tmp_path / "buffer.json").read_bytes(), type=BufferAddress)
    assert told == BufferAddress(address, os.getpid(), RUN)
    low, high = outgoing_ports()
    assert not low <= int(address.rpartition(":")[2]) <= high, "free again for whoever goes on after this process"
    end_run(connect("learner"))
    assert in_thread.result(WAIT_S) == ExitCode.OK


def test_welcome_and_heartbeat_replies_tell_the_published_version(in_thread: Future[int], connect: Connect) -> None:
    learner = connect("learner")
    learner.send(m.VersionPublished(m.WeightVersion(0, 3)))
    assert learner.flush(WAIT_S)
    actor = connect("actor")
    assert actor.published == m.WeightVersion(0, 3)
    end_run(learner)
    actor.close("done")
    assert in_thread.result(WAIT_S) == ExitCode.OK


def test_what_the_server_refused_is_in_the_ledger(in_thread: Future[int], connect: Connect, tmp_path: Path) -> None:
    learner = connect("learner")
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(wait_for_address(tmp_path))
        stranger.send(b"garbage")
        assert stranger.poll(int(WAIT_S * 1000))
    learner.send(m.SnapshotWanted())
    assert receive(learner, m.Snapshot)[0].ledger.rejected == {"damaged": 1}
    end_run(learner)
    assert in_thread.result(WAIT_S) == ExitCode.OK
    assert final_snapshot(tmp_path).ledger.rejected == {"damaged": 1}


def test_gauges_that_are_no_numbers_do_not_spoil_the_ledger_file(
    in_thread: Future[int], connect: Connect, tmp_path: Path
) -> None:
    learner = connect("learner")
    learner.set_heartbeat(None, {"loss": float("nan"), "step": 3.0})
    learner.flush(WAIT_S)
    learner.send(m.SnapshotWanted())
    while not receive(learner, m.Snapshot)[0].peers[0].stats:
        learner.send(m.SnapshotWanted())
    end_run(learner)
    assert in_thread.result(WAIT_S) == ExitCode.OK
    stats = final_snapshot(tmp_path).peers[0].stats
    assert stats.keys() == {"step", "cpu_s_total"} and stats["step"] == 3.0


# ------------------------------------------------------------------------------------------------------ the ends


def test_a_run_that_the_learner_calls_failed_ends_with_failure(
    in_thread: Future[int], connect: Connect, tmp_path: Path
) -> None:
    end_run(connect("learner"), ok=False)
    assert in_thread.result(WAIT_S) == ExitCode.FAILED
    assert final_snapshot(tmp_path).phase == "failed"


def test_late_messages_are_answered_until_their_sender_says_goodbye(in_thread: Future[int], connect: Connect) -> None:
    learner, actor = connect("learner"), connect("actor")
    end_run(learner)
    receive(actor, m.Shutdown)
    actor.send(m.RolloutFailed("train-0-0-0", "engine_error", detail="too late"))
    assert actor.flush(WAIT_S)
    assert not in_thread.done()
    actor.close("done")
    assert in_thread.result(WAIT_S) == ExitCode.OK


def test_a_core_that_breaks_is_told_to_all_and_raised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, connect: Connect
) -> None:
    def break_down(*_: object) -> None:
        raise ArithmeticError("two and two are five")

    monkeypatch.setattr(BufferState, "handle", break_down)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(stillhouse.buffer.server.main, config=CONFIG, run_id=RUN, run_dir=tmp_path)
        learner = connect("learner")
        shutdown, _ = receive(learner, m.Shutdown)
        assert shutdown == m.Shutdown(False, "the buffer broke: ArithmeticError: two and two are five")
        with pytest.raises(ArithmeticError):
            future.result(WAIT_S)
    assert final_snapshot(tmp_path).ledger.balanced


def _run_main(run_dir: Path) -> None:
    sys.exit(stillhouse.buffer.server.main(config=CONFIG, run_id=RUN, run_dir=run_dir))


@pytest.fixture
def in_process(tmp_path: Path) -> Iterator[SpawnProcess]:
    process = multiprocessing.get_context("spawn").Process(target=_run_main, args=(tmp_path,))
    process.start()
    yield process
    process.kill()
    process.join()
    process.close()


def terminate(process: SpawnProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)


def test_sigterm_fails_the_run_tells_everybody_and_leaves_a_ledger(
    in_process: SpawnProcess, connect: Connect, tmp_path: Path
) -> None:
    actor = connect("actor")
    terminate(in_process)
    assert receive(actor, m.Shutdown)[0] == m.Shutdown(False, "SIGTERM")
    actor.close("done")
    in_process.join(WAIT_S)
    assert in_process.exitcode == ExitCode.TERMINATED
    final = final_snapshot(tmp_path)
    assert (final.phase, final.phase_reason, final.ledger.balanced) == ("failed", "SIGTERM", True)


def test_after_sigterm_a_learner_may_leave_first_and_a_second_one_ends_the_wait(
    in_process: SpawnProcess, connect: Connect, tmp_path: Path
) -> None:
    """It needs answers for its last checkpoint; the run is given up when it has gone, or nobody waits any more."""
    learner, actor = connect("learner"), connect("actor")
    terminate(in_process)
    learner.send(m.SnapshotWanted())
    assert receive(learner, m.Snapshot)[0].phase == "running"
    learner.send(m.SnapshotWanted())
    assert receive(learner, m.Snapshot)[0].phase == "running"
    terminate(in_process)
    assert receive(actor, m.Shutdown)[0] == m.Shutdown(False, "SIGTERM")
    learner.close("done")
    actor.close("done")
    in_process.join(WAIT_S)
    assert in_process.exitcode == ExitCode.TERMINATED


def test_sigterm_while_waiting_for_goodbyes_ends_the_wait_not_the_result(
    in_process: SpawnProcess, connect: Connect, tmp_path: Path
) -> None:
    learner, actor = connect("learner"), connect("actor")
    end_run(learner)
    receive(actor, m.Shutdown)  # and never says goodbye
    terminate(in_process)
    in_process.join(WAIT_S)
    assert in_process.exitcode == ExitCode.OK
    assert final_snapshot(tmp_path).phase == "finished"


def test_the_buffer_imports_without_torch() -> None:
    code = "import sys, stillhouse.buffer.server; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_segment_is_acknowledged_only_when_the_journal_has_it(
    in_thread: Future[int], connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer that died in between would have let its actor forget what it does not know."""
    written: list[bytes] = []
    known: list[bool] = []
    write, send = Journal.write, PeerServer.send

    def written_first(journal: Journal, turn: bytes, blobs: Sequence[Any] = ()) -> None:
        write(journal, turn, blobs)
        written.append(turn)

    def look(server: PeerServer, role: m.Role, name: str, message: m.Message, arrays: Sequence[Any] = ()) -> Any:
        if isinstance(message, m.SegmentsAck):
            known.extend(any(rollout_id.encode() in turn for turn in written) for rollout_id in message.segments)
        return send(server, role, name, message, arrays)

    monkeypatch.setattr(Journal, "write", written_first)
    monkeypatch.setattr(PeerServer, "send", look)
    learner, actor = connect("learner"), connect("actor")
    learner.send(m.TasksOffered((m.Task(0, "train", 1, m.Sampling(max_new_tokens=8)),)), (np.array([5], np.int32),))
    actor.send(m.TicketCredit(1, 0, 0))
    rollout_id = receive(actor, m.Tickets)[0].tickets[0].rollout_id
    segment = m.Segment(rollout_id, 0, 0, 2, (m.VersionSpan(START, 1, 2),), True, "stop")
    actor.send(segment, (np.array([5, 6], np.int32), np.array([0, -0.5], np.float32), np.array([0, 1], np.uint8)))
    assert actor.flush(WAIT_S)
    assert known and all(known)
    end_run(learner)
    actor.close("done")
    assert in_thread.result(WAIT_S) == ExitCode.OK
