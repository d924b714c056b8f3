"""What one worker has to be told to start, wherever it starts.

It is plain data: it crosses to another process or machine as JSON. There is no process id, descriptor or path in it.
Everything else is in the run folder, at the same place on every host, and each host knows where its own mount of the
folder is:

    config.yaml         the resolved configuration
    keys/               the worker's own key pair, and the public keys of those it connects to (protocol.keys)
    logs/<name>.log     the worker's output
    checkpoints/, journal/, weights/, ...        what the roles read and write
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from launch.config.pools import config_of
from launch.config.run import RunConfig
from launch.machine.devices import on_device
from protocol.context import RoleContext, WorkerRole


class StartRole(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Launcher -> the process that becomes the worker, by way of a backend (launch.processes.backend)."""

    entry: str
    """`module:function`"""
    role: WorkerRole
    index: int
    """0.. within the role."""
    name: str
    incarnation: str
    """Random per process."""
    run_id: str
    buffer_address: str
    """Empty for the buffer itself, which chooses it and writes it into the run folder."""
    resume: bool
    server_url: str = ""
    """The worker's own inference server; empty for an embedded engine."""
    device: str = ""
    """Torch device that the launcher gave it (launch.checks.placement); empty: as the configuration has it."""

    def context(self, config: RunConfig, run_dir: Path) -> RoleContext[RunConfig]:
        """`run_dir`: the run folder as it is called on this host."""
        own = config_of(config, self.role, self.index)
        return RoleContext(
            role=self.role,
            index=self.index,
            name=self.name,
            incarnation=self.incarnation,
            run_id=self.run_id,
            run_dir=run_dir,
            buffer_address=self.buffer_address,
            resume=self.resume,
            config=on_device(own, self.role, self.device) if self.device else own,
            server_url=self.server_url,
        )
