"""A senseless learner configuration is refused when it is made, with a message that says what to change."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.objectives.options import TokenAdvantage, ValueConfig
from stillhouse.learner.prompts.config import TaskConfig
from stillhouse.protocol.settings import Member
from tests.learner.settings import learner_config
from tests.patience import PATIENCE_S


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr": 0.0}, "lr: got 0.0, expected float > 0"),
        ({"lr": float("nan")}, "lr: got nan, expected float > 0"),
        ({"coef": float("inf")}, "coef: got inf, expected float >= 0"),
        ({"coef": 0.0}, "leaves nothing to learn from"),
        ({"teacher_coefs": {"default": 0.0}, "coef": 0.0}, "leaves nothing to learn from"),
        (
            {"tasks": TaskConfig(routes={})},
            "tasks.routes = {} with objective.advantage = 'none' leaves nothing to learn from",
        ),
        ({"teacher_coefs": {"math": 1.0}}, "names the pool 'math'; expected one of tasks.routes: default"),
        ({"teacher_coefs": {"default": -1.0}}, "teacher_coefs.default must be at least 0"),
        ({"importance": ("ppo", {"dual": 1.1})}, "dual: got 1.1, expected 0 .off. or above high = 1.2"),
        ({"divergence": "k4"}, "divergence = 'k4'; did you mean 'k[123]'. expected one of k1, k2, k3"),
        ({"importance": "truncate"}, "importance = 'truncate'; did you mean 'truncated'."),
        ({"rejection": "geo"}, "rejection = 'geo'; did you mean 'geometric'"),
        (
            {"rejection": "token", "divergence": "seq_kd", "importance": "none"},
            "rejection = 'token' with divergence = 'seq_kd'",
        ),
        ({"rejection": "token", "divergence": "reverse_kl"}, "only terms of sampled tokens are rejected"),
        ({"advantage": "grpo2"}, "advantage = 'grpo2'; did you mean 'grpo'."),
        ({"advantage": "gea"}, "advantage = 'gea'; did you mean 'gae'.* 'stillhouse.advantages'"),
        ({"updates_per_batch": 0}, "updates_per_batch: got 0, expected int >= 1"),
        ({"aggregation": "mean"}, "aggregation = 'mean'; did you mean"),
        ({"divergence": "seq_kd"}, "importance = 'truncated': cross-entropy is on the text as it stands"),
        ({"aggregation": "turn_maen"}, "aggregation = 'turn_maen'; did you mean 'turn_mean'"),
        (
            {"aggregation": "turn_mean", "importance": "gspo", "advantage": "grpo"},
            "aggregation = 'turn_mean' with importance = 'gspo'",
        ),
        ({"turn_discount": 1.5}, "turn_discount: got 1.5, expected float >= 0 and <= 1"),
        ({"turn_discount": 0.9, "coef": 0.0, "advantage": "grpo"}, "there is no divergence to discount"),
        ({"prefix_gain": 0.5, "divergence": "null"}, "prefix_gain = 0.5 without a teacher in the loss"),
        ({"prefix_gain": 0.5, "coef": 0.0, "advantage": "grpo"}, "prefix_gain = 0.5 without a teacher in the loss"),
        ({"prefix_gain": 0.5, "tasks": TaskConfig(temperature=0.7)}, "objective.prefix_gain = 0.5 with tasks.temp"),
        ({"divergence": "null", "domain_scale": "rms"}, "divergence = 'null' reads no teacher"),
        ({"divergence": "null", "teacher_coefs": {"default": 1.0}}, "divergence = 'null' reads no teacher"),
        (
            {"divergence": "null", "teacher_divergences": {"default": "k3"}},
            "no teacher_coefs and no teacher_divergences",
        ),
        (
            {"teacher_divergences": {"default": "null"}},
            "teacher_divergences.default: got 'null', which reads no teacher",
        ),
        ({"teacher_divergences": {"default": "seq_kd"}}, "divergence = 'seq_kd' with importance = 'truncated'"),
        (
            {"teacher_divergences": {"math": "k3"}},
            "objective.teacher_divergences names the pool 'math'; expected one of",
        ),
        (
            {"teacher_divergences": {"default": Member(name="jsd")}},
            "teacher_divergences.default: divergence: got Member with the name 'jsd', expected Jsd",
        ),
        (
            {"teacher_divergences": {"default": "jsd"}, "cost_transform": "log"},
            "cost_transform = 'log' with divergence = 'jsd': only costs",
        ),
        (
            {"teacher_divergences": {"default": "jsd"}, "domain_scale": "rms"},
            "domain_scale = 'rms' with divergence = 'k1', 'jsd': only costs",
        ),
        (
            {"teacher_divergences": {"default": "jsd"}, "rejection": "token"},
            "rejection = 'token' with divergence = 'jsd' and advantage = 'none'",
        ),
        (
            {
                "teacher_divergences": {"default": ("k1", {"kl_student": "behaviour"})},
                "tasks": TaskConfig(temperature=0.7),
            },
            "objective.divergence.kl_student = 'behaviour'",
        ),
        ({"divergence": ("null", {"threshold": -4.2})}, "Expected `float` > 0.0 - at `..threshold`"),
        ({"length_penalty": "overlong"}, "length_penalty = 'overlong' with advantage = 'none'"),
        ({"length_penalty": "overlog", "advantage": "grpo"}, "length_penalty = 'overlog'; did you mean 'overlong'"),
        (
            {"length_penalty": "group_length", "advantage": "gae", "tasks": TaskConfig(group_size=1)},
            "tasks.group_size = 1 compares a rollout with itself",
        ),
        ({"record_max_bytes": -1}, "record_max_bytes: got -1, expected int >= 0"),
        ({"importance": ("truncated", {"cap": -1.0})}, "importance = 'truncated': Expected `float` > 0.0"),
        ({"rejection": ("token", {"low": 1.0, "high": 1.0})}, "low must be below high"),
        ({"rejection": ("token", {"low": -0.1})}, "Expected `float` >= 0.0 - at `..low`"),
        ({"rejection": ("geometric", {"low": 2.0})}, "low <= 1 <= high; tokens of the present policy have the ratio 1"),
        ({"importance": ("cispo", {"low": 0.2, "high": 0.28})}, "slime take, use low = 0.8 and high = 1.28"),
        ({"importance": ("gspo", {"low": 0.2, "high": 0.2})}, "eps_low and eps_high, .* use low = 0.8 and high = 1.2"),
        ({"importance": ("ppo", {"high": 0.28})}, "use low = 0.8 and high = 1.28"),
        ({"cost_return": "mean"}, "cost_return = 'mean' with cost_discount = 0"),
        ({"cost_discount": 0.9, "divergence": "jsd"}, "only costs of tokens that the student sampled are discounted"),
        ({"cost_discount": 0.9, "divergence": ("k1", {"baseline": "expected_cost"})}, "only noise would be left"),
        ({"cost_discount": 0.9, "coef": 0.0, "advantage": "grpo"}, "there are no costs"),
        ({"divergence": Member(name="jsd")}, "divergence: got Member with the name 'jsd', expected Jsd"),
        ({"betas": (0.9, 1.0)}, "betas: got .* two numbers in"),
        ({"min_lr_ratio": 1.5}, "min_lr_ratio: got 1.5, expected float >= 0 and <= 1"),
        ({"max_grad_norm": -1.0}, "max_grad_norm: got -1.0, expected float >= 0"),
        ({"pack_tokens": 0}, "pack_tokens: got 0, expected int >= 1"),
        ({"publish_every": 0}, "publish_every: got 0, expected int >= 1"),
        ({"keep_checkpoints": 0}, "keep_checkpoints: got 0, expected int >= 1"),
        ({"device": ""}, "device is empty"),
    ],
)
def test_senseless_value_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        learner_config(**fields)


def test_what_some_pools_use_is_not_refused_for_the_others() -> None:
    tasks = TaskConfig(routes={"default": (), "math": ()})
    two: dict[str, Any] = {"tasks": tasks, "teacher_divergences": {"math": "jsd"}}
    assert learner_config(**two, cost_transform="log", rejection="token").objective.needs_top_k_for("math")
    with_baseline = learner_config(divergence=("k1", {"baseline": "expected_cost"}), rejection="token").objective
    assert with_baseline.needs_top_k_for("default") == "divergence.baseline = 'expected_cost' of 'k1'"


@pytest.mark.parametrize(
    ("tasks", "fields", "message"),
    [
        ({"top_p": 0.9}, {}, "expected a top_k from 2 to 4096"),
        ({"min_p": 0.1}, {}, "expected a top_k from 2 to 4096"),
        ({"top_k": 1}, {}, "expected a top_k from 2 to 4096"),
        ({"top_k": 20}, {"divergence": ("k1", {"baseline": "expected_cost"})}, "some are never sampled"),
        ({"temperature": 0.7}, {"importance": "none"}, "needs the ratio .* 'truncated', or temperature 1"),
        ({"temperature": 0.7}, {"importance": "gspo"}, "needs the ratio of each token"),
        ({"temperature": 0.7}, {"rejection": "token"}, "the present policy would write too"),
        ({"teacher_share": 0.2}, {"importance": "none"}, "needs the ratio .* 'truncated', or teacher_share = 0"),
        ({"teacher_share": 0.2}, {"rejection": "token"}, "the present policy would write too"),
        ({"teacher_share": 0.2}, {"divergence": ("k1", {"kl_student": "behaviour"})}, "mu is not the student's"),
        ({"teacher_share": 0.2, "top_k": 20}, {}, "expected one of the two"),
        ({"temperature": 0.7}, {"divergence": ("k1", {"kl_student": "behaviour"})}, "mu is not the student's log-prob"),
    ],
)
def test_sampling_that_cannot_be_corrected_is_refused(
    tasks: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        learner_config(tasks=TaskConfig(**tasks), **fields)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("coef", 0.0, "coef: got 0.0, expected float > 0"),
        ("lr", float("inf"), "lr: got inf, expected float > 0"),
        ("clip", -0.1, "clip: got -0.1, expected float >= 0"),
        ("discount", 1.1, "discount: got 1.1, expected float >= 0 and <= 1"),
        ("decay", -0.5, "decay: got -0.5, expected float >= 0 and <= 1"),
    ],
)
def test_wrong_values_of_a_value_function_are_refused(field: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        section = TokenAdvantage if field in ("discount", "decay") else ValueConfig
        section(**{field: value})  # pyright: ignore[reportArgumentType]


def test_other_temperature_is_accepted_where_the_ratio_corrects_it() -> None:
    assert LearnerConfig(tasks=TaskConfig(temperature=0.7)).objective.importance.name == "truncated"


def test_configuration_imports_without_torch() -> None:
    code = "import sys, stillhouse.learner.config; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=PATIENCE_S).returncode == 0
