"""The shared types, the connection's own messages, and the snapshot that any peer may ask for."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

PROTOCOL_VERSION = 24
"""Rises with every change of a message (tests/protocol/test_protocol_version.py)."""
GPU_S = "gpu_s_total"
"""In heartbeats: GPUs times the seconds since a worker started; in snapshots with those of its former processes."""
MAX_EPOCH = 65_535
"""The buffer remembers every epoch; no run is resumed this often."""
MAX_STEP = 2**40
MAX_ROW_BYTES = 1 << 20
"""Longest row of a prompts file, as JSON. The text of a prompt as long as the longest rollout has about half of it."""

Role: TypeAlias = Literal["actor", "teacher", "learner", "launcher"]
TaskKind: TypeAlias = Literal["train", "eval"]
RefusalCode: TypeAlias = Literal[
    "protocol_version", "run_id", "vocab_fingerprint", "not_hello_first", "damaged", "malformed", "too_large", "role",
    "key", "duplicate_name", "peer_ahead",
]  # fmt: skip


class WeightVersion(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A point on the run's clock. These weights are the result of `step` optimizer steps; `epoch` rises by one each
    time a learner starts from a checkpoint, so that versions of an abandoned branch stay distinguishable."""

    epoch: Annotated[int, msgspec.Meta(ge=0, le=MAX_EPOCH)]
    step: Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)]

    def __str__(self) -> str:
        return f"{self.epoch}.{self.step}"


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Every sampled token in [start, end) of the rollout was sampled under `version`.

    The spans of a segment are sorted, disjoint, inside [segment.start, segment.end), and cover every sampled token;
    they may skip other tokens."""

    version: WeightVersion
    start: int
    end: int


class Branch(msgspec.Struct, frozen=True, array_like=True):
    """From `start` on, a rollout's tokens continue behind its first `follows` tokens, as one reads them there, and not
    behind token `start` - 1. With `follows` 0 they begin a root: they continue nothing."""

    start: int
    follows: int


class Dropped(msgspec.Struct, frozen=True, array_like=True):
    """A response at [start, end) of the rollout that nobody went on from, and that is not trained."""

    start: int
    end: int
    reason: Literal["retried", "undelivered"]
    """retried: the agent sent the same prompt again and went on from another response. undelivered: the agent was gone
    before the response ended."""


class TurnReward(msgspec.Struct, frozen=True, array_like=True):
    """A part of the rollout's reward that was given for the response that ends before token `end`."""

    end: int
    reward: float


class TopIdsWanted(msgspec.Struct, frozen=True, array_like=True):
    """For each sampled token, the ids of the smallest set of tokens whose probabilities, under the distribution that is
    sampled from, sum to `mass`; at most `k`, the likeliest."""

    k: int
    mass: float


class ExpertShape(msgspec.Struct, frozen=True, array_like=True):
    """The routers of a mixture of experts: each keeps `chosen` of its `experts` for a token."""

    layers: tuple[int, ...]
    """The model's layers that have a router, ascending."""
    experts: int
    chosen: int


class Sampling(msgspec.Struct, frozen=True):
    """Sampling parameters of the student. Temperature 0 = greedy; behaviour log-probs are then those of the T=1
    softmax."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    min_p: float = 0.0
    """Smallest probability of a token, as a share of the likeliest one's. 0 = off."""
    teacher_share: float = 0.0
    """Share of a teacher's distribution in the one that is sampled from, of which behaviour log-probs are. 0: none."""
    max_new_tokens: int = 96
    """Limit on the sampled tokens of the whole rollout, over all turns."""
    max_turns: int = 0
    """Limit on the turns of the whole rollout, below that of its environment. 0: only the environment's counts."""
    seed: int = 0
    """The same seed, prompt and weights give the same tokens, whatever else is in the engine's batch."""
    top_ids: TopIdsWanted | None = None
    """Not None: the engine also reports the likeliest tokens at the place of each token that it samples."""
    kept: bool = False
    """The engine also reports, at the place of each token, the ids that top-k, top-p and min-p left to sample from, in
    ascending order. They go the way of `top_ids`, which is None then; teachers do not get them, the learner does."""
    experts: ExpertShape | None = None
    """Not None: the engine also reports, where it can, the experts that its routers chose (`payloads.expert_ids`)."""

    @property
    def reports_ids(self) -> bool:
        """Each token comes with a set of ids."""
        return self.kept or self.top_ids is not None

    @property
    def truncated(self) -> bool:
        """Some tokens are never sampled."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


class WeightsRef(msgspec.Struct, frozen=True):
    """A snapshot of weights: a safetensors file in a folder that its readers can read."""

    version: WeightVersion
    path: str
    sha256: str


class Hello(msgspec.Struct, frozen=True, tag=True):
    """peer -> buffer, the first message on every connection."""

    role: Role
    name: str
    """Unique per role, stable across restarts of the same worker slot, e.g. `actor-3`."""
    incarnation: str
    """Random per process. A new one means that the former process of this name is dead."""
    run_id: str
    """Empty only for a launcher that asks which run this is (launch.join.command); Welcome answers."""
    vocab_fingerprint: str
    """Hash of the token-to-id map (`protocol.handshake`). Empty for roles without a tokenizer."""
    pool: str = ""
    """Teacher pool; empty for other roles."""
    received_total: int = 0
    """Numbered messages (`protocol.flow`) from the buffer that this incarnation has received. After a reconnect the
    buffer continues with the next one, so that nothing is lost or comes twice. Filled in by the client."""
    connection: int = 0
    """Rises with every connection of this incarnation. The Hellos of two connections may be read in any order; the
    higher number counts. Filled in by the client."""
    protocol_version: int = PROTOCOL_VERSION


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """buffer -> peer: accepted; the peer may ask for work."""

    heartbeat_s: float
    """The peer sends a Heartbeat at least this often."""
    peer_timeout_s: float
    """After a longer silence the buffer counts the peer as lost."""
    version: WeightVersion
    """The newest published version."""
    run_id: str = ""
    """The buffer's run."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """buffer -> peer: the peer, or one of its messages, is not accepted. After a refused Hello it must exit non-zero.

    After `damaged` and `not_hello_first` nothing more is read from this connection; the peer may open a new one."""

    code: RefusalCode
    message: str
    got: str
    expected: str


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """peer -> buffer: the process is alive. Leases are extended by results only, never by this."""

    version: WeightVersion | None
    """Weights of the peer's engine (actors, the learner, and teachers that were sent weights)."""
    stats: dict[str, float]
    """Gauges and running totals of the peer (docs/metrics.md). Names of totals end in `_total`."""
    received_total: int = 0
    """The count of Hello; the buffer forgets those messages. Filled in by the client."""


