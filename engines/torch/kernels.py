"""The parts of a decode step that `kernels.c` computes, compiled when an engine starts, for the machine it runs on.

torch's own products of few rows leave half of the memory's speed unused (docs/results/README.md, "What memory allows").
Nothing is built when the package is installed: without a C compiler the engine runs on torch alone, and says so. The
file is compiled in about a second and deleted when it is loaded, so that no stale or foreign file is ever run.

Tensors are float32, on the CPU and contiguous. Calls leave Python's lock to other threads, and use as many threads as
torch does.

Legend: T tokens, R rows that decode, N query heads, G key/value heads, D head size, C positions, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

SOURCE: Final = Path(__file__).with_name("kernels.c")
_FLAGS: Final = ("-std=gnu11", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")
_COMPILERS: Final = ("cc", "gcc", "clang")
_TIMEOUT_S: Final = 60.0

_POINTER, _SIZE, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_float, ctypes.c_int
_ARGUMENTS: Final[dict[str, Sequence[type[ctypes._SimpleCData]]]] = {  # pyright: ignore
    "product": (_POINTER, _SIZE, _SIZE, _POINTER, _POINTER, _POINTER, _POINTER, _SIZE, _INT),
    "rms_norm": (_POINTER, _SIZE, _SIZE, _POINTER, _FLOAT, _POINTER),
    "silu_gate": (_POINTER, _SIZE, _SIZE, _POINTER),
    "attend": (
        *(_POINTER, _SIZE, _SIZE, _SIZE, _SIZE, _POINTER, _POINTER, _POINTER, _POINTER, _FLOAT, _FLOAT),
        *(_POINTER, _POINTER, _SIZE, _POINTER, _INT),
    ),
}


class KernelsUnavailableError(RuntimeError):
    """The kernels cannot be compiled or loaded here; the message says why and what to do."""


class Rotary(NamedTuple):
    """What rotates a query or key of head size D."""

    cos_CD: Tensor
    sin_CD: Tensor
    """The first half of each line negated."""
    norms_HD: Tensor | None
    """Norms of the query heads, then of the key heads (N + G lines), before the rotation; None: no norms."""
    eps: float
    """Added to the mean square by these norms."""


class Kernels:
    """The loaded kernels."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = list(arguments), None
        library.panel.argtypes, library.panel.restype = [], _SIZE
        self._library = library
        self._panel = int(library.panel())

    def packed(self, weight_OI: Tensor) -> Tensor:
        """A copy of a weight in the order in which `product` reads it, [panels, I, outputs of a panel]; outputs are
        filled up with zeros to whole panels."""
        whole = pad(weight_OI, (0, 0, 0, -len(weight_OI) % self._panel))
        return whole.view(-1, self._panel, weight_OI.shape[1]).transpose(1, 2).contiguous()

    def product(
        self, x_TI: Tensor, packed: Tensor, n_outputs: int, bias_O: Tensor | None, residual_TO: Tensor | None
    ) -> Tensor:
        """x @ weight.T + bias + residual, [T, O]."""
        out_TO = x_TI.new_empty((len(x_TI), n_outputs))
        self._library.product(
            x_TI.data_ptr(),
            *x_TI.shape,
            packed.data_ptr(),
            None if bias_O is None else bias_O.data_ptr(),
            None if residual_TO is None else residual_TO.data_ptr(),
            out_TO.data_ptr(),
            n_outputs,
            torch.get_num_threads(),
        )
        return out_TO

    def rms_norm(self, x_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight, [T, I]."""
        out_TI = torch.empty_like(x_TI)
        self._library.rms_norm(x_TI.data_ptr(), *x_TI.shape, weight_I.data_ptr(), eps, out_TI.data_ptr())
        return out_TI

    def silu_gate(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up, [T, I]; gate and up side by side, [T, 2I]."""
        n_tokens, width = len(gate_up), gate_up.shape[1] // 2
        out_TI = gate_up.new_empty((n_tokens, width))
        self._library.silu_gate(gate_up.data_ptr(), n_tokens, width, out_TI.data_ptr())
        return out_TI

    def attend(
        self, qkv: Tensor, n_heads: int, positions_R: Tensor, turn: Rotary, scaling: float, store: Tensor
    ) -> Tensor:
        """Rotate queries and keys, write keys and values to their cells, attend to all cells so far; [R, N * D].

        `qkv` [R, (N + 2G) * D]; row r is at `positions_R` (int64) of slot r of `store` [2, slots, G, cells, D]."""
        _, _, n_groups, n_cells, size = store.shape
        out = qkv.new_empty((len(qkv), n_heads * size))
        self._library.attend(
            qkv.data_ptr(),
            len(qkv),
            n_heads,
            n_groups,
            size,
            positions_R.data_ptr(),
            turn.cos_CD.data_ptr(),
            turn.sin_CD.data_ptr(),
            None if turn.norms_HD is None else turn.norms_HD.data_ptr(),
            turn.eps,
            scaling,
            store.data_ptr(),
            store.data_ptr() + store.nbytes // 2,
            n_cells,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out


@functools.cache
def compiled_kernels(*flags: str) -> Kernels:
    """The kernels, compiled once per process, with further compiler flags. Raises KernelsUnavailableError."""
    command = [*_compiler(), *_FLAGS, *flags]
    try:
        # A loaded file cannot be deleted on some network file systems.
        folder = tempfile.TemporaryDirectory(prefix="stillhouse-kernels-", ignore_cleanup_errors=True)
    except OSError as error:
        raise KernelsUnavailableError(f"there is no place to compile to: {error}; name one in TMPDIR") from error
    with folder as name:
        return _loaded(_compiled(command, Path(name) / "kernels.so"))


def _compiled(command: Sequence[str], file: Path) -> Path:
    whole = [*command, str(SOURCE), "-o", str(file), "-lm"]
    try:
        done = subprocess.run(
            whole, capture_output=True, encoding="utf-8", errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailableError(f"{shlex.join(whole)}: {error}") from error
    if done.returncode:
        said = done.stderr.strip().splitlines()
        first = next((line for line in said if "error" in line.lower()), said[0] if said else str(done.returncode))
        raise KernelsUnavailableError(f"{shlex.join(whole)} failed: {first}")
    return file


def _loaded(file: Path) -> Kernels:
    try:
        return Kernels(ctypes.CDLL(str(file)))
    except OSError as error:
        raise KernelsUnavailableError(f"{file} was compiled, but cannot be loaded: {error}") from error


def _compiler() -> list[str]:
    """The compiler that CC names, else the first of the usual names."""
    try:
        if named := shlex.split(os.environ.get("CC", "")):
            return named
    except ValueError as error:
        raise KernelsUnavailableError(f"CC is {os.environ['CC']!r}, which is no command: {error}") from error
    for name in _COMPILERS:
        if (found := shutil.which(name)) is not None:
            return [found]
    names = ", ".join(_COMPILERS)
    raise KernelsUnavailableError(f"no C compiler: none of {names} is on the PATH; install gcc, or name one in CC")
