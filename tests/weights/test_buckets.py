"""Named tensors as one run of bytes: layout, gathering, views, checksums."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stillhouse.weights.buckets import EqualBuckets, byte_views, checksum, manifest_of

Named = list[tuple[str, Tensor]]


def mixed_tensors() -> Named:
    """Several dtypes and odd sizes, one tensor of 4 KB, a transposed one, a scalar and an empty one."""
    generator = torch.Generator().manual_seed(0)
    return [
        ("norm", torch.randn(3, generator=generator)),
        ("empty", torch.empty(0, 5)),
        ("large", torch.randn(1_025, generator=generator)),
        ("half", torch.randn(7, 3, generator=generator).bfloat16()),
        ("transposed", torch.randn(5, 9, generator=generator).t()),
        ("flags", torch.tensor([True, False, True])),
        ("count", torch.tensor(12345678901)),
        ("last", torch.randn(33, generator=generator).half()),
    ]


def gathered(layout: EqualBuckets, named: Named) -> Tensor:
    sources = byte_views(named)
    run_B = torch.empty(layout.total_bytes, dtype=torch.uint8)
    for index in range(layout.n_buckets):
        start, end = layout.bounds(index)
        layout.gather(*layout.bounds(index), sources, run_B[start:end])
    return run_B


@pytest.mark.parametrize("bucket_bytes", [64, 128, 1_024, 1 << 20])
def test_what_is_gathered_bucket_by_bucket_reads_back_as_the_same_tensors(bucket_bytes: int) -> None:
    named = mixed_tensors()
    layout = EqualBuckets(manifest_of(named), bucket_bytes)
    views = layout.views(gathered(layout, named))
    assert [name for name, _ in views] == [name for name, _ in named]
    for (name, got), (_, sent) in zip(views, named, strict=True):
        assert got.dtype == sent.dtype and got.shape == sent.shape, name
        assert torch.equal(got, sent), name


def test_the_named_tensors_share_memory_with_the_run() -> None:
    named = mixed_tensors()
    layout = EqualBuckets(manifest_of(named), 128)
    run_B = gathered(layout, named)
    for _, view in layout.views(run_B):
        assert view.untyped_storage().data_ptr() == run_B.untyped_storage().data_ptr()


def test_the_run_is_found_only_when_every_tensor_lies_where_the_layout_says() -> None:
    named = mixed_tensors()
    layout = EqualBuckets(manifest_of(named), 128)
    run_B = gathered(layout, named)
    views = layout.views(run_B)
    found_B = layout.run_of(views)
    assert found_B is not None
    assert found_B.data_ptr() == run_B.data_ptr() and found_B.numel() == layout.total_bytes
    assert layout.run_of(named) is None
    assert layout.run_of([*views[:-1], (views[-1][0], views[-1][1].clone())]) is None
    shifted = EqualBuckets(manifest_of(views[2:]), 128)
    assert shifted.run_of(views[2:]) is None


def test_every_bucket_but_the_last_is_full_and_together_they_are_the_run() -> None:
    layout = EqualBuckets(manifest_of(mixed_tensors()), 1_024)
    bounds = [layout.bounds(index) for index in range(layout.n_buckets)]
    assert bounds[0][0] == 0 and bounds[-1][1] == layout.total_bytes
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(bounds))
    assert {end - start for start, end in bounds[:-1]} == {1_024}
    assert 0 < bounds[-1][1] - bounds[-1][0] <= 1_024


@settings(max_examples=25)
@given(n=st.integers(1, 40), first=st.integers(0, 39), second=st.integers(0, 39), seed=st.integers(0, 2**32))
def test_exchanged_words_and_a_flipped_bit_change_the_checksum(n: int, first: int, second: int, seed: int) -> None:
    words = torch.from_numpy(np.random.default_rng(seed).integers(-(2**63), 2**63, 8 * n))
    first, second = first % len(words), second % len(words)
    exchanged, flipped = words.clone(), words.clone()
    exchanged[[first, second]] = words[[second, first]]
    flipped[first] ^= 1 << (seed % 63)
    before, after, bit = (checksum(w.view(torch.uint8)) for w in (words, exchanged, flipped))
    assert before.dtype == torch.int64
    assert torch.equal(before, after) == (first == second)
    assert not torch.equal(before, bit)


def test_a_bucket_that_differs_in_one_bit_or_is_another_has_another_checksum() -> None:
    named = mixed_tensors()
    layout = EqualBuckets(manifest_of(named), 1_024)
    run_B = gathered(layout, named)
    first, second = run_B[:1_024], run_B[1_024:2_048]
    assert checksum(first).item() != checksum(second).item()
    flipped = first.clone()
    flipped[517] ^= 1
    assert checksum(flipped).item() != checksum(first).item()


def test_the_digest_tells_manifests_apart_by_order_dtype_and_shape() -> None:
    a, b = ("a", torch.zeros(2, 3)), ("b", torch.zeros(6))
    digests = {
        manifest_of(named).digest
        for named in ([a, b], [b, a], [a, ("b", torch.zeros(6).half())], [("a", torch.zeros(3, 2)), b], [a])
    }
    assert len(digests) == 5
    assert manifest_of([a, b]).digest == manifest_of([("a", torch.ones(2, 3)), b]).digest


def test_no_tensor_a_name_twice_and_a_crooked_bucket_size_are_refused() -> None:
    with pytest.raises(ValueError, match="no tensors"):
        manifest_of([])
    with pytest.raises(ValueError, match="came twice: a"):
        manifest_of([("a", torch.zeros(1)), ("a", torch.zeros(1))])
    with pytest.raises(ValueError, match="bucket_bytes = 100"):
        EqualBuckets(manifest_of([("a", torch.zeros(1))]), 100)
