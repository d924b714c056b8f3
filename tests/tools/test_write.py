"""What `stillhouse write` starts. What it records: tests/integration/test_written.py."""

from __future__ import annotations

import pytest

from stillhouse.builtin import TEACHER_DIR
from stillhouse.tools.write import command as write


def test_the_student_is_the_teacher_is_never_trained_and_reads_the_text_for_teachers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[str] = []

    def start(arguments: list[str]) -> int:
        started.extend(arguments)
        return 7

    monkeypatch.setattr("stillhouse.launch.run.main", start)
    assert write.main(["out.record", "--learner.tasks.privileged=Be brief. ", "--buffer.max_staleness=3"]) == 7
    wanted = {f"--models.student={TEACHER_DIR}", f"--models.teacher={TEACHER_DIR}", "--learner.frozen=true"}
    assert {*wanted, "--learner.record=out.record", "--learner.tasks.privileged=Be brief. "} <= set(started)
    assert started.index("--buffer.max_staleness=7") < started.index("--buffer.max_staleness=3")  # the last one counts
