"""What POST /update_weights_from_tensor wants with load_format `flattened_bucket`: base64 of a pickle, which SGLang's
scheduler reads with its SafeUnpickler (sglang.srt.utils.common).

    {"flattened_tensor": memory that begins with a bucket, by its handle,
     "metadata": [FlattenedTensorMetadata(name, shape, dtype, start_idx, end_idx, numel in bytes), ...]}

Only opcodes for these values are written here, so nothing of ours can be pickled by accident, and nothing here reads a
pickle. It names what torch (torch.multiprocessing.reductions) and SGLang (sglang.srt.weight_sync.tensor_bucket) have at
the receiving end. It goes to a server that the launcher started, on this machine. No torch.
"""

# Why it is so: docs/decisions/weight-transports.md

from __future__ import annotations

import struct
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from stillhouse.weights.control_messages import CpuHandle, CudaHandle, MemoryHandle
from stillhouse.weights.manifest import WeightBucket


@dataclass(frozen=True, slots=True)
class _Global:
    module: str
    name: str


@dataclass(frozen=True, slots=True)
class _Call:
    function: _Global
    args: tuple[_Value, ...]


@dataclass(frozen=True, slots=True)
class _Instance:
    """Made without its constructor, as a dataclass is read back."""

    kind: _Global
    state: Mapping[str, _Value]


_Value: TypeAlias = (
    "bool | int | str | bytes | tuple[_Value, ...] | list[_Value] | Mapping[str, _Value] | _Global | _Call | _Instance"
)

_BUCKET: Final = "sglang.srt.weight_sync.tensor_bucket"
_REDUCTIONS: Final = "torch.multiprocessing.reductions"


def tensor_payload(handle: MemoryHandle, bucket: WeightBucket) -> str:
    """`handle`: of memory that begins with this bucket. It is used up by it."""
    metadata: list[_Value] = []
    at = 0
    for spec in bucket.tensors:
        state: Mapping[str, _Value] = {
            "name": spec.name,
            "shape": tuple(spec.shape),
            "dtype": _Global("torch", spec.dtype),
            "start_idx": at,
            "end_idx": at + spec.n_bytes,
            "numel": spec.n_bytes,
        }
        metadata.append(_Instance(_Global(_BUCKET, "FlattenedTensorMetadata"), state))
        at += spec.n_bytes
    run = _on_gpu(handle) if isinstance(handle, CudaHandle) else _in_host_memory(handle)
    return b64encode(b"\x80\x03" + _written({"flattened_tensor": run, "metadata": metadata}) + b".").decode()


def _in_host_memory(handle: CpuHandle) -> _Call:
    untyped = _Global("torch.storage", "UntypedStorage")
    storage = _Call(_Global(_REDUCTIONS, "rebuild_storage_filename"), (untyped, *_fields(handle)))
    typed = _Call(_Global(_REDUCTIONS, "rebuild_typed_storage"), (storage, _Global("torch", "uint8")))
    place: _Value = (0, (handle.n_bytes,), (1,), False)
    return _Call(_Global(_REDUCTIONS, "rebuild_tensor"), (_Global("torch", "Tensor"), typed, place))


def _fields(handle: CpuHandle) -> tuple[_Value, ...]:
    return handle.manager, handle.name, handle.n_bytes


def _on_gpu(handle: CudaHandle) -> _Call:
    """SGLang's variant takes the GPU's UUID in place of its number, which differs between processes."""
    rebuild = _Global("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified")
    tensor, storage = _Global("torch", "Tensor"), _Global("torch.storage", "TypedStorage")
    tensor_args: tuple[_Value, ...] = (tensor, (handle.n_bytes,), (1,), 0, storage, _Global("torch", "uint8"))
    storage_args: tuple[_Value, ...] = (handle.uuid, handle.handle, handle.n_bytes, handle.offset_bytes, False)
    counting: tuple[_Value, ...] = (handle.ref_counter, handle.ref_counter_offset, handle.event, handle.event_sync)
    return _Call(rebuild, (*tensor_args, *storage_args, *counting))


def _written(value: _Value) -> bytes:
    """The opcodes of a value (pickle protocol 3)."""
    match value:
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            digits = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            return b"\x8a" + bytes([len(digits)]) + digits
        case str():
            text = value.encode()
            return b"X" + struct.pack("<I", len(text)) + text
        case bytes():
            return b"B" + struct.pack("<I", len(value)) + value
        case _Global():
            return f"c{value.module}\n{value.name}\n".encode()
        case _Call():
            return _written(value.function) + _written(value.args) + b"R"
        case _Instance():
            return _written(value.kind) + b")\x81" + _written(value.state) + b"b"
        case tuple():
            return b"(" + b"".join(map(_written, value)) + b"t"
        case list():
            return b"](" + b"".join(map(_written, value)) + b"e"
        case Mapping():
            pairs = (_written(key) + _written(each) for key, each in value.items())
            return b"}(" + b"".join(pairs) + b"u"
