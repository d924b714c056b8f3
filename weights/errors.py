"""How the transport of weights fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Interrupted: TypeAlias = Callable[[], str | None]
"""Called about every 0.1 s during a wait; a reason ends the wait with GroupInterrupted."""


class GroupBroken(Exception):
    """An operation of the group failed or missed its deadline: a member is dead, hung or unreachable. The group cannot
    be used any more; close it and wait for the next plan."""


class GroupInterrupted(Exception):
    """The owner asked to stop waiting; the message is its reason. Close the group."""


class WeightsRefused(Exception):
    """The received weights are not the announced ones, or cannot be used here."""


class WeightsDiffer(WeightsRefused):
    """The server accepted all weights that were sent, but computes with others."""


class SnapshotRefused(Exception):
    """The snapshot is missing, is not what its reference says, or cannot be used."""
