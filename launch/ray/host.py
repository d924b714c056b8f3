"""One host of a run on Ray: an actor of Ray that runs `stillhouse join` on its node.

What the join needs (address, configuration, keys) comes as bytes with the actor's arguments and is written into a
folder that only this user can read. The join's logs go back in pieces, when the launcher asks for them. No token, score
or weight passes here: those go over the run's own links.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final, NamedTuple

from stillhouse.protocol.children import kill_group

PIECE_BYTES: Final = 64 * 1024
"""The most that one answer carries of one log."""
START_S: Final = 30.0
"""The most that a shell may take to start."""
JOIN_LOG: Final = "join.log"
"""Output of the join itself; the workers' logs lie beside it."""


class HostAnswer(NamedTuple):
    """Answer to the launcher's question."""

    code: int | None
    """Exit code of the join; None while it runs."""
    pieces: dict[str, bytes]
    """Name of a log -> what follows the given offset."""


class JoiningHost:
    """The join and its folder. It is used from one thread."""

    def __init__(self, files: Mapping[str, bytes], words: Sequence[str], address: str) -> None:
        """`files`: path -> content of the folder to join, as `stillhouse invite` writes it. `words`: the further
        arguments of `stillhouse join`; all of them where there are no files. `address`: the node's own."""
        self._home = Path(tempfile.mkdtemp(prefix="stillhouse-"))
        self._until_gone = _remove_when_this_process_is_gone(self._home)
        self._address = address
        run = self._home / "run"
        for name, content in files.items():
            (run / name).parent.mkdir(parents=True, exist_ok=True)
            (run / name).touch(mode=0o600)
            (run / name).write_bytes(content)
        self._logs = self._home / "joined" / "logs"
        self._logs.mkdir(parents=True)
        target = [str(run), "--dir", str(self._logs.parent)] if files else []
        child = [sys.executable, "-P", "-m", "stillhouse.launch.stages.child", str(os.getpid())]
        with (self._logs / JOIN_LOG).open("ab") as log:
            self._join = subprocess.Popen(
                [*child, "join", *target, *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def node(self) -> str:
        """Address of the node where Ray put the host."""
        return self._address

    def look(self, offsets: Mapping[str, int]) -> HostAnswer:
        """Pieces of the logs from these offsets on. The last pieces come together with the exit code, or after it."""
        code = self._join.poll()
        pieces: dict[str, bytes] = {}
        for file in sorted(self._logs.glob("*.log")):
            with file.open("rb") as log:
                log.seek(offsets.get(file.name, 0))
                if piece := log.read(PIECE_BYTES):
                    pieces[file.name] = piece
        return HostAnswer(code, pieces)

    def stop(self) -> None:
        """Ask the join to leave; its workers say goodbye to the run."""
        if self._join.poll() is None:
            self._join.send_signal(signal.SIGTERM)

    def clean(self) -> None:
        """End what is left, and remove the folder with the keys."""
        kill_group(self._join.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._join.wait(5.0)
        shutil.rmtree(self._home, ignore_errors=True)
        self._until_gone.close()


def _remove_when_this_process_is_gone(folder: Path) -> IO[bytes]:
    """Have the folder with the keys removed also when this process is killed, as Ray does when the launcher is gone.

    A shell waits for the end of a pipe whose only writer is this process. It is no child of ours, because Ray
    kills the children of an actor together with it."""
    remove = 'rm -rf -- "$0"'
    once_more = f"{{ sleep 5; {remove}; }}"  # the join and its workers may still have been writing
    script = f"exec 3<&0; {{ cat <&3; {remove} || {once_more}; }} >/dev/null 2>&1 &"
    shell = subprocess.Popen(["sh", "-c", script, str(folder)], stdin=subprocess.PIPE, start_new_session=True)
    shell.wait(START_S)
    assert shell.stdin is not None
    return shell.stdin
