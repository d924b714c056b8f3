"""Observes a run on the wire: which peers speak, when work is done, and what is trained.

The batches and their acknowledgements go to a file of JSON lines, one BatchSeen or TrainedSeen each, so that an audit
of what was trained depends on neither the buffer's ledger nor the learner's own account.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from stillhouse.protocol.codec import Received, decode
from stillhouse.protocol.errors import RemoteProtocolError
from stillhouse.protocol.messages import Batch, BatchTrained, BatchTrainedAck, Hello, VersionSpan, WeightVersion
from tests.sim.chaos.zmtp import Unit, bodies

USEFUL: Final = frozenset({"Segment", "RolloutFailed", "Scores", "BatchTrained", "TasksOffered", "Snapshot"})
"""Work done, not talk: from actor, actor, teacher, learner, learner; the launcher is answered."""


class ItemSeen(msgspec.Struct, frozen=True):
    rollout_id: str
    runs: list[tuple[int, int]]
    """[start, end) of the tokens to train."""
    spans: tuple[VersionSpan, ...]


class BatchSeen(msgspec.Struct, frozen=True, tag=True):
    """buffer -> learner."""

    batch_id: int
    version: WeightVersion
    staleness: dict[int, int]
    items: list[ItemSeen]
    digest: str
    """Digest of ids, masks and log-probs."""
    run_id: str = ""
    """Id of the launch: after --resume, an open rollout is written again under the same name."""


class TrainedSeen(msgspec.Struct, frozen=True, tag=True):
    """learner -> buffer, and back."""

    batch_id: int
    version: WeightVersion
    acknowledged: bool = False
    """The buffer's answer."""
    masked: tuple[str, ...] = ()
    """Rollouts that were left out."""


class _Tag(msgspec.Struct):
    type: str = ""


class Tap:
    """Fed by the proxy with every message that goes through it."""

    def __init__(self, file: Path | None) -> None:
        self._file = file.open("ab", buffering=0) if file is not None else None
        self._tag = msgspec.msgpack.Decoder(_Tag)
        self._run_id = ""
        self.useful_s: dict[str, float] = {}

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def name_of(self, unit: Unit) -> str:
        """Name of the peer, if the unit is a Hello; otherwise empty."""
        try:
            message = decode(bodies(unit)[:-1]).message
        except RemoteProtocolError:
            return ""
        if not isinstance(message, Hello):
            return ""
        self._run_id = message.run_id if message.role == "learner" else self._run_id
        return message.name

    def passed(self, name: str, unit: Unit) -> None:
        """A message of this peer, or to it, was passed on."""
        try:
            for frames in _messages(bodies(unit)[:-1]):
                kind = self._tag.decode(frames[0]).type
                if kind in USEFUL:
                    self.useful_s[name] = time.monotonic()
                if kind in ("Batch", "BatchTrained", "BatchTrainedAck") and self._file is not None:
                    self._write(decode(frames))
        except (msgspec.DecodeError, IndexError):
            return

    def _write(self, received: Received) -> None:
        assert self._file is not None
        match received.message:
            case Batch() as batch if batch.items:
                self._file.write(msgspec.json.encode(_batch_seen(batch, received, self._run_id)) + b"\n")
            case BatchTrained(batch_id, version, masked):
                seen = TrainedSeen(batch_id, version, masked=masked)
                self._file.write(msgspec.json.encode(seen) + b"\n")
            case BatchTrainedAck(batch_id, version):
                self._file.write(msgspec.json.encode(TrainedSeen(batch_id, version, True)) + b"\n")
            case _:
                pass


def _messages(frames: list[bytes]) -> list[list[bytes]]:
    """The frames of each message in a multipart: of several small ones, if it is one frame with an array of them."""
    if len(frames) == 1 and frames[0][:1] and (0x90 <= frames[0][0] <= 0x9F or frames[0][0] in (0xDC, 0xDD)):
        return msgspec.msgpack.decode(frames[0], type=list[list[bytes]])
    return [frames]


def read_tap(file: Path) -> list[BatchSeen | TrainedSeen]:
    lines = file.read_bytes().splitlines() if file.exists() else []
    decoder = msgspec.json.Decoder(BatchSeen | TrainedSeen)
    return [decoder.decode(line) for line in lines]


def _batch_seen(batch: Batch, received: Received, run_id: str) -> BatchSeen:
    digest = hashlib.sha256()
    items: list[ItemSeen] = []
    for index, item in enumerate(batch.items):
        ids_T, _, train_T, _ = arrays = received.arrays[4 * index : 4 * index + 4]
        for array in arrays:
            digest.update(array.tobytes())
        assert len(ids_T) == item.end
        edges = np.flatnonzero(np.diff(np.concatenate(([0], train_T != 0, [0]))))
        runs = [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]
        items.append(ItemSeen(item.rollout_id, runs, item.spans))
    return BatchSeen(batch.batch_id, batch.version, batch.staleness, items, digest.hexdigest(), run_id)
