"""Every message that crosses a wire: one Struct each, who sends it to whom, and which frames follow it.

A message is one ZeroMQ multipart: the first frame is MessagePack of the tagged Struct, the others are raw
little-endian arrays in the order and dtype the docstring names (see `protocol.codec`), the last is a checksum
(`protocol.sockets`). Lengths are tokens.

Loops (every peer talks to the buffer only; the buffer is a ROUTER, all others are DEALERs):

    any      Hello -> Welcome | Refused;  Heartbeat <-> HeartbeatReply;  Goodbye ->;  <- Shutdown
    actor    TicketCredit -> .. <- Tickets;  Segment -> <- SegmentAck;  RolloutFailed -> <- RolloutFailedAck;
             <- CancelRollout;  <- WeightPlan
    teacher  ScoreCredit -> .. <- ScoreWork;  Scores -> <- ScoresAck;  ScoreFailed -> <- ScoresAck;
             <- TeacherWeights
    learner  LearnerStarted ->;  TasksOffered -> <- TasksAck;  BatchWanted -> .. <- Batch;
             BatchTrained -> <- BatchTrainedAck;
             EvalWanted -> .. <- EvalResult;  VersionPublished ->;  PostWeightPlan ->;  <- Membership;  RunFinished ->;
             TeacherWeights ->
    anyone   SnapshotWanted -> <- Snapshot

Offsets: token offsets are absolute within the rollout, half-open. Offset 0 is the first prompt token.
"Sampled" tokens (loss mask 1) are those the student wrote; the ledger counts sampled tokens.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

PROTOCOL_VERSION = 5
"""Goes up whenever a message changes (tests/protocol/test_protocol_version.py)."""
MAX_EPOCH = 65_535
"""The buffer remembers each; no run is resumed that often."""
MAX_STEP = 2**40

Role: TypeAlias = Literal["actor", "teacher", "learner", "launcher"]
TaskKind: TypeAlias = Literal["train", "eval"]
FailureReason: TypeAlias = Literal[
    "env_error", "env_timeout", "env_unknown", "engine_error", "engine_aborted", "engine_refused"
]


class WeightVersion(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A point on the run's clock. `step` optimizer steps were applied to make these weights; `epoch` rises by one
    each time a learner starts from a checkpoint, so that versions of an abandoned branch stay distinguishable."""

    epoch: Annotated[int, msgspec.Meta(ge=0, le=MAX_EPOCH)]
    step: Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)]

    def __str__(self) -> str:
        return f"{self.epoch}.{self.step}"


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """The engine sampled every sampled token in [start, end) of the rollout under `version`.

    Within a segment spans are sorted, disjoint, inside [segment.start, segment.end) and cover every sampled token;
    they may skip tokens that were not sampled."""

    version: WeightVersion
    start: int
    end: int


class Sampling(msgspec.Struct, frozen=True):
    """How the student samples. temperature 0 = greedy (behaviour log-probs are then those of the T=1 softmax)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    max_new_tokens: int = 96
    """Sampled tokens over the whole rollout, all turns together."""
    seed: int = 0
    """Per rollout: the same seed, prompt and weights give the same tokens whatever else is in the batch."""


class Task(msgspec.Struct, frozen=True):
    """One prompt of the task stream. Frame when listed in a message: prompt token ids, int32 [n_prompt], and behind
    them the `teacher_prompt_tokens` ids of the prompt that teachers read in its place.

    The buffer turns it into `group_size` tickets, samples 0..group_size-1."""

    task_id: int
    """Rising along the task stream; unique among tasks of one kind within a run."""
    kind: TaskKind
    group_size: int
    sampling: Sampling
    """`seed` here is the task's; the ticket's seed is derived from it, the sample index and the attempt."""
    env: str = "single_turn"
    tag: str = ""
    teachers: tuple[str, ...] = ("default",)
    """Pools that must score each sampled token before it is scored. Empty = no teacher needed."""
    ground_truth: str | None = None
    eval_id: str = ""
    """For kind eval: which evaluation this belongs to."""
    teacher_prompt_tokens: int = 0
    """0: teachers read the student's own prompt. Otherwise theirs holds something that the student does not see."""


