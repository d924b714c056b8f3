"""TF32: off where it can be turned off, and allowed for by name where it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from stillhouse.models import packed, precision
from stillhouse.models.packed import PackingError, probe
from stillhouse.models.precision import tf32_forced, turn_tf32_off


@pytest.fixture(autouse=True)
def precision_as_before() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def _model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "head_dim": 8,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**shape, num_attention_heads=4, num_key_value_heads=2))
    model.set_attn_implementation(packed.IMPLEMENTATION)
    return model.eval()


def _always(device_type: str) -> bool:
    return True


def _never(device_type: str) -> bool:
    return False


def _on_cuda(device_type: str) -> bool:
    return device_type == "cuda"


@pytest.mark.parametrize(
    ("device", "environment", "forced"),
    [
        ("cuda", {"NVIDIA_TF32_OVERRIDE": "1"}, True),
        ("cuda", {"NVIDIA_TF32_OVERRIDE": "0"}, False),
        ("cuda", {}, False),
        ("cpu", {"NVIDIA_TF32_OVERRIDE": "1"}, False),
    ],
)
def test_only_cublas_own_variable_forces_tf32(device: str, environment: dict[str, str], forced: bool) -> None:
    assert tf32_forced(device, environment) is forced


def test_the_probe_compares_in_full_float32_and_leaves_the_setting_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    forward = packed.packed_hidden

    def look(*args: object) -> object:
        seen.append(torch.get_float32_matmul_precision())
        return forward(*args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(packed, "packed_hidden", look)
    torch.set_float32_matmul_precision("high")
    probe(_model())
    assert seen == ["highest"] and torch.get_float32_matmul_precision() == "high"


@pytest.mark.parametrize(
    ("off_by", "forced", "passes"), [(1e-3, False, False), (1e-3, True, True), (0.05, True, False)]
)
def test_a_probe_that_is_off_as_tf32_is_passes_only_where_tf32_is_forced(
    off_by: float, forced: bool, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = packed.packed_hidden

    def rounded(*args: object) -> torch.Tensor:
        return forward(*args) * (1.0 + off_by)  # pyright: ignore[reportArgumentType]

    model = _model()
    with torch.no_grad():
        model.lm_head.weight.mul_(10.0)  # logits well above 1
    monkeypatch.setattr(packed, "packed_hidden", rounded)
    monkeypatch.setattr(packed, "tf32_forced", _always if forced else _never)
    if passes:
        probe(model)
    else:
        named = "by TF32, which NVIDIA_TF32_OVERRIDE=1 forces" if forced else "in torch.float32"
        with pytest.raises(PackingError, match=named):
            probe(model)


def test_the_learner_turns_tf32_off_and_says_where_it_cannot(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.set_float32_matmul_precision("high")
    turn_tf32_off("cpu")
    assert torch.get_float32_matmul_precision() == "highest" and not caplog.records
    monkeypatch.setattr(precision, "tf32_forced", _on_cuda)
    turn_tf32_off("cuda:1")
    assert "NVIDIA_TF32_OVERRIDE=1 is set: float32 products on cuda:1 are TF32" in caplog.text
