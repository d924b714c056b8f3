"""The loss of a step (`make_step_loss` on a head and hidden states): divergences between distributions where numbers
are at their limits, in memory, and for numbers that cannot be; the entropy bonus against autograd through all
logits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stillhouse.learner.batch import Microbatch
from stillhouse.learner.objectives.distributions import log_tail
from stillhouse.learner.step.step_loss import MicrobatchTerms, make_step_loss
from stillhouse.models.logprobs import LmHead
from stillhouse.protocol.payloads.top_k import TopRows
from tests.learner.objectives.test_losses import token_inputs
from tests.learner.settings import objective_config

T, H, V, DIVISOR = 5, 4, 9, 7


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SHARE_T = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.25], dtype=torch.float64)
HEADS = {
    "plain": LmHead(_random(V, H, seed=2)),
    "bias, scale, softcap": LmHead(_random(V, H, seed=2), _random(V, seed=3), 0.7, 2.0),
}


def _terms(
    head: LmHead,
    hidden_TH: Tensor,
    top: TopRows,
    *,
    chunk_tokens: int = 1024,
    targets_N: Tensor | None = None,
    scores: tuple[Tensor, Tensor] | None = None,
    share_N: Tensor | None = None,
    divisor: int = 1,
    **objective: Any,
) -> MicrobatchTerms:
    """Of one rollout without a reward, whose teacher scores every token. `scores`: of the behaviour, and the
    teacher's."""
    n, rows = len(hidden_TH), len(head.weight_VH)
    step_loss = make_step_loss(
        objective_config(**objective), max_new_tokens=1, chunk_tokens=chunk_tokens, vocab_tokens=rows, rows=rows, seed=0
    )
    nothing, none, routed_1N = np.zeros(0, np.int64), np.zeros((1, n), np.float32), np.ones((1, n), np.bool_)
    behaviour_N, teacher_1N = scores or (hidden_TH.new_zeros(n), hidden_TH.new_zeros((1, n)))
    inputs = token_inputs(
        behaviour_N,
        teacher_1N,
        torch.from_numpy(routed_1N),
        share_N=hidden_TH.new_ones(n) if share_N is None else share_N,
        teachers=("default",),
    )
    microbatch = Microbatch(
        nothing, (), nothing, nothing, none[0, :0], none, routed_1N, nothing, nothing, nothing, (top,)
    )
    targets_N = torch.zeros(n, dtype=torch.int64) if targets_N is None else targets_N
    return step_loss(head, hidden_TH, targets_N, inputs, microbatch, divisor)


def test_tail_of_a_sure_student_keeps_its_gradient() -> None:
    """Trap 7: in float32 the student's top-k probability is exactly 1; 1 - sum, clamped, would have no gradient."""
    hidden_TH = torch.tensor([[1.0]])
    weight_VH = torch.tensor([[20.0], [0.0], [0.0], [0.0]], requires_grad=True)
    assert torch.softmax(hidden_TH @ weight_VH.T, 1)[0, 0].item() == 1.0
    half = np.log(np.array([0.5], np.float32))
    teacher = TopRows(np.array([[0]]), half[None], half, np.array([1]))
    for name in ("forward_kl", "mixed", "jsd"):
        weight_VH.grad = None
        got = _terms(LmHead(weight_VH), hidden_TH, teacher, divergence=name)
        got.loss.backward()
        if name == "forward_kl":  # log p of the tail is log 3 - 20, which 1 - sum cannot say
            assert got.terms.divergence_MN.item() == pytest.approx(math.log(0.5) + 0.5 * (20 - math.log(3)), rel=1e-5)
        assert weight_VH.grad is not None
        if name == "jsd":  # bounded: its gradient falls with p_tail, but is there
            assert float(weight_VH.grad[1]) < 0
        else:
            assert float(weight_VH.grad[1:].sum()) == pytest.approx(-0.5 * (0.5 if name == "mixed" else 1.0), rel=1e-3)


