"""The packed forward equals the plain per-sequence forward, values and gradients, and refuses what it cannot pack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from stillhouse.models import packed
from stillhouse.models.logprobs import lm_head
from stillhouse.models.packed import PackingError, packed_hidden
from stillhouse.models.packed_layout import first_fit_decreasing
from stillhouse.models.past import CacheUse, Cells, CellSpan, Past
from tests.models.families import ARCHITECTURES, EXPERTS, MOVING, SMALL, build, each_alone

QWEN3, PHI3 = "qwen3 (GQA, rotary)", "phi3 (longrope)"
GRADIENTS = [*(name for name in ARCHITECTURES if name.startswith(("qwen3", "gpt2", "gemma2"))), PHI3]


def _packed(name: str = QWEN3, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return build(name, packed.IMPLEMENTATION, dtype)


def _ids(lengths: Sequence[int], vocab_size: int = 61) -> Tensor:
    return torch.randint(0, vocab_size, (sum(lengths),), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ARCHITECTURES | MOVING)
@pytest.mark.parametrize("lengths", [(7,), (5, 5, 5), (3, 17, 1, 40, 9, 8, 2)], ids=str)
def test_packed_equals_plain_forward(name: str, lengths: tuple[int, ...]) -> None:
    dtype = torch.float32 if "experts" in name else torch.float64  # torch has no float64 kernel for experts
    model, plain = _packed(name, dtype), build(name, "eager", dtype)
    ids_T = _ids(lengths)
    with torch.no_grad():
        logits_TV = lm_head(model).logits(packed_hidden(model, ids_T, lengths))
        expected_TV = each_alone(plain, ids_T, lengths)
    assert expected_TV.abs().max() > 0.05
    # norms and rotary angles are float32 inside whatever the model's dtype
    torch.testing.assert_close(logits_TV, expected_TV, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "name", [*[name for name in ARCHITECTURES if name.startswith(("qwen3", "gpt2", "gemma2"))], PHI3]
)
def test_packed_gradients_equal_plain_gradients(name: str) -> None:
    lengths = (3, 17, 1, 30, 9)
    model, plain = _packed(name), build(name, "eager")
    ids_T = _ids(lengths)
    weight_TV = torch.randn((sum(lengths), 61), generator=torch.Generator().manual_seed(2))
    (lm_head(model).logits(packed_hidden(model, ids_T, lengths)) * weight_TV).sum().backward()
    (each_alone(plain, ids_T, lengths) * weight_TV).sum().backward()
    for (weight, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None, weight
        scale = float(theirs.grad.abs().max())
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5 * max(scale, 1.0), rtol=1e-4, msg=weight)


def test_a_sequence_does_not_feel_its_neighbours() -> None:
    model = _packed()
    lengths = (6, 9, 4)
    ids_T = _ids(lengths)
    other_T = ids_T.clone()
    other_T[6:15] = (other_T[6:15] + 1) % 61
    with torch.no_grad():
        before_TH, after_TH = packed_hidden(model, ids_T, lengths), packed_hidden(model, other_T, lengths)
    assert torch.equal(before_TH[:6], after_TH[:6]) and torch.equal(before_TH[15:], after_TH[15:])
    assert not torch.allclose(before_TH[6:15], after_TH[6:15])


def test_bfloat16_autocast_runs_and_stays_near_float32() -> None:
    model = _packed()
    lengths = (6, 9, 4)
    with torch.no_grad():
        full_TH = packed_hidden(model, _ids(lengths), lengths)
        with torch.autocast("cpu", torch.bfloat16):
            half_TH = packed_hidden(model, _ids(lengths), lengths).float()
    assert 0 < float((half_TH - full_TH).norm() / full_TH.norm()) < 0.05


@pytest.mark.parametrize("lengths", [(3, 4), (9, 0), (), (8,)], ids=str)
def test_lengths_that_do_not_fit_the_row_are_refused(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected ids"):
        packed_hidden(_packed(), _ids((9,)), lengths)


def test_sequence_longer_than_the_context_window_is_refused() -> None:
    with pytest.raises(ValueError, match="context window of this model is 64"):
        packed_hidden(_packed("gpt2 (learned positions, Conv1D)"), _ids((65,)), (65,))


def test_packed_model_called_directly_is_refused() -> None:
    model = _packed()
    with pytest.raises(PackingError, match="called directly"):
        model(input_ids=_ids((9,))[None])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sequences_that_continue_a_past_equal_the_whole_ones(name: str) -> None:
    """In one pack: two that continue (one a past of several pieces, the last of them cut), and two from the start."""
    model = _packed(name)
    long_T, other_T = _ids((23,)), _ids((23,))[8:]
    whole_TH, other_TH = (packed_hidden(model, ids_T, [len(ids_T)]) for ids_T in (long_T, other_T))
    first, second, third = Cells(), Cells(), Cells()
    packed_hidden(model, long_T[:11], [11], [CacheUse(cells=first, keep_last=11)])
    packed_hidden(model, long_T[11:17], [6], [CacheUse(Past((CellSpan(first, 11),)), second, 4)])
    assert second.layers[0][0].shape[1] == 4, "of the last tokens only"
    packed_hidden(model, long_T[11:17], [6], [CacheUse(Past((CellSpan(first, 11),)), third, 6)])
    pasts = (Past((CellSpan(first, 11), CellSpan(third, 4))), Past((CellSpan(first, 3),)))
    row_T = torch.cat([long_T[15:], other_T, long_T[3:], other_T[:2]])
    around = [CacheUse(pasts[0]), None, CacheUse(pasts[1]), CacheUse()]
    found_TH = packed_hidden(model, row_T, [8, 15, 20, 2], around)
    expected_TH = torch.cat([whole_TH[15:], other_TH, whole_TH[3:], other_TH[:2]])
    torch.testing.assert_close(found_TH, expected_TH, rtol=1e-4, atol=1e-5)
    assert packed.probe_past(model) == first.nbytes // 11


def test_a_past_counts_towards_the_context_window() -> None:
    model = _packed()
    cells = Cells()
    packed_hidden(model, _ids((60,)), [60], [CacheUse(cells=cells, keep_last=60)])
    with pytest.raises(ValueError, match="sequence of 65 tokens; the context window of this model is 64"):
        packed_hidden(model, _ids((5,)), [5], [CacheUse(Past((CellSpan(cells, 60),)))])


def test_probe_refuses_a_past_that_a_model_does_not_continue() -> None:
    model = _packed()
    model.model.layers[1].mlp.register_forward_hook(lambda _m, _i, out: out + out.mean(dim=1, keepdim=True))  # pyright: ignore
    with pytest.raises(PackingError, match="cannot continue from kept keys"):
        packed.probe_past(model)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_probe_accepts_what_packs_correctly_and_puts_the_attention_back(name: str) -> None:
    model = _packed(name)
    packed.probe(model)
    packed_hidden(model, _ids((4, 3)), (4, 3))


def test_probe_refuses_a_model_whose_logits_are_not_its_linear_head() -> None:
    model = _packed()
    model.lm_head.register_forward_hook(lambda _m, _i, out: out * 1.01)  # pyright: ignore
    with pytest.raises(PackingError, match="differ from the plain forward"):
        packed.probe(model)


def test_probe_refuses_a_model_that_mixes_tokens_outside_attention() -> None:
    model = _packed()

    def leak(_module: Any, _inputs: Any, out_1TH: Tensor) -> Tensor:
        return out_1TH + 0.1 * torch.nn.functional.pad(out_1TH, (0, 0, 1, 0))[:, :-1]  # a causal convolution

    model.model.layers[0].mlp.register_forward_hook(leak)  # pyright: ignore
    with pytest.raises(PackingError, match="mixes tokens outside"):
        packed.probe(model)


def test_probe_refuses_rotations_that_depend_on_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "turn_each_alone", lambda _model: None)  # pyright: ignore
    with pytest.raises(PackingError, match="Phi3RotaryEmbedding turns a short sequence otherwise beside a long one"):
        packed.probe(_packed(PHI3))


@pytest.mark.parametrize("name", MOVING)
def test_probe_accepts_what_is_turned_alone(name: str) -> None:
    packed.probe(_packed(name))


def test_a_window_that_an_architecture_keeps_to_itself_is_run_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _packed("mistral (sliding window)")
    inner = packed.packed_attention

    def without_window(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **{**kwargs, "sliding_window": None})

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, packed.IMPLEMENTATION, without_window)  # pyright: ignore
    with pytest.raises(PackingError, match="sliding window of 4 tokens"):
        packed_hidden(model, _ids((4,)), (4,))
    packed.choose_way(model)
    assert packed.way_of(model) == "padded"


def test_a_window_of_some_layers_that_is_in_the_mask_alone_is_run_padded() -> None:
    """In a shorter window the probe would see it by its logits."""
    kinds = {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}
    shape = {**SMALL, **EXPERTS, "shared_expert_intermediate_size": 24, "sliding_window": 12}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2_moe", **shape, **kinds)).eval()
    lengths = (17, 40)
    plain_TV = each_alone(model, _ids(lengths), lengths)
    packed.choose_way(model)
    assert packed.way_of(model) == "padded"
    with torch.no_grad():
        found_TV = lm_head(model).logits(packed_hidden(model, _ids(lengths), lengths))
    torch.testing.assert_close(found_TV, plain_TV.detach(), atol=2e-5, rtol=1e-4)


def test_first_fit_decreasing_drops_nothing_and_keeps_to_the_budget() -> None:
    lengths = [5, 9, 3, 12, 4, 1, 9]
    packs = first_fit_decreasing(lengths, 10)
    assert sorted(index for pack in packs for index in pack) == list(range(7))
    assert [[lengths[i] for i in pack] for pack in packs] == [[12], [9, 1], [9], [5, 4], [3]]
    with pytest.raises(ValueError, match="budget 0"):
        first_fit_decreasing(lengths, 0)