class Ticket(msgspec.Struct, frozen=True):
    """Permission to run one rollout. Frame when listed: prompt token ids, int32 [n_prompt]."""

    rollout_id: str
    """`<kind>-<task_id>-<sample>-<attempt>`; unique within the run, over all restarts."""
    task_id: int
    sample_index: int
    kind: TaskKind
    sampling: Sampling
    """`seed` is this rollout's own."""
    env: str
    tag: str
    ground_truth: str | None
    min_version: WeightVersion
    """The engine must have at least this version before the first token is sampled."""


# ---------------------------------------------------------------------------------------------- connection


class Hello(msgspec.Struct, frozen=True, tag=True):
    """peer -> buffer, first message on a connection, and again after every reconnect."""

    role: Role
    name: str
    """Unique per role, stable across restarts of the same worker slot, e.g. `actor-3`."""
    incarnation: str
    """Random per process: a new one means that the former process of this name is dead."""
    run_id: str
    """Empty only for a launcher that wants to know which run this is (launch.join.command): Welcome says it."""
    vocab_fingerprint: str
    """Hash of the token-to-id map (`protocol.handshake`). Empty for roles without a tokenizer."""
    pool: str = ""
    """Teacher pool; empty for other roles."""
    received_total: int = 0
    """Numbered messages (`protocol.flow`) of the buffer that this incarnation has received so far: after a reconnect
    the buffer goes on behind them, so that nothing it sent is lost or comes twice. Filled in by the client."""
    connection: int = 0
    """Rises with every connection of this incarnation: Hellos of two may be read in any order, the highest counts.
    Filled in by the client."""
    protocol_version: int = PROTOCOL_VERSION


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """buffer -> peer: accepted. Work may be asked for."""

    heartbeat_s: float
    """The peer sends a Heartbeat at least this often."""
    peer_timeout_s: float
    """Silence longer than this and the buffer counts the peer as lost."""
    version: WeightVersion
    """The newest published version."""
    weights: WeightsRef | None
    """Snapshot to catch up from, when there is one newer than the student the run began with."""
    run_id: str = ""
    """The buffer's run."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """buffer -> peer: not accepted, or a message that cannot be. After a refused Hello the peer must exit non-zero.

    `damaged` and `not_hello_first`: nothing more is read from this connection; a new one, with Hello, goes on."""

    code: Literal[
        "protocol_version",
        "run_id",
        "vocab_fingerprint",
        "not_hello_first",
        "damaged",
        "malformed",
        "too_large",
        "role",
        "key",
        "duplicate_name",
        "peer_ahead",
    ]
    message: str
    got: str
    expected: str


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """peer -> buffer. Says that the process lives; leases are extended by results only, never by this."""

    version: WeightVersion | None
    """Weights the peer's engine runs on (actors, the learner, teachers that were sent some)."""
    stats: dict[str, float]
    """Flat gauges and running totals of the peer; glossary in ARCHITECTURE.md. Totals end in `_total`."""
    received_total: int = 0
    """As in Hello: the buffer need not keep those messages any longer. Filled in by the client."""


class HeartbeatReply(msgspec.Struct, frozen=True, tag=True):
    """buffer -> peer."""

    version: WeightVersion
    """The newest published version."""


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """peer -> buffer: leaving on purpose; its leases and tickets go back at once."""

    reason: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """buffer -> every peer: the run is over (`ok`) or given up; finish and exit."""

    ok: bool
    reason: str


# --------------------------------------------------------------------------------------------------- actor


class TicketCredit(msgspec.Struct, frozen=True, tag=True):
    """actor -> buffer: up to `n` rollouts more than are running may be given to me. Absolute, not additive:
    the newest credit replaces the former one; tickets sent since reduce it (the buffer subtracts)."""

    n: int
    seq: int
    """Rising per incarnation; a lower one than seen is ignored."""
    tickets_received_total: int
    """Tickets this incarnation has received so far; the buffer subtracts those still on their way."""


