"""The joiner's own link to the run: asks for snapshots, hears of the end."""

from __future__ import annotations

import secrets
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from launch.buffer_link import CONNECT_TIMEOUT_S, BufferLink
from launch.errors import LaunchError
from launch.join.config import Joining
from launch.join.target import Target
from launch.processes.slots import worker_name
from protocol.addresses import is_local
from protocol.errors import ConnectTimeout, ProtocolError
from protocol.keys import load_client_keys

SNAPSHOT_WAIT_S: Final = 15.0


def connect(target: Target, prefix: str, *, timeout_s: float = CONNECT_TIMEOUT_S) -> BufferLink:
    """The joiner's own link, with a first snapshot, to a run that goes on. Raises LaunchError."""
    name = f"joiner-{prefix}-{secrets.token_hex(2)}"
    try:
        keys = load_client_keys(target.keys, "joiner") if target.keys is not None else None
        run_id = target.run_id
        if not run_id:  # asked on a link of its own: one without a run id would follow the address to another run
            asking = BufferLink(
                target.address, "", secrets.token_hex(8), keys, name=f"{name}-asks", connect_timeout_s=timeout_s
            )
            run_id = asking.run_id
            asking.close()
        link = BufferLink(target.address, run_id, secrets.token_hex(8), keys, name=name, connect_timeout_s=timeout_s)
    except ConnectTimeout as error:
        here = "; that address is this machine's own" if is_local(target.address) else ""
        raise LaunchError(f"{error}{here}") from error
    except ProtocolError as error:
        raise LaunchError(f"{target.address}: {error}") from error
    with close_on_error(link):
        _await_snapshot(link)
    return link


@contextmanager
def close_on_error(link: BufferLink) -> Generator[None]:
    try:
        yield
    except BaseException:
        link.close()
        raise


def _await_snapshot(link: BufferLink) -> None:
    deadline_s = time.monotonic() + SNAPSHOT_WAIT_S
    while link.snapshot is None and link.shutdown is None and link.lost is None and time.monotonic() < deadline_s:
        link.ask(time.monotonic(), 1.0)
        link.take()
        time.sleep(0.01)
    if link.shutdown is not None:
        raise LaunchError(f"the run is over: {link.shutdown.reason}")
    if link.snapshot is None:
        raise LaunchError(f"the buffer tells nothing of the run ({link.lost or f'for {SNAPSHOT_WAIT_S:.0f} s'})")


def check_names(link: BufferLink, joining: Joining, prefix: str) -> None:
    """Raises LaunchError when one of ours is in the run."""
    assert link.snapshot is not None
    config = joining.config
    names = {worker_name("actor", i, prefix) for i in range(config.actors)}
    names |= {worker_name("teacher", i, prefix) for i in range(config.teachers)}
    taken = sorted(peer.name for peer in link.snapshot.peers if peer.alive and peer.name in names)
    if taken:
        raise LaunchError(
            f"--name-prefix: {', '.join(taken)} is in the run already; choose another prefix (or wait, if that one has "
            f"just died: the buffer counts it as lost after buffer.peer_timeout_s)"
        )
