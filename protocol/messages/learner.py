"""The learner's work: tasks, batches, evaluations, and the distribution of weights."""

from __future__ import annotations

from typing import Literal

import msgspec

from stillhouse.protocol.messages.shared import (
    Branch,
    Sampling,
    Snapshot,
    TaskKind,
    TurnReward,
    VersionSpan,
    WeightsRef,
    WeightVersion,
)


class Task(msgspec.Struct, frozen=True):
    """One prompt of the task stream. Frame when listed in a message: prompt token ids, int32 [n_prompt], followed by
    the `teacher_prompt_tokens` ids of the prompt that teachers read in its place.

    The buffer turns it into `group_size` tickets, samples 0..group_size-1."""

    task_id: int
    """Rises along the task stream; unique among tasks of one kind within a run."""
    kind: TaskKind
    group_size: int
    sampling: Sampling
    """The task's `seed`. A ticket's seed is derived from it, the sample index and the attempt."""
    env: str = "single_turn"
    tag: str = ""
    teachers: tuple[str, ...] = ("default",)
    """Pools that must all score a sampled token before it counts as scored. Empty = no teacher needed."""
    ground_truth: str | None = None
    eval_id: str = ""
    """For kind eval: the evaluation this task belongs to."""
    teacher_prompt_tokens: int = 0
    """0: teachers read the student's own prompt. Above 0: their prompt holds something that the student does not
    see."""
    row: bytes = b""
    """All columns of the prompt's row as one JSON object, for the environment. Empty: none."""


class PartialSample(msgspec.Struct, frozen=True, array_like=True):
    """A sample with some trained tokens, of which more may be trained later."""

    sample_index: int
    rollout_id: str
    n_trained: int
    """Trained tokens of that rollout."""


class OpenTask(msgspec.Struct, frozen=True, array_like=True):
    """The progress of a train task whose samples are not all settled."""

    task_id: int
    settled: tuple[int, ...] = ()
    """Indices of samples that are trained, masked or dropped for good."""
    partial: tuple[PartialSample, ...] = ()


class LearnerStarted(msgspec.Struct, frozen=True, tag=True):
    """learner -> buffer, the first message of a learner process: the state from which it continues.

    The checkpoint decides which samples are done. Samples that the buffer settled later belong to the branch of
    versions that is abandoned here, and are run again."""

    version: WeightVersion
    """The weights with which the learner begins. The epoch is new, except at the start of a run."""
    parent: WeightVersion
    """The checkpoint's version, which is the former name of the same weights."""
    next_task_id: int = 0
    """Train tasks below this id are settled unless they are in `open`; tasks from it on will be offered."""
    open: tuple[OpenTask, ...] = ()
    """Tasks that are not settled, and tasks from `next_task_id` on that have a settled sample."""


class TasksOffered(msgspec.Struct, frozen=True, tag=True):
    """learner -> buffer, acknowledged: the next tasks of the stream. Frames: prompt ids, one int32 per task."""

    tasks: tuple[Task, ...]
    last: bool = False
    """No more train tasks follow, so the last batches may be smaller than the others. `tasks` may be empty."""


class TasksAck(msgspec.Struct, frozen=True, tag=True):
    """buffer -> learner. Also sent unasked when the queue runs low."""

    task_ids: tuple[int, ...]
    """Ids of the acknowledged tasks, of kind `kind`; train and eval tasks are numbered separately."""
    kind: TaskKind
    tasks_wanted: int
    """Number of train tasks for which the queue has room."""


class BatchWanted(msgspec.Struct, frozen=True, tag=True):
    """learner -> buffer: asks for one batch, for the optimizer step from `version` to `version.step + 1`. While the
    learner holds the batch before it, `version` is yet to be made. Repeated until answered. A repeat is answered with
    the same batch again only if the learner was lost since the batch was sent; otherwise the link itself delivers
    it."""

    version: WeightVersion


KEPT_IDS = -1
"""In place of a teacher, for the ids that `Sampling.kept` asks for."""
EXPERT_IDS = -2
"""In place of a teacher, for the experts that `Sampling.experts` asks for."""


class TopKPiece(msgspec.Struct, frozen=True, array_like=True):
    """One teacher's payload (`protocol.payloads`) for the tokens [start, end) of a rollout, or the ids that they were
    sampled from (`protocol.payloads.student_sets`), or the experts of the passes that predicted them
    (`protocol.payloads.expert_ids`)."""

    teacher: int
    """Index into the item's `teachers`; KEPT_IDS and EXPERT_IDS: of no teacher."""
    start: int
    end: int
    n_bytes: int