class Tickets(msgspec.Struct, frozen=True, tag=True):
    """buffer -> actor. Frames: one int32 [n_prompt] per ticket, in order."""

    tickets: tuple[Ticket, ...]


class Segment(msgspec.Struct, frozen=True, tag=True):
    """actor -> buffer, acknowledged. A contiguous run of tokens of one rollout.

    Frames: token ids int32 [n]; behaviour log-probs float32 [n] (0 where not sampled); loss mask uint8 [n];
    n = end - start. Segment 0 starts at offset 0 and begins with the prompt."""

    rollout_id: str
    index: int
    start: int
    end: int
    spans: tuple[VersionSpan, ...]
    final: bool
    finish_reason: str | None = None
    """On the final one: "stop", "length", "env_done", "env_error", "aborted"."""
    reward: float | None = None
    """On the final one, if the environment gave one."""
    n_turns: int = 1


class SegmentAck(msgspec.Struct, frozen=True, tag=True):
    """buffer -> actor. After it (any status) the actor forgets the segment; `rejected` ends the rollout."""

    rollout_id: str
    index: int
    status: Literal["accepted", "duplicate", "rejected"]
    reason: str | None = None
    """For rejected: a `RejectReason` of buffer.ledger, e.g. "nan_logprob", "unknown_rollout"."""


class RolloutFailed(msgspec.Struct, frozen=True, tag=True):
    """actor -> buffer, acknowledged: this rollout will not be finished."""

    rollout_id: str
    reason: FailureReason
    """env_error: the environment raised, or broke a rule; env_timeout: it took too long; env_unknown: the ticket names
    an environment that the configuration does not; engine_error, engine_aborted: the engine gave the request up;
    engine_refused: it did not take it."""
    error: str = ""
    """For env_error: the class of the exception."""
    detail: str = ""
    """What happened, for people. Nothing is counted by it."""


class RolloutFailedAck(msgspec.Struct, frozen=True, tag=True):
    """buffer -> actor."""

    rollout_id: str


class CancelRollout(msgspec.Struct, frozen=True, tag=True):
    """buffer -> actor: stop generating this rollout, its tokens are no longer wanted. No reply is owed."""

    rollout_id: str
    reason: str


# ------------------------------------------------------------------------------------------------- teacher


class ScoreCredit(msgspec.Struct, frozen=True, tag=True):
    """teacher -> buffer: up to `tokens` more context tokens may be leased to me than I hold. Absolute, like
    TicketCredit; one item larger than the credit is sent alone when nothing is held."""

    tokens: int
    seq: int
    items_received_total: int
    """ScoreItems this incarnation has received so far."""


class ScoreItem(msgspec.Struct, frozen=True):
    """Score tokens [start, end) of a rollout given its tokens [0, start). Frame: token ids int32 [end]; where the
    teacher has a prompt of its own, that one stands there instead of the first `prompt_tokens`."""

    lease_id: int
    rollout_id: str
    start: int
    end: int
    top_start: int = 0
    """Top-k sets are of use at [top_start, top_end), inside [start, end): from the first token that may be trained to
    the last. Empty where none may."""
    top_end: int = 0
    prompt_tokens: int = 0
    """Of the student's prompt that the frame does not hold; there is no score for them. 0: it is the rollout."""
    teacher_prompt_tokens: int = 0
    """Of the teacher's, with which the frame begins instead."""

    @property
    def shift(self) -> int:
        """Where a token of the rollout is in the frame, less where it is in the rollout."""
        return self.teacher_prompt_tokens - self.prompt_tokens

    @property
    def context_tokens(self) -> int:
        """Length of the frame."""
        return self.end + self.shift

    @property
    def first(self) -> int:
        """The first token of [start, end) that can be scored: something stands before it, and it is in the frame."""
        return min(self.end, max(self.start, self.prompt_tokens, 1))


class ScoreWork(msgspec.Struct, frozen=True, tag=True):
    """buffer -> teacher. Frames: one int32 [context_tokens] per item, in order."""

    items: tuple[ScoreItem, ...]


