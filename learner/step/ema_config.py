"""Settings of a teacher that is the student's own average. No torch here."""

from __future__ import annotations

from typing import Literal

import msgspec


class EmaConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exponential moving average of the student's weights, e <- decay * e + (1 - decay) * w after each step, which
    takes the place of the weights of one pool of teachers. Their model must be the student's: there it begins."""

    decay: float = 0.0
    """0 = off: teachers keep their weights. 0.99 averages over about the last 100 steps."""
    pool: str = "default"
    """Whose teachers they are."""
    every: int = 10
    """Steps between two snapshots of the average for the teachers."""
    device: Literal["cpu", "learner"] = "cpu"
    """Where the average is kept: 4 bytes per parameter."""
    keep_snapshots: int = 2
    """Of the average, on disk; older ones are deleted. A teacher that starts reads the newest."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.decay < 1.0:
            raise ValueError(f"ema.decay must be 0 (off) or in (0, 1), got {self.decay}")
        for name in ("every", "keep_snapshots"):
            if getattr(self, name) < 1:
                raise ValueError(f"ema.{name} must be at least 1, got {getattr(self, name)}")
