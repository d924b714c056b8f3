"""What peers say cannot write lines of its own into a log, nor command a terminal."""

from __future__ import annotations

import io
import logging
import re
import secrets
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from stillhouse.launch.workers.start_role import WorkFolder
from stillhouse.protocol import messages as m
from stillhouse.protocol.codec import encode
from stillhouse.protocol.printable import LineFormatter, in_one_line, printable, printable_texts
from stillhouse.protocol.server import PeerServer
from stillhouse.protocol.server_events import FromPeer
from stillhouse.protocol.sockets import new_socket, send_frames
from tests.wire import RUN, VOCAB, WAIT_S

FORGED = "x\n12:00:00.000 buffer ERROR stillhouse.buffer.loop: forged\r\x1b[2J\u202e\x9b\u2028y"
SHOWN = r"x\n12:00:00.000 buffer ERROR stillhouse.buffer.loop: forged\r\x1b[2J\u202e\x9b\u2028y"


def test_what_cannot_be_printed_is_written_as_in_python() -> None:
    assert printable("all fine, ä") == "all fine, ä"
    assert printable(FORGED) == SHOWN
    assert printable("\udcff") == r"\udcff", "half a character"


def test_a_quotation_fits_in_one_line_of_log() -> None:
    assert in_one_line("a\nWARNING forged") == r"a\nWARNING forged"
    assert in_one_line("x" * 10_000) == "x" * 200 + "... (10000 characters)"


def test_the_texts_of_a_message_are_made_printable_and_its_data_stays() -> None:
    assert printable_texts(m.RolloutFailed(FORGED, "env_error", FORGED, FORGED)) == m.RolloutFailed(
        SHOWN, "env_error", SHOWN, SHOWN
    )
    beat = m.Heartbeat(None, {FORGED: 1.0, "fine": 2.0})
    assert printable_texts(beat) == m.Heartbeat(None, {SHOWN: 1.0, "fine": 2.0})
    task = m.Task(0, "train", 1, m.Sampling(), ground_truth="two\nlines")
    for same in (m.TasksOffered((task,)), m.SnapshotWanted(), m.Goodbye("done"), m.Segment("r", 0, 0, 0, (), False)):
        assert printable_texts(same) is same


@pytest.fixture
def log() -> tuple[logging.Logger, io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter("actor-0"))
    logger = logging.Logger(secrets.token_hex(4))
    logger.addHandler(handler)
    return logger, stream


def test_a_record_is_one_line_whatever_it_quotes(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = log
    logger.error("an environment said %s", FORGED)
    (line,) = stream.getvalue().splitlines()
    assert re.fullmatch(rf"\d\d:\d\d:\d\d\.\d{{3}} actor-0 ERROR .*: an environment said {re.escape(SHOWN)}", line)


def test_no_line_of_a_traceback_looks_like_a_record(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = log
    try:
        raise ValueError(FORGED)
    except ValueError:
        logger.exception("it failed", stack_info=True)
    first, *others = stream.getvalue().rstrip("\n").split("\n")
    assert first.endswith("it failed") and len(others) > 4
    assert all(line.startswith("    ") for line in others)
    assert all(line.isprintable() for line in others)


def test_the_tail_of_a_log_on_the_terminal_commands_nothing(tmp_path: Path) -> None:
    folder = WorkFolder(tmp_path, RUN)
    folder.logs.mkdir()
    folder.log_path("actor-0").write_text("printed by native code \x1b]0;title\x07\n")
    assert folder.log_tail("actor-0", lines=1).strip() == r"printed by native code \x1b]0;title\x07"


def test_no_message_of_a_peer_writes_a_line_into_the_buffers_log_or_a_name_into_its_books(
    log: tuple[logging.Logger, io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real sockets: Hellos and other messages with line ends in every text that they have."""
    logger, stream = log
    monkeypatch.setattr("stillhouse.protocol.server.log", logger)
    server = PeerServer("tcp://127.0.0.1:0", run_id=RUN, vocab_fingerprint=VOCAB, heartbeat_s=0.1, peer_timeout_s=60.0)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    good = m.Hello("actor", "actor-0", "first", RUN, VOCAB)
    bad = [msgspec.structs.replace(good, **{field: FORGED}) for field in ("name", "incarnation", "run_id", "pool")]
    bad.append(msgspec.structs.replace(good, vocab_fingerprint=FORGED))
    received: list[m.Message] = []
    try:
        for hello in [*bad, good]:
            peer = new_socket(context, zmq.DEALER)
            peer.connect(server.address)
            send_frames(peer, encode(hello))
            send_frames(peer, encode(m.RolloutFailed(FORGED, "env_error", FORGED, FORGED)))
            send_frames(peer, encode(m.Heartbeat(None, {FORGED: 1.0})))
            send_frames(peer, encode(m.Goodbye(FORGED)))
            deadline_s = time.monotonic() + WAIT_S
            while not peer.poll(1) and time.monotonic() < deadline_s:
                received += [e.received.message for e in server.poll(0.01) if isinstance(e, FromPeer)]
            for _ in range(5):
                received += [e.received.message for e in server.poll(0.01) if isinstance(e, FromPeer)]
            peer.close()
    finally:
        context.term()
        server.close()
    assert m.RolloutFailed(SHOWN, "env_error", SHOWN, SHOWN) in received and m.Heartbeat(None, {SHOWN: 1.0}) in received
    assert server.refused["malformed"] == 1, "the name; incarnation and pool become printable"
    lines = stream.getvalue().splitlines()
    assert lines and all("actor-0 ERROR" not in line and line.isprintable() for line in lines)
    assert not any(line.startswith("12:00:00.000 buffer") for line in stream.getvalue().split("\n"))


def test_a_password_in_a_url_is_in_no_log() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "no answer from %s", ("http://me:p@ss@h:1/v1",), None)
    line = LineFormatter("actor-0").format(record)
    assert line.endswith("no answer from http://(hidden)@h:1/v1")
    assert in_one_line("ws://me:ss@h") == "ws://(hidden)@h"
