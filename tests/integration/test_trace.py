"""The trace of a whole run: a viewer can show it, nothing of it contradicts what the run's own figures say, and it
survives the death of a worker and a resume."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from stillhouse import builtin
from stillhouse.tools.trace.command import main
from stillhouse.tools.trace.figures import read_figures
from tests.integration.conftest import Launched
from tests.tools.trace.chrome_trace import faults, load

Launch = Callable[..., Launched]


def slices(trace: dict[str, Any], process: str, name: str) -> list[dict[str, Any]]:
    events = trace["traceEvents"]
    own = {e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"].startswith(process)}
    return [e for e in events if e["ph"] == "X" and e["pid"] in own and e["name"] == name]


def total(rows: Iterable[dict[str, Any]], prefix: str) -> float:
    return sum(value for row in rows for name, value in row.items() if name.startswith(prefix))


def operations(folder: Path, places: Iterable[Sequence[int]]) -> float:
    """Floating-point operations of reading tokens [start, end), by the layers of the model that transformers loads."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    weights = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, torch.nn.Linear))
    config = model.config
    pair = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return sum(2 * weights + pair * (at + 1) for start, end in places for at in range(start, end))


def test_the_figures_of_a_trace_agree_with_the_runs_own(launch: Launch, tmp_path: Path) -> None:
    """Counts exactly. Times as near as two clocks that are read one after the other: on a busy machine a process may
    stand still in between."""
    out = tmp_path / "run.json.gz"
    run = launch("--steps=25", "--learner.eval_every=0", "--max-staleness=1", f"--trace={out}")
    assert run.wait() == 0, run.text()
    assert "learner bubble" in run.text() and str(out) in run.text()
    trace, rows, summary = load(out), run.steps(), run.summary()
    assert faults(trace) == [] and set(trace["otherData"]["lost"].values()) == {0}
    figures = read_figures(out)
    waited_s, whole_s = total(rows, "wait/"), total(rows, "time/step_s")
    assert figures.learner_bubble == pytest.approx(waited_s / whole_s, rel=0.05, abs=0.03)
    assert sum(figures.wait_s.values()) == pytest.approx(waited_s, rel=0.05, abs=0.02 * len(rows))
    shares, efficiency = summary["learner"], summary["efficiency"]
    assert (
        1 - shares["busy_fraction"]
        == pytest.approx(waited_s / whole_s, abs=1e-6)
        == sum(shares["wait_fraction"].values())
    )
    assert efficiency["efficiency/learner_bubble"] == pytest.approx(1 - shares["busy_fraction"])
    assert efficiency["efficiency/teacher_wait"] == pytest.approx(figures.teacher_wait, abs=0.2)
    assert efficiency["efficiency/weight_pause_s"] == pytest.approx(figures.weight_pause_s, rel=0.5, abs=2e-3)
    words = " ".join(run.text().split())
    for places in (
        (r"the learner waited ([\d.]+)%", r"learner bubble: ([\d.]+)%"),
        (r"stood still ([\d.]+) ms per version", r"pause for weights: ([\d.]+) ms per version"),
        (r"goodput ([\d.]+)% of the tokens", r"goodput: ([\d.]+)% of the tokens"),
    ):
        table, traced = (float(re.findall(place, words)[0]) for place in places)
        assert table == pytest.approx(traced, rel=0.5, abs=2.0), places
    assert summary["tokens_trained"] == summary["tokens"]["trained"] == sum(row["train/tokens"] for row in rows)
    newest = rows[-5:]
    for tag, (_, last) in summary["changes"].items():
        assert last == pytest.approx(sum(row[tag] for row in newest) / 5), tag
    assert summary["sample"]["step"] == 25 == len(rows) == summary["steps"]
    tokens = summary["tokens"]
    assert figures.goodput == pytest.approx(tokens["trained"] / tokens["accepted"], rel=0.03)
    trained = slices(trace, "learner", "train")
    assert sum(e["args"]["tokens"] for e in trained) == tokens["trained"] and len(trained) == 25
    train_s = sum(e["dur"] for e in trained) / 1e6
    assert train_s == pytest.approx(total(rows, "train/step_s"), rel=0.1, abs=0.02 * len(rows))
    sends = [e["args"] for e in slices(trace, "actor", "send")]
    sent = [(one["start"], one["end"]) for one in sends if one["rollout"].startswith("train")]
    scores = [place for e in slices(trace, "teacher", "score") for place in e["args"]["items"]]
    items = [place[1:] for place in scores if place[0].startswith("train")]
    assert summary["flops"]["actor"] == pytest.approx(operations(builtin.STUDENT_DIR, sent), rel=0.1)
    assert summary["flops"]["teacher"] == pytest.approx(operations(builtin.TEACHER_DIR, items), rel=0.1)
    assert "floating-point operations: training" in words
    scored = sum(worker["tokens"] for worker in summary["workers"].values() if worker["role"] == "teacher")
    assert sum(e["args"]["tokens"] for e in slices(trace, "teacher", "score")) >= scored
    assert figures.teacher_wait == pytest.approx(1 - rows[-1]["teachers/busy_fraction"], abs=0.2)
    counted = [e["args"] for e in trace["traceEvents"] if e["ph"] == "C" and e["name"] == "staleness"]
    assert [c["max"] for c in counted] == [row["staleness/max"] for row in rows]
    assert [c["mean"] for c in counted] == pytest.approx([row["staleness/mean"] for row in rows])


