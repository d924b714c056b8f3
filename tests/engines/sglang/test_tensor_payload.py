"""The payload for /update_weights_from_tensor, read as SGLang's scheduler does: by pickle, with its list of names."""

from __future__ import annotations

import ast
import base64
import io
import pickle
import pickletools
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from stillhouse.engines.sglang.tensor_payload import tensor_payload
from stillhouse.weights.buckets import PackedLayout, manifest_of
from stillhouse.weights.control_messages import CudaHandle
from stillhouse.weights.shared_memory import export, shareable

NAMED: Final = [
    ("a", torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)),
    ("größe", torch.arange(300.0)),
    ("c", torch.tensor(5.0)),
]
LAYOUT: Final = PackedLayout(manifest_of(NAMED), 1 << 20)
(BUCKET,) = LAYOUT.buckets
SOURCE: Final = Path(
    *(Path(sys.prefix).parent / ".venv-sglang/lib" / f"python3.{sys.version_info.minor}" / "site-packages").parts
)


@dataclass
class FlattenedTensorMetadata:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


@cache
def allowed() -> set[tuple[str, str]]:
    """SafeUnpickler's list in the SGLang that is installed here."""
    source = SOURCE / "sglang/srt/utils/common.py"
    if not source.exists():
        pytest.skip(f"{source} is not there (make sglang-cpu)")
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "ALLOWED_GLOBALS":
            return set(ast.literal_eval(node.value))
    raise AssertionError("SafeUnpickler has no ALLOWED_GLOBALS")


def _arguments(*args: Any) -> tuple[Any, ...]:
    return args


class Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        assert (module, name) in allowed()
        if name == "_rebuild_cuda_tensor_modified":
            return _arguments
        return FlattenedTensorMetadata if name == "FlattenedTensorMetadata" else super().find_class(module, name)


def read(payload: str) -> dict[str, Any]:
    return Reader(io.BytesIO(base64.b64decode(payload))).load()


def test_a_server_finds_every_tensor_in_the_memory_itself() -> None:
    run_B = shareable(LAYOUT.total_bytes, torch.device("cpu"))
    views = dict(LAYOUT.views(run_B))
    for name, tensor in NAMED:
        views[name].copy_(tensor)
    found = read(tensor_payload(export(run_B), BUCKET))
    flat: Tensor = found["flattened_tensor"]
    seen = {
        meta.name: flat[meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape)
        for meta in found["metadata"]
    }
    assert seen.keys() == dict(NAMED).keys()
    assert all(torch.equal(seen[name], tensor) and seen[name].dtype == tensor.dtype for name, tensor in NAMED)
    assert [meta.numel for meta in found["metadata"]] == [1200, 4, 12]
    views["c"].fill_(9)
    assert seen["c"] == 9, "nothing was copied"


def test_memory_on_a_gpu_is_named_as_torch_names_it() -> None:
    """`reduce_tensor` of torch gives these arguments, with the GPU at place 6, where SGLang wants its UUID."""
    handle = CudaHandle("GPU-7", b"\x01chandle", 4096, 512, b"counter", 3, b"event", True)
    args = read(tensor_payload(handle, BUCKET))["flattened_tensor"]
    assert args[:6] == (Tensor, (4096,), (1,), 0, torch.storage.TypedStorage, torch.uint8)
    assert args[6:] == ("GPU-7", b"\x01chandle", 4096, 512, False, b"counter", 3, b"event", True)


@pytest.mark.parametrize("n", [0, 1, 127, 128, 255, 256, 1 << 31, 1 << 40])
def test_numbers_of_every_size_are_read_back(n: int) -> None:
    handle = CudaHandle("", b"", n, n, b"", n, b"", False)
    assert read(tensor_payload(handle, BUCKET))["flattened_tensor"][8] == n


def test_it_calls_nothing_but_what_makes_the_tensor() -> None:
    run_B = shareable(LAYOUT.total_bytes, torch.device("cpu"))
    raw = base64.b64decode(tensor_payload(export(run_B), BUCKET))
    names = {str(arg) for code, arg, _ in pickletools.genops(raw) if code.name == "GLOBAL"}
    assert all(code.name != "STACK_GLOBAL" for code, *_ in pickletools.genops(raw))
    assert {name for name in names if name.startswith("torch.multiprocessing")} == {
        f"torch.multiprocessing.reductions {name}"
        for name in ("rebuild_tensor", "rebuild_typed_storage", "rebuild_storage_filename")
    }
    Reader(io.BytesIO(raw)).load()  # takes away the reference that `export` added
