"""No two learners of a run make the same version: what one left unfinished, the next does under another epoch."""

from __future__ import annotations

from pathlib import Path

import pytest

from stillhouse.learner.reports.metrics import METRICS_FILE, newest_epoch
from stillhouse.learner.worker import first_version
from stillhouse.protocol.messages import WeightVersion as Version


@pytest.mark.parametrize(
    ("checkpoint", "buffers", "noted", "expected"),
    [
        (None, Version(0, 0), None, Version(1, 0)),  # killed in its first step, when the buffer had not heard of it
        (None, Version(0, 0), 0, Version(1, 0)),  # killed before the first checkpoint, and the buffer with it
        (None, Version(0, 7), None, Version(1, 0)),  # the buffer lives
        (Version(0, 4), Version(0, 4), 0, Version(1, 4)),
        (Version(0, 4), Version(0, 4), 1, Version(2, 4)),  # resumed once before, and killed before another checkpoint
        (Version(2, 8), Version(3, 9), 1, Version(4, 8)),
    ],
)
def test_going_on_opens_an_epoch_above_all_that_are_known(
    checkpoint: Version | None, buffers: Version, noted: int | None, expected: Version
) -> None:
    assert first_version(checkpoint, buffers, noted, resume=True) == expected


def test_the_first_learner_of_a_run_begins_with_the_buffers_version() -> None:
    assert first_version(None, Version(0, 0), None, resume=False) == Version(0, 0)


def test_the_newest_epoch_is_that_of_whole_lines(tmp_path: Path) -> None:
    assert newest_epoch(tmp_path) is None
    file = tmp_path / METRICS_FILE
    file.write_text('{"kind": "ev')
    assert newest_epoch(tmp_path) == 0, "somebody was here"
    row = '{"kind": "step", "step": 1, "epoch": %d}'
    file.write_text(f"{row % 2}\n{row % 1}\n{(row % 3)[:-1]}")
    assert newest_epoch(tmp_path) == 2