def test_every_trained_token_is_reached_by_arrows_from_where_it_was_sampled(launch: Launch, tmp_path: Path) -> None:
    """By enumeration: of each item of a step, the tokens are covered by scorings whose arrows lead there."""
    out = tmp_path / "run.json"
    run = launch("--steps=4", "--learner.eval_every=0", f"--trace={out}")
    assert run.wait() == 0, run.text()
    trace = load(out)
    assert faults(trace) == []
    arrows = {e["ts"] for e in trace["traceEvents"] if e["ph"] == "f" and e["name"] == "trained"}
    scored: dict[str, set[int]] = {}
    for score in slices(trace, "teacher", "score"):
        for rollout, start, end in score["args"]["items"]:
            scored.setdefault(rollout, set()).update(range(start, end))
    steps = slices(trace, "learner", "train")
    for step in steps:
        assert step["ts"] in arrows
        for rollout, start, end in step["args"]["items"]:
            assert set(range(start, end)) <= scored[rollout]
    assert len(steps) == 4


def test_a_killed_actor_and_a_resume_are_in_one_trace(launch: Launch, tmp_path: Path) -> None:
    out = tmp_path / "run.json.gz"
    traced = ("--actors=2", "--steps=12", "--learner.eval_every=0", "--learner.checkpoint_every=4", f"--trace={out}")
    run = launch(*traced)
    run.until(lambda: len(run.steps()) >= 3, "step 3")
    run.workers("actor")[0].send_signal(signal.SIGKILL)
    run.until(lambda: len(run.steps()) >= 9, "step 9")
    run.process.send_signal(signal.SIGKILL)
    run.process.wait()
    again = tmp_path / "again.json"
    assert main([str(run.run_dir), str(again)]) == 0, "a run whose launcher was killed"
    assert faults(load(again)) == []
    resumed = launch(*traced, "--resume")
    assert resumed.wait() == 0, resumed.text()
    trace = load(out)
    assert faults(trace) == []
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert "learner-0 (process 2)" in names and sum(name.startswith("actor-") for name in names) == 5
    trained = slices(trace, "learner", "train")
    first, second = ([e["args"]["step"] for e in trained if e["pid"] == pid] for pid in (1, 2))
    assert first == list(range(1, len(first) + 1)) and len(first) >= 6, "all but what it held when it was killed"
    assert second == list(range(second[0], 13)), "all of the resumed run"


def test_without_the_key_nothing_is_written(launch: Launch) -> None:
    run = launch("--steps=2", "--learner.eval_every=0")
    assert run.wait() == 0, run.text()
    assert not (run.run_dir / "trace").exists() and "perfetto" not in run.text()
    assert json.loads((run.run_dir / "summary.json").read_text())["ok"]
