"""Rejection against loops over tokens, alone and together with a weight, and which policy it compares in later
updates."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stillhouse.learner.objectives import rejection
from stillhouse.learner.objectives.importance import TokenRatios
from stillhouse.learner.objectives.losses import LossTerms, TokenInputs, make_objective, token_loss
from stillhouse.learner.objectives.options import RatioBounds
from stillhouse.learner.objectives.registry import REJECTIONS, find_member
from tests.learner.objectives.test_losses import token_inputs
from tests.learner.settings import objective_config

SEQUENCE = [2, 0, 0, 2, 2, 0, 3, 3]
"""Rollout 1 is elsewhere; tokens of one rollout need not be neighbours."""
LEVELS = {"token": (0.7, 1.6), "sequence": (0.7, 1.6), "geometric": (0.9, 1.2)}
"""Member -> bounds that some tokens are outside of."""


def _inputs(seed: int = 0, *, later: bool = False) -> tuple[Tensor, TokenInputs]:
    """Log-probs of the student, and inputs; in a later update with those from the start of the step."""
    random = np.random.default_rng(seed)
    start_N, shift_N = (torch.tensor(random.normal(size=8) * scale) for scale in (1.0, 0.6))
    behaviour_N = start_N - torch.tensor(random.normal(0.2, 0.5, 8))
    inputs = token_inputs(behaviour_N, torch.tensor(random.normal(size=(1, 8))), torch.ones(1, 8, dtype=torch.bool))
    inputs = replace(inputs, sequence_N=torch.tensor(SEQUENCE), n_sequences=4, proximal_N=start_N if later else None)
    return (start_N + shift_N if later else start_N), inputs


def _expected(level: str, student_N: Tensor, behaviour_N: Tensor) -> list[bool]:
    ratios = [math.exp(float(s) - float(mu)) for s, mu in zip(student_N, behaviour_N, strict=True)]
    (low, high), found = LEVELS[level], list[bool]()
    for t in range(8):
        own = [ratios[t]] if level == "token" else [ratios[u] for u in range(8) if SEQUENCE[u] == SEQUENCE[t]]
        ratio = math.prod(own) ** (1 / len(own) if level == "geometric" else 1)
        found.append(not low <= ratio <= high)
    return found


def _terms(level: str, importance: Any, student_N: Tensor, inputs: TokenInputs) -> LossTerms:
    options: Any = "none" if level == "none" else (level, dict(zip(("low", "high"), LEVELS[level], strict=True)))
    config = objective_config(importance=importance, rejection=options)
    return token_loss(student_N, inputs, make_objective(config, max_new_tokens=9), 5)


def test_every_member_has_a_slow_twin() -> None:
    assert {*LEVELS, "none"} == set(REJECTIONS.built_in)


@pytest.mark.parametrize("later", [False, True], ids=["first update", "later update"])
@pytest.mark.parametrize("importance", [("truncated", {"cap": 1.3}), "geometric", "decoupled", "cispo"], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_rejected_tokens_have_no_gradient_and_all_others_the_weight_of_importance(
    level: str, importance: Any, later: bool
) -> None:
    student_N, inputs = _inputs(later=later)
    student_N.requires_grad_()
    plain, terms = (_terms(one, importance, student_N, inputs) for one in ("none", level))
    start_N = student_N.detach() if inputs.proximal_N is None else inputs.proximal_N
    rejected = _expected(level, start_N, inputs.behaviour_N)
    assert any(rejected) and not all(rejected)
    assert terms.rejected_N.tolist() == rejected and not bool(plain.rejected_N.any())
    (got_N,) = torch.autograd.grad(terms.loss, student_N)
    (all_N,) = torch.autograd.grad(plain.loss, student_N)
    for t in range(8):
        assert float(got_N[t]) == (0.0 if rejected[t] else float(all_N[t]))
        assert bool(terms.cut_N[t]) == (bool(plain.cut_N[t]) and not rejected[t])


def test_updates_of_one_step_reject_the_same_tokens_however_far_they_move() -> None:
    student_N, inputs = _inputs(later=True)
    first = _terms("geometric", "decoupled", student_N, inputs).rejected_N
    assert torch.equal(_terms("geometric", "decoupled", student_N + 7.0, inputs).rejected_N, first)
    without = replace(inputs, proximal_N=None)
    assert not torch.equal(_terms("geometric", "decoupled", student_N + 7.0, without).rejected_N, first)


@pytest.mark.parametrize("name", REJECTIONS.built_in)
def test_rejections_said_to_be_a_tokens_own_are_worked_out_token_by_token(name: str) -> None:
    """The step takes chunks of a rollout for these, and whole rollouts for all others."""
    student_N, behaviour_N = torch.rand((2, 12), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    member = find_member(REJECTIONS, name)

    def rejected(part: slice) -> Tensor:
        n = len(student_N[part])
        ratios = TokenRatios(student_N[part], behaviour_N[part], torch.zeros(n), torch.zeros(n, dtype=torch.int64), 1)
        return member(ratios, RatioBounds(low=0.8, high=1.25))

    alone_N = torch.cat([rejected(slice(t, t + 1)) for t in range(12)])
    assert (member in rejection.TOKEN_LOCAL) == torch.equal(rejected(slice(None)), alone_N)
