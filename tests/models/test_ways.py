"""Architectures that leak in a row without padding run padded, or one sequence at a time, and then exactly: logits and
gradients are those of each sequence alone through transformers' own code."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from stillhouse.models import packed
from stillhouse.models.logprobs import lm_head
from stillhouse.models.packed import PackingError, choose_way, packed_hidden, set_way, way_of
from stillhouse.models.past import CacheUse, Cells
from tests.models.families import LEAKING, SMALL, build, each_alone

LENGTHS = (3, 17, 1, 40, 9, 8, 2)
HYBRID, BLOOM = "qwen3.5 (gated delta rule)", "bloom (distances of its own)"
ALONE = "dynamic frequencies, convolutions"


def _ids() -> Tensor:
    return torch.randint(0, 61, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", LEAKING)
def test_rows_equal_each_sequence_alone_and_so_do_gradients(name: str) -> None:
    model, plain, ids_T = build(name), build(name), _ids()
    plain.set_attn_implementation("eager")
    choose_way(model)
    assert way_of(model) == ("alone" if name == ALONE else "padded")
    weight_TV = torch.randn((len(ids_T), 61), generator=torch.Generator().manual_seed(2))
    found_TV, expected_TV = (
        lm_head(model).logits(packed_hidden(model, ids_T, LENGTHS)),
        each_alone(plain, ids_T, LENGTHS),
    )
    assert expected_TV.abs().max() > 0.05
    torch.testing.assert_close(found_TV, expected_TV, atol=2e-5, rtol=1e-5)
    for logits_TV in (found_TV, expected_TV):
        (logits_TV * weight_TV).sum().backward()
    for (named, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None) == ("indexer" in named), named
        if ours.grad is not None and theirs.grad is not None:
            scale = max(1.0, float(theirs.grad.abs().max()))
            torch.testing.assert_close(ours.grad, theirs.grad, atol=2e-5 * scale, rtol=1e-4, msg=named)


def test_a_row_without_padding_leaks_and_the_probe_says_by_how_much(caplog: pytest.LogCaptureFixture) -> None:
    """Its configuration names no types of layers: only the measurement shows it."""
    model = build(BLOOM)
    set_way(model, "packed")
    with pytest.raises(PackingError, match=r"packed logits differ from the plain forward by \d.* mixes tokens outside"):
        packed.probe(model)
    with caplog.at_level(logging.INFO):
        choose_way(model)
    assert "runs its sequences padded: BloomForCausalLM: packed logits differ" in caplog.text


def test_padding_that_leaks_leaves_one_sequence_at_a_time() -> None:
    model = build(HYBRID)

    def leak(_module: Any, _inputs: Any, out: Tensor) -> Tensor:
        return out + 0.1 * out.mean(dim=0, keepdim=True)  # between the rows of a batch

    cast(Any, model).model.layers[0].mlp.register_forward_hook(leak)
    choose_way(model)
    assert way_of(model) == "alone"


def _looks_ahead(out_BTH: Tensor) -> Tensor:
    return out_BTH + out_BTH.mean(dim=1, keepdim=True)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (_looks_ahead, "is not causal: tokens change logits before them by"),
        (
            None,
            "alone logits differ .* changes its logits after the head; it can be neither .*engine = sglang",
        ),
    ],
    ids=["looks ahead", "other head"],
)
def test_what_no_way_makes_exact_is_refused(wrong: Callable[[Tensor], Tensor] | None, named: str) -> None:
    model = cast(Any, build(HYBRID))
    if wrong is None:
        model.lm_head.register_forward_hook(lambda _m, _i, out: out * 1.01)  # pyright: ignore
    else:
        model.model.layers[0].mlp.register_forward_hook(lambda _m, _i, out: wrong(out))  # pyright: ignore
    with pytest.raises(PackingError, match=named):
        choose_way(model)


def test_a_bidirectional_model_is_refused_from_its_configuration() -> None:
    with pytest.raises(PackingError, match="configured as bidirectional"):
        choose_way(LlamaForCausalLM(LlamaConfig(**cast(Any, {**SMALL, "is_causal": False}))))


def test_only_packed_sequences_continue_a_past() -> None:
    model, ids_T = build(HYBRID), _ids()[:5]
    choose_way(model)
    with pytest.raises(PackingError, match="runs padded; only packed sequences continue a past"):
        packed_hidden(model, ids_T, [5], [CacheUse(cells=Cells(), keep_last=5)])
    with pytest.raises(PackingError, match="its state is more than keys and values"):
        packed.probe_past(model)


def test_ranks_that_share_parameters_make_as_many_passes_as_any() -> None:
    model, ids_T = build(HYBRID), _ids()
    choose_way(model)
    expected_TH = packed_hidden(model, ids_T, LENGTHS)
    asked: list[int] = []
    calls: list[Any] = []
    cast(Any, model).model.layers[0].register_full_backward_hook(lambda *_: calls.append(1))  # pyright: ignore

    def most(number: int) -> int:
        asked.append(number)
        return number + 2

    set_way(model, "padded", most=most)
    found_TH = packed_hidden(model, ids_T, LENGTHS)
    assert torch.equal(found_TH, expected_TH)
    found_TH.sum().backward()
    assert len(calls) == asked[0] + 2
