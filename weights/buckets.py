"""A set of named tensors as one run of bytes, cut into buckets: what a weight broadcast moves. No process group here.

    Layout          tensor 0 | pad | tensor 1 | pad | ... | tensor n-1 | pad    (each starts at a multiple of 64 bytes)
    buckets         [0, bucket_bytes) [bucket_bytes, 2 * bucket_bytes) ... the last one is smaller

    PackedLayout    whole tensors without padding, as weights.manifest cuts them: what SGLang servers take

A bucket border of `Layout` may run through a tensor: whoever receives has the whole run in one piece, so that each
tensor is a view of it and nothing is copied. Whoever sends gathers one bucket at a time.

Legend: B = bytes of the whole run, b = bytes of one bucket. All byte tensors are uint8, 1-D.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from weights.manifest import Bucket, Manifest, TensorSpec, whole_tensor_buckets

ALIGN_BYTES = 64
"""Where tensors start; also the unit of bucket sizes. Enough for any dtype, and for vector loads."""


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    """Raises ValueError for one that this torch does not have."""
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{spec.name}: {spec.dtype!r} is no dtype of this torch ({torch.__version__})")
    return dtype


def manifest_of(named: Iterable[tuple[str, Tensor]]) -> Manifest:
    """Raises ValueError when there is no tensor or a name comes twice."""
    specs = tuple(
        TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in named
    )
    if not specs:
        raise ValueError("got no tensors to publish; expected the named parameters of a model")
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"these names came twice: {', '.join(twice[:8])}; name each tensor once")
    return Manifest(specs)


class Layout:
    """Where each tensor of a manifest lies, and where the buckets are cut."""

    def __init__(self, manifest: Manifest, bucket_bytes: int) -> None:
        """Raises ValueError unless `bucket_bytes` is a positive multiple of 64."""
        if bucket_bytes < ALIGN_BYTES or bucket_bytes % ALIGN_BYTES:
            raise ValueError(f"bucket_bytes = {bucket_bytes}; expected a positive multiple of {ALIGN_BYTES}")
        self.manifest = manifest
        self.bucket_bytes = bucket_bytes
        self.offsets: list[int] = []
        end = 0
        for spec in manifest.tensors:
            self.offsets.append(end)
            end += -(-spec.n_bytes // ALIGN_BYTES) * ALIGN_BYTES
        self.total_bytes = max(end, ALIGN_BYTES)

    @property
    def n_buckets(self) -> int:
        return -(-self.total_bytes // self.bucket_bytes)

    def bounds(self, index: int) -> tuple[int, int]:
        """First byte and end of bucket `index`."""
        start = index * self.bucket_bytes
        return start, min(start + self.bucket_bytes, self.total_bytes)

    def gather(self, index: int, sources: Sequence[Tensor], out_b: Tensor) -> None:
        """Copy the bytes of bucket `index` to the front of `out_b` (other device allowed). `sources`: `byte_views` of
        the tensors, in manifest order."""
        start, end = self.bounds(index)
        first = max(0, bisect.bisect_right(self.offsets, start) - 1)
        for offset, source in zip(self.offsets[first:], sources[first:], strict=True):
            if offset >= end:
                break
            low, high = max(start, offset), min(end, offset + source.numel())
            if low < high:
                out_b[low - start : high - start].copy_(source[low - offset : high - offset])

    def run_of(self, named: Sequence[tuple[str, Tensor]]) -> Tensor | None:
        """The run that these tensors are views of, if they are: then its buckets need no gathering."""
        return _run_of(named, self.manifest, self.offsets, self.total_bytes)

    def views(self, run_B: Tensor) -> list[tuple[str, Tensor]]:
        """The named tensors, as views of the run."""
        return _views(run_B, self.manifest, self.offsets)


class PackedLayout:
    """Where each tensor of a manifest lies when buckets hold whole tensors."""

    def __init__(self, manifest: Manifest, bucket_bytes: int) -> None:
        """Raises ValueError unless `bucket_bytes` is positive."""
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes = {bucket_bytes}; expected at least 1")
        self.manifest = manifest
        self.buckets: tuple[Bucket, ...] = whole_tensor_buckets(manifest, bucket_bytes)
        self.total_bytes = self.buckets[-1].end if self.buckets else 0
        starts: dict[str, int] = {}
        for bucket in self.buckets:
            at = bucket.start
            for spec in bucket.tensors:
                starts[spec.name] = at
                at += spec.n_bytes
        self.offsets = [starts.get(spec.name, 0) for spec in manifest.tensors]

    def run_of(self, named: Sequence[tuple[str, Tensor]]) -> Tensor | None:
        """The run that these tensors are views of, if they are."""
        return _run_of(named, self.manifest, self.offsets, self.total_bytes)

    def views(self, run_B: Tensor) -> list[tuple[str, Tensor]]:
        """The named tensors, in manifest order, as views of the run."""
        return _views(run_B, self.manifest, self.offsets)


def _run_of(
    named: Sequence[tuple[str, Tensor]], manifest: Manifest, offsets: Sequence[int], total_bytes: int
) -> Tensor | None:
    first = named[0][1]
    storage = first.untyped_storage()
    for (_, tensor), spec, offset in zip(named, manifest.tensors, offsets, strict=True):
        same = tensor.untyped_storage().data_ptr() == storage.data_ptr()
        at = tensor.storage_offset() * tensor.dtype.itemsize
        if not same or not tensor.is_contiguous() or (at != offset and spec.n_bytes > 0):
            return None
    if storage.nbytes() != total_bytes:
        return None
    return torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage)


def _views(run_B: Tensor, manifest: Manifest, offsets: Sequence[int]) -> list[tuple[str, Tensor]]:
    return [
        (spec.name, run_B[offset : offset + spec.n_bytes].view(torch_dtype(spec)).view(spec.shape))
        for spec, offset in zip(manifest.tensors, offsets, strict=True)
    ]


def byte_views(named: Iterable[tuple[str, Tensor]]) -> list[Tensor]:
    """The bytes of each tensor; a copy only of what is not contiguous."""
    return [tensor.detach().contiguous().view(-1).view(torch.uint8) for _, tensor in named]


def checksum(bucket_b: Tensor) -> Tensor:
    """Wrapping sum of the bucket's 8-byte words: int64 scalar on the bucket's device.

    It runs at memory speed (25 GB/s on one core, where crc32 does 2) and is there to catch a bucket that is stale,
    misplaced or half written; TCP guards against flipped bits."""
    return bucket_b.view(torch.int64).sum()
