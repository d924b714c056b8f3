"""Figures of weight transport, as the learner sees it."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.messages import WeightVersion
from weights.transport import DropReason


@dataclass(frozen=True, slots=True)
class PublisherStats:
    """A frozen look. Totals since the start; seconds and bytes of the newest broadcast where not a total."""

    published: WeightVersion | None
    members: int
    group_epoch: int
    broadcasts_total: int
    broadcast_s: float
    broadcast_s_total: float
    broadcast_bytes: int
    copy_s: float
    """What the newest `publish` cost the training thread, waiting excluded."""
    snapshots_total: int
    snapshot_s: float
    snapshot_failures_total: int
    rebuilds_total: int
    failed_groups_total: int
    skipped_versions_total: int
    dropped_total: dict[DropReason, int]
    """Members left out, by `weights.transport.DropReason`."""
    control_unreadable_total: int
    """Messages on the control channel that were not ours."""
    check_requests_total: int
    """Versions that SGLang servers were asked to prove. The actors' `weight_checks_*_total` say whether they could."""


@dataclass(slots=True)
class PublishFigures:
    """What the publisher thread counts as it goes."""

    published: WeightVersion | None = None
    broadcasts: int = 0
    broadcast_s: float = 0.0
    broadcast_s_total: float = 0.0
    broadcast_bytes: int = 0
    rebuilds: int = 0
    failed_groups: int = 0
    check_requests: int = 0
