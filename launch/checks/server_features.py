"""What the SGLang servers of a run can do, for people: servers alike are told once."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from engines.sglang.features import Features
from launch.runfolder import SERVERS

NAMES_SHOWN: Final = 8
log = logging.getLogger(__name__)


class ServerSeen(msgspec.Struct, frozen=True):
    """`servers/<worker>.json`."""

    url: str
    features: Features


def features_of_run(run_dir: Path) -> str:
    """For the status; empty where no worker has a server."""
    found: list[tuple[str, Features]] = []
    for file in sorted((run_dir / SERVERS).glob("*.json")):
        try:
            found.append((file.stem, msgspec.json.decode(file.read_bytes(), type=ServerSeen).features))
        except (OSError, msgspec.DecodeError) as error:
            log.warning("%s cannot be read: %s", file, error)
    return grouped(found)


def grouped(servers: Iterable[tuple[str, Features]]) -> str:
    """A table for each kind of server; what they call their weights is no difference."""
    kinds: defaultdict[Features, list[tuple[str, Features]]] = defaultdict(list)
    for name, features in servers:
        kinds[msgspec.structs.replace(features, weights_label="")].append((name, features))
    told: list[str] = []
    for same in kinds.values():
        names = [name for name, _ in same]
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        labels = dict.fromkeys(features.weights_label for _, features in same)
        features = msgspec.structs.replace(same[0][1], weights_label=", ".join(list(labels)[:NAMES_SHOWN]))
        told.append(f"server of {', '.join(names[:NAMES_SHOWN])}{more}:\n{features.table()}")
    return "\n".join(told)