class Scores(msgspec.Struct, frozen=True, tag=True):
    """teacher -> buffer, acknowledged. Frames: one float32 [end - start] per lease, in order: log-probs of the given
    tokens (any finite number where the token was not sampled: 0 before `first`). With `top_k` two per lease: behind the
    log-probs the teacher's likeliest tokens at each of [top_start, top_end) as a payload of `protocol.topk_codec`,
    uint8 [n]."""

    leases: tuple[int, ...]
    top_k: bool = False


class ScoreFailed(msgspec.Struct, frozen=True, tag=True):
    """teacher -> buffer, acknowledged with ScoresAck: these leases could not be scored."""

    leases: tuple[int, ...]
    reason: str


class ScoresAck(msgspec.Struct, frozen=True, tag=True):
    """buffer -> teacher, one status per lease: accepted; expired (another teacher has it by now, or was asked as well
    and answered first; or nobody wants it any more); rejected."""

    leases: tuple[int, ...]
    statuses: tuple[Literal["accepted", "expired", "rejected"], ...]
    reasons: tuple[str | None, ...]


# ------------------------------------------------------------------------------------------------- learner


class PartialSample(msgspec.Struct, frozen=True, array_like=True):
    """A sample of which some tokens are trained and others may follow."""

    sample_index: int
    rollout_id: str
    n_trained: int
    """Tokens of that rollout that are trained."""


class OpenTask(msgspec.Struct, frozen=True, array_like=True):
    """How far one train task has come, when not all of its samples are settled."""

    task_id: int
    settled: tuple[int, ...] = ()
    """Sample indices that are trained, masked or dropped for good."""
    partial: tuple[PartialSample, ...] = ()


class LearnerStarted(msgspec.Struct, frozen=True, tag=True):
    """learner -> buffer, the first message of a learner process: what it goes on from.

    The checkpoint decides what is done. What the buffer settled later belongs to the branch of versions that is left
    here: those samples are run again."""

    version: WeightVersion
    """The weights that the learner begins with; the epoch is new unless the run begins."""
    parent: WeightVersion
    """The same weights under their former name: the version of the checkpoint."""
    next_task_id: int = 0
    """Train tasks below this one that are not in `open` are settled; those from it on will be offered."""
    open: tuple[OpenTask, ...] = ()
    """Tasks that are not settled, and tasks from `next_task_id` on of which a sample is."""


class TasksOffered(msgspec.Struct, frozen=True, tag=True):
    """learner -> buffer, acknowledged: the next tasks of the stream. Frames: prompt ids, one int32 per task."""

    tasks: tuple[Task, ...]
    last: bool = False
    """No train task follows these (`tasks` may be empty): the last batches may then be smaller than the others."""


class TasksAck(msgspec.Struct, frozen=True, tag=True):
    """buffer -> learner. Also sent unasked when the queue runs low."""

    task_ids: tuple[int, ...]
    """Acknowledged ones (kind train and eval are numbered apart; `kind` says which)."""
    kind: TaskKind
    tasks_wanted: int
    """How many more train tasks the queue has room for."""


class BatchWanted(msgspec.Struct, frozen=True, tag=True):
    """learner -> buffer: one batch, to be trained in the optimizer step that takes `version` to `version.step + 1`.
    Repeated until answered; a repeat gets the same batch again if the learner was lost since it was sent, else nothing:
    the link brings what was sent."""

    version: WeightVersion


class TopKPiece(msgspec.Struct, frozen=True, array_like=True):
    """One teacher's payload (`protocol.topk_codec`) for the tokens [start, end) of a rollout."""

    teacher: int
    """Index into the item's `teachers`."""
    start: int
    end: int
    n_bytes: int


class BatchItem(msgspec.Struct, frozen=True):
    """Tokens [0, end) of one rollout. Frames, each [end]: token ids int32; behaviour log-probs float32; train mask
    uint8 (1 = train this token in this batch); teacher log-probs float32 [n_teachers, end] (0 where not scored). Where
    `top_k` is not empty a fifth: its payloads one behind the other, uint8.

    Tokens with mask 0 are context: the prompt, environment text, tokens trained in an earlier batch, or masked ones."""

    rollout_id: str
    task_id: int
    sample_index: int
    group_size: int
    tag: str
    teachers: tuple[str, ...]
    end: int
    spans: tuple[VersionSpan, ...]
    """Spans of [0, end)."""
    final: bool
    finish_reason: str | None
    reward: float | None
    n_turns: int
    top_k: tuple[TopKPiece, ...] = ()
    """Of segments with tokens to train, where teachers sent them."""


