"""A safetensors file that all ranks of a learner write together, each its own rows of every tensor.

    n (8 bytes) | header: n bytes of JSON, padded with spaces | the tensors, the widest dtypes first, then by name

Every rank knows the names, dtypes and whole shapes of all tensors, so each can compute the same header and finds the
place of its rows by itself. Nothing is exchanged, and no rank holds more than its share. The file does not depend on
the number of ranks: it is the one that a single process writes.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from stillhouse.models.transfer import Shares

DTYPES: Final[Mapping[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNED: Final = 8


class Layout(NamedTuple):
    """Where everything is in the file."""

    header: bytes
    offsets: dict[str, int]
    """Offset of the first byte of each tensor, from the beginning of the file."""
    total_bytes: int


def layout_of(shares: Shares) -> Layout:
    """The same on all ranks. Raises ValueError for a dtype that the format does not have."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, at = dict[str, int](), 0
    for name in sorted(shares.tensors, key=lambda name: (-shares.tensors[name].element_size(), name)):
        tensor = shares.tensors[name]
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} has dtype {tensor.dtype}; expected one of {', '.join(map(str, DTYPES))}")
        shape = shares.rows[name].shape if name in shares.rows else tuple(tensor.shape)
        offsets[name], begin = at, at
        at += torch.Size(shape).numel() * tensor.element_size()
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(shape), "data_offsets": [begin, at]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    header = len(text).to_bytes(8, "little") + text
    return Layout(header, {name: len(header) + offset for name, offset in offsets.items()}, len(header) + at)


def write_share(file: Path, shares: Shares, *, leads: bool) -> int:
    """Write this process's rows into the file and flush them to the disk. Returns the number of bytes; over all ranks
    they add up to `Layout.total_bytes`. `leads`: whether this is rank 0, which also writes the header and what is
    whole on every rank. Raises OSError."""
    written = 0
    with _opened(file) as descriptor:
        for at, data in _placed(shares, leads=leads):
            written += _write_at(descriptor, data, at)
    return written


def _placed(shares: Shares, *, leads: bool) -> Iterator[tuple[int, memoryview]]:
    """What this process writes: places in the file, and bytes."""
    layout = layout_of(shares)
    if leads:
        yield 0, memoryview(layout.header)
    for name, tensor in shares.tensors.items():
        rows = shares.rows.get(name)
        if rows is None and not leads:
            continue
        row_bytes = torch.Size(rows.shape[1:]).numel() * tensor.element_size() if rows is not None else 0
        first = rows.first * row_bytes if rows is not None else 0
        yield layout.offsets[name] + first, _bytes_of(tensor)


@contextmanager
def _opened(file: Path) -> Generator[int]:
    """A descriptor for writing to any place. Flushed to the disk at the end."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_at(descriptor: int, data: memoryview, at: int) -> int:
    """Write all of it. The system writes at most 2 GB per call."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], at + done)
    return done


def _bytes_of(tensor: Tensor) -> memoryview:
    of_bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return of_bytes.data
