"""What is read of a safetensors file without its weights, and that a file which is not whole is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import save_file

from stillhouse.models.safetensors_header import read_header

Header = dict[str, Any]


def written(path: Path) -> Path:
    """A file with tensors of several dtypes, one of them empty and one a scalar."""
    tensors = {
        "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
        "b": torch.arange(5, dtype=torch.bfloat16),
        "c": torch.zeros(0, 7),
        "d": torch.tensor(3),
        "e": torch.tensor([True, False]),
    }
    save_file(tensors, path, metadata={"version": "1.7"})
    return path


def test_a_whole_file_says_what_is_in_it(tmp_path: Path) -> None:
    path = written(tmp_path / "whole")
    assert (read_header(path).metadata, read_header(path).parameters) == ({"version": "1.7"}, 12 + 5 + 0 + 1 + 2)
    assert path.stat().st_size < 1000, "all dtypes that torch has, in files of one tensor each"
    for dtype in (torch.float64, torch.float16, torch.int8, torch.uint16, torch.int64, torch.complex64, torch.uint8):
        save_file({"t": torch.zeros(3, 2, dtype=dtype)}, tmp_path / "one")
        assert read_header(tmp_path / "one").parameters == 6
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        save_file({"t": torch.zeros(3, 2).to(dtype)}, tmp_path / "one")
        assert read_header(tmp_path / "one").parameters == 6


def moved(header: Header, name: str, begin: int, end: int) -> None:
    header[name]["data_offsets"] = [header[name]["data_offsets"][0] + begin, header[name]["data_offsets"][1] + end]


MALFORMED: Final[dict[str, Callable[[Header], object]]] = {
    "ends after the file": lambda header: moved(header, "e", 0, 4096),
    "over the next one": lambda header: moved(header, "a", 0, 8),
    "a hole": lambda header: moved(header, "b", 4, 0),
    "a larger shape": lambda header: header["a"].update(shape=[1 << 30, 4]),
    "a dtype that is a number": lambda header: header["a"].update(dtype=32),
    "no tensors": lambda header: [header.pop(name) for name in "abcde"],
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_header_that_lies_is_refused(tmp_path: Path, case: str) -> None:
    whole = written(tmp_path / "whole").read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    MALFORMED[case](header)
    text = json.dumps(header).encode()
    path = tmp_path / "malformed"
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])
    with pytest.raises(ValueError, match="no whole safetensors file"):
        read_header(path)


@pytest.mark.parametrize("n_bytes", [0, 7, 8, 9, 100, -1])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, n_bytes: int) -> None:
    path = tmp_path / "cut"
    path.write_bytes(written(tmp_path / "whole").read_bytes()[:n_bytes])
    with pytest.raises(ValueError, match=r"no whole safetensors file|empty"):
        read_header(path)
