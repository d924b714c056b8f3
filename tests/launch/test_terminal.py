"""A run outlives the terminal or pipe that it was started in."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from launcher_process import PATIENCE_S, ROOT, StartLauncher, eventually


def take_terminal() -> None:
    """In the child: standard input is its controlling terminal."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_a_run_survives_its_terminal_and_leaves_its_summary(start_launcher: StartLauncher) -> None:
    ours, theirs = pty.openpty()
    launcher = start_launcher(
        settings={"launch": {"status": "rich"}},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    launcher.until_ready()
    os.close(ours)  # SIGHUP to the launcher, and nothing can be written any more
    eventually(lambda: "the terminal is gone (SIGHUP)" in launcher.log("launcher"), "it is noticed")
    assert launcher.process.poll() is None
    assert launcher.summary_when_finished()["state"] == "finished"


def test_a_run_survives_the_reader_of_its_output_and_under_nohup_sighup_stays_ignored(
    start_launcher: StartLauncher,
) -> None:
    launcher = start_launcher(
        settings={"launch": {"status": "plain", "status_every_s": 0.1}},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    for stream in (launcher.process.stdout, launcher.process.stderr):
        assert stream is not None
        stream.close()
    launcher.process.stdout = launcher.process.stderr = None
    launcher.until_ready()
    status = Path(f"/proc/{launcher.process.pid}/status").read_text(encoding="utf-8")
    (ignored,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigIgn")]
    assert int(ignored, 16) & 1 << (signal.SIGHUP - 1)
    launcher.process.send_signal(signal.SIGHUP)
    assert launcher.summary_when_finished()["ok"]
    assert "the terminal is gone" not in launcher.log("launcher")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["view", "--help"], 0),
        (["--no-such-key"], 2),
    ],
    ids=str,
)
def test_commands_whose_reader_has_gone_say_nothing_of_it(words: list[str], code: int) -> None:
    """`| head`: what cannot be written counts as written, and the exit code stays what it means."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-u", str(ROOT / "launch" / "cluster.py"), *words]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=PATIENCE_S, check=False)
    assert ended.returncode == code and b"BrokenPipe" not in ended.stderr and b"Traceback" not in ended.stderr
    if code:
        assert subprocess.run(command, stdout=writer, stderr=writer, timeout=PATIENCE_S, check=False).returncode == code
    os.close(writer)
