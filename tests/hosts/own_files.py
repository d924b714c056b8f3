"""A host's own view of the file system: below one folder it sees what was copied to it by hand, and no more."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Final

from tests.hosts.network import Network

IN_IT: Final = 'mount -t tmpfs none "$0" && tar -C "$0" -xf "$1" && shift && exec "$@"'


def alone_on(network: Network, host: str, hidden: Path, copied: Path) -> list[str]:
    """To be put before a command: it runs on that host, where `hidden` is an empty folder in memory, into which a copy
    of the folder `copied` was put under its own name. The command keeps the process id."""
    carried = hidden.with_name(f"{hidden.name}-to-{host}.tar")
    with tarfile.open(carried, "w") as tar:
        tar.add(copied, copied.name)
    return network.command(host, ["unshare", "-m", "sh", "-c", IN_IT, str(hidden), str(carried)])


def seen_by(process_id: int, path: Path) -> Path:
    """The path as that process sees it; to be used while it lives."""
    return Path(f"/proc/{process_id}/root{path}")
