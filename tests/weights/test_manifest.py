"""Buckets of whole tensors, and where they lie."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stillhouse.weights.buckets import PackedLayout, manifest_of
from stillhouse.weights.manifest import ITEM_BYTES, TensorSpec, WeightManifest, whole_tensor_buckets

specs = st.builds(
    TensorSpec,
    name=st.just(""),
    dtype=st.sampled_from(["float32", "bfloat16", "int64", "bool"]),
    shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
)


def test_sizes_of_items_are_those_of_torch() -> None:
    for name, size in ITEM_BYTES.items():
        assert getattr(torch, name).itemsize == size


def test_a_dtype_that_weights_do_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="complex128"):
        whole_tensor_buckets(WeightManifest((TensorSpec("a", "complex128", (2,)),)), 64)


@settings(max_examples=40)
@given(st.lists(specs, min_size=1, max_size=12), st.integers(1, 600))
def test_every_tensor_with_bytes_is_in_one_bucket_aligned_and_without_gaps(
    tensors: list[TensorSpec], bucket_bytes: int
) -> None:
    tensors = [msgspec.structs.replace(spec, name=str(number)) for number, spec in enumerate(tensors)]
    buckets = whole_tensor_buckets(WeightManifest(tuple(tensors)), bucket_bytes)
    found = [spec.name for bucket in buckets for spec in bucket.tensors]
    assert sorted(found) == sorted(spec.name for spec in tensors if spec.n_bytes)
    end = 0
    for bucket in buckets:
        assert bucket.start == end
        at = 0
        for spec in bucket.tensors:
            assert at % spec.item_bytes == 0  # what SGLang's FlattenedTensorBucket.empty insists on
            at += spec.n_bytes
        end = bucket.end
        assert end - bucket.start == at
        assert at <= bucket_bytes or len(bucket.tensors) == 1


def mixed_tensors() -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        ("half", torch.randn(7, 3, generator=generator).bfloat16()),
        ("empty", torch.empty(0, 5)),
        ("large", torch.randn(1_025, generator=generator)),
        ("count", torch.tensor(7)),
        ("flags", torch.tensor([True, False, True])),
    ]


def test_each_bucket_reads_back_as_its_tensors() -> None:
    named = mixed_tensors()
    layout = PackedLayout(manifest_of(named), 64)
    run_B = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    for (_, view), (_, tensor) in zip(layout.views(run_B), named, strict=True):
        view.copy_(tensor)
    sent = dict(named)
    assert len(layout.buckets) > 1
    for bucket in layout.buckets:
        at = bucket.start
        for spec in bucket.tensors:
            got = run_B[at : at + spec.n_bytes].view(sent[spec.name].dtype).view(spec.shape)
            assert torch.equal(got, sent[spec.name]), spec.name
            at += spec.n_bytes


def test_the_run_is_found_only_where_the_tensors_lie_as_the_layout_says() -> None:
    named = mixed_tensors()
    layout = PackedLayout(manifest_of(named), 64)
    run_B = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    found = layout.run_of(layout.views(run_B))
    assert found is not None and found.data_ptr() == run_B.data_ptr()
    assert layout.run_of(named) is None
