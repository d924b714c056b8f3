"""A whole run whose rewards come from a function of whole groups, and its replay."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from stillhouse.recording.reader import Recording
from stillhouse.replay import command as replay
from tests.integration.conftest import Launched
from tests.integration.test_whole_run import assert_balanced

CODE = """
def shortest_wins(rows, texts, rewards):
    assert len(texts) == 4 and all(reward is not None for reward in rewards) and "=" in rows[0]["prompt"]
    return [1.0 if len(text) == min(map(len, texts)) else None if reward == 0.0 else 0.25
            for text, reward in zip(texts, rewards)]
"""
OPTIONS = (
    *("--actors=1", "--teachers=1", "--steps=4", "--learner.eval_every=0"),
    *("--advantage=grpo", "--learner.tasks.group_reward=my_rewards:shortest_wins"),
)


def test_a_function_judges_whole_groups(launch: Callable[..., Launched], tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(CODE)
    run = launch(*OPTIONS, "--buffer.release=rollout")
    assert run.wait() == 0, run.text()
    assert_balanced(run.summary())
    run.expect_clean_audit()
    groups: defaultdict[int, list[float | None]] = defaultdict(list)
    with Recording(run.record) as recording:
        for batch in recording.batches:
            for rollout in recording.rollouts(batch):
                groups[rollout.item.task_id].append(rollout.item.reward)
    whole = [rewards for rewards in groups.values() if len(rewards) == 4]
    assert len(whole) >= 8 and all(1.0 in rewards and set(rewards) <= {None, 0.25, 1.0} for rewards in whole)
    assert not [name for step in run.steps() for name in step if "group_reward" in name]

    (tmp_path / "my_rewards.py").write_text("def shortest_wins(*_):\n    raise RuntimeError('a replay asks nobody')\n")
    assert replay.main([str(run.record), f"--run-dir={tmp_path / 'again'}"]) == 0
    weights = Path("checkpoints") / "step_000004" / "model.safetensors"
    assert (tmp_path / "again" / weights).read_bytes() == (run.run_dir / weights).read_bytes()

    failing = launch(*OPTIONS, "--buffer.release=rollout", folder="failing")
    assert failing.wait() == 1
    assert "failed for all" in failing.text() and "a replay asks nobody" in failing.text()
    assert failing.summary()["workers"]["learner-0"]["restarts"] == 0


def test_parts_of_groups_are_refused_before_anything_starts(launch: Callable[..., Launched], tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(CODE)
    run = launch(*OPTIONS, "--buffer.release=segment")
    assert run.wait() == 2
    assert "learner.tasks.group_reward: got 'my_rewards:shortest_wins' with buffer.release = segment" in run.text()
