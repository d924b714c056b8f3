"""TensorBoard events, written at once by the calling thread.

Not by `SummaryWriter`: its writer is a thread that ends at the first error, so that after a full disk nothing more is
written, the error comes up in some later call, and a half-written record hides all that follows it. The summaries
themselves are torch's, the framing of records is TensorBoard's.
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

from recording.append_file import AppendFile, Unwritten

FILE_VERSION: Final = "brain.Event:2"
"""What readers expect in the first event."""


class EventFile:
    """One file of events in a TensorBoard folder. One thread."""

    def __init__(self, folder: Path, unwritten: Unwritten, *, purge_step: int | None = None) -> None:
        """`purge_step`: readers forget what older files of the folder say of this step and later ones."""
        now_s, now_ns = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{now_s:010d}.{socket.gethostname()}.{os.getpid()}.{now_ns:09d}"
        first = [Event(wall_time=time.time(), file_version=FILE_VERSION)]
        if purge_step is not None:
            start = SessionLog(status=SessionLog.START)
            first.append(Event(wall_time=time.time(), step=purge_step, session_log=start))
        self._file = AppendFile(folder / name, unwritten, first=_records(first))

    def add(self, summaries: Sequence[Any], step: int) -> bool:
        """`summaries`: `Summary` messages of one row; False if they could not be written."""
        now_s = time.time()
        events = [Event(wall_time=now_s, step=step, summary=summary) for summary in summaries]
        return self._file.append(_records(events), rows=1)

    def close(self) -> None:
        self._file.close()


def _records(events: Sequence[Any]) -> bytes:
    stream = io.BytesIO()
    writer = RecordWriter(stream)
    for event in events:
        writer.write(event.SerializeToString())
    return stream.getvalue()
