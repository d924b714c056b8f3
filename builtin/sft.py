"""Supervised fine-tuning of the built-in models on generated solutions: a plain loop on one CPU thread.

Shape suffixes: B = batch, T = longest example of the batch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from stillhouse.builtin.addition import Chain, Operator, Problem, calculator_solution, chains, problems, solution
from stillhouse.builtin.tokenizer import END_OF_TEXT, END_OF_TURN, PAD, prompt_token_ids

IGNORED = -100  # label of a token without loss
_RECURRENT: Final[dict[str, Any]] = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    # Published models turn a quarter of each head by position: 64 of 256 dimensions. Of 32 that would be 8, four
    # frequencies, and the digits of long sums are not found.
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """Size and training of one model."""

    hidden: int
    mlp: int
    steps: int
    """Length of the learning rate schedule; training may stop earlier."""
    learning_rate: float
    seed: int
    init_std: float
    """Standard deviation of the initial weights. The library's default of 0.02 is for wide models; these learn faster
    with more."""
    calculator_share: float = 0.2
    """Share of examples that are calculator episodes."""
    label_smoothing: float = 0.0
    """Probability spread over the whole vocabulary. A little keeps a teacher's log-probs of wrong tokens finite in
    practice: around -12 instead of -25, which one-sample divergences would have to average out."""
    operators: tuple[Operator, ...] = ("+",)
    """Operators of the other examples, equally often."""
    layers: int = 3
    """Not of a hybrid, which has three."""
    head_dim: int = 32
    hybrid: bool = False
    """Two of its three layers are recurrent (gated delta rule), as in Qwen3.5, and not attention."""
    style: str = "compact"
    batch_examples: int = 16
    warmup_steps: int = 50
    final_lr_fraction: float = 0.03


@dataclass(frozen=True, slots=True)
class Example:
    """One episode as tokens; `labels` is IGNORED where the model did not write."""

    token_ids: list[int]
    labels: list[int]


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Problems that no model is trained on."""

    problems: frozenset[Problem]
    chains: frozenset[Chain]


def new_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """A newly initialised Qwen3, or Qwen3.5, of the recipe's size. The caller seeds torch."""
    end_id, text_end_id, pad_id = (
        cast(int, tokenizer.convert_tokens_to_ids(t)) for t in (END_OF_TURN, END_OF_TEXT, PAD)
    )
    kind, model_class = (Qwen3_5TextConfig, Qwen3_5ForCausalLM) if recipe.hybrid else (Qwen3Config, Qwen3ForCausalLM)
    config = kind(
        **(_RECURRENT if recipe.hybrid else {}),
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.mlp,
        num_hidden_layers=recipe.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=recipe.head_dim,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=recipe.init_std,
        bos_token_id=None,
        eos_token_id=end_id,
        pad_token_id=pad_id,
        dtype="float32",
    )
    model = model_class(cast(Any, config))
    model.generation_config = GenerationConfig(
        eos_token_id=[end_id, text_end_id], pad_token_id=pad_id, do_sample=True, temperature=1.0
    )
    return model


def encode_example(tokenizer: PreTrainedTokenizerFast, task: Problem | Chain, style: str) -> Example:
    """Encode the prompt with the chat template, the solution, and the end-of-turn token."""
    token_ids = prompt_token_ids(tokenizer, task.prompt)
    labels = [IGNORED] * len(token_ids)
    if isinstance(task, Chain):
        pieces = [(piece.text, piece.by_model) for piece in calculator_solution(task)]
    else:
        pieces = [(solution(task, style), True)]
    for text, by_model in [*pieces, (END_OF_TURN, True)]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        token_ids += ids
        labels += ids if by_model else [IGNORED] * len(ids)
    return Example(token_ids, labels)


def example_stream(tokenizer: PreTrainedTokenizerFast, recipe: Recipe, held_out: HeldOut) -> Iterator[Example]:
    """Endless stream. For each example it draws whether it is a calculator episode, and else its operator."""
    rng = random.Random(recipe.seed)
    plain = [problems(recipe.seed + 1, operator=operator, exclude=held_out.problems) for operator in recipe.operators]
    calculator = chains(recipe.seed + 2, exclude=held_out.chains)
    while True:
        is_chain = rng.random() < recipe.calculator_share
        task = next(calculator) if is_chain else next(plain[0] if len(plain) == 1 else rng.choice(plain))
        yield encode_example(tokenizer, task, recipe.style)


def train(
    model: PreTrainedModel,
    examples: Iterator[Example],
    recipe: Recipe,
    pad_id: int,
    after_step: Callable[[int, float], bool],
) -> int:
    """Train until the end of the schedule, or until `after_step(steps_done, loss)` returns True. Returns the steps
    done."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(recipe, step))
    model.train()
    for step in range(recipe.steps):
        batch = [next(examples) for _ in range(recipe.batch_examples)]
        ids_BT = _padded([one.token_ids for one in batch], pad_id)
        labels_BT = _padded([one.labels for one in batch], IGNORED)
        # Padding is on the right and attention is causal: no real token sees it, so no mask is needed.
        logits = model(input_ids=ids_BT).logits[:, :-1]
        targets = labels_BT[:, 1:]
        trained = targets != IGNORED
        loss = torch.nn.functional.cross_entropy(
            logits[trained], targets[trained], label_smoothing=recipe.label_smoothing
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if after_step(step + 1, float(loss.detach())):
            return step + 1
    return recipe.steps


def lr_factor(recipe: Recipe, step: int) -> float:
    """Linear warm-up, then cosine down to `final_lr_fraction`."""
    warm = min(1.0, (step + 1) / recipe.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / recipe.steps)))
    return warm * (recipe.final_lr_fraction + (1 - recipe.final_lr_fraction) * cosine)


def _padded(rows: list[list[int]], value: int) -> torch.Tensor:
    """[B, T], padded on the right."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)
