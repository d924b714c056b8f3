"""The context that a worker process receives at its start, inside the process and never over the wire.

It is in this package because every role reads it, and roles may not import one another. A role's main is

    def main(ctx: RoleContext[WhatIRead]) -> int: ...

where `WhatIRead` is a typing.Protocol next to that main, with the parts of the configuration that the role reads.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Generic, Literal, TypeAlias, TypeVar

from stillhouse.protocol.turns import FILE, Turn

WorkerRole: TypeAlias = Literal["buffer", "learner", "actor", "teacher"]
ConfigT_co = TypeVar("ConfigT_co", covariant=True)


class ExitCode(IntEnum):
    """Exit codes of a worker process, for the supervisor. Death by a signal is negative, as everywhere in Python."""

    OK = 0
    """Shutdown(ok=True) came, and all results were delivered."""
    FAILED = 1
    """An error. Actors and teachers are started again within the restart budget."""
    USELESS = 4
    """A restart would end the same way (handshake refused, wrong model), so the run stops at once."""
    SERVER_LOST = 5
    """The inference server of this worker is dead or stuck. The supervisor ends the server and starts both again."""
    RUN_LOST = 6
    """The buffer is not the one that this worker knew: another launch of the run, another run, or a buffer that has
    lost its journal. The launch that this worker belonged to is over."""
    SPENT = 7
    """A teacher has sent as much to an API as it may. The run ends in order, with a checkpoint."""
    TERMINATED = 143
    """The worker ended because of SIGTERM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleContext(Generic[ConfigT_co]):
    """The identity of this process, and the place of its run."""

    role: WorkerRole
    index: int
    """Number within the role, from 0."""
    name: str
    """`<role>-<index>`; stays the same when the process is started again."""
    incarnation: str
    """Random per process."""
    run_id: str
    run_dir: Path
    buffer_address: str
    """ZeroMQ endpoint of the buffer; empty for the buffer itself, which chooses it and writes it into the run
    folder."""
    resume: bool
    """Continue from the newest checkpoint and ledger in the run folder, if there are any."""
    config: ConfigT_co
    buffer_away_s: float = 30.0
    """How long it waits for a buffer that was there and is away: the launcher may be starting it again."""
    in_turns: bool = False
    """It shares its device with others in turn (`protocol.turns`)."""
    gpus: float = 0.0
    """That it and its server have, with those of the learner's ranks; of one that several share, an equal part."""
    began_s: float = field(default_factory=time.monotonic)
    """Monotonic time at which this process began as the worker."""
    server_url: str = ""
    """URL of this worker's own inference server; empty for an embedded engine. If the server needs a bearer key, it is
    in the environment variable named by `engines.provider.API_KEY_VARIABLE`, or by the configuration."""

    def first_turn(self) -> Turn | None:
        """Waits for the turn in which the worker takes memory of the device; None: it need not wait for any. Raises
        TurnTimeout."""
        if not self.in_turns:
            return None
        turn = Turn(self.run_dir / FILE, self.name)
        turn.take()
        return turn
