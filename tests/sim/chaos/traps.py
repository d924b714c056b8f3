"""Named functions before or after which a process of the run can be killed (see trap/sitecustomize.py)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, TypeAlias

Side: TypeAlias = Literal["before", "after"]
POINTS: Final[Mapping[str, Sequence[str]]] = {
    "learner": (
        "stillhouse.learner.checkpoints.checkpoint:write_checkpoint",
        "stillhouse.learner.loop:LearnerLoop._offer_tasks",
        "stillhouse.learner.checkpoints.files:prune",
        "stillhouse.learner.checkpoints.files:write_manifest",
        "stillhouse.learner.feed:BatchFeed.next",
        "stillhouse.learner.loop:LearnerLoop._report",
        "stillhouse.learner.reports.metrics:MetricsWriter.step",
        "stillhouse.weights.publisher:Publisher.publish",
        "stillhouse.recording.writer:BatchRecorder.add",
        "stillhouse.learner.prompts.tasks:TaskStream.next",
        "stillhouse.learner.prompts.tasks:TaskStream.step",
    ),
    "buffer": (
        "stillhouse.buffer.go_back:go_back",
        "stillhouse.buffer.journal.journal:Journal.write",
        "stillhouse.buffer.learner_desk:LearnerDesk.batch_trained",
        "stillhouse.buffer.learner_desk:LearnerDesk.batch_wanted",
        "stillhouse.buffer.learner_desk:LearnerDesk.form_batch",
        "stillhouse.buffer.learner_desk:LearnerDesk.started",
        "stillhouse.buffer.learner_desk:LearnerDesk.tasks_offered",
        "stillhouse.buffer.loop:BufferLoop._send",
    ),
    "actor": ("stillhouse.actors.worker:ActorWorker._send_credit", "stillhouse.actors.worker:ActorWorker._take"),
    "teacher": (
        "stillhouse.teachers.worker:TeacherWorker._score_batch",
        "stillhouse.teachers.worker:TeacherWorker._report",
    ),
    "launcher": (
        "stillhouse.launch.workers.watch:Watch._kill_silent",
        "stillhouse.launch.workers.watch:Watch._read_link",
    ),
}
"""By the role whose process passes there."""
AT_A_NEW_LEARNER: Final = ("stillhouse.buffer.go_back:go_back", "stillhouse.buffer.learner_desk:LearnerDesk.started")
"""Those that no process reaches while the same learner continues."""
HOOK: Final = Path(__file__).parent / "trap"
LOOK_EVERY_S: Final = 0.02


class Traps:
    """The traps of one run, set by files in a folder of their own."""

    def __init__(self, folder: Path, points: Sequence[str] = tuple(p for of in POINTS.values() for p in of)) -> None:
        """`points`: functions that can be trapped, as `module:function` or `module:Class.method`."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._points = points

    def environment(self, python_path: str) -> dict[str, str]:
        """Environment variables of the processes that can be trapped."""
        return {
            "PYTHONPATH": f"{python_path}{os.pathsep}{HOOK}",
            "STILLHOUSE_TRAP_POINTS": ",".join(self._points),
            "STILLHOUSE_TRAP_FOLDER": str(self._folder),
        }

    def catch(
        self,
        point: str,
        side: Side,
        victim: int,
        *,
        n: int = 1,
        others: Sequence[int] = (),
        spare: bool = False,
        timeout_s: float,
        alive: Callable[[], bool] = lambda: True,
    ) -> bool:
        """SIGKILL for the process `victim` when it passes there for the n-th time from now, and for the others at that
        moment. `spare`: for the others alone. False when it has not come by until `timeout_s`, or is no longer `alive`:
        the trap is taken away."""
        assert point in self._points, f"{point} is not among the functions that can be trapped"
        trap = self._folder / f"{point}.{side}"
        sprung = trap.with_name(f"{trap.name}.sprung")
        sprung.unlink(missing_ok=True)
        draft = trap.with_name(f"{trap.name}.new")
        draft.write_text(" ".join(map(str, (n, victim, *others, *(() if spare else (victim,))))))
        draft.replace(trap)
        deadline_s = time.monotonic() + timeout_s
        while not sprung.exists() and alive() and time.monotonic() < deadline_s:
            time.sleep(LOOK_EVERY_S)
        trap.unlink(missing_ok=True)
        return sprung.exists()
