"""A whole run with an environment that gives a reward at each turn, trained on the returns of turns, through everything
that rewards pass: the journal (the buffer is killed), record, audit, replay, samples, `try`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stillhouse.recording.reader import Recording
from stillhouse.replay import command as replay
from tests.integration.conftest import ROOT, Launched
from tests.integration.test_whole_run import assert_balanced

CODE = '''
from stillhouse.actors.envs.base import Action, Environment, EnvTask, Observation, StepResult, TextTokenizer

class Lengths(Environment):
    """Three turns; each is worth minus a tenth of its tokens, the second nothing."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    async def reset(self, task: EnvTask) -> Observation:
        return Observation()

    async def step(self, action: Action) -> StepResult:
        reward = None if action.turn == 1 else -0.1 * len(action.token_ids)
        if action.turn == 2 or action.last:
            return StepResult(done=True, reward=reward)
        return StepResult(self._tokenizer.chat_turn("8293+4758="), reward=reward)
'''
CONFIG = """
[learner]
eval_every = 2
[learner.tasks]
env = "lengths"
max_new_tokens = 120
[actor.environments.lengths]
name = "my_rewards:Lengths"
[actor.torch]
max_context = 256
[learner.objective]
advantage = { name = "turn_returns", discount = 0.9 }
aggregation = "sequence_turn_mean"
turn_discount = 0.9
length_penalty = "group_length"
[buffer]
release = "rollout"
"""


def test_rewards_of_turns_reach_the_learner(
    launch: Callable[..., Launched], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_rewards.py").write_text(CODE)
    (tmp_path / "rewards.toml").write_text(CONFIG)
    run = launch("--config=rewards.toml", "--actors=1", "--teachers=1", "--steps=4")
    run.until(lambda: len(run.steps()) >= 1, "the first step")
    (buffer,) = run.workers("buffer")
    os.kill(buffer.pid, signal.SIGKILL)  # what it held comes back from its journal
    assert run.wait() == 0, run.text()
    assert_balanced(run.summary())
    run.expect_clean_audit()
    with Recording(run.record) as recording:
        rollouts = [rollout for batch in recording.batches for rollout in recording.rollouts(batch)]
    three = [r for r in rollouts if r.item.final and r.item.n_turns == 3]
    assert three
    for item, (_, _, mask, _), _ in three:
        first, last = item.turn_rewards
        assert last.end == item.end and mask[first.end - 1] and not mask[first.end]
        assert item.reward == pytest.approx(first.reward + last.reward)
    assert any(step["rollouts/rewarded_turns_mean"] > 1 for step in run.steps())
    assert all("train/length_penalty" in step for step in run.steps())
    samples = [json.loads(line) for line in (run.run_dir / "samples.jsonl").read_text().splitlines()]
    assert any([turn for turn, _ in sample["turn_rewards"]] == [1, 3] for sample in samples)

    monkeypatch.syspath_prepend(str(tmp_path))
    assert replay.main([str(run.record), f"--run-dir={tmp_path / 'again'}"]) == 0
    weights = Path("checkpoints") / "step_000004" / "model.safetensors"
    assert (tmp_path / "again" / weights).read_bytes() == (run.run_dir / weights).read_bytes()

    said = subprocess.run(
        [sys.executable, str(ROOT / "launch" / "cluster.py"), "try", "lengths", "--config", "rewards.toml", "--n", "2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout
    assert "reward of this turn: -" in said
