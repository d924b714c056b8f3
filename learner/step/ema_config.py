"""Settings of a teacher that is the student's own average. No torch here."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from protocol.settings import PositiveInt, Settings


class EmaConfig(Settings, frozen=True, kw_only=True):
    """Exponential moving average of the student's weights as the teacher (self-distillation). After each step
    e <- decay * e + (1 - decay) * w; the teachers of one pool load it now and then. They begin with the student's
    model."""

    decay: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Weight of the former average, in [0, 1). 0.99 averages over about the last 100 steps. 0: off."""
    pool: str = "default"
    """Pool of teachers that load the average."""
    every: PositiveInt = 10
    """Steps between two snapshots of the average."""
    device: Literal["cpu", "learner"] = "cpu"
    """Where the average is kept. It takes 4 bytes per parameter."""
    keep_snapshots: PositiveInt = 2
    """Number of recent snapshots of the average to keep on disk. A teacher that starts loads the newest."""
