"""A whole run of the agent written out in docs/agents/coroutine.md: branches and roots reach the learner."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from stillhouse.recording.reader import Recording
from tests.integration.conftest import Launched
from tests.integration.test_whole_run import assert_balanced

PAGE = Path(__file__).parents[2] / "docs" / "agents" / "coroutine.md"


def test_the_pages_agent_trains_branches_of_one_rollout(launch: Callable[..., Launched], tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    (tmp_path / "my_agents.py").write_text("".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)))
    (tmp_path / "agents.toml").write_text("".join(re.findall(r"```toml\n(.*?)```", text, re.DOTALL)))
    few = ("--config=agents.toml", "--actors=1", "--teachers=1", "--learner.eval_every=2")
    run = launch(*few, "--steps=2")
    assert run.wait() == 0, run.text()
    assert_balanced(run.summary())
    run.expect_clean_audit()
    assert run.summary()["eval"][-1]["failed"] == 0
    with Recording(run.record) as recording:
        rollouts = [rollout for batch in recording.batches for rollout in recording.rollouts(batch)]
    whole = [rollout for rollout in rollouts if rollout.item.final]
    assert whole and all(len(rollout.item.branches) >= 2 for rollout in whole), "a second line and a helper"
    for rollout in whole:
        n_prompt = int(rollout.arrays[2].argmax())  # the first token to train stands behind the task's prompt
        follows = [branch.follows for branch in rollout.item.branches]
        assert min(follows) < n_prompt <= max(follows), "the helper leaves the prompt, the second line its end"
