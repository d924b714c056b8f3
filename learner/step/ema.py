"""The student's exponential moving average, as weights for its teachers (self-distillation).

    after each step         e <- decay * e + (1 - decay) * w        float32, on the CPU or beside the student
    every `every` steps     snapshot file -> TeacherWeights -> buffer -> the teachers, which read it between two batches

Training waits while the file is written.

With adapters, w are the merged weights, because an average of products is not the product of averages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from stillhouse.learner.config import EmaConfig
from stillhouse.protocol.messages import WeightsRef, WeightVersion
from stillhouse.weights.snapshot import write_snapshot
from stillhouse.weights.staged_weights import Weight, tensor_of

log = logging.getLogger(__name__)

SNAPSHOTS_KEPT: Final = 2
"""Number of recent snapshots to keep on disk. A teacher that starts loads the newest."""


class StudentEma:
    """Owns the average. All methods are for the training thread."""

    def __init__(
        self,
        config: EmaConfig,
        weights: Iterable[tuple[str, Weight]],
        *,
        folder: Path,
        send: Callable[[WeightsRef], None],
        failed: Callable[[str], None] = lambda _: None,
    ) -> None:
        """The average starts as `weights`. `folder` gets the snapshots; `send` announces one to the teachers. `failed`
        is called with the reason when an average could not be written."""
        self._config = config
        self._folder = folder
        self._send = send
        self._failed = failed
        self._average = {name: self._own(tensor_of(weight)) for name, weight in weights}
        self._sent_total = 0
        self.failed_total = 0
        """Averages that could not be written."""
        self.error = ""
        """Why the newest of these could not."""
        self._sent_step = 0

    @property
    def figures(self) -> dict[str, float]:
        """Metrics: snapshots sent, snapshots that could not be written, and the step of the newest."""
        return {
            "ema_snapshots_total": float(self._sent_total),
            "ema_failures_total": float(self.failed_total),
            "ema_step": float(self._sent_step),
        }

    def update(self, weights: Iterable[tuple[str, Weight]]) -> None:
        """Add the weights of one more step."""
        with torch.no_grad():
            for name, weight in weights:
                average = self._average[name]
                average.lerp_(tensor_of(weight).to(average), 1.0 - self._config.decay)

    def step(self, version: WeightVersion, weights: Iterable[tuple[str, Weight]]) -> None:
        """To be called after each optimizer step: `update`, and `publish` when it is due."""
        self.update(weights)
        if version.step % self._config.every == 0:
            self.publish(version)

    def publish(self, version: WeightVersion) -> None:
        """Write a snapshot and announce it. A failure is counted, and the teachers keep their weights."""
        try:
            ref = write_snapshot(self._folder, version, self._average.items(), keep=SNAPSHOTS_KEPT)
        except OSError as error:
            self.failed_total += 1
            self.error = f"no new average of the student for its teachers: {error}"
            log.error("%s (%d failed so far)", self.error, self.failed_total)
            self._failed(self.error)
            return
        self._send(ref)
        self._sent_total += 1
        self._sent_step = ref.version.step

    def state_dict(self) -> dict[str, Tensor]:
        """Copies on the CPU, by name."""
        return {name: tensor.detach().cpu().clone() for name, tensor in self._average.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Resume from a `state_dict`. Raises ValueError, changing nothing, for other names or shapes."""
        got = {name: tensor.shape for name, tensor in state.items()}
        wanted = {name: tensor.shape for name, tensor in self._average.items()}
        if got != wanted:
            differing = sorted(name for name in got.keys() | wanted.keys() if got.get(name) != wanted.get(name))
            raise ValueError(
                f"the saved average does not fit the student in {len(differing)} tensors, e.g. {differing[:4]}; was "
                "the run started without learner.ema, or with another student?"
            )
        for name, tensor in state.items():
            self._average[name].copy_(tensor)

    def _own(self, tensor: Tensor) -> Tensor:
        device = tensor.device if self._config.device == "learner" else "cpu"
        return tensor.detach().to(device=device, dtype=torch.float32, copy=True)
