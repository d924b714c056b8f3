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
from torch.utils.tensorboard.summary import custom_scalars

from recording.append_file import AppendFile, Unwritten

FILE_VERSION: Final = "brain.Event:2"
"""File version that readers expect in the first event."""
OVERVIEW: Final = {
    "Reward": ("rollouts/reward_mean",),
    "Accuracy": ("eval/accuracy_greedy", "eval/accuracy_sampled"),
    "Reverse KL, nats": ("train/reverse_kl", "eval/reverse_kl"),
    "Response length, tokens": ("rollouts/length_mean",),
    "Truncated share": ("rollouts/truncated_share",),
    "Entropy, nats": ("train/entropy",),
    "Staleness, steps": ("staleness/mean", "staleness/max"),
    "Tokens per second": ("rate/actor_tokens_per_s", "rate/teacher_tokens_per_s", "rate/learner_tokens_per_s"),
    "Waits of the learner, seconds per step": ("wait/data_s", "wait/scoring_s", "wait/weights_s"),
    "Busy fraction": ("actors/busy_fraction", "teachers/busy_fraction"),
}
"""Charts of the Custom Scalars tab: title -> tags."""


class EventFile:
    """One file of events in a TensorBoard folder. One thread."""

    def __init__(self, folder: Path, unwritten: Unwritten, *, purge_step: int | None = None) -> None:
        """`purge_step`: readers discard the events of this and later steps in the folder's older files."""
        now_s, now_ns = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{now_s:010d}.{socket.gethostname()}.{os.getpid()}.{now_ns:09d}"
        first = [Event(wall_time=time.time(), file_version=FILE_VERSION)]
        if purge_step is not None:
            start = SessionLog(status=SessionLog.START)
            first.append(Event(wall_time=time.time(), step=purge_step, session_log=start))
        first.append(Event(wall_time=time.time(), summary=_overview()))
        self._file = AppendFile(folder / name, unwritten, first=_records(first))

    def add(self, summaries: Sequence[Any], step: int) -> bool:
        """Write the `Summary` messages of one row. Returns False if they could not be written."""
        now_s = time.time()
        events = [Event(wall_time=now_s, step=step, summary=summary) for summary in summaries]
        return self._file.append(_records(events), rows=1)

    def close(self) -> None:
        self._file.close()


def _overview() -> Any:
    # TensorBoard matches each tag as a regular expression, from its beginning.
    charts = {title: ["Multiline", [f"{tag}$" for tag in tags]] for title, tags in OVERVIEW.items()}
    return custom_scalars({"Overview": charts})


def _records(events: Sequence[Any]) -> bytes:
    stream = io.BytesIO()
    writer = RecordWriter(stream)
    for event in events:
        writer.write(event.SerializeToString())
    return stream.getvalue()
