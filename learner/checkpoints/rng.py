"""The global random states of this process as plain JSON values, so that a checkpoint needs no pickle."""

from __future__ import annotations

import base64
import random
from typing import Any

import msgspec
import numpy as np
import torch


class RngState(msgspec.Struct, frozen=True):
    """Binary states are base64."""

    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, int, int, float]
    """MT19937 keys (little-endian uint32), position, has_gauss, cached_gaussian."""
    torch_cpu: str
    torch_cuda: tuple[str, ...]
    """One per device that was visible."""


def capture_rng() -> RngState:
    keys: Any
    _, keys, position, has_gauss, cached = np.random.get_state()  # pyright: ignore[reportAssignmentType]
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return RngState(
        python=random.getstate(),
        numpy=(_encode(np.asarray(keys, "<u4").tobytes()), int(position), int(has_gauss), float(cached)),
        torch_cpu=_encode(torch.get_rng_state().numpy().tobytes()),
        torch_cuda=tuple(_encode(state.cpu().numpy().tobytes()) for state in cuda),
    )


def restore_rng(state: RngState) -> None:
    """CUDA states are restored for the devices there are now, first to first."""
    random.setstate(state.python)
    keys, position, has_gauss, cached = state.numpy
    np.random.set_state(("MT19937", np.frombuffer(base64.b64decode(keys), "<u4"), position, has_gauss, cached))
    torch.set_rng_state(_bytes_tensor(state.torch_cpu))
    if torch.cuda.is_available():
        for device, encoded in enumerate(state.torch_cuda[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_bytes_tensor(encoded), device)


def _encode(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def _bytes_tensor(encoded: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(encoded)), dtype=torch.uint8)
