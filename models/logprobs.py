"""Log-probs of given tokens from hidden states and the LM head, without holding logits for all of them at once.

The head is applied to `chunk_tokens` rows at a time; the backward pass recomputes each chunk's softmax instead of
keeping it, so both passes need chunk_tokens x V memory, independent of T.

    z = cap * tanh(scale * (h W' + b) / cap)        softcap and scale as the architecture has them, else z = h W' + b
    logprob_t = z_t[y_t] / temperature - logsumexp(z_t / temperature)

Legend: T tokens, H hidden size, V vocabulary rows of the head, K top tokens, C tokens of one chunk.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

DEFAULT_CHUNK_TOKENS = 1024


@dataclass(frozen=True)
class LmHead:
    """The LM head of an architecture: last hidden state to logits. `weight_VH` is the live parameter."""

    weight_VH: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    @cached_property
    def identity(self) -> int:
        """Hash of its numbers, rounded to bfloat16: the same in float32 and in bfloat16. 0 for float16, which rounds
        otherwise. Reads all numbers once."""
        if self.weight_VH.dtype == torch.float16:
            return 0
        digest = hashlib.blake2b(struct.pack("<dd", self.scale, self.softcap or 0.0), digest_size=8)
        for tensor in (self.weight_VH, *(() if self.bias_V is None else (self.bias_V,))):
            digest.update(str(tuple(tensor.shape)).encode())
            for rows in tensor.detach().split(4096):
                digest.update(rows.bfloat16().contiguous().view(torch.int16).cpu().numpy().tobytes())
        return int.from_bytes(digest.digest(), "little") or 1

    def logits(self, hidden_CH: Tensor) -> Tensor:
        """[C, V] in float32 (float64 for a float64 model), at temperature 1."""
        logits_CV = torch.nn.functional.linear(hidden_CH, self.weight_VH, self.bias_V)
        logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        if self.scale != 1.0:
            logits_CV = logits_CV * self.scale
        if self.softcap is not None:
            logits_CV = torch.tanh(logits_CV / self.softcap) * self.softcap
        return logits_CV


@dataclass(frozen=True)
class TokenScores:
    """`logprobs_T` is differentiable; the other fields are not, and are None unless requested."""

    logprobs_T: Tensor
    entropy_T: Tensor | None
    """Entropy of the whole distribution at each position, nats."""
    top_ids_TK: Tensor | None
    """int64, likeliest first; or the given ones."""
    top_logprobs_TK: Tensor | None


def lm_head(model: PreTrainedModel) -> LmHead:
    """Read the head of a Hugging Face causal LM, with the bias, scale and softcap that its configuration names.

    Raises ValueError for heads that are not one linear layer. `models.packed.probe` compares the result with the
    model's own logits, so an architecture that changes them otherwise is detected at load time.
    """
    layer = model.get_output_embeddings()
    if not isinstance(layer, torch.nn.Linear):
        raise ValueError(f"{type(model).__name__} has a {type(layer).__name__} as LM head; expected a linear layer")
    config: Any = model.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)  # Gemma 2 and later
    bias = cast(Tensor | None, layer.bias)
    return LmHead(layer.weight, bias, _scale(config), None if softcap is None else float(softcap))


def _scale(config: Any) -> float:
    for name in ("logit_scale", "lm_head_multiplier"):  # Cohere, Falcon-H1
        if (factor := getattr(config, name, None)) is not None:
            return float(factor)
    if (scaling := getattr(config, "logits_scaling", None)) is None:
        return 1.0
    # One name, two meanings: HyperCLOVA X multiplies by it, Granite and MiniCPM divide.
    return float(scaling) if config.model_type.startswith("hyperclovax") else 1.0 / float(scaling)


def token_scores(
    head: LmHead,
    hidden_TH: Tensor,
    targets_T: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    entropy: bool = False,
    top_k: int = 0,
    given_TK: Tensor | None = None,
) -> TokenScores:
    """Log-probs of the targets (differentiable in hidden states, head weight and bias), and optionally the entropy and
    the `top_k` likeliest tokens, or the tokens `given_TK`, in one pass.

    hidden_TH [T, H] floating; targets_T [T] and given_TK [T, K] integers in [0, V). float32 out (float64 for float64
    in). Raises ValueError for shapes that do not fit, temperature <= 0, chunk_tokens < 1, top_k outside [0, V], and
    top_k above 0 with given_TK.
    """
    _check(head, hidden_TH, targets_T, temperature, chunk_tokens, top_k)
    if given_TK is not None and (top_k or given_TK.ndim != 2 or len(given_TK) != len(targets_T)):
        raise ValueError(
            f"given tokens of shape {tuple(given_TK.shape)} for {len(targets_T)} targets, with top_k {top_k}; expected "
            "[T, K] and 0"
        )
    given = given_TK is not None
    outputs = cast(
        tuple[Tensor, Tensor, Tensor, Tensor],
        _ChunkedScores.apply(
            hidden_TH,
            head.weight_VH,
            head.bias_V,
            targets_T.long(),
            given_TK,
            _Options(float(temperature), chunk_tokens, head.scale, head.softcap, entropy, top_k),
        ),
    )
    logprobs_T, entropy_T, top_ids_TK, top_logprobs_TK = outputs
    return TokenScores(
        logprobs_T,
        entropy_T if entropy else None,
        top_ids_TK if top_k or given else None,
        top_logprobs_TK if top_k or given else None,
    )


def _check(head: LmHead, hidden_TH: Tensor, targets_T: Tensor, temperature: float, chunk: int, top_k: int) -> None:
    vocab_rows, hidden_size = head.weight_VH.shape
    if hidden_TH.ndim != 2 or hidden_TH.shape[1] != hidden_size:
        raise ValueError(f"hidden states have shape {tuple(hidden_TH.shape)}; the head needs [T, {hidden_size}]")
    if targets_T.shape != hidden_TH.shape[:1]:
        raise ValueError(f"{tuple(targets_T.shape)} targets for {hidden_TH.shape[0]} hidden states; expected [T]")
    if not temperature > 0:
        raise ValueError(f"temperature {temperature}; log-probs need a temperature above 0")
    if chunk < 1:
        raise ValueError(f"chunk_tokens {chunk}; expected at least 1")
    if not 0 <= top_k <= vocab_rows:
        raise ValueError(f"top_k {top_k}; expected 0 (off) to {vocab_rows} (rows of the head)")


@dataclass(frozen=True)
class _Options:
    temperature: float
    chunk_tokens: int
    scale: float
    softcap: float | None
    entropy: bool
    top_k: int


class _ChunkedScores(torch.autograd.Function):
    """forward saves hidden states, head and the [T] log-normalisers only."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        given_TK: Tensor | None,
        options: _Options,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        head = LmHead(weight_VH, bias_V, options.scale, options.softcap)
        out = torch.promote_types(hidden_TH.dtype, torch.float32)
        n_tokens = hidden_TH.shape[0]
        logprobs_T = hidden_TH.new_empty(n_tokens, dtype=out)
        normalisers_T = hidden_TH.new_empty(n_tokens, dtype=out)
        entropy_T = hidden_TH.new_empty(n_tokens if options.entropy else 0, dtype=out)
        top_ids_TK = targets_T.new_empty((n_tokens, options.top_k)) if given_TK is None else given_TK.long()
        top_logprobs_TK = hidden_TH.new_empty(top_ids_TK.shape, dtype=out)
        for start in range(0, n_tokens, options.chunk_tokens):
            chunk = slice(start, start + options.chunk_tokens)
            z_CV = head.logits(hidden_TH[chunk])
            if options.temperature != 1.0:
                z_CV = z_CV / options.temperature
            largest_C = z_CV.amax(dim=1)
            exp_CV = (z_CV - largest_C[:, None]).exp_()
            total_C = exp_CV.sum(dim=1)
            normaliser_C = largest_C + total_C.log()
            normalisers_T[chunk] = normaliser_C
            logprobs_T[chunk] = z_CV.gather(1, targets_T[chunk, None]).squeeze(1) - normaliser_C
            if options.top_k:
                top_CK, top_ids_TK[chunk] = z_CV.topk(options.top_k, dim=1)
                top_logprobs_TK[chunk] = top_CK - normaliser_C[:, None]
            if given_TK is not None:
                top_logprobs_TK[chunk] = z_CV.gather(1, top_ids_TK[chunk]) - normaliser_C[:, None]
            if options.entropy:
                entropy_T[chunk] = normaliser_C - exp_CV.mul_(z_CV).sum(dim=1) / total_C
            del z_CV, exp_CV  # else they would stay until the next chunk's logits are there
        ctx.save_for_backward(hidden_TH, weight_VH, bias_V, targets_T, normalisers_T)
        ctx.options = options
        ctx.mark_non_differentiable(entropy_T, top_ids_TK, top_logprobs_TK)
        return logprobs_T, entropy_T, top_ids_TK, top_logprobs_TK

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_T: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        """d logprob_t / d z_t = (onehot(y_t) - softmax(z_t / temperature)) / temperature, through softcap and scale."""
        hidden_TH, weight_VH, bias_V, targets_T, normalisers_T = cast(tuple[Tensor, ...], ctx.saved_tensors)
        options: _Options = ctx.options
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden_TH = torch.empty_like(hidden_TH) if needs_hidden else None
        accumulate = torch.promote_types(weight_VH.dtype, torch.float32)
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=accumulate) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=accumulate) if needs_bias else None
        head = LmHead(weight_VH, bias_V, options.scale, options.softcap)
        for start in range(0, hidden_TH.shape[0], options.chunk_tokens):
            chunk = slice(start, start + options.chunk_tokens)
            hidden_CH = hidden_TH[chunk]
            z_CV = head.logits(hidden_CH)
            grad_C = grad_T[chunk] / options.temperature
            # in place: the softmax of this chunk becomes the gradient of its logits
            grad_CV = (z_CV / options.temperature).sub_(normalisers_T[chunk, None]).exp_().mul_(-grad_C[:, None])
            grad_CV.scatter_add_(1, targets_T[chunk, None], grad_C[:, None])
            if options.softcap is not None:
                grad_CV.mul_(1.0 - (z_CV / options.softcap).square())
            grad_CV = grad_CV.mul_(options.scale).to(hidden_TH.dtype)
            if grad_hidden_TH is not None:
                grad_hidden_TH[chunk] = grad_CV @ weight_VH
            if grad_weight_VH is not None:
                grad_weight_VH.add_(grad_CV.T @ hidden_CH)
            if grad_bias_V is not None:
                grad_bias_V.add_(grad_CV.sum(dim=0))
            del z_CV, grad_CV
        return (
            grad_hidden_TH,
            None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype),
            None if grad_bias_V is None else grad_bias_V.to(weight_VH.dtype),
            None,
            None,
            None,
        )
