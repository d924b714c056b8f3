"""A host's own view of the file system: below one folder it sees what was copied to it by hand, and no more."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final

from tests.hosts.network import Network, environment
from tests.patience import PATIENCE_S
from tests.s3_server import environment_of

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


def names_in_bucket(network: Network, host: str, url: str) -> list[str]:
    """By boto3, on a host that reaches the server."""
    code = (
        "import boto3, sys; c = boto3.client('s3', endpoint_url=sys.argv[1]); "
        "print(*(o['Key'] for o in c.list_objects_v2(Bucket='runs').get('Contents', [])), sep='\\n')"
    )
    command = network.command(host, [sys.executable, "-c", code, url])
    done = subprocess.run(
        command, env=environment(environment_of(url)), capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    return done.stdout.split()
