"""A set of named tensors as one run of bytes, cut into the buckets that a broadcast sends. No process group here.

    Layout          tensor 0 | pad | tensor 1 | pad | ... | tensor n-1 | pad    (each starts at a multiple of 64 bytes)
    buckets         [0, bucket_bytes) [bucket_bytes, 2 * bucket_bytes) ... the last one is smaller

    PackedLayout    buckets of whole tensors without padding, as weights.manifest cuts them, for SGLang servers

A bucket border of `EqualBuckets` may cut through a tensor: a receiver holds the whole run in one piece, so each tensor
is a view of it and nothing is copied. A sender gathers one bucket at a time.

Legend: B = bytes of the whole run, b = bytes of one bucket. All byte tensors are uint8, 1-D.
"""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor
from xxhash import xxh3_64_digest

from stillhouse.weights.errors import WeightsRefused
from stillhouse.weights.manifest import TensorSpec, WeightBucket, WeightManifest, whole_tensor_buckets

ALIGN_BYTES = 64
"""Alignment of tensors and unit of bucket sizes. Enough for any dtype, and for vector loads."""


def aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGN_BYTES) * ALIGN_BYTES


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    """Raises ValueError for a dtype that this torch does not have."""
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{spec.name}: {spec.dtype!r} is not a dtype of this torch ({torch.__version__})")
    return dtype


def manifest_of(named: Iterable[tuple[str, Tensor]]) -> WeightManifest:
    """The manifest of these tensors. Raises ValueError when there are none, or a name comes twice."""
    specs = tuple(
        TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in named
    )
    if not specs:
        raise ValueError("got no tensors to publish; expected the named parameters of a model")
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"these names came twice: {', '.join(twice[:8])}; name each tensor once")
    return WeightManifest(specs)


