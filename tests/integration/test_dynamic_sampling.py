"""Whole runs with groups of known rewards: what was trained, dropped and masked, recounted from the record and from
what the environment itself wrote down."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from stillhouse import builtin
from stillhouse.tools.audit.record import RecordedBatch, RecordFile
from tests.integration.conftest import Launched
from tests.integration.test_exactly_once import fates, interrupt
from tests.integration.test_whole_run import assert_balanced

CODE = '''
import json, os
from stillhouse.actors.envs.base import Environment, Observation, StepResult


class Known(Environment):
    """Every answer to an easy prompt gets 1, to a hard one 0; to a mixed one, what the sample's number says."""

    def __init__(self, tokenizer, *, log):
        self._log = log

    async def reset(self, task):
        self._task = task
        return Observation()

    async def step(self, action):
        kind, (what, _, sample, _) = self._task.row["kind"], self._task.rollout_id.split("-")
        reward = {"easy": 1.0, "hard": 0.0, "mixed": float(int(sample) % 2)}[kind]
        if what == "train":
            entry = {"rollout": self._task.rollout_id, "kind": kind, "reward": reward,
                     "tokens": len(action.token_ids), "end": action.finish_reason}
            with open(self._log, "a") as log:
                log.write(json.dumps(entry) + "\\n")
        return StepResult(done=True, reward=reward)
'''
OPTIONS = (
    *("--actors=2", "--teachers=0", "--steps=6", "--learner.eval_every=0", "--learner.objective.coef=0"),
    *("--advantage=grpo", "--buffer.release=rollout", "--learner.tasks.env=known", "--max-staleness=1"),
    "--learner.tasks.max_new_tokens=24",
)


class Logged(NamedTuple):
    """What the environment said of a rollout."""

    kind: str
    reward: float
    tokens: int
    end: str


def prompts(folder: Path, *kinds: str) -> tuple[str, ...]:
    """Rows whose kinds take turns, and the environment: the options of a run."""
    (folder / "known_env.py").write_text(CODE)
    rows = [json.loads(line) for line in builtin.TRAIN_JSONL.read_text().splitlines()[:3000]]
    lines = [json.dumps({**row, "kind": kinds[i % len(kinds)]}) for i, row in enumerate(rows)]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    environment = "--actor.environments.known"
    return (
        f"--learner.tasks.prompts={folder / 'rows.jsonl'}",
        f"{environment}.name=known_env:Known",
        f"{environment}.options.log={folder / 'rewards.log'}",
    )


def logged(folder: Path) -> dict[str, Logged]:
    entries: list[dict[str, Any]] = [json.loads(line) for line in (folder / "rewards.log").read_text().splitlines()]
    return {one.pop("rollout"): Logged(**one) for one in entries}


def test_groups_of_equal_rewards_are_dropped_and_truncated_rollouts_masked_as_the_environment_counted_them(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    rows = prompts(tmp_path, "easy", "mixed", "hard")
    run = launch(*OPTIONS, *rows, "--buffer.dynamic_sampling=10", "--buffer.mask_truncated=true")
    assert run.wait() == 0, run.text()
    summary, said = run.summary(), logged(tmp_path)
    assert_balanced(summary)
    run.expect_clean_audit()

    fates, rewards, trained = dict[str, tuple[str, str]](), defaultdict[int, set[float | None]](set), Counter[str]()
    with RecordFile(run.record) as file:
        for place in file.places():
            if not isinstance(batch := place.record, RecordedBatch):
                continue
            for one in batch.settled or ():
                (rollout_id,) = (i for i in said if i.startswith(f"train-{one.task_id}-{one.sample_index}-"))
                assert rollout_id not in fates, "settled twice"
                fates[rollout_id] = (one.fate, one.reason)
            for item in batch.items:
                rollout_id = item.item.rollout_id
                assert item.item.reward == said[rollout_id].reward
                rewards[item.item.task_id].add(item.item.reward)
                trained[rollout_id] += sum(end - start for start, end in file.runs(item, place.blob_at))
    assert len(rewards) >= 24 and all(some == {0.0, 1.0} for some in rewards.values())
    for rollout_id, (fate, reason) in fates.items():
        one = said[rollout_id]
        if one.end == "length":
            assert (fate, reason, trained[rollout_id]) == ("masked", "truncated", 0)
        elif one.kind == "mixed":
            assert (fate, reason, trained[rollout_id]) == ("trained", "", one.tokens)
        else:
            assert (fate, reason, trained[rollout_id]) == ("dropped", "equal_rewards", 0)
    kinds = Counter(said[rollout_id].kind for rollout_id in fates)
    assert min(kinds["easy"], kinds["hard"]) >= 40, "two of three groups taught nothing"

    tokens = summary["tokens"]
    assert sum(trained.values()) == tokens["trained"]
    settled = sum(said[i].tokens for i, (_, reason) in fates.items() if reason == "equal_rewards")
    never_in_a_batch = sum(one.tokens for one in said.values() if one.kind != "mixed" and one.end == "stop")
    assert settled <= tokens["dropped"]["equal_rewards"] <= never_in_a_batch
    assert tokens["masked"]["truncated"] > 0
    last = run.steps()[-1]
    assert last["queue/groups_equal_total"] >= 10 and last["queue/batches_equal_in_a_row"] == 0
    assert 0 < last["dropped/equal_rewards_total"] <= tokens["dropped"]["equal_rewards"]


def test_a_run_of_nothing_but_equal_rewards_ends_and_says_why(launch: Callable[..., Launched], tmp_path: Path) -> None:
    run = launch(*OPTIONS, *prompts(tmp_path, "hard"), "--buffer.dynamic_sampling=3")
    assert run.wait() == 1, run.text()
    said = r"dynamic sampling dropped \d+ batches of rollouts in a row at step 0, because all rewards of a group were"
    assert re.search(said, run.text()), run.text()
    summary = run.summary()
    assert_balanced(summary)
    assert summary["workers"]["learner-0"]["restarts"] == 0 and summary["tokens"]["trained"] == 0
    assert summary["tokens"]["dropped"]["equal_rewards"] >= 3 * 16


def test_each_sample_is_settled_once_when_learner_and_launcher_are_killed(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    """A dropped group is settled in the checkpoint that knows it, and sampled again after one that does not."""
    rows = prompts(tmp_path, "easy", "mixed", "hard")
    words = (*OPTIONS, *rows, "--steps=12", "--learner.checkpoint_every=3", "--buffer.dynamic_sampling=10")
    run = interrupt(launch, words, 4, 7)
    run.expect_clean_audit()
    assert_balanced(run.summary())
    kinds = {int(rollout_id.split("-")[1]): one.kind for rollout_id, one in logged(tmp_path).items()}
    settled, end = fates(run)
    assert end >= 60 and {(task, i) for task in range(end) for i in range(4)} <= settled.keys()
    for (task, _), one in settled.items():
        if kinds[task] == "mixed":
            assert one.fate == "trained" or one.reason == "stale", one
        else:
            assert (one.fate, one.reason) == ("dropped", "equal_rewards"), one
    assert len({task for task, _ in settled if kinds[task] != "mixed"}) >= 40
