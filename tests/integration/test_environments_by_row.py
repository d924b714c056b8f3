"""A whole run whose rows name different environments, one of which makes its own prompts: docs/environments.md as it
stands there. Recorded, audited, replayed and resumed."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from stillhouse.actors.envs.base import TextTokenizer
from stillhouse.builtin import STUDENT_DIR
from stillhouse.recording.reader import Recording
from stillhouse.replay import command as replay
from tests.integration.conftest import Launched
from tests.integration.test_whole_run import assert_balanced

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"
FEW = ("--config=several.toml", "--actors=2", "--teachers=1", "--learner.eval_every=4", "--learner.checkpoint_every=2")


def page(folder: Path) -> None:
    """Write the files of the page's example."""
    text = PAGE.read_text(encoding="utf-8")
    one, other = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (rows,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    (config,) = [t for t in re.findall(r"```toml\n(.*?)```", text, re.DOTALL) if "my_environments" in t]
    (folder / "my_environments.py").write_text(one + other)
    (folder / "prompts.jsonl").write_text(rows)
    (folder / "several.toml").write_text(config)


def test_the_pages_environments_run_side_by_side(
    launch: Callable[..., Launched], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page(tmp_path)
    run = launch(*FEW, "--steps=4")
    assert run.wait() == 0, run.text()
    assert_balanced(run.summary())
    run.expect_clean_audit()
    last = run.summary()["eval"][-1]
    assert list(last["tags"]) == ["addition", "guess", "sum"] and last["environments"] == {}
    assert last["failed"] == last["missing"] == 0
    figures = {name for row in run.steps() for name in row}
    assert {f"rollouts/{tag}/reward_mean" for tag in ("addition", "guess", "sum")} <= figures
    samples = [json.loads(line) for line in (run.run_dir / "samples.jsonl").read_text().splitlines()]
    assert any("12+30=" in sample["prompt"] for sample in samples)

    resumed = launch(*FEW, "--steps=6", "--resume")
    assert resumed.wait() == 0, resumed.text()
    assert_balanced(resumed.summary())
    resumed.expect_clean_audit()
    assert_prompts(resumed.record)

    monkeypatch.syspath_prepend(str(tmp_path))  # replay looks for the environments where it was started
    assert replay.main([str(resumed.record), f"--run-dir={tmp_path / 'again'}"]) == 0
    weights = Path("checkpoints") / "step_000004" / "model.safetensors"
    assert (tmp_path / "again" / weights).read_bytes() == (run.run_dir / weights).read_bytes()


def assert_prompts(record: Path) -> None:
    """Recorded rollouts begin with the prompt that their environment made, or with that of the row, and were trained
    and scored behind it."""
    tokenizer = TextTokenizer(AutoTokenizer.from_pretrained(STUDENT_DIR))
    texts = {"addition": "8293+4758=", "guess": "Guess my number.", "sum": "12+30="}
    begin = {tag: tokenizer.chat_prompt([{"role": "user", "content": text}]) for tag, text in texts.items()}
    trained: defaultdict[str, int] = defaultdict(int)
    turns: defaultdict[str, int] = defaultdict(int)
    with Recording(record) as recording:
        rollouts = [one for batch in recording.batches for one in recording.rollouts(batch)]
    for item, (ids, _, mask, scores), _ in rollouts:
        n = len(begin[item.tag])
        np.testing.assert_array_equal(ids[:n], begin[item.tag])
        assert not mask[:n].any() and scores[0][mask.astype(bool)].all()
        trained[item.tag] += int(mask.sum())
        turns[item.tag] = max(turns[item.tag], item.n_turns)
    assert trained.keys() == texts.keys() and min(trained.values()) > 0
    assert turns["addition"] == turns["sum"] == 1 and turns["guess"] <= 6


def test_a_row_for_an_unknown_environment_is_refused_before_anything_starts(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    page(tmp_path)
    with (tmp_path / "prompts.jsonl").open("a") as rows:
        rows.write('{"prompt": "x", "env": "sums"}\n')
    run = launch(*FEW, "--steps=4")
    assert run.wait() == 2, run.text()
    assert "prompts.jsonl:4: env 'sums' is not an environment of this run, expected one of guess, single_turn, sum" in (
        run.text()
    )
    assert "did you mean 'sum'?" in run.text() and not list((run.run_dir / "logs").glob("learner*"))


def test_a_row_far_down_ends_the_run_once_with_its_line(launch: Callable[..., Launched], tmp_path: Path) -> None:
    """The launcher looks at the first rows only; the learner at more of them, before it loads a model."""
    page(tmp_path)
    rows = ['{"prompt": "1+1=", "tag": "addition"}'] * 1_200 + ['{"prompt": "x", "env": "gess"}']
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write("\n".join(rows))
    run = launch(*FEW, "--steps=4")
    assert run.wait() == 1, run.text()
    assert "prompts.jsonl, line 1204: env 'gess' is not an environment of this run" in run.text()
    assert run.summary()["workers"]["learner-0"]["restarts"] == 0