class BucketLayout(ABC):
    """The place of each tensor in the run, and the cuts between buckets."""

    def __init__(self, manifest: WeightManifest, offsets: Sequence[int], total_bytes: int) -> None:
        """`offsets`: first byte of each tensor, in manifest order."""
        self.manifest = manifest
        self.offsets = list(offsets)
        self.total_bytes = total_bytes
        tensors = enumerate(zip(offsets, manifest.tensors, strict=True))
        self._by_offset = sorted((offset, i) for i, (offset, spec) in tensors if spec.n_bytes)

    @property
    @abstractmethod
    def n_buckets(self) -> int: ...

    @property
    @abstractmethod
    def largest_bytes(self) -> int:
        """Size of the largest bucket."""

    @abstractmethod
    def bounds(self, index: int) -> tuple[int, int]:
        """First byte and end of bucket `index`."""

    def tensors_in(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Tensors that may have a part in bytes [start, end) of the run: place in the manifest, and first byte in the
        run."""
        first = max(0, bisect.bisect_right(self._by_offset, (start, len(self.offsets))) - 1)
        for offset, i in self._by_offset[first:]:
            if offset >= end:
                break
            yield i, offset

    def gather(self, start: int, end: int, sources: Sequence[Tensor], out_b: Tensor) -> None:
        """Copy bytes [start, end) of the run to the front of `out_b`, which may be on another device. `sources`:
        `byte_views` of the tensors, in manifest order."""
        for i, offset in self.tensors_in(start, end):
            low, high = max(start, offset), min(end, offset + sources[i].numel())
            if low < high:
                out_b[low - start : high - start].copy_(sources[i][low - offset : high - offset])

    def run_of(self, named: Sequence[tuple[str, Tensor]]) -> Tensor | None:
        """The run of which these tensors are views; its buckets need no gathering. None if they are not such views."""
        first = named[0][1]
        storage = first.untyped_storage()
        for (_, tensor), spec, offset in zip(named, self.manifest.tensors, self.offsets, strict=True):
            same = tensor.untyped_storage().data_ptr() == storage.data_ptr()
            at = tensor.storage_offset() * tensor.dtype.itemsize
            if not same or not tensor.is_contiguous() or (at != offset and spec.n_bytes > 0):
                return None
        if storage.nbytes() != self.total_bytes:
            return None
        return torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage)

    def views(self, run_B: Tensor) -> list[tuple[str, Tensor]]:
        """The named tensors, in manifest order, as views of the run."""
        return [
            (spec.name, run_B[offset : offset + spec.n_bytes].view(torch_dtype(spec)).view(spec.shape))
            for spec, offset in zip(self.manifest.tensors, self.offsets, strict=True)
        ]


class EqualBuckets(BucketLayout):
    """Tensors start at multiples of 64 bytes; buckets have one size and may cut through them."""

    def __init__(self, manifest: WeightManifest, bucket_bytes: int) -> None:
        """Raises ValueError unless `bucket_bytes` is a positive multiple of 64."""
        if bucket_bytes < ALIGN_BYTES or bucket_bytes % ALIGN_BYTES:
            raise ValueError(f"bucket_bytes = {bucket_bytes}; expected a positive multiple of {ALIGN_BYTES}")
        self.bucket_bytes = bucket_bytes
        padded = [aligned(spec.n_bytes) for spec in manifest.tensors]
        *offsets, end = accumulate(padded, initial=0)
        super().__init__(manifest, offsets, max(end, ALIGN_BYTES))

    @property
    def n_buckets(self) -> int:
        return -(-self.total_bytes // self.bucket_bytes)

    @property
    def largest_bytes(self) -> int:
        return min(self.bucket_bytes, self.total_bytes)

    def bounds(self, index: int) -> tuple[int, int]:
        start = index * self.bucket_bytes
        return start, min(start + self.bucket_bytes, self.total_bytes)


class PackedLayout(BucketLayout):
    """Buckets of whole tensors, without gaps."""

    def __init__(self, manifest: WeightManifest, bucket_bytes: int) -> None:
        """Raises ValueError unless `bucket_bytes` is positive."""
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes = {bucket_bytes}; expected at least 1")
        self.buckets: tuple[WeightBucket, ...] = whole_tensor_buckets(manifest, bucket_bytes)
        starts: dict[str, int] = {}
        for bucket in self.buckets:
            at = bucket.start
            for spec in bucket.tensors:
                starts[spec.name] = at
                at += spec.n_bytes
        offsets = [starts.get(spec.name, 0) for spec in manifest.tensors]
        super().__init__(manifest, offsets, self.buckets[-1].end if self.buckets else 0)

    @property
    def n_buckets(self) -> int:
        return len(self.buckets)

    @property
    def largest_bytes(self) -> int:
        return max((bucket.end - bucket.start for bucket in self.buckets), default=0)

    def bounds(self, index: int) -> tuple[int, int]:
        return self.buckets[index].start, self.buckets[index].end

    @property
    def slot_bytes(self) -> int:
        """Memory that holds any of the buckets, and can be summed on every device."""
        return aligned(self.largest_bytes)

    def views_in(self, index: int, bucket_b: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors of bucket `index`, as views of its bytes. Empty ones are in no bucket."""
        at = 0
        for spec in self.buckets[index].tensors:
            yield spec.name, bucket_b[at : at + spec.n_bytes].view(torch_dtype(spec)).view(spec.shape)
            at += spec.n_bytes


class Content(Protocol):
    """The bytes of a set of tensors, for whoever sends them or writes them to a file. One thread at a time."""

    def in_place(self, layout: BucketLayout) -> Tensor | None:
        """The whole run, if its bytes lie in memory as this layout wants them. Otherwise they must be read."""
        ...

    def read(self, layout: BucketLayout, start: int, end: int, out_b: Tensor) -> None:
        """Copy bytes [start, end) of the run to the front of `out_b`, which may be on any device."""
        ...


class WholeTensors:
    """The bytes of tensors of this process. They must not change meanwhile."""

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """`named`: in the order of the layouts' manifest."""
        self._named = named
        self._sources: list[Tensor] | None = None

    def in_place(self, layout: BucketLayout) -> Tensor | None:
        return layout.run_of(self._named)

    def read(self, layout: BucketLayout, start: int, end: int, out_b: Tensor) -> None:
        if self._sources is None:
            self._sources = byte_views(self._named)
        layout.gather(start, end, self._sources, out_b)


def byte_views(named: Iterable[tuple[str, Tensor]]) -> list[Tensor]:
    """The bytes of each tensor. Only tensors that are not contiguous are copied."""
    return [tensor.detach().contiguous().view(-1).view(torch.uint8) for _, tensor in named]


def checksum(bucket_b: Tensor) -> Tensor:
    """int64 scalar on the bucket's device: in host memory the bytes' XXH3, elsewhere the wrapping sum of their 8-byte
    words. Sender and receivers of a group have the same kind of device.

    Both run at memory speed, without the GIL. Both notice a bucket that is stale, misplaced or half written; XXH3 also
    notices words that are exchanged. TCP guards against flipped bits."""
    if bucket_b.device.type == "cpu":
        return torch.tensor(_xxh3(bucket_b), dtype=torch.int64)
    return bucket_b.view(torch.int64).sum()


def expect_sums(found: Sequence[int], sent: Sequence[int]) -> None:
    """Raises WeightsRefused unless the checksums of the buckets are those that were sent."""
    if len(found) != len(sent):
        raise WeightsRefused(f"{len(sent)} checksums came, expected {len(found)}")
    if wrong := [i for i, (mine, theirs) in enumerate(zip(found, sent, strict=True)) if mine != theirs]:
        raise WeightsRefused(f"checksum differs in buckets {wrong[:8]} of {len(found)}")


def _xxh3(bucket_b: Tensor) -> int:
    """XXH3 with 64 bits, seed 0, as a signed number."""
    return int.from_bytes(xxh3_64_digest(bucket_b.numpy().data), "big", signed=True)
