"""Each recipe for three steps on the built-in task: it trains by what it names, and its ledger balances."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stillhouse.builtin.addition import write_problems
from stillhouse.builtin.specialists import problem_sets
from stillhouse.replay import command as replay
from tests.integration.conftest import ROOT, Launched
from tests.integration.test_whole_run import assert_balanced

Launch = Callable[..., Launched]
SHORT = ("--steps=3", "--learner.eval_every=0", "--actors=1")


def run_recipe(launch: Launch, name: str, *more: str) -> Launched:
    run = launch("--config", str(ROOT / "examples" / "recipes" / f"{name}.toml"), *SHORT, *more)
    assert run.wait() == 0, run.text()
    assert_balanced(run.summary())
    assert [row["step"] for row in run.steps()] == [1, 2, 3]
    assert all(row["train/grad_norm"] > 0 for row in run.steps())
    return run


@pytest.mark.parametrize(
    ("name", "cost", "rewards"),
    [
        ("opd", "sampled", False),
        ("opd_top_k", "distributions", False),
        ("opd_grpo", "sampled", True),
        ("grpo", None, True),
    ],
)
def test_a_recipe_trains_by_what_it_names(launch: Launch, name: str, cost: str | None, rewards: bool) -> None:
    costs_only: list[bool] = []
    for row in run_recipe(launch, name).steps():
        # k1 of sampled tokens is the reverse KL as reported; a divergence between distributions is another number.
        assert ("train/divergence" in row) == ("train/reverse_kl" in row) == (cost is not None)
        if cost is not None:
            assert (row["train/divergence"] == pytest.approx(row["train/reverse_kl"])) == (cost == "sampled")
        expected = -row["train/divergence"] if cost == "sampled" else 0.0
        costs_only.append(row["train/advantage_mean"] == pytest.approx(expected, abs=1e-9))
    # Without an advantage from rewards, A = -coef * cost. GRPO's own has mean 0 over the rollouts of a group, and over
    # their tokens too in a step whose answers happen to be equally long.
    assert any(not same for same in costs_only) if rewards else all(costs_only)


def test_rewards_need_no_teacher(launch: Launch, tmp_path: Path) -> None:
    """Nothing waits for grades, nothing says what only a teacher could; the recording of it is replayed so, too."""
    record = tmp_path / "run.record"
    run = launch(
        *("--config", str(ROOT / "examples" / "recipes" / "grpo.toml"), "--steps=4", "--actors=1"),
        *("--learner.eval_every=2", f"--record={record}", "--teacher=nowhere"),
    )
    assert run.wait() == 0, run.text()
    summary = run.summary()
    assert_balanced(summary)
    assert "no teacher" in run.text() and "warning" not in run.text()
    assert {worker["role"] for worker in summary["workers"].values()} == {"buffer", "learner", "actor"}
    assert [point["step"] for point in summary["eval"]] == [0, 2, 4]
    assert all(0 <= point["accuracy_sampled"] <= 1 and point["reverse_kl"] is None for point in summary["eval"])
    assert summary["reverse_kl_last"] is None and summary["teacher_accuracy"] == {}
    assert "KL" not in run.text()
    assert len(run.steps()) == 4 and not {"train/reverse_kl", "train/divergence"} & run.steps()[-1].keys()

    again = tmp_path / "again"
    assert replay.main([str(record), f"--run-dir={again}", "--learner.eval_every=4"]) == 0
    weights = Path("checkpoints") / "step_000004" / "model.safetensors"
    assert (again / weights).read_bytes() == (run.run_dir / weights).read_bytes()


def test_ppo_trains_and_a_replay_makes_its_updates_again(launch: Launch, tmp_path: Path) -> None:
    """Value head and several updates per batch, from key to checkpoint, bit for bit."""
    recorded, again = tmp_path / "ppo.record", tmp_path / "again"
    run = run_recipe(launch, "ppo", "--record", str(recorded))
    assert [(row["train/updates_made"], row["train/updates_lost"]) for row in run.steps()] == [(2, 0)] * 3
    assert all(row["train/value_tokens"] == row["train/tokens"] > 0 for row in run.steps())
    assert run.steps()[0]["train/value_mean"] == 0.0 != run.steps()[-1]["train/value_mean"]
    assert replay.main([str(recorded), f"--run-dir={again}"]) == 0
    for name in ("model.safetensors", "value_head.safetensors", "optimizer.safetensors"):
        file = Path("checkpoints") / "step_000003" / name
        assert (again / file).read_bytes() == (run.run_dir / file).read_bytes(), name


def test_two_pools_grade_their_own_tags_in_the_shares_of_the_mix(launch: Launch, tmp_path: Path) -> None:
    train, evaluation, _ = problem_sets()
    half = len(evaluation) // 2
    mixed = [problem for pair in zip(evaluation[:half], evaluation[half:], strict=True) for problem in pair]
    for name, problems in (("train", train), ("eval", mixed)):
        write_problems(tmp_path / f"{name}.jsonl", problems)
    run = run_recipe(
        launch,
        "specialists",
        *("--student=builtin", "--pools.multipliers.model=builtin"),
        *(f"--prompts={tmp_path / 'train.jsonl'}", f"--eval-prompts={tmp_path / 'eval.jsonl'}"),
        "--learner.eval_every=3",
    )
    for point in run.summary()["eval"]:
        tags = point["tags"]
        assert tags.keys() == {"addition", "multiplication"}
        assert sum(own["n_sampled"] for own in tags.values()) == point["n_sampled"] == 8
        assert all(0 <= own["accuracy_sampled"] <= 1 and own["reverse_kl"] > 0 for own in tags.values())
    assert "of multiplication" in run.text()
    workers = run.summary()["workers"]
    assert workers["teacher-0"]["tokens"] > 0 and workers["teacher-1"]["tokens"] > 0
