"""Settings of the buffer: staleness, pacing, release policy, leases and the limits of what it accepts."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

from protocol.addresses import is_local

Sync: TypeAlias = Literal["process", "disk"]
Release: TypeAlias = Literal["rollout", "segment", "deadline"]

AT_LEAST_ZERO: Final = (
    *("max_staleness", "max_held_segments", "journal_reserve_mb", "journal_memory_mb"),
    *("hedge_multiple", "hedge_floor_s", "breaker_failures"),
)
AT_LEAST_ONE: Final = (
    *("batch_rollouts", "max_attempts", "max_score_attempts", "task_queue", "max_segment_tokens"),
    *("max_rollout_tokens", "journal_log_mb", "max_top_k_bytes"),
)
ABOVE_ZERO: Final = (
    *("heartbeat_s", "peer_timeout_s", "tick_s", "idle_release_s", "lease_s", "ticket_timeout_s"),
    "breaker_backoff_s",
)
SHARES: Final = ("hedge_quantile", "hedge_budget")


ATTEMPTS_PER_EPOCH: Final = 1000
"""Attempts at a sample are numbered from `epoch * ATTEMPTS_PER_EPOCH` on, so that a rollout id is never used twice,
not even by a buffer that remembers nothing of the ones before a restart."""


class BufferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The buffer's settings. Times are seconds, lengths are tokens."""

    bind: str = "tcp://127.0.0.1:0"
    """Address the server binds to; port 0 lets the system choose."""
    advertise: str = ""
    """Where other machines reach the buffer, if that is not `bind` (a port forward, NAT, bind on all addresses):
    tcp://HOST:PORT. Told to those that join (launch/cluster.py join); empty: `bind`."""
    encrypt: Literal["auto", "on", "off"] = "auto"
    """Encrypt the links to the buffer and the weight control channel, and let in only who has a key of this run
    (SECURITY.md). auto: on, unless `bind` and `advertise` can be reached from this machine alone."""
    allow_plain_network: bool = False
    """Needed for encrypt = off where other machines reach `bind`: they can then read all of it, and take part."""
    heartbeat_s: float = 1.0
    """Peers are told to send a heartbeat at least this often."""
    peer_timeout_s: float = 10.0
    """A peer silent for longer is lost: its tickets and leases go to others."""
    tick_s: float = 0.05
    """How often the server lets the core look at its clocks (leases, ticket timeouts, idle release)."""
    max_staleness: int = 4
    """S. No token is trained further than this many optimizer steps from the version that sampled it.
    0 = synchronous."""
    batch_rollouts: int = 64
    """B. Rollouts trained per optimizer step (a piece of a rollout counts as a fraction)."""
    release: Release = "deadline"
    """What may leave for the learner. `rollout`: whole groups of whole rollouts. `segment`: tokens as soon as scored.
    `deadline`: whole rollouts, but a scored prefix leaves early when waiting would make it stale or leave the learner
    idle."""
    idle_release_s: float = 2.0
    """`deadline` only: once the learner waited this long, scored prefixes may fill its batch."""
    lease_s: float = 60.0
    """A teacher that has not returned scores after this long loses the lease; another teacher gets it."""
    hedge_multiple: float = 3.0
    """An item that a teacher has held for this many times as long as is usual in its pool is given to a second teacher
    as well; the first answer counts. 0: never."""
    hedge_quantile: float = 0.95
    """What is usual: this quantile of the pool's recent lease times."""
    hedge_floor_s: float = 2.0
    """An item held for less is never given to a second teacher."""
    hedge_budget: float = 0.05
    """At most this share of a pool's recent leases are such second ones."""
    breaker_failures: int = 3
    """A teacher that fails so many items in a row (or lets their leases run out), which no other teacher failed, is
    given no work for a while, then one item as a trial. 0: it is always given work."""
    breaker_backoff_s: float = 1.0
    """How long, at first; doubled whenever the trial fails."""
    breaker_backoff_max_s: float = 60.0
    """How long at most."""
    ticket_timeout_s: float = 600.0
    """A rollout of which nothing was heard for this long is taken from its actor and issued again."""
    max_attempts: int = 3
    """Times a rollout is tried in all; then it is dropped and its group shrinks."""
    max_score_attempts: int = 4
    """Times a segment is leased to teachers of one pool in all; then its tokens are masked as unscorable."""
    task_queue: int = 64
    """Train tasks held ready. The learner is asked for more when fewer than half are left."""
    max_segment_tokens: int = 32_768
    """Longer segments are rejected."""
    max_rollout_tokens: int = 131_072
    """A segment that would make its rollout longer is rejected."""
    max_top_k_bytes: int = 1024
    """Per token. Top-k sets of teachers (teacher.top_k) that take more are refused. They are held in memory here until
    they are trained, and are part of the journal."""
    max_held_segments: int = 64
    """Segments of one rollout that may arrive ahead of a missing one and wait for it; one more is rejected."""

    journal: bool = True
    """Write all that happens to RUN/journal before it is acknowledged: a buffer that dies is started again, and goes on
    as if nothing had been. Off: a buffer that dies ends the run."""
    journal_sync: Sync = "process"
    """What must not lose anything acknowledged. `process`: the death of the buffer's process. `disk`: the loss of power
    too, at the price of one flush of the disk per turn of the loop; without it the last moments before a loss of power
    may be missing, which is noticed, and the run is resumed from its last checkpoint."""
    journal_log_mb: int = 256
    """MiB of journal after which an image of what is still held takes its place (later, when the image is large)."""
    journal_reserve_mb: int = 64
    """MiB of disk that are kept occupied, so that grades and trained batches can still be journaled when the disk is
    full and nothing new is taken in."""
    journal_memory_mb: int = 64
    """MiB of journal that may wait in memory when it cannot be written at all; then everything stops."""

    @property
    def encrypted(self) -> bool:
        return self.encrypt == "on" or (self.encrypt == "auto" and self._reachable)

    @property
    def _reachable(self) -> bool:
        """From other machines."""
        return not is_local(self.bind) or bool(self.advertise and not is_local(self.advertise))

    def __post_init__(self) -> None:
        self._check_network()
        self._check_numbers()
        self._check_pairs()

    def _check_network(self) -> None:
        if self.advertise and not self.advertise.startswith("tcp://"):
            raise ValueError(f"buffer.advertise is {self.advertise!r}, expected tcp://HOST:PORT")
        if not self.encrypted and self._reachable and not self.allow_plain_network:
            where = f"buffer.bind ({self.bind})" if not is_local(self.bind) else f"buffer.advertise ({self.advertise})"
            raise ValueError(
                f"buffer.encrypt is off, and other machines reach {where}: whoever does could read "
                "and feed this run. Leave encrypt at auto, or say buffer.allow_plain_network = true as well"
            )

    def _check_numbers(self) -> None:
        """Each by itself. NaN is refused everywhere: no comparison with it holds."""
        checks = (
            *((name, getattr(self, name) >= 0, "0 or more") for name in AT_LEAST_ZERO),
            *((name, getattr(self, name) >= 1, "1 or more") for name in AT_LEAST_ONE),
            *((name, getattr(self, name) > 0, "more than 0 seconds") for name in ABOVE_ZERO),
            *((name, 0 <= getattr(self, name) <= 1, "a share from 0 to 1") for name in SHARES),
        )
        for name, fits, expected in checks:
            if not fits:
                raise ValueError(f"buffer.{name} is {getattr(self, name)}, expected {expected}")

    def _check_pairs(self) -> None:
        """Fields that bound one another."""
        if self.peer_timeout_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"buffer.peer_timeout_s is {self.peer_timeout_s}, expected at least twice heartbeat_s"
                f" ({self.heartbeat_s}), or one late heartbeat loses a healthy peer"
            )
        if not self.breaker_backoff_max_s >= self.breaker_backoff_s:
            raise ValueError(
                f"buffer.breaker_backoff_max_s is {self.breaker_backoff_max_s}, expected at least breaker_backoff_s"
                f" ({self.breaker_backoff_s})"
            )
        if self.max_attempts > ATTEMPTS_PER_EPOCH:
            raise ValueError(f"buffer.max_attempts is {self.max_attempts}, expected at most {ATTEMPTS_PER_EPOCH}")
        if self.max_segment_tokens > self.max_rollout_tokens:
            raise ValueError(
                f"buffer.max_segment_tokens is {self.max_segment_tokens}, expected at most max_rollout_tokens"
                f" ({self.max_rollout_tokens})"
            )
