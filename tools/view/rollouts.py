"""The rollouts of a record. One that was in several batches (`buffer.release`) is put together from all of them.

Finding the rollouts reads the headers only; `read` then reads the frames of one. Legend: L tokens of a rollout, M its
teachers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from stillhouse.protocol.messages import BatchItem, VersionSpan, WeightVersion
from stillhouse.protocol.payloads.aligned import NOT_SCORED
from stillhouse.recording.format import RecordedRollout
from stillhouse.recording.reader import KeptBatch, Recording
from stillhouse.tools.write.given import DATA

_IDS, _BEHAVIOUR, _TRAIN_MASK, _TEACHER, _PAYLOADS = range(5)
"""Places of an item's frames (protocol.messages.BatchItem)."""
TOKEN_BYTES: Final = 12
"""What one token takes in the page, about: its id and two log-probs, in base64."""
ROLLOUT_BYTES: Final = 600
"""What a rollout takes beside its tokens, about: its row, its spans and its worst tokens."""
TOP_K_BYTES: Final = 600
"""What the alternatives to its worst tokens take, about, for each teacher that sent top-k sets."""


@dataclass(frozen=True, slots=True)
class FoundRollout:
    """A rollout, and the items of the record that hold parts of it, in the order of their steps."""

    item: BatchItem
    """The newest, which is the longest."""
    offline: bool
    items: list[tuple[KeptBatch, int]]
    """(batch, index of the item in it)."""

    @property
    def page_bytes(self) -> int:
        """Estimate of what it takes in the page."""
        n_sent = len({piece.teacher for piece in self.item.top_k if piece.teacher >= 0})
        token = TOKEN_BYTES + 3 * max(0, len(self.item.teachers) - 1)
        return ROLLOUT_BYTES + TOP_K_BYTES * n_sent + self.item.end * token


class TrainedRange(NamedTuple):
    """Tokens [start, end) that one step trained, all sampled by one version."""

    start: int
    end: int
    version: WeightVersion
    """The version that the step started from."""
    staleness: int | None
    """Optimizer steps since the version that sampled them. None: of another run, or not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """One rollout with its tokens."""

    item: BatchItem
    offline: bool
    version: WeightVersion
    """That of the newest batch that it was in."""
    left_out: bool
    """True if a step left it out, because something of it was not finite or could not be read."""
    n_prompt: int
    """Tokens before the first sampled one."""
    ids_L: npt.NDArray[np.int32]
    sampled_L: npt.NDArray[np.bool_]
    behaviour_L: npt.NDArray[np.float32]
    behaviour_known: bool
    """False for text of unknown origin (tools.write.given): nobody's log-probs were recorded."""
    teacher_ML: npt.NDArray[np.float32]
    scored_ML: npt.NDArray[np.bool_]
    trained: tuple[TrainedRange, ...]
    parts: tuple[RecordedRollout, ...] = field(repr=False)
    """The items that it was put together from."""

    @property
    def gaps(self) -> npt.NDArray[np.float64]:
        """Student minus teacher [M, L], in nats; NaN for a token that is not scored. Where the student's log-prob is
        not known it counts as 0, so that what remains is the teacher's surprise."""
        gap_ML = self.behaviour_L.astype(np.float64)[None, :] * self.behaviour_known - self.teacher_ML
        return np.where(self.scored_ML, gap_ML, np.nan)

    @property
    def staleness(self) -> int | None:
        """The largest of its trained tokens."""
        return max((one.staleness for one in self.trained if one.staleness is not None), default=None)


def find_rollouts(recording: Recording) -> list[FoundRollout]:
    """All rollouts of the kept branch, in the order in which they first appear."""
    found: dict[tuple[bool, str], FoundRollout] = {}
    for batch in recording.batches:
        for index, record in enumerate(batch.record.items):
            key = (record.offline, record.item.rollout_id)
            before = found[key].items if key in found else []
            found[key] = FoundRollout(record.item, record.offline, [*before, (batch, index)])
    return list(found.values())


