"""learner.json: what a learner that goes on carries over from the one before it; and a full disk leaves the former."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stillhouse.learner.reports.alarms import LENGTH
from stillhouse.learner.reports.progress import AccountFile, LearnerProgress
from stillhouse.protocol import atomic_file
from stillhouse.protocol.messages import WeightVersion
from stillhouse.recording.append_file import Unwritten


def point(step: int, accuracy: float) -> dict[str, Any]:
    return {"step": step, "accuracy_greedy": accuracy}


def account(*points: dict[str, Any], first: float | None, steps: int = 0) -> dict[str, Any]:
    return {"steps": steps, "eval": list(points), "reverse_kl_first": first, "reverse_kl_last": first}


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "learner.json").read_text())


@pytest.fixture
def former(tmp_path: Path) -> Path:
    evaluations = (point(0, 0.1), point(20, 0.2), point(40, 0.4))
    AccountFile(tmp_path, Unwritten()).write(account(*evaluations, first=0.9, steps=45))
    return tmp_path


def test_evaluations_up_to_where_it_goes_on_and_the_first_reverse_kl_are_carried_over(former: Path) -> None:
    file = AccountFile(former, Unwritten(), resume=WeightVersion(1, 20))
    assert file.write(account(point(40, 0.45), first=0.5, steps=41))
    told = read(former)
    assert told["eval"] == [point(0, 0.1), point(20, 0.2), point(40, 0.45)]
    assert (told["steps"], told["reverse_kl_first"], told["reverse_kl_last"]) == (41, 0.9, 0.5)


def test_figures_of_the_run_go_on_after_a_resume_with_the_steps_that_were_kept() -> None:
    """The alarms compare with the start of the run, and the count of tokens is that of the student that is kept."""
    long: list[dict[str, Any]] = [
        {"kind": "step", "step": n, "train/tokens": 10, LENGTH: 40.0 + n % 3} for n in range(1, 31)
    ]
    whole, parts = LearnerProgress(), LearnerProgress()
    short: list[dict[str, Any]] = [{"kind": "step", "step": n, "train/tokens": 10, LENGTH: 3.0} for n in range(26, 41)]
    whole.restore([*long[:25], *short], 40)
    parts.restore(long, 25)
    assert parts.alarms.raised == [] and parts.tokens_trained == 250, "five of them a restart took back"
    for row in short:
        parts.alarms.add(row["step"], {LENGTH: row[LENGTH]})
    assert parts.alarms.raised == whole.alarms.raised and "short" in parts.alarms.on
    assert whole.tokens_trained == whole.account()["tokens_trained"] == 400


def test_from_the_beginning_again_only_the_untrained_student_is_the_same(former: Path) -> None:
    file = AccountFile(former, Unwritten(), resume=WeightVersion(1, 0))
    file.write(account(first=None))
    assert read(former)["eval"] == [point(0, 0.1)]
    file.write(account(point(0, 0.15), first=0.8))  # it is evaluated again, and the later one counts
    assert (read(former)["eval"], read(former)["reverse_kl_first"]) == ([point(0, 0.15)], 0.8)


@pytest.mark.parametrize("content", ["", '{"eval": 3}', '{"eval": [{}]}', "[]"])
def test_an_account_that_cannot_be_read_is_told_and_left_aside(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "learner.json").write_text(content)
    file = AccountFile(tmp_path, Unwritten(), resume=WeightVersion(1, 20))
    assert "nothing is carried over from it" in caplog.text
    assert file.write(account(point(40, 0.4), first=0.5))
    assert [p["step"] for p in read(tmp_path)["eval"]] == [40]


def test_an_account_that_cannot_be_written_is_counted_and_leaves_the_former_one(
    former: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    unwritten = Unwritten()
    file = AccountFile(former, unwritten)
    with monkeypatch.context() as patch:
        patch.setattr(atomic_file, "sync", full)
        assert not file.write(account(first=0.5, steps=50))
    assert read(former)["steps"] == 45 and [p.name for p in former.iterdir()] == ["learner.json"]
    assert unwritten.rows_total == 1
    assert file.write(account(first=0.5, steps=60)) and read(former)["steps"] == 60
