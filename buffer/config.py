"""Settings of the buffer: staleness, pacing, release policy, leases and the limits of what it accepts."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from stillhouse.protocol.addresses import is_local
from stillhouse.protocol.settings import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Settings, Share

Sync: TypeAlias = Literal["process", "disk"]
Release: TypeAlias = Literal["rollout", "segment", "deadline"]

ATTEMPTS_PER_EPOCH = 1000
"""Attempts at a sample are numbered from `epoch * ATTEMPTS_PER_EPOCH` on, so that a rollout id is never used twice,
not even by a buffer that remembers nothing of the ones before a restart."""


class BufferConfig(Settings, frozen=True, kw_only=True):
    """Staleness bound, batches, what happens when a worker is slow or gone, size limits and the journal."""

    bind: str = "tcp://127.0.0.1:0"
    """Address that the buffer listens on. Port 0: a free port is chosen."""
    advertise: str = ""
    """Address at which other machines reach the buffer, tcp://HOST:PORT, where it differs from `bind` (port forwarding,
    NAT, or bind on all interfaces). Workers that join are given it. Empty: the same as `bind`."""
    encrypt: Literal["auto", "on", "off"] = "auto"
    """Encrypt the links to the buffer and the weight control channel, and admit only holders of this run's keys
    (SECURITY.md). auto: on, unless only this machine can reach `bind` and `advertise`."""
    allow_plain_network: bool = False
    """Required for encrypt = off when other machines can reach `bind`. They can then read all traffic and take part."""
    heartbeat_s: PositiveFloat = 1.0
    """Longest time between two heartbeats of a worker."""
    peer_timeout_s: PositiveFloat = 10.0
    """A worker that is silent for longer is counted as lost, and its tickets and leases go to others."""
    max_staleness: NonNegativeInt = 4
    """Staleness bound: no token is trained more than this many optimizer steps after the version that sampled it.
    0: synchronous."""
    batch_rollouts: PositiveInt = 64
    """Rollouts per optimizer step. A part of a rollout counts as a fraction. With max_staleness = 1 a batch also takes
    along what would be too old for the next one, except with release = rollout."""
    release: Release = "deadline"
    """When scored tokens may be trained. `rollout`: in whole groups of whole rollouts. `segment`: as soon as they are
    scored. `deadline`: in whole rollouts, but a scored prefix is released early if waiting would make it stale or leave
    the learner idle."""
    idle_release_s: PositiveFloat = 2.0
    """`deadline` only: how long the learner waits with no batch to train, before scored prefixes may fill one."""
    dynamic_sampling: NonNegativeInt = 0
    """Dynamic sampling of DAPO: drop a group whose rollouts all have the same reward, which teaches nothing, and sample
    another prompt in its place. The value is the limit: the run ends, with a checkpoint, when as many batches of
    rollouts in a row were dropped without one to train (max_num_gen_batches in verl); 10 is usual. 0: drop none. Needs
    release = rollout, group_size above 1 and an advantage that compares a group."""
    reward_limit: PositiveFloat = 1e4
    """A rollout whose reward, or that of a turn, is further from 0 is not scored, and counted (reward_out_of_range): a
    number that large is mostly a fault. 1e4 is above the returns of the games that there are adapters for."""
    mask_truncated: bool = False
    """Overlong filtering of DAPO (mask_truncated_completions in TRL): do not train a rollout that ended at a length
    limit. Its tokens are masked as truncated; its reward still counts in the mean of its group. Needs release =
    rollout."""
    lease_s: PositiveFloat = 60.0
    """Time that a teacher has to return scores. After that the item goes to another teacher."""
    hedge_multiple: NonNegativeFloat = 3.0
    """Lease an item to a second teacher when the first has held it this many times longer than 95% of its pool's
    recent leases took. The first answer counts. 0: never."""
    hedge_floor_s: NonNegativeFloat = 2.0
    """An item that was held for less than this is never leased to a second teacher."""
    hedge_budget: Share = 0.05
    """Largest share of a pool's recent leases that may be second ones."""
    breaker_failures: NonNegativeInt = 3
    """Circuit breaker: a teacher that fails this many items in a row, none of which another teacher failed, receives no
    work for a while, then one item as a trial. 0: no circuit breaker."""
    breaker_backoff_s: PositiveFloat = 1.0
    """Time without work after the breaker opens. It doubles each time the trial fails, up to 60 times."""
    ticket_timeout_s: PositiveFloat = 600.0
    """A rollout that made no progress for this long is taken from its actor and started again elsewhere."""
    max_attempts: Annotated[int, Meta(ge=1, le=ATTEMPTS_PER_EPOCH)] = 3
    """Attempts per rollout. After the last one fails it is dropped, and its group is smaller by one."""
    max_score_attempts: PositiveInt = 4
    """Attempts to score a segment, per pool. After the last one fails its tokens are masked as unscorable."""
    task_queue: PositiveInt = 64
    """Prompts to keep ready. The learner is asked for more when fewer than half are left."""
    max_segment_tokens: PositiveInt = 32_768
    """Longest segment. Longer ones are rejected."""
    max_rollout_tokens: PositiveInt = 131_072
    """Longest rollout. A segment that would exceed it is rejected."""
    max_top_k_bytes: PositiveInt = 1024
    """Largest top-k set (teacher.top_k) or hidden state (teacher.payload = hidden, 2 bytes times the hidden size) of a
    teacher, in bytes per token. Larger ones are refused. The buffer keeps them in memory and in the journal until they
    are trained."""
    max_held_segments: NonNegativeInt = 64
    """Segments of a rollout that may wait for a missing earlier one. Further ones are rejected."""

    journal_sync: Sync = "process"
    """Everything is written to RUN/journal before it is acknowledged, so that a buffer that dies is restarted and
    continues where it was. Failure that this must survive: `process`: the death of the buffer process. `disk`: a power
    failure, at the cost of one disk flush per turn of the buffer's loop. With `process`, a power failure may lose the
    last moments; this is detected, and the run resumes from its last checkpoint."""
    journal_log_mb: PositiveInt = 256
    """Size of what came since the last image of the state, in MiB, at which the next image is made (later if the image
    is large). The disk needs room for as much, for all that is held, and for an image."""

    @property
    def encrypted(self) -> bool:
        return self.encrypt == "on" or (self.encrypt == "auto" and self._reachable)

    @property
    def _reachable(self) -> bool:
        """True if other machines can reach the buffer."""
        return not is_local(self.bind) or bool(self.advertise and not is_local(self.advertise))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_network()
        self._check_pairs()

    def _check_network(self) -> None:
        if self.advertise and not self.advertise.startswith("tcp://"):
            raise ValueError(f"buffer.advertise is {self.advertise!r}, expected tcp://HOST:PORT")
        if not self.encrypted and self._reachable and not self.allow_plain_network:
            where = f"buffer.bind ({self.bind})" if not is_local(self.bind) else f"buffer.advertise ({self.advertise})"
            raise ValueError(
                f"buffer.encrypt is off, and other machines reach {where}: they could read all traffic "
                "and take part in this run. Leave encrypt at auto, or set buffer.allow_plain_network = true as well"
            )

    def _check_pairs(self) -> None:
        """Check keys that bound one another."""
        if self.peer_timeout_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"buffer.peer_timeout_s is {self.peer_timeout_s}, expected at least twice heartbeat_s"
                f" ({self.heartbeat_s}), or one late heartbeat loses a healthy peer"
            )
        if self.max_segment_tokens > self.max_rollout_tokens:
            raise ValueError(
                f"buffer.max_segment_tokens is {self.max_segment_tokens}, expected at most max_rollout_tokens"
                f" ({self.max_rollout_tokens})"
            )
