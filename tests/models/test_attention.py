"""Which attention calls get repeated keys and values, and that repeating changes no number."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models import attention
from models.attention import attend, computed_in, repeats_heads

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("device", "dtype", "masked", "sizes", "grouped", "repeated"),
    [
        ("cuda", BFLOAT16, False, (128, 128), True, False),  # flash takes grouped queries
        ("cuda", FLOAT16, False, (64, 64), True, False),
        (
            "cuda",
            FLOAT32,
            False,
            (128, 128),
            True,
            True,
        ),  # no flash in float32: memory-efficient, which takes no groups
        ("cuda", BFLOAT16, True, (128, 128), True, True),  # no flash with a mask
        ("cuda", FLOAT32, True, (128, 128), True, True),
        ("cuda", BFLOAT16, False, (256, 256), True, True),  # beyond what flash takes on every GPU
        ("cuda", BFLOAT16, False, (192, 128), True, True),  # values of another size
        ("cuda", FLOAT32, True, (128, 128), False, False),  # nothing to repeat
        ("cpu", FLOAT32, True, (128, 128), True, False),
        ("cpu", BFLOAT16, False, (256, 256), True, False),
    ],
)
def test_grouped_queries_are_repeated_where_no_fused_kernel_takes_them(
    device: str, dtype: torch.dtype, masked: bool, sizes: tuple[int, int], grouped: bool, repeated: bool
) -> None:
    query_size, value_size = sizes
    got = repeats_heads(device, dtype, masked=masked, query_size=query_size, value_size=value_size, grouped=grouped)
    assert got is repeated


@pytest.mark.parametrize("windowed", [False, True])
def test_repeated_heads_give_the_same_values_and_gradients(windowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mask_LM = torch.ones(9, 9, dtype=torch.bool).tril().triu(-3) if windowed else None

    def run() -> list[Tensor]:
        random = torch.Generator().manual_seed(1)
        shapes = ((2, 6, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8))
        inputs = [torch.randn(*shape, generator=random, dtype=torch.float64).requires_grad_() for shape in shapes]
        rows = attend(inputs[0], inputs[1], inputs[2], mask_LM=mask_LM, scaling=0.3)
        weights = torch.randn(*rows.shape, generator=random, dtype=torch.float64)
        return [rows.detach(), *torch.autograd.grad((rows * weights).sum(), inputs)]

    grouped = run()
    asked: list[bool] = []

    def always(*args: object, **kwargs: object) -> bool:
        asked.append(True)
        return True

    monkeypatch.setattr(attention, "repeats_heads", always)
    repeated = run()
    assert asked
    for one, other in zip(grouped, repeated, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_the_dtype_that_counts_is_the_one_of_the_products() -> None:
    tensor = torch.zeros(1)
    assert computed_in(tensor) == FLOAT32
    with torch.autocast("cpu", BFLOAT16):
        assert computed_in(tensor) == BFLOAT16
        assert computed_in(tensor.double()) == torch.float64
    assert computed_in(torch.zeros(1, device="meta")) == FLOAT32
