"""The entropy bonus in the loss of a step, against autograd through all logits, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stillhouse.learner.batch import Microbatch
from stillhouse.learner.objectives.losses import TokenInputs
from stillhouse.learner.step.step_loss import make_step_loss
from stillhouse.models.logprobs import LmHead
from stillhouse.protocol.payloads.top_k import TopRows
from tests.learner.settings import objective_config

T, H, V, DIVISOR = 5, 4, 9, 7


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SHARE_T = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.25], dtype=torch.float64)
HEADS = {
    "plain": LmHead(_random(V, H, seed=2)),
    "bias, scale, softcap": LmHead(_random(V, H, seed=2), _random(V, seed=3), 0.7, 2.0),
}


def _step(hidden_TH: Tensor, head: LmHead, *, chunk_tokens: int, **fields: Any) -> tuple[Tensor, Tensor]:
    """(loss, entropy [T]) of one rollout; its teacher sent every token's log-prob where sets are needed."""
    config = objective_config(**fields)
    step_loss = make_step_loss(config, max_new_tokens=1, chunk_tokens=chunk_tokens, vocab_tokens=V, rows=V, seed=0)
    teacher_TV = _random(T, V, seed=5).log_softmax(1)
    top_TV, ids_TV = teacher_TV.sort(dim=1, descending=True)
    top = TopRows(ids_TV.numpy(), top_TV.numpy(), np.full(T, -np.inf), np.full(T, V))
    targets_T = torch.tensor([3, 1, 4, 1, 5])
    routed_1T, nothing = np.ones((1, T), np.bool_), np.zeros(0, np.int64)
    inputs = TokenInputs(
        behaviour_N=_random(T, seed=6) - 3.0,
        teacher_MN=teacher_TV.gather(1, targets_T[:, None]).T,
        routed_MN=torch.from_numpy(routed_1T),
        teachers=("default",),
        coef_M=torch.ones(1, dtype=torch.float64),
        reward_advantage_N=torch.zeros(T, dtype=torch.float64),
        share_N=SHARE_T,
        sequence_N=torch.zeros(T, dtype=torch.int64),
        n_sequences=1,
    )
    none = np.zeros((1, T), np.float32)
    microbatch = Microbatch(
        nothing, (), nothing, nothing, none[0, :0], none, routed_1T, nothing, nothing, nothing, (top,)
    )
    terms = step_loss(head, hidden_TH, targets_T, inputs, microbatch, DIVISOR)
    return terms.loss, terms.entropy_N


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("chunk_tokens", [2, 100])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"importance": "sequence"},
        {"divergence": "reverse_kl"},
        {"divergence": ("k1", {"baseline": "expected_cost"})},
    ],
    ids=["k1", "weights of rollouts", "reverse KL", "baseline"],
)
def test_the_bonus_adds_the_gradient_of_minus_coef_times_entropy(
    head: LmHead, chunk_tokens: int, fields: dict[str, Any]
) -> None:
    def gradients(coef: float) -> tuple[Tensor, list[Tensor]]:
        free = [
            x if x is None else x.detach().clone().requires_grad_()
            for x in (_random(T, H, seed=0), head.weight_VH, head.bias_V)
        ]
        hidden_TH, weight_VH, bias_V = free
        assert hidden_TH is not None and weight_VH is not None
        student = LmHead(weight_VH, bias_V, head.scale, head.softcap)
        loss, _ = _step(hidden_TH, student, chunk_tokens=chunk_tokens, entropy_coef=coef, **fields)
        wanted = [x for x in free if x is not None]
        return loss.detach(), list(torch.autograd.grad(loss, wanted))

    (loss, plain), (loss_bonus, bonus) = gradients(0.0), gradients(0.3)
    free = [
        x.detach().clone().requires_grad_()
        for x in (_random(T, H, seed=0), head.weight_VH, head.bias_V)
        if x is not None
    ]
    z_TV = free[0] @ free[1].T
    if len(free) == 3:
        z_TV = z_TV + free[2]
    z_TV = z_TV * head.scale
    if head.softcap is not None:
        z_TV = head.softcap * torch.tanh(z_TV / head.softcap)
    p_TV = z_TV.softmax(1)
    expected = -0.3 * (SHARE_T * -(p_TV * p_TV.log()).sum(1)).sum() / DIVISOR
    torch.testing.assert_close(loss_bonus - loss, expected.detach())
    for got, without, by_autograd in zip(bonus, plain, torch.autograd.grad(expected, free), strict=True):
        torch.testing.assert_close(got - without, by_autograd)
        assert float(by_autograd.abs().max()) > 1e-3


def test_a_student_that_is_almost_certain_has_a_finite_bonus() -> None:
    hidden_TH = torch.zeros(T, H, dtype=torch.float64).index_fill(1, torch.tensor([0]), 1.0).requires_grad_()
    weight_VH = torch.zeros(V, H, dtype=torch.float64)
    weight_VH[0, 0] = 800.0  # exp of the others is 0
    loss, entropy_T = _step(hidden_TH, LmHead(weight_VH), chunk_tokens=2, entropy_coef=1.0)
    loss.backward()  # pyright: ignore[reportUnknownMemberType]
    assert hidden_TH.grad is not None and bool(hidden_TH.grad.isfinite().all()) and not entropy_T.any()
