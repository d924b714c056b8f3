"""Is a snapshot of weights what its reference says? No torch: servers read the file, and their actors check it."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from protocol.messages import WeightsRef
from weights.checks import Canary
from weights.sink import SnapshotRefused

_HEADER_MAX_BYTES: Final = 100_000_000
"""The format's own limit."""


class Checked(NamedTuple):
    path: Path
    canary: Canary | None


def check_snapshot(ref: WeightsRef) -> Path:
    """The file, if it has the bytes that the learner wrote and names the version. Raises SnapshotRefused."""
    return read_header(ref).path


def read_header(ref: WeightsRef) -> Checked:
    """The same, with the canary that the learner put into the file, if it did."""
    path = Path(ref.path)
    try:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            if sha256 != ref.sha256:
                raise SnapshotRefused(
                    f"{path}: sha256 {sha256}, expected {ref.sha256}; the file was damaged or replaced"
                )
            file.seek(0)
            (n_header,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(n_header, _HEADER_MAX_BYTES)))
    except OSError as error:
        raise SnapshotRefused(f"{path}: {error}") from error
    except (ValueError, struct.error) as error:
        raise SnapshotRefused(f"{path}: no safetensors header: {error}") from error
    metadata = header.get("__metadata__", {})
    found = metadata.get("version")
    if found != str(ref.version):
        raise SnapshotRefused(f"{path}: holds version {found}, expected {ref.version}")
    try:
        canary = msgspec.json.decode(metadata["canary"], type=Canary) if "canary" in metadata else None
    except msgspec.DecodeError as error:
        raise SnapshotRefused(f"{path}: its canary cannot be read: {error}") from error
    return Checked(path, canary)