class Settled(msgspec.Struct, frozen=True, array_like=True):
    """A sample of a train task to which nothing more will happen."""

    task_id: int
    sample_index: int
    fate: Literal["trained", "masked", "dropped"]
    """trained: at least one of its tokens was."""
    reason: str = ""
    """Why not all of its tokens were trained: a reason of the ledger. Empty: they all were."""


class Batch(msgspec.Struct, frozen=True, tag=True):
    """buffer -> learner. Frames: four or five per item, in order (see BatchItem).

    Without items (batch_id 0, nothing to train or acknowledge): the stream ended and nothing is left to train."""

    batch_id: int
    version: WeightVersion
    items: tuple[BatchItem, ...]
    staleness: dict[int, int]
    """Distance in optimizer steps -> number of tokens to train at that distance. Never above the bound."""
    settled: tuple[Settled, ...]
    """Train samples that are settled once this batch is trained, and were not when the one before was. Each sample is
    reported once (for as long as the weights are kept, see LearnerStarted)."""
    snapshot: Snapshot


class BatchTrained(msgspec.Struct, frozen=True, tag=True):
    """learner -> buffer, acknowledged: the batch became part of the step that made `version`."""

    batch_id: int
    version: WeightVersion
    masked: tuple[str, ...] = ()
    """Rollouts of the batch that were left out of it, because they give a loss or a gradient that is not finite,
    or have top-k sets that cannot be read; all of them: `version` has the weights of the one before."""


class BatchTrainedAck(msgspec.Struct, frozen=True, tag=True):
    """buffer -> learner."""

    batch_id: int
    version: WeightVersion


class EvalWanted(msgspec.Struct, frozen=True, tag=True):
    """learner -> buffer: send EvalResult for finished, scored rollouts of this evaluation, as they come.
    Repeated until all arrived; `have` are rollout ids received already."""

    eval_id: str
    have: tuple[str, ...]


class EvalResult(msgspec.Struct, frozen=True, tag=True):
    """buffer -> learner. Frames as in Batch; train mask = loss mask."""

    eval_id: str
    items: tuple[BatchItem, ...]
    failed: int
    """Rollouts of this evaluation that were given up (no result will come)."""
    outstanding: int
    """Rollouts still to come after this message."""


class VersionPublished(msgspec.Struct, frozen=True, tag=True):
    """learner -> buffer: this version is out; `weights` is a snapshot to catch up from (may be older)."""

    version: WeightVersion
    weights: WeightsRef | None


class WeightsRef(msgspec.Struct, frozen=True):
    """A snapshot of weights on a folder that actors can read: safetensors."""

    version: WeightVersion
    path: str
    sha256: str


class TeacherWeights(msgspec.Struct, frozen=True, tag=True):
    """learner -> buffer -> each teacher of the pool, also to one that comes later: grade with these from the next batch
    on."""

    pool: str
    weights: WeightsRef


class WeightPlan(msgspec.Struct, frozen=True, tag=True):
    """learner -> buffer -> each member actor: leave the former weight group, catch up from `weights`, join this one.

    Rank 0 (the learner) hosts the TCP store at host:port and broadcasts; members[i] has the ranks from
    `1 + i * ranks_per_member` on."""

    group_epoch: int
    host: str
    port: int
    backend: Literal["gloo", "nccl", "folder"]
    """folder: there is no process group; each version is a file that members are told to load."""
    members: tuple[str, ...]
    """Actor names, in the order of their ranks."""
    world_size: int
    join_timeout_s: float
    weights: WeightsRef | None
    control: str = ""
    """Endpoint of the learner's control channel (`weights.control`)."""
    control_keys: tuple[str, str, str] | None = None
    """For it, in a run whose links are not encrypted: the members' public and secret key, and the learner's public."""
    kind: Literal["engines", "servers"] = "engines"
    """Who the ranks are: the members' own processes, or the SGLang server of each."""
    ranks_per_member: int = 1
    """Above 1: the tensor-parallel ranks of a server."""
    group_name: str = ""
    """Of the process group: unique over all learners that a server ever sees, but for the group epoch at its end."""