class HeartbeatReply(msgspec.Struct, frozen=True, tag=True):
    """buffer -> peer."""

    version: WeightVersion
    """The newest published version."""


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """peer -> buffer: leaving on purpose; its leases and tickets are returned at once."""

    reason: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """buffer -> every peer: the run is finished (`ok`) or given up; finish and exit."""

    ok: bool
    reason: str


class LedgerCounts(msgspec.Struct, frozen=True):
    """`accepted = trained + sum(masked) + sum(dropped) + waiting + in_flight`, in one unit."""

    accepted: int
    trained: int
    masked: dict[str, int]
    dropped: dict[str, int]
    waiting: int
    in_flight: int

    @property
    def balanced(self) -> bool:
        gone = self.trained + sum(self.masked.values()) + sum(self.dropped.values())
        return self.accepted == gone + self.waiting + self.in_flight


class Ledger(msgspec.Struct, frozen=True):
    """Train rollouts, segments and sampled tokens; `rejected` never entered `accepted`."""

    rollouts: LedgerCounts
    segments: LedgerCounts
    tokens: LedgerCounts
    rejected: dict[str, int]
    """Messages refused on arrival, by reason."""
    eval_tokens: LedgerCounts
    """The same for evaluation rollouts; `trained` means delivered to the learner here."""

    @property
    def balanced(self) -> bool:
        return all(c.balanced for c in (self.rollouts, self.segments, self.tokens, self.eval_tokens))


class PeerView(msgspec.Struct, frozen=True):
    """One connected or lost peer as the buffer sees it."""

    role: Role
    name: str
    alive: bool
    version: WeightVersion | None
    silent_s: float
    stats: dict[str, float]
    held: int
    """Tickets (actor), score leases (teacher) or batches (learner) held."""
    done_total: int
    """Rollouts finished (actor), items scored (teacher), batches trained (learner)."""
    tokens_total: int
    """Sampled tokens accepted from (actor), scored by (teacher) or trained by (learner) it, over all incarnations."""
    held_back: str = ""
    """Why a connected teacher receives no work at the moment: its items failed, or it is leaving."""


class ForgottenPeers(msgspec.Struct, frozen=True):
    """Sums over actors or teachers that left so long ago that they are not listed any more."""

    n: int = 0
    """Number of departures. A name that came back after it was forgotten counts again."""
    done_total: int = 0
    tokens_total: int = 0


class RolloutFailures(msgspec.Struct, frozen=True):
    """Attempts that actors reported as failed for one reason (`buffer.ledger`), since this launch began."""

    reason: str
    n: int
    newest: str
    """The last failure: the actor, and what happened."""
    examples: tuple[str, ...]
    """The first few that differ from one another."""


class SnapshotWanted(msgspec.Struct, frozen=True, tag=True):
    """anyone -> buffer."""


class Snapshot(msgspec.Struct, frozen=True, tag=True):
    """buffer -> the peer that asked: the state of the whole run at one moment."""

    time_s: float
    """Monotonic clock of the buffer."""
    phase: Literal["running", "finished", "failed"]
    phase_reason: str
    version: WeightVersion
    published: WeightVersion
    ledger: Ledger
    queues: dict[str, int]
    """tasks_queued, tickets_outstanding, rollouts_waiting, tokens_unscored, tokens_scoring, tokens_scored,
    tokens_in_batch, tickets_free (tickets that pacing would still issue), rollouts_live (not settled) and
    rollouts_allowed (how many may be, `buffer.pacing`), top_k_bytes (payloads held). Also totals of `buffer.scoring`
    and `buffer.arrivals`: hedges, wasted leases by reason, breakers opened, probes; rollouts issued again, given up;
    with dynamic sampling, of `buffer.groups`: groups dropped, and how many batches of them in a row."""
    staleness_hist: dict[int, int]
    """Trained tokens by distance, since the start."""
    max_staleness: int
    peers: tuple[PeerView, ...]
    forgotten: dict[Role, ForgottenPeers] = {}
    """By role. These are not among `peers`."""
    failures: tuple[RolloutFailures, ...] = ()
    """One per reason; the most recent is last."""

    def tokens_total(self, role: Role) -> int:
        """Tokens of all peers of the role, over the whole run."""
        gone = self.forgotten.get(role, ForgottenPeers())
        return gone.tokens_total + sum(peer.tokens_total for peer in self.peers if peer.role == role)
