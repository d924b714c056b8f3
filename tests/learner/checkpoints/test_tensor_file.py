"""Ranks that each write their rows of a file make the file that one process makes, and that the safetensors library
reads and writes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from stillhouse.learner.checkpoints.tensor_file import DTYPES, layout_of, write_share
from stillhouse.models.loading import converted_on_saving, describe_hf, load_causal_lm, weights_to_save
from stillhouse.models.transfer import Rows, Shares
from tests.learner.conftest import tiny_student, word_tokenizer

SHAPES = st.lists(st.lists(st.integers(0, 5), min_size=0, max_size=3), min_size=1, max_size=6)


def made_up(shapes: list[list[int]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtypes = list(DTYPES)
    made = (torch.randint(-100, 100, shape, generator=generator) for shape in shapes)
    return {f"t{i}.weight": tensor.to(dtypes[(i + seed) % len(dtypes)]) for i, tensor in enumerate(made)}


def share(tensors: dict[str, Tensor], rank: int, n_ranks: int) -> Shares:
    """As FSDP divides: ceil(rows / ranks) for each, as long as there are any. Tensors with a 3 in their name are whole
    everywhere."""
    own, rows = dict[str, Tensor](), dict[str, Rows]()
    for name, tensor in tensors.items():
        if tensor.ndim == 0 or "3" in name:
            own[name] = tensor
            continue
        n = -(-len(tensor) // n_ranks)
        first = min(rank * n, len(tensor))
        own[name], rows[name] = tensor[first : first + n], Rows(first, tuple(tensor.shape))
    return Shares(own, rows)


def same(ones: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return ones.keys() == others.keys() and all(
        ones[name].dtype == others[name].dtype and torch.equal(ones[name], others[name]) for name in ones
    )


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.integers(1, 4), st.integers(0, 30), st.randoms(use_true_random=False))
def test_any_division_in_any_order_gives_the_same_file(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], n_ranks: int, seed: int, random: object
) -> None:
    folder, tensors = tmp_path_factory.mktemp("files"), made_up(shapes, seed)
    alone, together, theirs = (folder / name for name in ("alone", "together", "theirs"))
    order = list(range(n_ranks))
    random.shuffle(order)  # type: ignore[attr-defined]
    written = [write_share(together, share(tensors, rank, n_ranks), leads=rank == 0) for rank in order]
    n_alone = write_share(alone, Shares(tensors), leads=True)
    assert together.read_bytes() == alone.read_bytes()
    assert sum(written) == n_alone == alone.stat().st_size == layout_of(Shares(tensors)).total_bytes
    assert same(load_file(together), tensors)
    save_file(tensors, theirs, metadata={"format": "pt"})
    assert same(load_file(theirs), load_file(alone))
    n_header = int.from_bytes(alone.read_bytes()[:8], "little")
    assert n_header % 8 == 0, "tensors are aligned for whoever maps the file into memory"
    assert json.loads(alone.read_bytes()[8 : 8 + n_header])["__metadata__"] == {"format": "pt"}


def test_more_than_the_system_writes_in_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite

    def seven_bytes(descriptor: int, data: memoryview, at: int) -> int:
        return real(descriptor, data[:7], at)

    monkeypatch.setattr(os, "pwrite", seven_bytes)
    tensors = {"a": torch.arange(40.0), "b": torch.arange(6)}
    write_share(tmp_path / "file", Shares(tensors), leads=True)
    assert same(load_file(tmp_path / "file"), tensors)


def test_dtypes_that_the_format_has_not_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"z has dtype torch\.complex64"):
        write_share(tmp_path / "file", Shares({"z": torch.zeros(2, dtype=torch.complex64)}), leads=True)


def mixture() -> PreTrainedModel:
    shape: dict[str, Any] = {
        "vocab_size": 32,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 16,
        "moe_intermediate_size": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape))


@pytest.mark.parametrize("kind", ["dense", "mixture"])
@pytest.mark.parametrize("loaded", [False, True])
def test_weights_are_those_that_save_pretrained_writes(tmp_path: Path, kind: str, loaded: bool) -> None:
    """By the same names; tied ones once, and experts one by one."""
    model = tiny_student() if kind == "dense" else mixture()
    if loaded:
        model.save_pretrained(tmp_path / "first")
        model = load_causal_lm(tmp_path / "first", device="cpu", dtype="float32", attention="sdpa", train=True)
    model.save_pretrained(tmp_path / "theirs")
    ours = tmp_path / "ours"
    ours.mkdir()
    assert converted_on_saving(model) == (kind == "mixture")
    weights = weights_to_save(model, converted=kind == "mixture")
    write_share(ours / "model.safetensors", Shares(weights), leads=True)
    describe_hf(model, word_tokenizer(), ours)
    assert same(load_file(ours / "model.safetensors"), load_file(tmp_path / "theirs" / "model.safetensors"))
    again = AutoModelForCausalLM.from_pretrained(ours)
    assert same(dict(again.state_dict()), dict(model.state_dict()))
