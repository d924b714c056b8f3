"""The header of a safetensors file, checked without a look at the weights. No torch.

A file begins with 8 bytes (the length of its header), the header (JSON: name -> dtype, shape, offsets) and then the
weights without gaps. The safetensors library checks that; programs that map a file where it does not hold, an SGLang
server among them, may end. Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

LENGTH_BYTES: Final = 8
SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
_EXPONENTS: Final = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
"""The bits of a number, and those of its exponent: all are set in infinity and NaN."""
_ONE_BYTE: Final = ("I8", "U8", "F8_E4M3", "F8_E5M2")
HEADS: Final = ("lm_head.weight", "embed_out.weight")
EMBEDDINGS: Final = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
_BLOCK_BYTES: Final = 1 << 20
_KNOWN: Final = 1024
"""Files whose headers are kept."""


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)


class Header(NamedTuple):
    """What a whole file says of itself."""

    metadata: Mapping[str, str]
    tensors: Mapping[str, _Entry]
    start: int
    """Byte where the numbers begin."""

    @property
    def parameters(self) -> int:
        """Numbers in all tensors."""
        return sum(entry.numbers for entry in self.tensors.values())


def nonfinite_tensors(file: Path, header: Header) -> list[str]:
    """Names of the tensors with NaN or infinity in them; all numbers are read. Of dtypes of 16 bits and more."""
    found: list[str] = []
    for name, entry in header.tensors.items():
        if (dtype := _EXPONENTS.get(entry.dtype)) is None:
            continue
        kind, bits = dtype
        values = (
            np.memmap(file, kind, "r", header.start + entry.data_offsets[0], (entry.numbers,)) if entry.numbers else ()
        )
        if any(
            ((part & bits) == bits).any() for part in np.array_split(values, -(-entry.numbers // _BLOCK_BYTES) or 1)
        ):
            found.append(name)
    return found


def coded_weights(header: Header) -> list[str]:
    """Names of the weights of one byte that are no numbers by themselves: integers, and floats with a scale."""
    scaled = {name.rpartition(".")[0] for name in header.tensors if "scale" in name.rpartition(".")[2]}
    codes = {name: one for name, one in header.tensors.items() if name.endswith("weight") and one.dtype in _ONE_BYTE}
    return [name for name, one in codes.items() if one.dtype[0] != "F" or name.rpartition(".")[0] in scaled]


def head_beside_embedding(headers: Mapping[Path, Header]) -> str:
    """The name of an output head in the safetensors files of a model whose numbers differ from those of the embedding,
    which is there too; empty if there are not both, or they are equal."""
    found: dict[str, _Place] = {}
    for file, header in headers.items():
        found |= {
            name: _Place(file, header.start, one)
            for name, one in header.tensors.items()
            if name in HEADS or name.endswith(EMBEDDINGS)
        }
    for name, head in found.items():
        for other, embedding in found.items():
            if name in HEADS and other.endswith(EMBEDDINGS) and head.entry.shape == embedding.entry.shape:
                return "" if head.equals(embedding) else name
    return ""


class _Place(NamedTuple):
    file: Path
    start: int
    """Position of its first byte among the file's numbers."""
    entry: _Entry

    def equals(self, other: _Place) -> bool:
        return self.entry.dtype == other.entry.dtype and all(
            mine == theirs for mine, theirs in zip(self._blocks(), other._blocks(), strict=True)
        )

    def _blocks(self) -> Iterator[bytes]:
        begin, end = self.entry.data_offsets
        with self.file.open("rb") as stream:
            stream.seek(self.start + begin)
            for at in range(begin, end, _BLOCK_BYTES):
                yield stream.read(min(_BLOCK_BYTES, end - at))


def indexed_files(folder: Path) -> list[str]:
    """The files that the index of a folder names, ascending; empty without one. Raises ValueError and OSError."""
    if not (folder / INDEX_FILE).is_file():
        return []
    try:
        placed: dict[str, str] = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"]
        return sorted(set(placed.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / INDEX_FILE} is not an index of safetensors files: {error!r}") from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers reads for a model: the single one, else those of the index, else all.
    What lies beside them (an optimizer's state, other shards) is none of the model's. Raises as `indexed_files`."""
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    return [folder / name for name in indexed_files(folder)] or sorted(folder.glob("*.safetensors"))


def read_headers(folder: Path) -> dict[Path, Header]:
    """Those of a model's files, in order of their names. Raises as `read_header` and `weight_files`."""
    return {file: known_header(file) for file in weight_files(folder)}


def known_header(file: Path) -> Header:
    """`read_header`, which reads a file once for as long as it stays as it is: the checks before a start ask for the
    same headers many times."""
    stat = file.stat()
    return _known(file, stat.st_ino, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(_KNOWN)
def _known(file: Path, *_as_it_is: int) -> Header:
    return read_header(file)


def read_header(file: Path) -> Header:
    """The header. Raises ValueError if the file is not whole or its tensors are not where they must be, and OSError."""
    if not (size := file.stat().st_size):
        raise ValueError("got an empty file, expected safetensors")
    try:
        with safe_open(file, framework="np") as whole:  # checks that the tensors fill the file, without gaps
            metadata = dict(whole.metadata() or {})
    except SafetensorError as error:
        raise ValueError(
            f"got {size:,} bytes that are no whole safetensors file, cut short perhaps: {error}"
        ) from error
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        fields = msgspec.json.decode(stream.read(length), type=dict[str, msgspec.Raw])
    entries = {
        name: msgspec.json.decode(field, type=_Entry) for name, field in fields.items() if name != "__metadata__"
    }
    return Header(metadata, entries, LENGTH_BYTES + length)
