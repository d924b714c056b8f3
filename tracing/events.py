"""The events of one process, in a file of its own. `--trace FILE` turns them on; without it every call returns at once.

    begin(folder, ...)     once per process; the file is <folder>/<worker>.<incarnation>.jsonl
    span, done             a slice of a track: something that took from one moment to another
    counter                a number that changes
    end()                  writes what is still held, and when the process ended

The first line is an object, HEADER; each later one is an array:

    ["X", track, name, began_ns, ended_ns, {figures}]      slices of one track are disjoint, or one is inside the other
    ["C", name, at_ns, {figures}]
    ["I", name, at_ns]                                     a moment: `ready`, when a worker takes work
    ["dropped", n]                                         n events so far are not in the file; the last one counts
    ["end", at_ns]

Times are CLOCK_MONOTONIC, which all processes of a machine share. The header has the wall clock of the same moment, by
which files of other machines are moved (`tools.trace.clocks`).

A line is written whole, in one write with others, at most FLUSH_S after it was made if more events follow. A killed
process loses what it held, and leaves at most one torn line. A file ends at MAX_BYTES, and a disk that is full loses
events; both are counted. Tracing never ends a process.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

FOLDER: Final = "trace"
"""Folder of these files, in the run folder."""
MAX_BYTES: Final = 64 << 20
"""Size of one file: about 700,000 events."""
FLUSH_S: Final = 0.25
HELD_BYTES: Final = 64 << 10
"""Events that are held before they are written."""

log = logging.getLogger(__name__)


class TraceHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a file."""

    role: str
    worker: str
    incarnation: str
    pid: int
    host: str
    boot: str
    """Processes with the same value share a monotonic clock."""
    monotonic_ns: int
    unix_ns: int
    """Wall clock at `monotonic_ns`."""


class TraceFile:
    """The file of one process. Thread-safe."""

    def __init__(self, path: Path, header: TraceHeader, *, max_bytes: int = MAX_BYTES) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._lock = threading.Lock()
        self._held: list[bytes] = []
        self._held_bytes = self._n_held = 0
        self._written_bytes = 0
        self._flushed_s = time.monotonic()
        self._dropped = self._dropped_said = 0
        self._torn = self._failing = False
        self._descriptor: int | None = None
        self._hold(msgspec.json.encode(header), events=0)
        self._flush()

    def add(self, event: list[Any]) -> None:
        """Add an event; what cannot be written is counted."""
        with self._lock:
            line = msgspec.json.encode(event)
            if self._written_bytes + self._held_bytes + len(line) >= self._max_bytes:
                self._drop(1)
                return
            self._hold(line, events=1)
            if self._held_bytes >= HELD_BYTES or time.monotonic() - self._flushed_s >= FLUSH_S:
                self._flush()

    def close(self) -> None:
        """Write what is held, and the end. Idempotent."""
        with self._lock:
            if self._dropped > self._dropped_said:
                self._hold(msgspec.json.encode(["dropped", self._dropped]), events=0)
            self._hold(msgspec.json.encode(["end", time.monotonic_ns()]), events=0)
            self._flush()
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                os.close(descriptor)

    def _drop(self, events: int) -> None:
        """Count, and say so in the file each time the number has doubled: that takes few lines, and a killed process
        has said at least half of it."""
        self._dropped += events
        if self._dropped >= 2 * self._dropped_said:
            self._dropped_said = self._dropped
            self._hold(msgspec.json.encode(["dropped", self._dropped]), events=0)
            self._flush()

    def _hold(self, line: bytes, *, events: int) -> None:
        self._held.append(line)
        self._held_bytes += len(line) + 1
        self._n_held += events

    def _flush(self) -> None:
        data, n_events = b"\n".join([*self._held, b""]), self._n_held
        self._held, self._held_bytes, self._n_held = [], 0, 0
        self._flushed_s = time.monotonic()
        try:
            if self._descriptor is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
                self._descriptor = os.open(self._path, flags, 0o666)
            data = b"\n" + data if self._torn else data
            done = os.write(self._descriptor, data)
            self._written_bytes += done
            self._torn = done < len(data)
            if self._torn:
                raise OSError(f"{done} of {len(data)} bytes were written")
            self._failing = False
        except OSError as error:
            if not self._failing:
                log.error("trace events are lost: %s: %s", self._path, error)
            self._failing = True
            self._dropped += n_events


_file: TraceFile | None = None
"""The file of this process."""


def begin(folder: Path, *, role: str, worker: str, incarnation: str, max_bytes: int = MAX_BYTES) -> None:
    """Write the events of this process from now on."""
    global _file
    header = TraceHeader(
        role=role,
        worker=worker,
        incarnation=incarnation,
        pid=os.getpid(),
        host=platform.node(),
        boot=_boot(),
        monotonic_ns=time.monotonic_ns(),
        unix_ns=time.time_ns(),
    )
    _file = TraceFile(folder / f"{worker}.{incarnation}.jsonl", header, max_bytes=max_bytes)


def end() -> None:
    """Write what is held. Nothing is traced any more. Idempotent."""
    global _file
    file, _file = _file, None
    if file is not None:
        file.close()


def tracing() -> bool:
    """Whether events are written: for figures that take time to compute."""
    return _file is not None


def now_ns() -> int:
    """The clock of all events."""
    return time.monotonic_ns()


def done(track: str, name: str, began_ns: int, **figures: Any) -> None:
    """Something on `track` took from `began_ns` until now."""
    if (file := _file) is not None:
        file.add(["X", track, name, began_ns, time.monotonic_ns(), figures])


@contextmanager
def span(track: str, name: str, **figures: Any) -> Generator[dict[str, Any]]:
    """What is inside, as a slice; it also ends by an error. More figures can be put into the dictionary."""
    if _file is None:
        yield figures
        return
    began_ns = time.monotonic_ns()
    try:
        yield figures
    finally:
        done(track, name, began_ns, **figures)


def counter(name: str, **figures: float) -> None:
    """The values of a counter from now on."""
    if (file := _file) is not None:
        file.add(["C", name, time.monotonic_ns(), figures])


def mark(name: str) -> None:
    """A moment of this process."""
    if (file := _file) is not None:
        file.add(["I", name, time.monotonic_ns()])


class Lanes:
    """Tracks for what goes on side by side: each thing gets the lowest number that is free. One thread only."""

    def __init__(self) -> None:
        self._taken: dict[str, tuple[int, int]] = {}
        """Key -> number, and when it was taken."""

    def take(self, key: str) -> None:
        """`key` begins."""
        if _file is not None and key not in self._taken:
            used = {number for number, _ in self._taken.values()}
            self._taken[key] = next(n for n in range(len(used) + 1) if n not in used), time.monotonic_ns()

    def done(self, key: str, track: str, name: str, **figures: Any) -> None:
        """`key` has ended: a slice of the track `<track> <number>`."""
        if (taken := self._taken.pop(key, None)) is not None:
            done(f"{track} {taken[0]}", name, taken[1], **figures)


def _boot() -> str:
    """The kernel's own id of this start of the machine; containers of one machine share it, and its clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return platform.node()


def _forget() -> None:
    global _file
    _file = None


os.register_at_fork(after_in_child=_forget)  # a fork would write its parent's events once more
