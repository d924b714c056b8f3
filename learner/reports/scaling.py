"""What happened to the hosts of a run on Ray: decisions of the autoscaler, and hosts that left, were killed or lost.
Counts by name in scaling.json of the run's folder, over all launches.

The launcher counts (launch.ray.hosts); the learner adds the counts to its metrics. No torch."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

import msgspec

from stillhouse.protocol.atomic_file import write_atomic

SCALING_FILE: Final = "scaling.json"
Outcome: TypeAlias = Literal[
    "added_actors",
    "added_teachers",
    "removed_teachers",
    "refused_not_there",
    "refused_little_gain",
    "refused_most",
    "overtaken",
    "kept",
    "no_figures",
]
"""Each decision has one of these; docs/metrics.md explains them."""
HostEnd: TypeAlias = Literal["hosts_left", "hosts_killed", "hosts_lost"]
"""How a host ended before its run did, or why it had to be ended."""
OUTCOMES: Final[tuple[Outcome, ...]] = get_args(Outcome)
HOST_ENDS: Final[tuple[HostEnd, ...]] = get_args(HostEnd)
log = logging.getLogger(__name__)


def read_counts(run_dir: Path) -> dict[Outcome | HostEnd, int]:
    """Empty for a run without hosts of Ray, and for a damaged file, which is logged."""
    file = run_dir / SCALING_FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[Outcome | HostEnd, int])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        log.error("%s cannot be read, its counts are left out: %s", file, error)
        return {}


class ScalingCounts:
    """Goes on from the counts of the launch before. Used from one thread."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._counts = run_dir, Counter(read_counts(run_dir))

    def add(self, what: Outcome | HostEnd) -> None:
        """Count one more. A count that cannot be written, on a full disk, is written with the next one."""
        self._counts[what] += 1
        try:
            write_atomic(self._run_dir / SCALING_FILE, msgspec.json.encode(dict(self._counts)) + b"\n")
        except OSError as error:
            log.error("%s cannot be written: %s", self._run_dir / SCALING_FILE, error)


def figures(run_dir: Path) -> dict[str, float]:
    """By tag, for the metrics."""
    return {f"scaling/{outcome}_total": n for outcome, n in read_counts(run_dir).items()}
