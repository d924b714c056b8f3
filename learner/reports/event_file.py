"""TensorBoard events, written at once by the calling thread.

torch's `SummaryWriter` is not used, because its writer thread ends at the first error: after a full disk it writes
nothing more, raises the error in some later call, and leaves a half-written record that hides everything behind it. The
summaries come from torch, the framing of records from TensorBoard.
"""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.record_writer import RecordWriter

from stillhouse.learner.reports import board
from stillhouse.recording.append_file import AppendFile, Unwritten

FILE_VERSION: Final = "brain.Event:2"
"""File version that readers expect in the first event."""


class EventFile:
    """One file of events in a TensorBoard folder. One thread."""

    def __init__(
        self, folder: Path, unwritten: Unwritten, *, about: Sequence[Any] = (), purge_step: int | None = None
    ) -> None:
        """`about`: summaries that describe the run. `purge_step`: readers discard the events of this and later steps in
        the folder's older files."""
        self._described: set[str] = set()
        now_s, now_ns = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{now_s:010d}.{socket.gethostname()}.{os.getpid()}.{now_ns:09d}"
        first = [Event(wall_time=time.time(), file_version=FILE_VERSION)]
        if purge_step is not None:
            start = SessionLog(status=SessionLog.START)
            first.append(Event(wall_time=time.time(), step=purge_step, session_log=start))
        first += [Event(wall_time=time.time(), summary=summary) for summary in about]
        self._file = AppendFile(folder / name, unwritten, first=_records(first))

    def add(self, summaries: Sequence[Any], step: int, *, rows: int = 1) -> bool:
        """Write `Summary` messages, which are one row or (0) none. Returns False if they could not be written."""
        now_s = time.time()
        new = {summary.value[0].tag: summary for summary in summaries if summary.value[0].tag not in self._described}
        for summary in new.values():
            board.describe(summary)
        events = [Event(wall_time=now_s, step=step, summary=summary) for summary in summaries]
        written = self._file.append(_records(events), rows=rows)
        if written:
            self._described |= new.keys()
        return written

    def close(self) -> None:
        self._file.close()


def _records(events: Sequence[Any]) -> bytes:
    stream = io.BytesIO()
    writer = RecordWriter(stream)
    for event in events:
        writer.write(event.SerializeToString())
    return stream.getvalue()
