"""What a worker process is told at its start. Handed over in the process itself, never on the wire.

It stands here because every role reads it and the arrows point down: a role's main is

    def main(ctx: RoleContext[WhatIRead]) -> int: ...

where `WhatIRead` is a typing.Protocol, beside that main, of the few parts of the configuration tree the role looks at.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Generic, Literal, TypeAlias, TypeVar

WorkerRole: TypeAlias = Literal["buffer", "learner", "actor", "teacher"]
ConfigT_co = TypeVar("ConfigT_co", covariant=True)


class ExitCode(IntEnum):
    """How a worker process ends, as the supervisor reads it. A signal's death is negative, as everywhere in Python."""

    OK = 0
    """Shutdown(ok=True) came and everything was handed over."""
    FAILED = 1
    """Something broke. Actors and teachers are started again within the restart budget."""
    USELESS = 4
    """Starting again would end the same way (handshake refused, wrong model): the run stops at once."""
    SERVER_LOST = 5
    """The inference server of this worker is dead or stuck: the supervisor ends that server, and starts both again."""
    RUN_LOST = 6
    """The buffer is not the one that this worker knew: another launch of the run, another run, or it has lost its
    journal. What this worker was part of is over."""
    TERMINATED = 143
    """SIGTERM was obeyed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleContext(Generic[ConfigT_co]):
    """Who this process is, and where the run is."""

    role: WorkerRole
    index: int
    """0.. within the role."""
    name: str
    """`<role>-<index>`; stays the same when the process is started again."""
    incarnation: str
    """Random per process."""
    run_id: str
    run_dir: Path
    buffer_address: str
    """ZeroMQ endpoint of the buffer; empty for the buffer itself, which chooses it."""
    resume: bool
    """Go on from the newest checkpoint and ledger in the run folder, if there are any."""
    config: ConfigT_co
    server_url: str = ""
    """Of this worker's own inference server; empty for an embedded engine. If it asks for a bearer key, that is in the
    environment variable `engines.sglang.http.API_KEY_VARIABLE` names, or in the one the configuration names."""
