"""Recounts a replay: whether each batch of a record was trained once in each pass over it.

A replay may take the batches of a pass in any order, so passes are compared as collections of token counts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec

from stillhouse.tools.audit.history import History
from stillhouse.tools.audit.record import AuditError, RecordedBatch, RecordFile, RecordPlace, Resumed, Version
from stillhouse.tools.audit.run import Row, read_frontiers, read_rows


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of a replay, and what is wrong."""

    steps: int
    batches: int
    """In the record."""
    tokens: int
    """Trained in all kept steps."""
    checkpoint: str
    faults: tuple[str, ...]

    @property
    def clean(self) -> bool:
        return not self.faults

    def __str__(self) -> str:
        counts = f"{self.steps:,} steps on {self.batches:,} written batches, {self.tokens:,} tokens trained"
        lines = [f"replay      {counts}; up to {self.checkpoint or 'no checkpoint'}", *self.faults]
        return "\n".join([*lines, "", "clean" if self.clean else "WRONG"])


def audit_replay(run: Path, record: Path) -> ReplayReport:
    """Audit the replay in this folder, of this record. Raises AuditError if there is nothing to count."""
    kept = _kept_rows(run)
    if not kept:
        raise AuditError(f"{run / 'metrics.jsonl'} has no step; there is nothing to count")
    with RecordFile(record) as file:
        written = _tokens_of_batches(file)
    if not written:
        raise AuditError(f"{record} has no batch; there is nothing to count")
    steps, faults = max(kept), list[str]()
    if missing := [step for step in range(1, steps + 1) if step not in kept]:
        faults.append(f"steps without a line in metrics.jsonl: {missing[:5]}, {len(missing)} in all")
    for first in range(1, steps + 1, len(written)):
        last = min(first + len(written) - 1, steps)
        trained = Counter(kept[step].tokens for step in range(first, last + 1) if step in kept)
        if not missing and (extra := trained - Counter(written)):
            faults.append(
                f"steps {first} to {last} trained batches of {sorted(extra.elements())[:5]} tokens more often than the "
                "record has such batches"
            )
    checkpoints = [(frontier, name) for name, frontier in read_frontiers(run / "checkpoints")]
    newest = max(checkpoints, key=lambda one: one[0].version.step, default=None)
    if newest is None or newest[0].version.step != steps:
        faults.append(f"the newest intact checkpoint is {newest and newest[1]}, and {steps} steps were made")
    return ReplayReport(
        steps=steps,
        batches=len(written),
        tokens=sum(row.tokens for row in kept.values()),
        checkpoint=newest[1] if newest is not None else "",
        faults=tuple(faults),
    )


def _kept_rows(run: Path) -> dict[int, Row]:
    """The lines of the steps that the replay did not take back, by step. A resumed one goes on from a checkpoint."""
    kept: dict[int, Row] = {}
    for row in read_rows(run / "metrics.jsonl"):
        if row.kind == "resume":
            kept = {step: former for step, former in kept.items() if step <= row.version.step}
        elif row.kind == "step":
            kept[row.version.step] = row
    return kept


def _tokens_of_batches(file: RecordFile) -> list[int]:
    """Tokens to train of each batch on the branch that its writer kept."""
    history, places = History(), dict[Version, RecordPlace]()
    for place in file.places():
        match place.record:
            case Resumed(version, parent):
                history.begin(version, parent)
            case RecordedBatch(_, version):
                history.step(version)
                places[version] = place
            case _:
                pass
    history.find_parents()
    found: list[int] = []
    for version in history.kept():
        if (place := places.get(version)) is not None:
            items = file.batch(place).trained_items
            found.append(sum(end - start for item in items for start, end in file.runs(item, place.blob_at)))
    return found
