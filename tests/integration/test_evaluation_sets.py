"""A whole run with the evaluation sets of docs/evaluation.md, and its replay."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from stillhouse.learner.reports.metrics import read_metrics
from stillhouse.replay import command as replay
from tests.integration.conftest import Launched
from tests.integration.test_whole_run import assert_balanced

PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"


def test_each_set_is_evaluated_at_its_steps_with_its_limits(
    launch: Callable[..., Launched], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sets.toml").write_text("".join(re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)))
    run = launch("--config=sets.toml", "--actors=1", "--teachers=1", "--steps=3")
    assert run.wait() == 0, run.text()
    assert_balanced(run.summary())
    run.expect_clean_audit()
    rows = [row for row in read_metrics(run.run_dir) if row["kind"] == "eval"]
    at = {name: sorted(row["step"] for row in rows if row.get("set", "") == name) for name in ("", "short")}
    assert at == {"": [0, 2, 3], "short": [0, 1, 2, 3]}
    own, short = ([row for row in rows if row.get("set", "") == name][-1] for name in ("", "short"))
    assert (own["eval/n_sampled"], own["eval/missing"], own["eval/failed"]) == (8 * 4, 0, 0)
    assert own["eval/avg_at_4"] == pytest.approx(own["eval/accuracy_sampled"])
    assert own["eval/avg_at_4"] <= own["eval/pass_at_2"] <= own["eval/pass_at_4"]
    assert (short["eval/sets/short/n_greedy"], short["eval/sets/short/n_sampled"]) == (4, 8 * 2)
    assert short["eval/sets/short/mean_length_sampled"] <= 8 < own["eval/mean_length_sampled"]
    summary = run.summary()
    assert [(p["name"], p["step"]) for p in summary["eval_sets"]] == [("short", step) for step in range(4)]
    assert "on short" in run.text() and "pass@2" in run.text()
    samples = [json.loads(line) for line in (run.run_dir / "samples.jsonl").read_text().splitlines()]
    assert {sample["name"] for sample in samples} == {"", "short"}

    monkeypatch.chdir(tmp_path)
    assert replay.main([str(run.record), f"--run-dir={tmp_path / 'again'}"]) == 0
    again = json.loads((tmp_path / "again" / "replay.json").read_text())
    again = again["eval"] + again["eval_sets"]
    assert sorted((point["name"], point["step"]) for point in again) == [
        *(("", step) for step in (0, 2, 3)),
        *(("short", step) for step in range(4)),
    ]
    first = next(point for point in again if (point["name"], point["step"]) == ("", 0))
    assert first["at_k"] == pytest.approx(summary["eval"][0]["at_k"])  # the same seeds, answer by answer
