"""Divergences between distributions in the loss of a step (`make_step_loss` on a head and hidden states): against
float64 loops over the vocabulary, by central differences, by autograd, and in memory."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stillhouse.learner.batch import Microbatch
from stillhouse.learner.objectives.config import ObjectiveConfig
from stillhouse.learner.objectives.distributions import log_tail
from stillhouse.learner.objectives.losses import TokenInputs
from stillhouse.learner.objectives.registry import DISTRIBUTION_DIVERGENCES, DIVERGENCE
from stillhouse.learner.step.step_loss import make_step_loss
from stillhouse.models.logprobs import LmHead
from stillhouse.protocol.payloads.top_k import TopRows

T, H, V, K = 5, 4, 9, 3
OPTIONS: dict[str, dict[str, Any]] = {"mixed": {"weight": 0.3}, "jsd": {"beta": 0.2}}
NAMES = [name for name in DISTRIBUTION_DIVERGENCES.built_in if name != "multi_sample"]  # test_multi_sample


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Got(NamedTuple):
    loss: Tensor
    divergence_T: Tensor


def _divergence(
    head: LmHead,
    hidden_TH: Tensor,
    top: TopRows,
    weight_T: Tensor,
    name: str,
    *,
    chunk_tokens: int = 1024,
    vocab_tokens: int | None = None,
    **options: Any,
) -> Got:
    """sum_t weight_t * D_t as a step computes it, for one teacher that scores every token and no reward."""
    n, rows = len(hidden_TH), len(head.weight_VH)
    step_loss = make_step_loss(
        ObjectiveConfig(divergence=DIVERGENCE.make(name, **options)),
        max_new_tokens=1,
        chunk_tokens=chunk_tokens,
        vocab_tokens=rows if vocab_tokens is None else vocab_tokens,
        rows=rows,
        seed=0,
    )
    zero_N = hidden_TH.new_zeros(n)
    inputs = TokenInputs(
        behaviour_N=zero_N,
        teacher_MN=zero_N[None],
        routed_MN=torch.full((1, n), len(top.counts_R) > 0),
        teachers=("default",),
        coef_M=hidden_TH.new_ones(1),
        reward_advantage_N=zero_N,
        share_N=weight_T,
        sequence_N=torch.zeros(n, dtype=torch.int64),
        n_sequences=1,
    )
    nothing = np.zeros(0, np.int64)
    microbatch = Microbatch(
        ids_T=nothing,
        lengths=(),
        predictor_N=nothing,
        target_N=nothing,
        behaviour_N=np.zeros(0, np.float32),
        teacher_MN=np.zeros((1, n), np.float32),
        routed_MN=np.full((1, n), len(top.counts_R) > 0),
        item_N=nothing,
        token_N=nothing,
        before_N=nothing,
        top=(top,),
    )
    terms = step_loss(head, hidden_TH, torch.zeros(n, dtype=torch.int64), inputs, microbatch, 1)
    return Got(terms.loss, terms.terms.divergence_MN.sum(dim=0))


def _top_k(logprobs_TV: Tensor, counts: list[int] | None = None) -> TopRows:
    """The K likeliest of each row, or as many as `counts` says; V of them leave no tail. The ids behind them are
    invalid on purpose."""
    counts = [K] * len(logprobs_TV) if counts is None else counts
    top_TK, ids_TK = logprobs_TV.detach().topk(max(counts, default=1), dim=1)
    tails = [
        float(log_tail(top_TK[t : t + 1, :k])[0]) if k < logprobs_TV.shape[1] else -math.inf
        for t, k in enumerate(counts)
    ]
    for t, k in enumerate(counts):
        ids_TK[t, k:], top_TK[t, k:] = -77, math.nan
    return TopRows(ids_TK.numpy(), top_TK.numpy(), np.array(tails), np.array(counts, np.int64))


HEADS = {
    "plain": LmHead(_random(V, H, seed=2)),
    "bias, scale, softcap": LmHead(_random(V, H, seed=2), _random(V, seed=3), 0.7, 2.0),
}


@pytest.mark.parametrize("name", NAMES)
def test_gradient_equals_the_plain_one_by_autograd(name: str) -> None:
    """The plain way: all logits, log_softmax, the textbook formula on tokens and tail; gradient by autograd."""
    hidden_TH, weight_VH = _random(T, H).requires_grad_(), _random(V, H, seed=2).requires_grad_()
    weight_T, teacher = _random(T, seed=4), _top_k(_random(T, V, seed=5).log_softmax(1))
    _divergence(LmHead(weight_VH), hidden_TH, teacher, weight_T, name, **OPTIONS.get(name, {})).loss.backward()
    ids_TK, top_TK, tail_T = (torch.from_numpy(x) for x in (teacher.ids_RK, teacher.logprobs_RK, teacher.tail_R))
    p_TV = (hidden_TH @ weight_VH.T).log_softmax(1)
    outside_TV = torch.ones((T, V)).bool().scatter(1, ids_TK, False)
    tail_T1 = p_TV.masked_fill(~outside_TV, -math.inf).logsumexp(1, keepdim=True)
    p_TB = torch.cat([p_TV.gather(1, ids_TK), tail_T1], 1)
    q_TB = torch.cat([top_TK, tail_T[:, None]], 1)
    m_TB = torch.log(0.2 * q_TB.exp() + 0.8 * p_TB.exp())
    forward, reverse = (q_TB.exp() * (q_TB - p_TB)).sum(1), (p_TB.exp() * (p_TB - q_TB)).sum(1)
    bounded = 0.2 * (q_TB.exp() * (q_TB - m_TB)).sum(1) + 0.8 * (p_TB.exp() * (p_TB - m_TB)).sum(1)
    value_T = {"forward_kl": forward, "reverse_kl": reverse, "jsd": bounded, "mixed": 0.3 * forward + 0.7 * reverse}
    expected = torch.autograd.grad((weight_T * value_T[name]).sum(), [hidden_TH, weight_VH])
    torch.testing.assert_close([hidden_TH.grad, weight_VH.grad], list(expected))


def test_rows_past_the_vocabulary_are_no_tokens() -> None:
    """Trap 5: the student's embedding is padded, and what stands in the padding is large."""
    tokens_VH = _random(V, H, seed=2)
    hidden_TH = _random(T, H).requires_grad_()
    weight_VH = torch.cat([tokens_VH, 50 * torch.ones(3, H)]).requires_grad_()
    teacher = _top_k((hidden_TH @ tokens_VH.T).log_softmax(1))
    got = _divergence(LmHead(weight_VH), hidden_TH, teacher, torch.ones(T), "reverse_kl", vocab_tokens=V)
    got.loss.backward()
    assert float(got.divergence_T.abs().max()) < 1e-12  # the same tokens, the same states: they agree
    assert weight_VH.grad is not None and not weight_VH.grad[V:].any()
    padded = _divergence(LmHead(weight_VH), hidden_TH, teacher, torch.ones(T), "reverse_kl", vocab_tokens=V + 3)
    assert float(padded.divergence_T.abs().max()) > 0.1  # what happens when the padding is taken for tokens


