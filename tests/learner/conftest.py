"""Tiny students, hand-made batches, a small tokenizer and prompt files for the learner's tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from stillhouse.learner.batch import TrainItem, train_items
from stillhouse.models import packed
from stillhouse.protocol.messages import BatchItem, TopKPiece

VOCAB = 23


def tiny_student(
    implementation: str = packed.IMPLEMENTATION,
    dtype: torch.dtype = torch.float32,
    vocab: int = VOCAB,
    *,
    tied: bool = True,
) -> PreTrainedModel:
    """The same random Qwen3 each time."""
    shape: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
    }
    torch.manual_seed(0)
    model: PreTrainedModel = Qwen3ForCausalLM(Qwen3Config(**shape))
    model.set_attn_implementation(implementation)
    model.to(dtype)  # pyright: ignore[reportArgumentType]
    return model.eval()


def build_hybrid(dtype: torch.dtype = torch.float32, vocab: int = VOCAB, **changes: Any) -> PreTrainedModel:
    """A random Qwen3.5: of two layers, one is recurrent. `changes`: of its config; with `num_experts`, a mixture."""
    shape: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 4,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        **changes,
    }
    torch.manual_seed(0)
    if "num_experts" in changes:
        shape |= {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
        model: PreTrainedModel = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**shape))
    else:
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**shape))
    return model.to(dtype).eval()  # pyright: ignore


def word_tokenizer() -> PreTrainedTokenizerFast:
    """23 words, of which the second ends a text."""
    words = {f"w{i}": i for i in range(23)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), eos_token="w1"
    )
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    return tokenizer


def make_item(
    rollout_id: str,
    mask: Sequence[int],
    *,
    teachers: tuple[str, ...] = ("default",),
    seed: int | None = None,
    vocab: int = VOCAB,
    task_id: int = 0,
    reward: float | None = None,
    final: bool = True,
) -> TrainItem:
    """A rollout whose trained tokens are where `mask` is 1; tokens and log-probs random by `seed`."""
    random = np.random.default_rng(sum(rollout_id.encode()) if seed is None else seed)
    end = len(mask)
    item = BatchItem(
        rollout_id=rollout_id,
        task_id=task_id,
        sample_index=0,
        group_size=1,
        tag="",
        teachers=teachers,
        end=end,
        spans=(),
        final=final,
        finish_reason="stop",
        reward=reward,
        n_turns=1,
    )
    frames = (
        random.integers(0, vocab, end).astype(np.int32),
        -random.exponential(2.0, end).astype(np.float32),
        np.array(mask, np.uint8),
        -random.exponential(2.0, (len(teachers), end)).astype(np.float32),
    )
    return train_items([item], frames)[0]


def remade(
    one: TrainItem,
    payloads: Sequence[tuple[int, int, int, bytes]] = (),
    *,
    tokens_L: Any = None,
    behaviour_L: Any = None,
    mask_L: Any = None,
    teacher_ML: Any = None,
    **fields: Any,
) -> TrainItem:
    """As the buffer hands it on with these payloads, (teacher, start, end, bytes) each, other arrays, and `fields` of
    its message."""
    frames = [
        one.tokens_L if tokens_L is None else tokens_L,
        one.behaviour_L if behaviour_L is None else behaviour_L,
        np.asarray(one.train_mask_L if mask_L is None else mask_L, np.uint8),
        one.teacher_ML if teacher_ML is None else teacher_ML,
    ]
    if payloads:
        frames.append(np.frombuffer(b"".join(body for *_, body in payloads), np.uint8))
    pieces = tuple(TopKPiece(teacher, start, end, len(body)) for teacher, start, end, body in payloads)
    return train_items([msgspec.structs.replace(one.item, top_k=pieces, **fields)], frames)[0]


@pytest.fixture(scope="session")
def small_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, plus <|im_start|> and <|im_end|>, with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    return tokenizer


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[[Sequence[dict[str, Any]]], Path]:
    """Write rows as prompts.jsonl; the path."""

    def write(rows: Sequence[dict[str, Any]]) -> Path:
        file = tmp_path / "prompts.jsonl"
        file.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
        return file

    return write