class PostWeightPlan(msgspec.Struct, frozen=True, tag=True):
    """learner -> buffer: pass the plan to its members."""

    plan: WeightPlan


class Membership(msgspec.Struct, frozen=True, tag=True):
    """buffer -> learner, at once after its Hello and on every change: actors connected now."""

    actors: tuple[str, ...]
    incarnations: tuple[str, ...]


class RunFinished(msgspec.Struct, frozen=True, tag=True):
    """learner -> buffer: no step will follow. The buffer retires what is left and sends Shutdown to all."""

    ok: bool
    reason: str


# ------------------------------------------------------------------------------------------------ snapshot


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
    """Messages refused at the door, by reason."""
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
    """Why a teacher is given no work at the moment although it is there: its items failed, or it is leaving."""


class ForgottenPeers(msgspec.Struct, frozen=True):
    """Actors or teachers that left so long ago that only their sum is known."""

    n: int = 0
    """Departures: a name that came back after it was forgotten counts again."""
    done_total: int = 0
    tokens_total: int = 0


class RolloutFailures(msgspec.Struct, frozen=True):
    """Attempts that actors said have failed, under one reason (`buffer.failures`), since this launch began."""

    reason: str
    n: int
    newest: str
    """Who, and what happened, the last time."""
    examples: tuple[str, ...]
    """The first few that differ."""


class SnapshotWanted(msgspec.Struct, frozen=True, tag=True):
    """anyone -> buffer."""


class Snapshot(msgspec.Struct, frozen=True, tag=True):
    """buffer -> asker: everything, at one moment, frozen."""

    time_s: float
    """Monotonic clock of the buffer."""
    phase: Literal["running", "finished", "failed"]
    phase_reason: str
    version: WeightVersion
    published: WeightVersion
    ledger: Ledger
    queues: dict[str, int]
    """tasks_queued, tickets_outstanding, rollouts_waiting, tokens_unscored, tokens_scoring, tokens_scored,
    tokens_in_batch, tickets_free (what pacing would still issue), top_k_bytes (payloads held); and totals of
    `buffer.scoring` and `buffer.arrivals`: hedges, wasted leases by reason, breakers opened, probes; rollouts issued
    again, given up."""
    staleness_hist: dict[int, int]
    """Trained tokens by distance, since the start."""
    max_staleness: int
    peers: tuple[PeerView, ...]
    intake_trouble: str = ""
    """Why new segments and tasks are not taken in at the moment (the journal cannot be written); empty: they are."""
    forgotten: dict[Role, ForgottenPeers] = {}
    """By role; they are not among `peers`."""
    failures: tuple[RolloutFailures, ...] = ()
    """By reason; the one that occurred last stands last."""

    def tokens_total(self, role: Role) -> int:
        """Of all peers of the role, over the whole run."""
        gone = self.forgotten.get(role, ForgottenPeers())
        return gone.tokens_total + sum(peer.tokens_total for peer in self.peers if peer.role == role)


Message: TypeAlias = (
    Hello
    | Welcome
    | Refused
    | Heartbeat
    | HeartbeatReply
    | Goodbye
    | Shutdown
    | TicketCredit
    | Tickets
    | Segment
    | SegmentAck
    | RolloutFailed
    | RolloutFailedAck
    | CancelRollout
    | ScoreCredit
    | ScoreWork
    | Scores
    | ScoreFailed
    | ScoresAck
    | LearnerStarted
    | TasksOffered
    | TasksAck
    | BatchWanted
    | Batch
    | BatchTrained
    | BatchTrainedAck
    | EvalWanted
    | EvalResult
    | VersionPublished
    | TeacherWeights
    | WeightPlan
    | PostWeightPlan
    | Membership
    | RunFinished
    | SnapshotWanted
    | Snapshot
)
