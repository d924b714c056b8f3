"""Packed weights: the same products as with plain ones, before and after the weights change. What can be packed is
asked of the processor, as the product does; the path of a processor that cannot is taken by all."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from stillhouse.engines.torch import products
from stillhouse.engines.torch.engine import TorchEngine
from stillhouse.engines.torch.products import Product, packs
from stillhouse.protocol.messages import WeightVersion
from tests.engines.torch.generation import assert_true, make_engine, make_model, make_requests, run

torch.set_num_threads(1)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


NO_BFLOAT16, NO_OPERATORS, NO_ONEDNN = "no products in bfloat16", "no operators", "no oneDNN"


def processor_multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN has packed products of this type here: in bfloat16 it needs AVX-512, or AVX-NE-CONVERT."""
    return dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


@pytest.fixture
def everything_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "PACKED_FROM_ELEMENTS", 1)


def slow_product(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """Element by element, in float64."""
    rows = [[float((row.double() * line.double()).sum()) for line in weight] for row in x]
    return torch.tensor(rows, dtype=torch.float64) + (0.0 if bias is None else bias.double())


@pytest.mark.usefixtures("everything_packed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_packed_weight_multiplies_as_a_plain_one(dtype: torch.dtype, rows: int, with_bias: bool) -> None:
    assert packs(torch.empty(24, 40, dtype=dtype)) == processor_multiplies(dtype)
    assert_product_follows_its_weight(dtype, rows, with_bias)


@pytest.mark.usefixtures("everything_packed")
@pytest.mark.parametrize("lacking", [NO_BFLOAT16, NO_OPERATORS, NO_ONEDNN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_nothing_can_be_packed_products_are_the_same(
    lacking: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacking == NO_BFLOAT16:
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    elif lacking == NO_OPERATORS:
        monkeypatch.setattr(products, "_ops", lambda: SimpleNamespace(mkldnn=SimpleNamespace()))
    else:
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert packs(torch.empty(24, 40, dtype=dtype)) == (lacking == NO_BFLOAT16 and dtype == torch.float32)
    for rows in (1, 17):
        for with_bias in (False, True):
            assert_product_follows_its_weight(dtype, rows, with_bias)


def assert_product_follows_its_weight(dtype: torch.dtype, rows: int, with_bias: bool) -> None:
    torch.manual_seed(rows)
    weight, bias = torch.randn(24, 40).to(dtype), torch.randn(24).to(dtype) if with_bias else None
    x, residual = torch.randn(rows, 40).to(dtype), torch.randn(rows, 24).to(dtype)
    product = Product(weight, bias)
    for _ in range(2):
        expected = slow_product(weight, bias, x)
        allowed = TOLERANCE[dtype] * float(expected.abs().max())
        torch.testing.assert_close(product(x).double(), expected, atol=allowed, rtol=0)
        torch.testing.assert_close(
            product.added_to(residual, x).double(), expected + residual.double(), atol=2 * allowed, rtol=0
        )
        weight.copy_(torch.randn(24, 40))
        product.refresh()


def test_small_and_wide_weights_are_not_packed() -> None:
    assert not packs(torch.zeros(16, 16))
    assert packs(torch.zeros(512, 512))
    assert not packs(torch.zeros(512, 512, dtype=torch.float64))
    assert not packs(torch.zeros(512, 512, device="meta"))


@pytest.mark.usefixtures("everything_packed")
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_an_engine_with_packed_weights_follows_a_swap(kind: str) -> None:
    """Log-probs are those of the plain forward of the weights that are in force, old and new."""
    engine: TorchEngine = make_engine(kind, fused=True, update_mode="retract")
    requests = make_requests(4, new_tokens=6)
    assert_true(make_model(kind, 0), requests, run(engine, requests))
    new = make_model(kind, 1)
    engine.stage_weights(WeightVersion(0, 1), [(name, p.detach()) for name, p in new.named_parameters()])
    assert_true(new, requests, run(engine, requests))
