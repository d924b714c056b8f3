"""Bytes in use in the C heap: what libraries keep, and Python's own accounts do not show."""

from __future__ import annotations

import ctypes
import gc
import re
import sys
from typing import Final

import pytest

_HEAP: Final = re.compile(rb'<heap nr="\d+">(.*?)</heap>', re.DOTALL)
_FREE: Final = re.compile(rb'<total type="(?:fast|rest)" count="\d+" size="(\d+)"')
_SYSTEM: Final = re.compile(rb'<system type="current" size="(\d+)"')
_MAPPED: Final = re.compile(rb'<total type="mmap" count="\d+" size="(\d+)"')


def heap_bytes() -> int:
    """In all of glibc's arenas and in blocks of their own, after a collection of garbage. Skips the test elsewhere."""
    if sys.platform != "linux" or not hasattr(libc := ctypes.CDLL(None), "malloc_info"):
        pytest.skip("glibc only")
    gc.collect()
    report = _malloc_info(libc)
    arenas = [(int(_SYSTEM.findall(heap)[0]), sum(map(int, _FREE.findall(heap)))) for heap in _HEAP.findall(report)]
    mapped = int(_MAPPED.findall(report[report.rindex(b"</heap>") :])[0])
    return sum(taken - free for taken, free in arenas) + mapped


def _malloc_info(libc: ctypes.CDLL) -> bytes:
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    libc.open_memstream.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    assert stream.value, "no memory for the report"
    failed = libc.malloc_info(0, stream)
    libc.fclose(stream)
    report = text.value or b""
    libc.free(text)
    assert not failed and report
    return report
