"""How the tokens of a packed row are divided among processes, and what they compute with it. Whole steps are in
tests/learner/ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from transformers import Gemma2Config, GptOssConfig, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen3Config

from stillhouse.models.divided import DividedLayout, RankGroup, RankPart, chunks_of
from stillhouse.models.packed import PackingError, divided_hidden, packed_attention, refuse_undividable
from tests.learner.conftest import tiny_student
from tests.patience import PATIENCE_S


@given(st.lists(st.integers(1, 90), min_size=1, max_size=20), st.integers(1, 6))
def test_each_token_is_in_one_part_and_parts_are_of_like_size(lengths: list[int], size: int) -> None:
    rows = [(i, position) for i, length in enumerate(lengths) for position in range(length)]
    parts = [RankPart.of(lengths, size, rank) for rank in range(size)]
    seen: list[tuple[int, int]] = []
    for part, chunks in zip(parts, chunks_of(lengths, size), strict=True):
        own = [(i, position) for i, start, end in chunks for position in range(start, end)]
        seen += own
        assert [rows[t] for t in part.tokens] == (own or [(0, 0)]), "one without tokens runs the first"
    assert sorted(seen) == rows
    for i, length in enumerate(lengths):
        sizes = [sum(end - start for j, start, end in chunks if j == i) for chunks in chunks_of(lengths, size)]
        assert max(sizes) <= length // size + 2, "of each sequence"


def test_parts_of_a_long_sequence_have_the_same_number_of_pairs() -> None:
    pairs = [sum(end * (end + 1) - start * (start + 1) for _, start, end in own) for own in chunks_of([6400], 4)]
    assert max(pairs) / min(pairs) < 1.001


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (MistralConfig(), "sliding_attention"),
        (Gemma2Config(), "sliding_attention"),
        (GptOssConfig(), "sliding_attention"),
        (Gemma2Config(layer_types=["full_attention"] * 26), "attn_logit_softcapping"),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "dynamic"),
    ],
)
def test_architectures_that_cannot_be_divided_are_refused_by_name(config: PreTrainedConfig, named: str) -> None:
    with pytest.raises(PackingError, match=named):
        refuse_undividable(config)


def test_architectures_with_full_attention_can_be_divided() -> None:
    for config in (LlamaConfig(), Qwen3Config(), MistralConfig(sliding_window=None)):
        refuse_undividable(config)


@pytest.mark.parametrize("form", [{"softcap": 5.0}, {"sliding_window": 8}, {"s_aux": torch.zeros(2)}])
def test_attention_of_another_form_is_refused_in_a_divided_row(form: dict[str, Any]) -> None:
    layout = DividedLayout(RankPart.of([9], 2, 0), RankGroup(cast(Any, None), 0, 2))
    rows = torch.zeros(1, 2, 5, 4)
    with pytest.raises(PackingError, match=r"context_parallel = 1"):
        packed_attention(torch.nn.Identity(), rows, rows, rows, None, packed_layout=layout, **form)


def test_processes_that_divide_a_row_compute_what_transformers_computes_of_each_sequence_alone() -> None:
    """Values and gradients; transformers rounds its norms to float32. The processes are threads here, with a gloo group
    between them."""
    size, lengths = 2, (11, 3, 1, 8)
    plain = tiny_student("sdpa", torch.float64)
    ids_T = torch.randint(0, 20, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    weight_TH = torch.randn((sum(lengths), 16), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected_TH = torch.cat([plain.base_model(ids_L[None]).last_hidden_state[0] for ids_L in ids_T.split(lengths)])
    (weight_TH * expected_TH).sum().backward()
    store, got_TH = dist.HashStore(), torch.zeros_like(expected_TH)  # pyright: ignore[reportPrivateImportUsage]
    models = [tiny_student(dtype=torch.float64) for _ in range(size)]

    def process(rank: int) -> None:
        group = dist.ProcessGroup(store, rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=PATIENCE_S))
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)  # pyright: ignore
        layout = DividedLayout(RankPart.of(lengths, size, rank), RankGroup(group, rank, size))
        own_P = torch.from_numpy(layout.part.tokens)
        hidden_PH = divided_hidden(models[rank], ids_T[own_P], layout)
        got_TH[own_P] = hidden_PH.detach()
        (weight_TH[own_P] * hidden_PH).sum().backward()

    with ThreadPoolExecutor(size) as threads:
        list(threads.map(process, range(size)))
    torch.testing.assert_close(got_TH, expected_TH.detach(), atol=1e-5, rtol=1e-5)
    for name, parameter in plain.named_parameters():
        sums = [model.get_parameter(name).grad for model in models]
        if parameter.grad is not None:
            total = torch.stack([grad for grad in sums if grad is not None]).sum(dim=0)
            torch.testing.assert_close(total, parameter.grad, atol=1e-4, rtol=1e-5, msg=name)
