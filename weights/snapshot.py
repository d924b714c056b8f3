"""Weights as files: for the proof of servers by a second way (`weights.verify`), and for teachers that follow the
student (`learner.ema`).

    <weights folder>/<epoch>.<step>/model.safetensors       named like a Hugging Face checkpoint, so engines that load
                                                            from a folder can be pointed at it

A file appears under its name when it is whole (written under another name, synced, renamed) and never changes
afterwards. The WeightsRef carries its sha256 over the wire, so a reader can check that the shared folder returns what
the learner wrote.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stillhouse.protocol.atomic_file import replacing, sync
from stillhouse.protocol.messages import WeightsRef, WeightVersion
from stillhouse.weights.buckets import Content, PackedLayout, WholeTensors, manifest_of
from stillhouse.weights.errors import SnapshotRefused
from stillhouse.weights.manifest import WeightManifest
from stillhouse.weights.sink import check_snapshot
from stillhouse.weights.snapshot_format import FILE_NAME, snapshot_head
from stillhouse.weights.staged_weights import StagedVersion

log = logging.getLogger(__name__)

PIECE_BYTES: Final = 64 << 20
"""Memory that writing takes."""
_VERSION_FOLDER: Final = re.compile(r"(\d+)\.(\d+)")


class SnapshotKeeper:
    """The snapshots of one publisher's versions. Each is written once, when it is first needed. Used by one thread."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        """`keep`: number of snapshots to keep."""
        self._folder = folder
        self._keep = keep
        self.ref: WeightsRef | None = None
        """The newest snapshot."""
        self.written_total = 0
        self.failures_total = 0
        self.write_s = 0.0
        """Seconds that writing the newest snapshot took."""

    def write(self, weights: StagedVersion) -> WeightsRef | None:
        """The snapshot of these weights. None if it cannot be written, which is counted."""
        if self.ref is not None and self.ref.version == weights.version:
            return self.ref
        weights.wait()
        began_s = time.monotonic()
        try:
            self.ref = write_content(self._folder, weights.version, weights.manifest, weights.content, keep=self._keep)
        except OSError as error:
            self.failures_total += 1
            log.error("no snapshot of version %s: %s", weights.version, error)
            return None
        self.written_total += 1
        self.write_s = time.monotonic() - began_s
        return self.ref


def write_snapshot(
    folder: Path,
    version: WeightVersion,
    named: Iterable[tuple[str, Tensor]],
    *,
    keep: int,
) -> WeightsRef:
    """Write the tensors, and delete all but the newest `keep` snapshots. Raises OSError (disk full, no permission)."""
    tensors = list(named)
    return write_content(folder, version, manifest_of(tensors), WholeTensors(tensors), keep=keep)


def write_content(
    folder: Path, version: WeightVersion, manifest: WeightManifest, content: Content, *, keep: int
) -> WeightsRef:
    """The same, PIECE_BYTES at a time, in one pass."""
    target = folder.resolve() / str(version) / FILE_NAME
    target.parent.mkdir(parents=True, exist_ok=True)
    layout = PackedLayout(manifest, PIECE_BYTES)
    digest = hashlib.sha256()
    piece_b = torch.empty(min(PIECE_BYTES, layout.total_bytes), dtype=torch.uint8)
    with replacing(target) as draft, draft.open("wb") as file:
        for part in chain((snapshot_head(manifest, version),), _pieces(layout, content, piece_b)):
            digest.update(part)
            file.write(part)
    sync(target.parent)
    sync(target.parent.parent)
    _delete_old(folder, keep)
    return WeightsRef(version, str(target), digest.hexdigest())


def _pieces(layout: PackedLayout, content: Content, piece_b: Tensor) -> Iterator[memoryview]:
    """The bytes of the run, in pieces that share one memory."""
    for start in range(0, layout.total_bytes, PIECE_BYTES):
        end = min(start + PIECE_BYTES, layout.total_bytes)
        content.read(layout, start, end, piece_b)
        yield piece_b[: end - start].numpy().data


def read_snapshot(ref: WeightsRef) -> list[tuple[str, Tensor]]:
    """The named tensors on the CPU, mapped from the file. Raises SnapshotRefused."""
    path = check_snapshot(ref)
    try:
        with safe_open(path, framework="pt", device="cpu") as opened:
            names: list[str] = list(opened.keys())
            return [(name, _tensor(opened.get_tensor(name))) for name in names]
    except (OSError, SafetensorError) as error:
        raise SnapshotRefused(f"{path}: {error}") from error


def snapshots(folder: Path) -> list[WeightVersion]:
    """Versions with a complete snapshot, oldest first."""
    found = (_version_of(path.parent.name) for path in folder.glob(f"*/{FILE_NAME}"))
    return sorted(version for version in found if version is not None)


def _version_of(name: str) -> WeightVersion | None:
    matched = _VERSION_FOLDER.fullmatch(name)
    return WeightVersion(int(matched[1]), int(matched[2])) if matched else None


def _delete_old(folder: Path, keep: int) -> None:
    for version in snapshots(folder)[: -max(keep, 1)]:
        shutil.rmtree(folder / str(version))


def _tensor(loaded: object) -> Tensor:
    if not isinstance(loaded, torch.Tensor):
        raise TypeError(f"safetensors gave {type(loaded).__name__}, expected a tensor")
    return loaded
