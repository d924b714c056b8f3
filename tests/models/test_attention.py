"""Which attention calls get repeated keys and values, and that repeating changes no number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stillhouse.models import attention
from stillhouse.models.attention import attend, attend_last, computed_in, repeats_heads

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


def _explicit(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Attention of each query by itself, head by head."""
    n_heads, n_queries = query.shape[1:3]
    n_seen, groups = key.shape[2], n_heads // key.shape[1]
    rows: list[Tensor] = []
    for head in range(n_heads):
        for i in range(n_queries):
            seen = n_seen - n_queries + i + 1
            keys, values = key[0, head // groups, :seen], value[0, head // groups, :seen]
            rows.append(torch.softmax(keys @ query[0, head, i] * scaling, dim=0) @ values)
    return torch.stack(rows).view(1, n_heads, n_queries, -1)


@pytest.mark.parametrize("way", [attend_last, attention._attend_aligned])  # pyright: ignore[reportPrivateUsage]
@pytest.mark.parametrize(
    ("n_queries", "n_seen", "sizes"), [(5, 12, (8, 8)), (1, 9, (8, 8)), (7, 7, (8, 8)), (6, 7, (8, 8)), (3, 8, (8, 4))]
)
def test_last_queries_see_themselves_and_all_before_them(
    n_queries: int, n_seen: int, sizes: tuple[int, int], way: Callable[..., Tensor]
) -> None:
    random = torch.Generator().manual_seed(n_seen)
    shapes = ((1, 6, n_queries, sizes[0]), (1, 2, n_seen, sizes[0]), (1, 2, n_seen, sizes[1]))
    inputs = [torch.randn(*shape, generator=random, dtype=torch.float64).requires_grad_() for shape in shapes]
    weights = torch.randn(1, 6, n_queries, sizes[1], generator=random, dtype=torch.float64)
    ways = (_explicit(inputs[0], inputs[1], inputs[2], 0.3), way(*inputs, scaling=0.3))
    found = [[rows.detach(), *torch.autograd.grad((rows * weights).sum(), inputs)] for rows in ways]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_cudnn_which_compiles_a_plan_for_each_shape_is_not_used() -> None:
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.mem_efficient_sdp_enabled()