class BatchItem(msgspec.Struct, frozen=True):
    """Tokens [0, end) of one rollout. Frames, each [end]: token ids int32; behaviour log-probs float32; train mask
    uint8 (1 = train this token in this batch); teacher log-probs float32 [n_teachers, end] (0 where not scored). If
    `top_k` is not empty, a fifth: its concatenated payloads, uint8.

    Tokens with mask 0 are context: the prompt, environment text, tokens trained in an earlier batch, or masked ones."""

    rollout_id: str
    task_id: int
    sample_index: int
    group_size: int
    tag: str
    teachers: tuple[str, ...]
    end: int
    spans: tuple[VersionSpan, ...]
    """Version spans of [0, end)."""
    final: bool
    finish_reason: str | None
    reward: float | None
    n_turns: int
    branches: tuple[Branch, ...] = ()
    """Where the rollout branches, by ascending `start`."""
    top_k: tuple[TopKPiece, ...] = ()
    """Payloads for segments with tokens to train, where teachers sent them; experts also of those before them."""
    turn_rewards: tuple[TurnReward, ...] = ()
    """If it is final: the parts of `reward` by response, as in Segment."""


class Settled(msgspec.Struct, frozen=True, array_like=True):
    """A sample of a train task that is finished: nothing more will happen to it."""

    task_id: int
    sample_index: int
    fate: Literal["trained", "masked", "dropped"]
    """trained: at least one of its tokens was trained."""
    reason: str = ""
    """The ledger's reason why some tokens were not trained. Empty: all were trained."""


class Batch(msgspec.Struct, frozen=True, tag=True):
    """buffer -> learner. Frames: four or five per item, in order (see BatchItem).

    Without items (batch_id 0, nothing to train or acknowledge): the stream ended and nothing is left to train."""

    batch_id: int
    version: WeightVersion
    items: tuple[BatchItem, ...]
    staleness: dict[int, int]
    """Number of tokens to train by distance in optimizer steps, which is never above the bound."""
    settled: tuple[Settled, ...]
    """Train samples that become settled when this batch is trained. Each sample is reported once (on the branch of
    versions whose weights are kept, see LearnerStarted)."""
    snapshot: Snapshot


class BatchTrained(msgspec.Struct, frozen=True, tag=True):
    """learner -> buffer, acknowledged: the batch became part of the step that made `version`."""

    batch_id: int
    version: WeightVersion
    masked: tuple[str, ...] = ()
    """Rollouts that were left out of the step, because their loss or gradient is not finite or their top-k sets cannot
    be read. If that is all of them, `version` has the weights of the version before."""


class BatchTrainedAck(msgspec.Struct, frozen=True, tag=True):
    """buffer -> learner."""

    batch_id: int
    version: WeightVersion


class EvalWanted(msgspec.Struct, frozen=True, tag=True):
    """learner -> buffer: asks for an EvalResult for each finished, scored rollout of this evaluation, as they come.
    Repeated until all have arrived; `have` lists the rollout ids received so far."""

    eval_id: str
    have: tuple[str, ...]


class EvalResult(msgspec.Struct, frozen=True, tag=True):
    """buffer -> learner. Frames as in Batch; train mask = loss mask."""

    eval_id: str
    items: tuple[BatchItem, ...]
    failed: int
    """Rollouts of this evaluation that were given up and will give no result."""
    outstanding: int
    """Rollouts still to come after this message."""


class VersionPublished(msgspec.Struct, frozen=True, tag=True):
    """learner -> buffer: this version is published."""

    version: WeightVersion


class TeacherWeights(msgspec.Struct, frozen=True, tag=True):
    """learner -> buffer -> each teacher of the pool, also those that connect later: score with these weights from the
    next batch on."""

    pool: str
    weights: WeightsRef


class WeightPlan(msgspec.Struct, frozen=True, tag=True):
    """learner -> buffer -> each member actor: leave the former weight group, join this one. A member
    that lacks the newest version gets it as the first broadcast in the new group.

    Rank 0 (the learner) hosts the TCP store at host:port and broadcasts; members[i] has the ranks from
    `1 + i * ranks_per_member` on."""

    group_epoch: int
    host: str
    port: int
    backend: Literal["gloo", "nccl", "wire", "ipc"]
    """wire, ipc: there is no process group. Members fetch each version's bytes over encrypted connections to `control`,
    or open memory of the learner."""
    members: tuple[str, ...]
    """Actor names, in the order of their ranks."""
    world_size: int
    join_timeout_s: float
    control: str = ""
    """Endpoint of the learner's control channel (`weights.control`)."""
    control_keys: tuple[str, str, str] | None = None
    """Keys for that channel in a run whose links are not encrypted: the members' public and secret key, and the
    learner's public key."""
    kind: Literal["engines", "servers", "adapters"] = "engines"
    """The ranks are the members' own processes, or the SGLang server of each member. adapters: each member has its
    server load adapters from files."""
    ranks_per_member: int = 1
    """Above 1: the tensor-parallel ranks of a server."""
    group_name: str = ""
    """Name of the process group. Ends in the group epoch; the rest is unique among all learners a server may meet."""


class PostWeightPlan(msgspec.Struct, frozen=True, tag=True):
    """learner -> buffer: forward the plan to its members."""

    plan: WeightPlan


class Membership(msgspec.Struct, frozen=True, tag=True):
    """buffer -> learner, directly after its Hello and on every change: the actors connected now."""

    actors: tuple[str, ...]
    incarnations: tuple[str, ...]


class RunFinished(msgspec.Struct, frozen=True, tag=True):
    """learner -> buffer: no step will follow. The buffer drops the remaining work and sends Shutdown to all peers."""

    ok: bool
    reason: str
