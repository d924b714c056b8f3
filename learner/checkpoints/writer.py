"""Checkpoints in the background: training waits for copies in host memory only.

    training thread    stage: copies of everything ............ | next step ...
    writer's thread                                             | files, fsync, checksums, the name of the checkpoint

One checkpoint is written at a time. If another one comes due meanwhile, it is put off to the end of the first step that
finds the writer idle, and counted. The last one of a run waits for the one before, and so does that of a learner that
was asked to leave. The training thread takes note of the outcome at the end of a step: a failure is counted and logged,
training goes on, and the checkpoint before is untouched.

With several ranks, each has a thread that writes its rows, unless another one with the same rows does
(learner.ranks.mesh). Rank 0 waits for all of them before it gives the checkpoint its name (`Ranks.collected`). No
collective is involved, so the training threads can use theirs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from stillhouse.learner.checkpoints.checkpoint import write_shares
from stillhouse.learner.ranks.group import Ranks
from stillhouse.learner.reports.progress import LearnerProgress
from stillhouse.models.transfer import Shares
from stillhouse.protocol.messages import Snapshot, WeightVersion
from stillhouse.tracing import events

log = logging.getLogger(__name__)

Write = Callable[[], Path]
"""Writes a staged checkpoint; returns its folder. Raises OSError."""


class CheckpointWriter:
    """The writer of rank 0. All methods are for the training thread."""

    def __init__(
        self,
        stage: Callable[[WeightVersion, Snapshot | None], Write],
        progress: LearnerProgress,
        *,
        saved: Callable[[WeightVersion], None] = lambda _: None,
        failed: Callable[[], None] = lambda: None,
        keep_waiting: bool = True,
    ) -> None:
        """`stage` copies what the checkpoint needs and may raise OSError, too. `saved` is called once the checkpoint of
        that version is complete, `failed` when the progress has counted one that is not. `keep_waiting`: at exit, also
        after an error, wait for a checkpoint that is being written. Off where other processes may be what the error is
        about."""
        self.progress = progress
        self._stage = stage
        self._saved = saved
        self._failed = failed
        self._keep_waiting = keep_waiting
        self._thread: threading.Thread | None = None
        self._version = WeightVersion(0, 0)
        """Version of the newest checkpoint that was begun."""
        self._outcome: Path | BaseException | None = None
        self._due = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or self._keep_waiting:
            self.wait()

    def should_save(self, *, due: bool) -> bool:
        """Whether to save now, at the end of a step: one is `due`, or was put off, and none is being written."""
        self._look()
        self._due = self._due or due
        if self._due and self._thread is not None:
            if due:
                self.progress.checkpoints_put_off += 1
                log.warning(
                    "the checkpoint of step %d is still being written: the next one is put off until it is done (%d "
                    "so far); a larger learner.checkpoint_every or a faster disk avoids that",
                    self._version.step,
                    self.progress.checkpoints_put_off,
                )
            return False
        return self._due

    def save(self, version: WeightVersion, snapshot: Snapshot | None = None) -> None:
        """Stage a checkpoint and begin to write it, unless this version has one. Waits for the one before. A failure is
        counted and logged."""
        self.wait()
        self._due = False
        if version == self._version and isinstance(self._outcome, Path):
            return
        self._version = version
        try:
            write = self._stage(version, snapshot)
        except OSError as error:
            self._outcome = error
            self._take_note()
            return
        self._outcome = None
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> OSError | None:
        """Wait until none is being written. Returns why the newest one could not be; None if it is complete."""
        if self._thread is not None:
            self._thread.join()
        self._look()
        return self._outcome if isinstance(self._outcome, OSError) else None

    def _run(self, write: Write) -> None:
        try:
            with events.span("checkpoint", "write", step=self._version.step):
                self._outcome = write()
        except BaseException as error:
            self._outcome = error

    def _look(self) -> None:
        if self._thread is not None and not self._thread.is_alive():
            self._thread.join()
            self._thread = None
            self._take_note()

    def _take_note(self) -> None:
        progress = self.progress
        match self._outcome:
            case Path() as folder:
                progress.checkpoint = folder
                log.info("checkpoint %s", folder)
                self._saved(self._version)
            case OSError() as error:
                newest = progress.checkpoint or "none of this process"
                progress.checkpoint_failed(
                    f"the checkpoint of step {self._version.step} could not be written: {error}; the newest one is "
                    f"{newest}"
                )
                self._failed()
            case BaseException() as error:
                raise error
            case None:
                pass


class _Said(msgspec.Struct, frozen=True):
    """What a rank says of its share."""

    n_bytes: int = 0
    errno: int = 0
    """Number of an OSError; 0: none."""
    error: str = ""


class ShareWriter:
    """The writer of any other rank that writes."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._thread: threading.Thread | None = None

    def write(self, draft: Path, weights: Shares, moments: Shares, *, adapters: bool) -> None:
        """Begin to write a staged share; rank 0 is told when it is done, or why it failed."""
        self.wait()  # not for long: rank 0 was told, or would not have asked for another one
        arguments = (draft, weights, moments, adapters)
        self._thread = threading.Thread(target=self._run, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being written and rank 0 was told."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, draft: Path, weights: Shares, moments: Shares, adapters: bool) -> None:
        try:
            said = _Said(n_bytes=write_shares(draft, weights, moments, adapters=adapters, leads=False))
        except OSError as error:
            said = _Said(errno=error.errno or 0, error=str(error))
        except BaseException as error:
            said = _Said(error=f"{type(error).__name__}: {error}")
        self._ranks.post(draft.name, msgspec.json.encode(said))


def written_by_others(ranks: Ranks, draft: Path) -> list[int]:
    """On rank 0: the bytes of each other rank that writes; waits for them. Raises OSError or RuntimeError if one of
    them has failed."""
    answers = [msgspec.json.decode(one, type=_Said) for one in ranks.collected(draft.name)]
    for rank, said in enumerate(answers, start=1):
        if said.errno:
            raise OSError(said.errno, f"rank {rank}: {said.error}")
        if said.error:
            raise RuntimeError(f"rank {rank} could not write its share of a checkpoint: {said.error}")
    return [said.n_bytes for said in answers]