def choose(found: Sequence[FoundRollout], most_bytes: int) -> list[FoundRollout]:
    """As many of the rollouts as fit into a page of this size, and at least those of one task. Whole tasks are chosen,
    evenly spaced over the run, so that rollouts of one prompt stay together."""
    tasks: dict[tuple[bool, int], list[FoundRollout]] = {}
    for one in found:
        tasks.setdefault((one.offline, one.item.task_id), []).append(one)
    groups = list(tasks.values())
    sizes = np.array([sum(one.page_bytes for one in group) for group in groups], np.int64)
    n = len(groups)
    while True:
        places = np.unique(np.arange(n) * len(groups) // max(n, 1))
        taken = int(sizes[places].sum())
        if taken <= most_bytes or n <= 1:
            break
        n = max(1, min(n - 1, int(n * most_bytes / taken)))
    chosen = {id(one) for place in places.tolist() for one in groups[place]}
    return [one for one in found if id(one) in chosen]


def read(recording: Recording, found: FoundRollout) -> Read:
    """Read one rollout. Raises RecordError for frames that cannot be read."""
    records = [batch.record for batch, _ in found.items]
    parts = [recording.rollout(batch, index) for batch, index in found.items]
    item, newest = found.item, parts[-1].arrays
    n = item.end
    sampled_L = np.zeros(n, np.bool_)
    for span in item.spans:
        sampled_L[span.start : span.end] = True
    behaviour_L = newest[_BEHAVIOUR].copy()
    teacher_ML = newest[_TEACHER].reshape(len(item.teachers), n).copy()
    in_batch_L = np.zeros(n, np.bool_)
    trained: list[TrainedRange] = []
    left_out = False
    for record, part in zip(records, parts, strict=True):
        mask_L = _whole(part.arrays[_TRAIN_MASK], n)
        in_batch_L |= mask_L
        here = part.item.end
        behaviour_L[mask_L] = part.arrays[_BEHAVIOUR][mask_L[:here]]
        teacher_ML[:, mask_L] = part.arrays[_TEACHER].reshape(len(item.teachers), here)[:, mask_L[:here]]
        if part.item.rollout_id in record.masked and not found.offline:
            left_out = True
            continue
        for start, end, sampled_by in _runs(mask_L, part.item.spans):
            staleness = None if found.offline else recording.branches.distance(sampled_by, record.version)
            trained.append(TrainedRange(start, end, record.version, staleness))
    given = found.offline or recording.header.writer == "data"
    unscored = given and item.teachers == (DATA,) and not teacher_ML.any()
    return Read(
        item=item,
        offline=found.offline,
        version=records[-1].version,
        left_out=left_out,
        n_prompt=min((span.start for span in item.spans), default=n),
        ids_L=newest[_IDS],
        sampled_L=sampled_L,
        behaviour_L=behaviour_L,
        behaviour_known=not given or bool(behaviour_L[sampled_L].any()),
        teacher_ML=teacher_ML,
        # A token that a batch was to train was scored, also if q is 0. Another one was scored if q is not 0.
        scored_ML=sampled_L & (in_batch_L | (teacher_ML != 0)) & (teacher_ML != NOT_SCORED) & (not unscored),
        trained=tuple(trained),
        parts=tuple(parts),
    )


def payload_rows(part: RecordedRollout, teacher: int, token: int) -> tuple[bytes, int, int] | None:
    """The payload of this teacher that covers a token: (payload, its number of tokens, the token's row), or None."""
    at = 0
    for piece in part.item.top_k:
        if piece.teacher == teacher and piece.start <= token < piece.end:
            payload = part.arrays[_PAYLOADS][at : at + piece.n_bytes].tobytes()
            return payload, piece.end - piece.start, token - piece.start
        at += piece.n_bytes
    return None


def _whole(mask: npt.NDArray[Any], n: int) -> npt.NDArray[np.bool_]:
    """A train mask, extended to all `n` tokens of the rollout."""
    whole_L = np.zeros(n, np.bool_)
    whole_L[: len(mask)] = mask != 0
    return whole_L


def _runs(mask_L: npt.NDArray[np.bool_], spans: Sequence[VersionSpan]) -> Iterator[tuple[int, int, WeightVersion]]:
    """Ranges of the mask with one version each."""
    for span in spans:
        inside = mask_L[span.start : span.end].astype(np.int8)
        edges = np.flatnonzero(np.diff(inside, prepend=0, append=0)) + span.start
        for start, end in edges.reshape(-1, 2).tolist():
            yield start, end, span.version
