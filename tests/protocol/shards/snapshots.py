"""Snapshots for tests of what is put together of them."""

from __future__ import annotations

from typing import Any

import msgspec

from stillhouse.protocol import messages as m
from stillhouse.protocol.messages import WeightVersion


def counts(trained: int, masked: int = 0) -> m.LedgerCounts:
    reasons = {"stale": masked} if masked else {}
    return m.LedgerCounts(trained + masked, trained, reasons, {}, 0, 0)


def snapshot(trained: int = 0, **fields: Any) -> m.Snapshot:
    """A shard with so many trained tokens."""
    ledger = m.Ledger(counts(0), counts(0), counts(trained), {}, counts(0))
    plain = m.Snapshot(1.0, "running", "", WeightVersion(0, 0), WeightVersion(0, 0), ledger, {}, {}, 1, ())
    return msgspec.structs.replace(plain, **fields)
