"""The tensors that a weight broadcast sends, and buckets of whole tensors. No torch: an actor whose engine is a server
describes the coming tensors to the server from this.

    buckets of whole tensors    wide dtypes first, no gaps:   | f32 f32 f32 | f32 bf16 | bf16 bf16 ... |

so that every tensor starts at a multiple of its item size, which receivers require. (The layout for embedded engines,
which cuts through tensors, is weights.buckets.EqualBuckets.)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import msgspec

ITEM_BYTES: Final = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"), 1),
}
"""Bytes per element, by torch's name of the dtype."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of the set."""

    name: str
    dtype: str
    """Torch's name of the dtype, e.g. "bfloat16"."""
    shape: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        """Raises ValueError for a dtype that weights cannot have."""
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"{self.name}: dtype {self.dtype!r}; expected one of {', '.join(ITEM_BYTES)}")
        return ITEM_BYTES[self.dtype]

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes


class WeightManifest(msgspec.Struct, frozen=True):
    """Names, dtypes and shapes of a set of weights."""

    tensors: tuple[TensorSpec, ...]

    @property
    def digest(self) -> str:
        """sha256 of the encoded manifest, hexadecimal."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()


class TensorPiece(NamedTuple):
    """A part of a tensor that servers know as a tensor of its own."""

    name: str
    shape: tuple[int, ...]


Pieces: TypeAlias = Mapping[str, tuple[TensorPiece, ...]]
"""Tensor name -> the pieces as which it is sent. Together, in this order, they are its bytes."""


def in_pieces(manifest: WeightManifest, pieces: Pieces) -> WeightManifest:
    """The manifest that servers are told of. In buckets of whole tensors, both describe the same run of bytes."""
    return WeightManifest(
        tuple(
            TensorSpec(piece.name, spec.dtype, piece.shape)
            for spec in manifest.tensors
            for piece in pieces.get(spec.name, (TensorPiece(spec.name, spec.shape),))
        )
    )


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """Tensors that travel in one broadcast: bytes [start, end) of the run of all buckets."""

    start: int
    end: int
    tensors: tuple[TensorSpec, ...]


def whole_tensor_buckets(manifest: WeightManifest, bucket_bytes: int) -> tuple[WeightBucket, ...]:
    """Buckets of at most `bucket_bytes`; a larger tensor has a bucket to itself. Empty tensors are in no bucket."""
    specs = [spec for spec in manifest.tensors if spec.n_bytes]
    specs.sort(key=lambda spec: -spec.item_bytes)  # stable: within a dtype the order stays
    buckets: list[WeightBucket] = []
    start = end = 0
    held: list[TensorSpec] = []
    for spec in specs:
        if held and end + spec.n_bytes - start > bucket_bytes:
            buckets.append(WeightBucket(start, end, tuple(held)))
            start, held = end, []
        held.append(spec)
        end += spec.n_bytes
    if held:
        buckets.append(WeightBucket(start, end, tuple(held)))
    return tuple(buckets)


def smallest_tensor_bucket(buckets: Sequence[WeightBucket]) -> WeightBucket:
    """A bucket with only the smallest tensor of all these buckets."""
    smallest = WeightBucket(0, 0, ())
    for bucket in buckets:
        at = bucket.start
        for spec in bucket.tensors:
            if not smallest.tensors or spec.n_bytes < smallest.end - smallest.start:
                smallest = WeightBucket(at, at + spec.n_bytes, (spec,))
            at += spec.n_bytes
    return smallest