def test_tail_of_a_sure_student_keeps_its_gradient() -> None:
    """Trap 7: in float32 the student's top-k probability is exactly 1; 1 - sum, clamped, would have no gradient."""
    hidden_TH = torch.tensor([[1.0]])
    weight_VH = torch.tensor([[20.0], [0.0], [0.0], [0.0]], requires_grad=True)
    assert torch.softmax(hidden_TH @ weight_VH.T, 1)[0, 0].item() == 1.0
    half = np.log(np.array([0.5], np.float32))
    teacher = TopRows(np.array([[0]]), half[None], half, np.array([1]))
    for name in ("forward_kl", "mixed", "jsd"):
        weight_VH.grad = None
        got = _divergence(LmHead(weight_VH), hidden_TH, teacher, torch.ones(1), name)
        got.loss.backward()
        if name == "forward_kl":  # log p of the tail is log 3 - 20, which 1 - sum cannot say
            assert got.divergence_T.item() == pytest.approx(math.log(0.5) + 0.5 * (20 - math.log(3)), rel=1e-5)
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
    teacher = _top_k(logprobs_TV, [4] * 512)
    with Sizes():
        _divergence(LmHead(weight_VH), hidden_TH, teacher, torch.ones(512), "jsd", chunk_tokens=16).loss.backward()
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
    head = HEADS["plain"]
    with pytest.raises(ValueError, match=message):
        _divergence(head, _random(2, H), replace(GOOD, **fields), torch.ones(2), "reverse_kl")
