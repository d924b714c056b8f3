"""One-pass losses against the two-pass log-probs, which have a slow reference of their own (test_logprobs)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stillhouse.models.logprobs import LmHead, token_scores
from stillhouse.models.one_pass import one_pass_loss
from tests.sim.sampled_tokens import SampledTokens


def _inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    hidden_TH, weight_VH, bias_V = (
        torch.randn(shape, generator=source, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((7, 4), (11, 4), (11,))
    )
    return hidden_TH, weight_VH, bias_V, torch.randint(0, 11, (7,), generator=source)


def _loss(logprobs_C: Tensor, place: slice) -> tuple[Tensor, Tensor]:
    """s^2 / 2 times a number of the token's own."""
    own_C = torch.arange(1.0, 8.0)[place].to(logprobs_C.dtype)
    return own_C * logprobs_C.square() / 2, own_C * logprobs_C


@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
@pytest.mark.parametrize("bent", [False, True])
def test_loss_and_gradients_equal_those_of_two_passes(chunk_tokens: int, bent: bool) -> None:
    hidden_TH, weight_VH, bias_V, targets_T = _inputs()
    inputs = [hidden_TH, weight_VH, bias_V] if bent else [hidden_TH, weight_VH]
    head = LmHead(weight_VH, bias_V, 0.3, 2.0) if bent else LmHead(weight_VH)
    sampled = SampledTokens(targets_T, _loss)
    got = one_pass_loss(head, hidden_TH, sampled, chunk_tokens=chunk_tokens)
    logprobs_T = token_scores(head, hidden_TH, targets_T).logprobs_T
    expected = _loss(logprobs_T, slice(None))[0].sum()
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(torch.cat(sampled.logprobs), logprobs_T.detach())
    torch.testing.assert_close(torch.autograd.grad(3 * got, inputs), torch.autograd.grad(3 * expected, inputs))


def test_second_backward_pass_is_refused_and_not_wrong() -> None:
    hidden_TH, weight_VH, _, targets_T = _inputs()
    loss = one_pass_loss(LmHead(weight_VH), hidden_TH, SampledTokens(targets_T, _loss))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass; compute the loss again"):
        loss.backward()


def test_memory_follows_the_chunk_and_not_the_tokens() -> None:
    sizes: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))
            return out

    hidden_TH, weight_VH = torch.randn((512, 8), requires_grad=True), torch.randn((1000, 8), requires_grad=True)

    def loss(logprobs_C: Tensor, place: slice) -> tuple[Tensor, Tensor]:
        return logprobs_C, torch.ones_like(logprobs_C)

    with Sizes():
        sampled = SampledTokens(torch.zeros(512, dtype=torch.int64), loss)
        one_pass_loss(LmHead(weight_VH), hidden_TH, sampled, chunk_tokens=16).backward()
    assert max(sizes) == 16 * 1000


def test_shapes_that_do_not_fit_are_refused() -> None:
    hidden_TH, weight_VH, _, targets_T = _inputs()
    with pytest.raises(ValueError, match="the head needs"):
        one_pass_loss(LmHead(weight_VH), hidden_TH[:, :3], SampledTokens(targets_T, _loss))
    with pytest.raises(ValueError, match="chunk_tokens 0"):
        one_pass_loss(LmHead(weight_VH), hidden_TH, SampledTokens(targets_T, _loss), chunk_tokens=0)
