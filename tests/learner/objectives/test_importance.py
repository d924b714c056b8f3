"""Importance weights against loops over tokens, clipped ones against the gradient of the surrogate they stand for, and
what each does to the expected gradient of sequences that another policy sampled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from stillhouse.learner.objectives.importance import (
    TOKEN_LOCAL,
    ImportanceFn,
    TokenRatios,
    decoupled,
    gspo,
    ppo,
    truncated,
)
from stillhouse.learner.objectives.options import Capped, Decoupled
from stillhouse.learner.objectives.registry import IMPORTANCE, find_member


class Every(NamedTuple):
    """The options of all members: each reads its own."""

    cap: float
    low: float
    high: float
    dual: float = 0.0


OPTIONS = Every(cap=1.5, low=0.5, high=2.0, dual=3.0)
RATIOS = [0.0, 0.1, 0.5, 0.999, 1.0, 1.5, 1.7, 2.0, 2.1, 30.0, math.inf]


def _ratios(ratio_N: Sequence[float], advantage_N: Sequence[float], sequence_N: Sequence[int]) -> TokenRatios:
    behaviour_N = -torch.arange(1, len(ratio_N) + 1, dtype=torch.float64)
    return TokenRatios(
        student_N=behaviour_N + torch.tensor(ratio_N, dtype=torch.float64).log(),
        behaviour_N=behaviour_N,
        advantage_N=torch.tensor(advantage_N, dtype=torch.float64),
        sequence_N=torch.tensor(sequence_N),
        n_sequences=max(sequence_N) + 2,  # one rollout of the batch is in another microbatch
    )


def _bounded(kind: str, ratio: float, advantage: float) -> tuple[float, bool]:
    if kind == "none":
        return 1.0, False
    if kind == "capped":
        return (OPTIONS.cap, True) if ratio > OPTIONS.cap else (ratio, False)
    if kind == "limited":
        nearest = OPTIONS.low if ratio < OPTIONS.low else OPTIONS.high if ratio > OPTIONS.high else ratio
        return nearest, nearest != ratio
    high = OPTIONS.high if advantage > 0 else OPTIONS.dual if advantage < 0 else math.inf
    low = OPTIONS.low if advantage < 0 else -math.inf
    return (ratio, False) if low <= ratio <= high else (0.0, True)


SLOW = {
    "none": ("none", "token"),
    "truncated": ("capped", "token"),
    "cispo": ("limited", "token"),
    "sequence": ("capped", "product"),
    "geometric": ("capped", "geometric"),
    "ppo": ("clip", "token"),
    "gspo": ("clip", "geometric"),
    "decoupled": ("capped", "token"),
}
"""What is done to which ratio."""


def test_every_member_has_a_slow_twin() -> None:
    assert set(SLOW) == set(IMPORTANCE.built_in)


@pytest.mark.parametrize("name", [name for name, (_, level) in SLOW.items() if level == "token"])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 2.0])
def test_token_members_equal_the_loop(name: str, advantage: float) -> None:
    told = RATIOS[1:-1] if name == "decoupled" else RATIOS  # it looks at s alone, which is finite in a batch
    ratios = _ratios(told, [advantage] * len(told), [0] * len(told))
    weights_N, cut_N = find_member(IMPORTANCE, name)(ratios, OPTIONS)
    expected = [_bounded(SLOW[name][0], ratio, advantage) for ratio in ratios.ratio().tolist()]
    assert weights_N.tolist() == [weight for weight, _ in expected]
    assert cut_N.tolist() == [cut for _, cut in expected]


@pytest.mark.parametrize("name", [name for name, (_, level) in SLOW.items() if level != "token"])
def test_sequence_members_equal_the_loop(name: str) -> None:
    random = np.random.default_rng(0)
    sequence_N = [2, 0, 0, 2, 2, 0, 3, 3]  # rollout 1 is elsewhere; tokens of one rollout need not be neighbours
    ratio_N, advantage_N = random.lognormal(0.2, 0.6, 8).tolist(), random.normal(size=8).tolist()
    weights_N, cut_N = find_member(IMPORTANCE, name)(_ratios(ratio_N, advantage_N, sequence_N), OPTIONS)
    kind, level = SLOW[name]
    for t in range(8):
        own = [ratio_N[u] for u in range(8) if sequence_N[u] == sequence_N[t]]
        ratio = math.prod(own) ** (1 if level == "product" else 1 / len(own))
        weight, cut = _bounded(kind, ratio, advantage_N[t])
        assert float(weights_N[t]) == pytest.approx(weight, rel=1e-12) and bool(cut_N[t]) == cut


@pytest.mark.parametrize("member", [ppo, gspo])
@pytest.mark.parametrize("dual", [0.0, 3.0])
def test_clip_has_the_gradient_of_the_surrogate_it_stands_for(member: ImportanceFn, dual: float) -> None:
    """max(dual A, min(r A, clip(r) A)) for A < 0, min(r A, clip(r) A) else, differentiated by autograd; r is the ratio
    of the token (ppo) or, with the mean over the rollout's tokens (gspo), of the rollout."""
    random = np.random.default_rng(1)
    options = OPTIONS._replace(dual=dual)
    n, sequence_N = 40, torch.tensor([0, 1, 2, 3] * 10)
    advantage_N = torch.tensor(random.normal(size=n))
    if member is gspo:
        advantage_N = advantage_N[sequence_N]
    behaviour_N = torch.tensor(-random.exponential(size=n))
    shift_N = torch.tensor(random.normal(scale=1.5 if member is ppo else 0.2, size=n))
    shift_N = shift_N if member is ppo else shift_N + torch.tensor([-1.0, 0.9, 0.1, 1.4])[sequence_N]
    student_N = (behaviour_N + shift_N).requires_grad_()
    log_ratio_N = student_N - behaviour_N
    if member is gspo:
        log_ratio_N = torch.stack([log_ratio_N[sequence_N == r].mean() for r in range(4)])
        advantages = advantage_N[:4]
    else:
        advantages = advantage_N
    ratio_N = log_ratio_N.exp()
    surrogate_N = torch.minimum(ratio_N * advantages, ratio_N.clamp(options.low, options.high) * advantages)
    if dual:
        surrogate_N = torch.where(advantages < 0, torch.maximum(surrogate_N, dual * advantages), surrogate_N)
    (expected_N,) = torch.autograd.grad(surrogate_N.sum(), student_N)
    current_N = student_N.detach()
    weights_N, cut_N = member(TokenRatios(current_N, behaviour_N, advantage_N, sequence_N, 4), options)
    share = 1.0 if member is ppo else 0.1  # aggregation = sequence_mean gives gspo's tokens their 1 / length
    torch.testing.assert_close(weights_N * advantage_N * share, expected_N)
    assert bool(cut_N.any()) and not bool(cut_N.all())


