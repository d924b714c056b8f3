"""The safetensors files of a model folder, looked at without reading a weight: are all there, and whole? No torch.

A file begins with 8 bytes (the length of the header), the header (JSON: name -> dtype, shape, place) and then holds the
weights; so its header says how long it has to be. A copy or download that was cut short is shorter.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple, cast

LENGTH_BYTES: Final = 8
MAX_HEADER_BYTES: Final = 100_000_000
"""As the safetensors library has it."""
INDEX_FILE: Final = "model.safetensors.index.json"


class WeightFiles(NamedTuple):
    """Of one model folder."""

    mistakes: list[str]
    parameters: int
    """Numbers in all tensors of the files that are whole; 0 where there is no safetensors file."""


def check_weights(key: str, folder: Path) -> WeightFiles:
    """`key`: of the configuration, with which each mistake begins. Weights in other formats are not looked at."""
    mistakes = list(_missing_files(key, folder))
    parameters = 0
    for file in sorted(folder.glob("*.safetensors")):
        try:
            parameters += _parameters(file)
        except (OSError, ValueError) as error:
            mistakes.append(f"{key}: {file}: {error}; copy or download it again")
    return WeightFiles(mistakes, parameters)


def _missing_files(key: str, folder: Path) -> Iterator[str]:
    """Those that the index names."""
    index = folder / INDEX_FILE
    if not index.is_file():
        return
    try:
        placed = cast(Mapping[str, str], json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        names = sorted(set(placed.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        yield f"{key}: {index} is no index of safetensors files: {error!r}"
        return
    if lacking := [name for name in names if not (folder / name).is_file()]:
        yield f"{key}: {folder} lacks {len(lacking)} of the {len(names)} files that {INDEX_FILE} names: {lacking[0]}"


def _parameters(file: Path) -> int:
    """Numbers in its tensors. Raises ValueError for a file that is not whole."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or not 2 <= length <= MAX_HEADER_BYTES:
            raise ValueError(f"got {size:,} bytes without a safetensors header")
        header = stream.read(length)
    if len(header) < length:
        raise ValueError(f"got {size:,} bytes, expected at least {LENGTH_BYTES + length:,}: it is cut short")
    try:
        tensors = cast(dict[str, Mapping[str, list[int]]], json.loads(header))
        tensors.pop("__metadata__", None)
        ends = [tensor["data_offsets"][1] for tensor in tensors.values()]
        parameters = sum(math.prod(tensor["shape"]) for tensor in tensors.values())
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"its safetensors header cannot be read: {error!r}") from error
    expected = LENGTH_BYTES + length + max(ends, default=0)
    if size != expected:
        why = "it is cut short" if size < expected else "something else is behind the weights"
        raise ValueError(f"got {size:,} bytes, expected {expected:,} by its header: {why}")
    return parameters
