"""The file of a snapshot as bytes, for `weights.snapshot`, and for an actor whose server loads what came by wire. No
torch.

The format (github.com/huggingface/safetensors, "Format"): 8 bytes, the length of the header; the header, JSON; the
tensors without gaps, here in the order of `weights.manifest.whole_tensor_buckets`.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from stillhouse.protocol.messages import WeightVersion
from stillhouse.weights.manifest import WeightManifest, whole_tensor_buckets

FILE_NAME: Final = "model.safetensors"
_DTYPES: Final = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    **{f"{sign}int{bits}": f"{sign[:1].upper() or 'I'}{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "bool": "BOOL",
    "complex64": "C64",
}
"""Names of dtypes in a file, by torch's."""


def snapshot_head(manifest: WeightManifest, version: WeightVersion) -> bytes:
    """What stands before the tensors' bytes."""
    starts: dict[str, int] = {}
    at = 0
    for bucket in whole_tensor_buckets(manifest, 1):
        for spec in bucket.tensors:
            starts[spec.name] = at
            at += spec.n_bytes
    header: dict[str, object] = {"__metadata__": {"version": str(version), "format": "pt"}}
    for spec in manifest.tensors:
        start = starts.get(spec.name, 0)
        header[spec.name] = {
            "dtype": _DTYPES[spec.dtype],
            "shape": spec.shape,
            "data_offsets": (start, start + spec.n_bytes),
        }
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)  # so that tensors begin at multiples of 8 in a mapped file
    return struct.pack("<Q", len(text)) + text