def test_decoupled_corrects_against_the_sampler_and_clips_against_the_proximal_policy() -> None:
    random = np.random.default_rng(2)
    student_N, behaviour_N, proximal_N = (torch.tensor(-random.exponential(size=30)) for _ in range(3))
    advantage_N = torch.tensor(random.normal(size=30))
    sequence_N = torch.zeros(30, dtype=torch.int64)
    ratios = TokenRatios(student_N, behaviour_N, advantage_N, sequence_N, 1, proximal_N)
    weights_N, cut_N = decoupled(ratios, Decoupled(**OPTIONS._asdict()))
    for t in range(30):
        correction = math.exp(float(proximal_N[t] - behaviour_N[t]))
        update, clipped = _bounded("clip", math.exp(float(student_N[t] - proximal_N[t])), float(advantage_N[t]))
        assert float(weights_N[t]) == pytest.approx(min(correction, OPTIONS.cap) * update)
        assert bool(cut_N[t]) == (clipped or correction > OPTIONS.cap)
    assert bool((weights_N == 0).any())
    one_update = TokenRatios(student_N, behaviour_N, advantage_N, sequence_N, 1)
    first = decoupled(one_update, Decoupled(**OPTIONS._asdict()))
    assert torch.equal(first.weights_N, truncated(one_update, Capped(cap=OPTIONS.cap)).weights_N)


# ------------------------------------------------------------------------------------------ exact enumeration


@pytest.mark.parametrize("name", IMPORTANCE.built_in)
def test_weights_said_to_be_a_tokens_own_are_worked_out_token_by_token(name: str) -> None:
    """The step takes chunks of a rollout for these, and whole rollouts for all others."""
    source = torch.Generator().manual_seed(0)
    student_N, behaviour_N, advantage_N = torch.rand((3, 8), generator=source, dtype=torch.float64) - 1
    options = Every(1.2, 0.8, 1.2, 1.5)
    member = find_member(IMPORTANCE, name)

    def weights(part: slice) -> Tensor:
        one_N = torch.zeros(len(student_N[part]), dtype=torch.int64)
        return member(TokenRatios(student_N[part], behaviour_N[part], advantage_N[part], one_N, 1), options).weights_N

    alone_N = torch.cat([weights(slice(t, t + 1)) for t in range(8)])
    assert (member in TOKEN_LOCAL) == torch.allclose(weights(slice(None)), alone_N)