def test_memory_follows_the_chunk_and_not_the_tokens() -> None:
    sizes: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))
            return out

    hidden_TH, weight_VH = torch.randn((512, 8), requires_grad=True), torch.randn((1000, 8), requires_grad=True)
    logprobs_TV = torch.randn((512, 1000)).log_softmax(1)
    top_TK, ids_TK = logprobs_TV.topk(4, dim=1)
    teacher = TopRows(ids_TK.numpy(), top_TK.numpy(), log_tail(top_TK).numpy(), np.full(512, 4))
    with Sizes():
        _terms(LmHead(weight_VH), hidden_TH, teacher, divergence="jsd", chunk_tokens=16).loss.backward()
    assert max(sizes) == 16 * 1000


GOOD = TopRows(
    ids_RK=np.array([[1, 2], [3, 4]]),
    logprobs_RK=np.log(np.array([[0.5, 0.2], [0.6, 0.3]], np.float32)),
    tail_R=np.log(np.array([0.3, 0.1], np.float32)),
    counts_R=np.array([2, 2]),
)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logprobs_RK": np.array([[-0.7, math.nan], [-0.5, -1.2]])}, r"1 positions \(first: 0\) are not finite"),
        ({"logprobs_RK": np.array([[-0.7, -1.6], [-0.5, -math.inf]])}, r"1 positions \(first: 1\) are not finite"),
        ({"logprobs_RK": np.array([[-0.1, -0.1], [-0.5, -1.2]])}, "sum to more than 1"),
        ({"tail_R": np.array([math.nan, -2.0])}, r"1 positions \(first: 0\)"),
        ({"counts_R": np.array([0, 2])}, "counts from 0 to 2"),
        ({"counts_R": np.array([1, 3])}, "counts from 1 to 3"),
        ({"tail_R": np.array([-1.0])}, r"tail \(1,\)"),
        ({"ids_RK": np.array([[1, 2], [3, 9]])}, "outside the vocabulary of 9"),
        ({"ids_RK": np.array([[1, -2], [3, 4]])}, "outside the vocabulary of 9"),
        ({"ids_RK": np.array([[1, 1], [3, 4]])}, "names a token twice"),
        ({"tail_R": np.array([-1.0, -math.inf])}, "1 positions have a tail of no mass"),
    ],
)
def test_numbers_of_a_teacher_that_cannot_be_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _terms(HEADS["plain"], _random(2, H), replace(GOOD, **fields), divergence="reverse_kl")


def _step(hidden_TH: Tensor, head: LmHead, *, chunk_tokens: int, **fields: Any) -> MicrobatchTerms:
    """Its teacher sent every token's log-prob where sets are needed."""
    teacher_TV = _random(T, V, seed=5).log_softmax(1)
    top_TV, ids_TV = teacher_TV.sort(dim=1, descending=True)
    top = TopRows(ids_TV.numpy(), top_TV.numpy(), np.full(T, -np.inf), np.full(T, V))
    targets_T = torch.tensor([3, 1, 4, 1, 5])
    scores = _random(T, seed=6) - 3.0, teacher_TV.gather(1, targets_T[:, None]).T
    given: dict[str, Any] = {"targets_N": targets_T, "scores": scores, "share_N": SHARE_T, "divisor": DIVISOR}
    return _terms(head, hidden_TH, top, chunk_tokens=chunk_tokens, **given, **fields)


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
    def leaves() -> list[Tensor]:
        given = (_random(T, H, seed=0), head.weight_VH, head.bias_V)
        return [x.detach().clone().requires_grad_() for x in given if x is not None]

    def gradients(coef: float) -> tuple[Tensor, tuple[Tensor, ...]]:
        hidden_TH, weight_VH, *bias = free = leaves()
        student = LmHead(weight_VH, bias[0] if bias else None, head.scale, head.softcap)
        loss = _step(hidden_TH, student, chunk_tokens=chunk_tokens, entropy_coef=coef, **fields).loss
        return loss.detach(), torch.autograd.grad(loss, free)

    (loss, plain), (loss_bonus, bonus) = gradients(0.0), gradients(0.3)
    free = leaves()
    z_TV = free[0] @ free[1].T + (free[2] if len(free) == 3 else 0.0)
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
    got = _step(hidden_TH, LmHead(weight_VH), chunk_tokens=2, entropy_coef=1.0)
    got.loss.backward()  # pyright: ignore[reportUnknownMemberType]
    assert hidden_TH.grad is not None and bool(hidden_TH.grad.isfinite().all()) and not got.entropy_N.any()
