"""New weights on their way into a running engine: checked and copied by the thread that receives them, swapped in by
the thread that decodes, between two steps."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from protocol.messages import WeightVersion

_NAMES_IN_ERROR = 8


@dataclass(frozen=True, slots=True)
class _Staged:
    version: WeightVersion
    tensors: list[Tensor]
    """In the order of the parameters, on their device, in their dtype; our own copies."""


class WeightStage:
    """Owns the live version and at most one staged set. Thread-safe."""

    def __init__(self, parameters: dict[str, torch.nn.Parameter], version: WeightVersion) -> None:
        """`parameters`: named_parameters() of the model; tied weights appear once."""
        self._parameters = parameters
        self._version = version
        self._staged: _Staged | None = None
        self._changed = threading.Condition()
        self.stale_total = 0
        """Stagings left aside because a newer version was there already."""

    @property
    def version(self) -> WeightVersion:
        return self._version

    @property
    def waiting(self) -> bool:
        return self._staged is not None

    def stage(self, version: WeightVersion, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy a full set; it replaces one not yet swapped in. A version older than the newest known is left aside and
        counted: weights never go back. Raises ValueError for names or shapes that do not fit."""
        staged = _Staged(version, self._checked_copies(tensors))
        with self._changed:
            if version < (self._staged.version if self._staged is not None else self._version):
                self.stale_total += 1
                return
            self._staged = staged
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Return when something is staged, or woken, or after `timeout_s`."""
        with self._changed:
            if self._staged is None:
                self._changed.wait(timeout=max(timeout_s, 0.0))

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def swap(self) -> bool:
        """Copy the staged set into the parameters, in place; False if there is none."""
        with self._changed:
            staged, self._staged = self._staged, None
            if staged is None:
                return False
            self._version = staged.version
        for parameter, tensor in zip(self._parameters.values(), staged.tensors, strict=True):
            parameter.copy_(tensor)
        return True

    def _checked_copies(self, tensors: Iterable[tuple[str, Tensor]]) -> list[Tensor]:
        copies: dict[str, Tensor] = {}
        wrong: dict[str, str] = {}
        for name, tensor in tensors:
            parameter = self._parameters.get(name)
            if parameter is None:
                wrong[name] = "is not a parameter of this model"
            elif name in copies:
                wrong[name] = "came twice"
            elif parameter.shape != tensor.shape:
                wrong[name] = f"has shape {tuple(tensor.shape)}, expected {tuple(parameter.shape)}"
            else:
                copies[name] = tensor.detach().to(parameter, copy=True)
        wrong.update({name: "is missing" for name in self._parameters if name not in copies and name not in wrong})
        if wrong:
            listed = "; ".join(f"{name} {what}" for name, what in list(wrong.items())[:_NAMES_IN_ERROR])
            more = f" (and {len(wrong) - _NAMES_IN_ERROR} more)" if len(wrong) > _NAMES_IN_ERROR else ""
            raise ValueError(
                f"weights refused, nothing will be swapped: {listed}{more}. Expected the {len(self._parameters)} "
                "names of named_parameters() of the same model (tied weights once)"
            )
        return [copies[name] for name in self._parameters]
