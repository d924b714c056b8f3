"""Chunked log-probs against a float64 loop over tokens and vocabulary, and their hand-written backward."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import FalconH1Config, FalconH1ForCausalLM

from stillhouse.models.logprobs import LmHead, lm_head, token_scores


def _inputs(n_tokens: int = 7, hidden: int = 4, vocab: int = 11, dtype: Any = torch.float64) -> tuple[Tensor, ...]:
    source = torch.Generator().manual_seed(0)
    hidden_TH = torch.randn((n_tokens, hidden), generator=source, dtype=torch.float64).to(dtype)
    weight_VH = torch.randn((vocab, hidden), generator=source, dtype=torch.float64).to(dtype)
    bias_V = torch.randn(vocab, generator=source, dtype=torch.float64).to(dtype)
    targets_T = torch.randint(0, vocab, (n_tokens,), generator=source)
    return hidden_TH, weight_VH, bias_V, targets_T


def _slow(head: LmHead, hidden_TH: Tensor, targets_T: Tensor, temperature: float) -> tuple[Any, Any, Any]:
    """Token by token, word by word, in float64: log-prob, entropy and all log-probs."""
    weight, states = head.weight_VH.double().numpy(), hidden_TH.double().numpy()
    logprobs, entropies, everything = [], [], []
    for t in range(states.shape[0]):
        logits = []
        for v in range(weight.shape[0]):
            z = float(sum(states[t, h] * weight[v, h] for h in range(states.shape[1])))
            z += 0.0 if head.bias_V is None else float(head.bias_V[v])
            z *= head.scale
            z = z if head.softcap is None else head.softcap * math.tanh(z / head.softcap)
            logits.append(z / temperature)
        total = math.log(sum(math.exp(z) for z in logits))
        row = [z - total for z in logits]
        logprobs.append(row[int(targets_T[t])])
        entropies.append(-sum(math.exp(lp) * lp for lp in row))
        everything.append(row)
    return np.array(logprobs), np.array(entropies), np.array(everything)


def _head(name: str, weight_VH: Tensor, bias_V: Tensor) -> LmHead:
    if name == "plain":
        return LmHead(weight_VH)
    return LmHead(weight_VH, bias_V) if name == "bias" else LmHead(weight_VH, bias_V, 0.3, 2.0)


HEADS = ("plain", "bias", "scaled and capped")


@pytest.mark.parametrize("head_name", HEADS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 100])
def test_equal_to_the_slow_loop(head_name: str, temperature: float, chunk_tokens: int) -> None:
    hidden_TH, weight_VH, bias_V, targets_T = _inputs()
    head = _head(head_name, weight_VH, bias_V)
    got = token_scores(
        head, hidden_TH, targets_T, temperature=temperature, chunk_tokens=chunk_tokens, entropy=True, top_k=4
    )
    logprobs, entropies, everything = _slow(head, hidden_TH, targets_T, temperature)
    assert got.entropy_T is not None and got.top_ids_TK is not None and got.top_logprobs_TK is not None
    np.testing.assert_allclose(got.logprobs_T.numpy(), logprobs, atol=1e-12)
    np.testing.assert_allclose(got.entropy_T.numpy(), entropies, atol=1e-12)
    order = np.argsort(-everything, axis=1)[:, :4]
    np.testing.assert_array_equal(got.top_ids_TK.numpy(), order)
    np.testing.assert_allclose(got.top_logprobs_TK.numpy(), np.take_along_axis(everything, order, 1), atol=1e-12)


@pytest.mark.parametrize("head_name", HEADS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_tokens", [2, 7])
def test_gradcheck(head_name: str, temperature: float, chunk_tokens: int) -> None:
    hidden_TH, weight_VH, bias_V, targets_T = _inputs()

    def logprobs(hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor) -> Tensor:
        head = _head(head_name, weight_VH, bias_V)
        return token_scores(
            head, hidden_TH, targets_T, temperature=temperature, chunk_tokens=chunk_tokens, entropy=True
        ).logprobs_T

    inputs = [x.clone().requires_grad_() for x in (hidden_TH, weight_VH, bias_V)]
    if head_name == "plain":
        inputs[2].requires_grad_(False)
    assert torch.autograd.gradcheck(logprobs, inputs)


def test_gradient_of_a_frozen_head_and_of_frozen_hidden_states() -> None:
    hidden_TH, weight_VH, _, targets_T = _inputs()
    hidden_TH.requires_grad_()
    token_scores(LmHead(weight_VH), hidden_TH, targets_T).logprobs_T.sum().backward()
    weight_VH.requires_grad_()
    token_scores(LmHead(weight_VH), hidden_TH.detach(), targets_T).logprobs_T.sum().backward()
    reference_TV = torch.log_softmax(hidden_TH @ weight_VH.T, 1)
    expected = torch.autograd.grad(reference_TV.gather(1, targets_T[:, None]).sum(), [hidden_TH, weight_VH])
    assert hidden_TH.grad is not None and weight_VH.grad is not None
    torch.testing.assert_close([hidden_TH.grad, weight_VH.grad], list(expected))


def test_repeated_targets_and_extreme_logits_stay_finite() -> None:
    hidden_TH = torch.tensor([[1e4, 0.0], [1e4, 0.0]], requires_grad=True)
    weight_VH = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
    scores = token_scores(LmHead(weight_VH), hidden_TH, torch.tensor([0, 1]), entropy=True)
    scores.logprobs_T.sum().backward()
    assert scores.logprobs_T.tolist() == [0.0, -2e4]
    assert scores.entropy_T is not None and scores.entropy_T.abs().max() < 1e-6
    assert hidden_TH.grad is not None and torch.isfinite(hidden_TH.grad).all()


def test_bfloat16_states_give_float32_logprobs() -> None:
    hidden_TH, weight_VH, _, targets_T = _inputs(dtype=torch.bfloat16)
    hidden_TH.requires_grad_()
    logprobs_T = token_scores(LmHead(weight_VH), hidden_TH, targets_T).logprobs_T
    logprobs_T.sum().backward()
    assert logprobs_T.dtype == torch.float32 and hidden_TH.grad is not None
    exact = token_scores(LmHead(weight_VH.double()), hidden_TH.detach().double(), targets_T).logprobs_T
    torch.testing.assert_close(logprobs_T.detach().double(), exact, atol=0.05, rtol=0.02)


def test_no_token_asked_for_is_an_empty_answer_with_zero_gradient() -> None:
    hidden_TH, weight_VH, _, targets_T = _inputs()
    weight_VH.requires_grad_()
    logprobs_T = token_scores(LmHead(weight_VH), hidden_TH[:0], targets_T[:0]).logprobs_T
    assert logprobs_T.shape == (0,)
    logprobs_T.sum().backward()
    assert weight_VH.grad is not None and not weight_VH.grad.any()


def test_memory_follows_the_chunk_and_not_the_tokens() -> None:
    """No tensor of [T, V] exists at any time: the largest one made has chunk_tokens rows."""
    sizes: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))
            return out

    hidden_TH = torch.randn((512, 8), requires_grad=True)
    weight_VH = torch.randn((1000, 8), requires_grad=True)
    with Sizes():
        targets_T = torch.zeros(512, dtype=torch.int64)
        token_scores(LmHead(weight_VH), hidden_TH, targets_T, chunk_tokens=16).logprobs_T.sum().backward()
    assert max(sizes) == 16 * 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature 0.0"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"chunk_tokens": 0}, "chunk_tokens 0"),
        ({"top_k": 12}, "top_k 12"),
    ],
)
def test_senseless_options_are_refused(options: dict[str, Any], message: str) -> None:
    hidden_TH, weight_VH, _, targets_T = _inputs()
    with pytest.raises(ValueError, match=message):
        token_scores(LmHead(weight_VH), hidden_TH, targets_T, **options)


def test_shapes_that_do_not_fit_are_refused() -> None:
    hidden_TH, weight_VH, _, targets_T = _inputs()
    with pytest.raises(ValueError, match="the head needs"):
        token_scores(LmHead(weight_VH), hidden_TH[:, :3], targets_T)
    with pytest.raises(ValueError, match=r"\(6,\) targets for 7 hidden states"):
        token_scores(LmHead(weight_VH), hidden_TH, targets_T[:6])


def test_the_heads_multiplier_of_falcon_h1_is_read() -> None:
    """The model's own logits, from the hidden states that its head gets."""
    shape: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    mamba: dict[str, Any] = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
    config = FalconH1Config(**shape, **heads, **mamba, mamba_n_groups=1, lm_head_multiplier=0.125)
    torch.manual_seed(0)
    model = FalconH1ForCausalLM(config).eval()
    ids_1T = torch.arange(7)[None]
    with torch.no_grad():
        hidden_TH = model.model(input_ids=ids_1T, use_cache=False).last_hidden_state[0]
        expected_TV = model(input_ids=ids_1T, use_cache=False).logits[0]
    head = lm_head(model)
    assert head.scale == 0.125
    torch.testing.assert_close(head.logits(hidden_TH), expected_TV)
