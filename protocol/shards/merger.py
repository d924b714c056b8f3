"""One buffer out of several shards, as their learner and the launcher see it. No I/O.

    outgoing(message)        -> for each shard its part: its tasks, its piece of a trained batch, or the message itself
    incoming(shard, message) -> what the shards have said together, as soon as that is known

Shards know nothing of one another. A batch is one piece from each, all for the same version. Which rollouts are in a
piece, which tokens are masked and what a ledger says is decided by the shard that owns the tasks. The learner waits for
all pieces, so no shard is more than a batch behind it.

A shard whose tasks are all trained answers with an empty piece. As it has no lease by which it knows that a batch is
still being trained, it is asked for the next piece only when that batch is trained: a request moves its clock.

A new learner process begins with a new Merger: shards take back what its predecessor held.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import msgspec

from stillhouse.protocol.codec import Array, Received
from stillhouse.protocol.messages import (
    Batch,
    BatchTrained,
    BatchTrainedAck,
    BatchWanted,
    EvalResult,
    EvalWanted,
    LearnerStarted,
    Membership,
    Message,
    Shutdown,
    Snapshot,
    SnapshotWanted,
    TasksAck,
    TasksOffered,
    WeightVersion,
)
from stillhouse.protocol.shards.division import of_shard, shard_of, task_of
from stillhouse.protocol.shards.snapshots import summed, whole_snapshot

replace = msgspec.structs.replace

REMEMBERED: Final = 16
"""Batches, and evaluations that are over, to remember. A learner has two batches at a time, and any number of
evaluations."""


@dataclass(slots=True)
class _Whole:
    """A batch that was put together."""

    version: WeightVersion
    ids: dict[int, int]
    """Batch id by shard."""
    owners: dict[str, int]
    """Shard by rollout."""
    trained: bool = False
    """The learner has said so."""
    acknowledged: set[int] = field(default_factory=set[int])
    """Shards that have said that their piece is trained."""


@dataclass(slots=True)
class _Evaluation:
    """What the shards have said of one evaluation."""

    failed: dict[int, int] = field(default_factory=dict[int, int])
    outstanding: dict[int, int] = field(default_factory=dict[int, int])
    """By shard with tasks of it. Until that has said something: the rollouts of those tasks."""

    @property
    def over(self) -> bool:
        """All rollouts have been sent or given up."""
        return not any(self.outstanding.values())


Part: TypeAlias = tuple[int, Message, Sequence[Array]]
"""Shard, message and its frames."""


class Merger:
    """Divides what one peer sends and puts together what it receives."""

    def __init__(self, n_shards: int, *, waits_for_all: bool = True) -> None:
        """`waits_for_all`: the run is over when every shard has said so, not when the first does."""
        self._shards = range(n_shards)
        self._waits_for_all = waits_for_all
        self._pieces: dict[WeightVersion, dict[int, Received]] = {}
        """Pieces of batches that are not whole yet."""
        self._batches: OrderedDict[int, _Whole] = OrderedDict()
        """Batches that were given out, by their id here."""
        self._next_batch_id = 1
        self._tasks_wanted = dict.fromkeys(self._shards, 0)
        self._evaluations: dict[str, _Evaluation] = {}
        """The one that was spoken of last is the last."""
        self._members: dict[int, Membership] = {}
        self._snapshots: dict[int, Snapshot] = {}
        self._owes_snapshot: set[int] = set()
        self.ended: dict[int, Shutdown] = {}
        """What each shard has said of the end."""

    def __repr__(self) -> str:
        waiting = {str(version): sorted(pieces) for version, pieces in self._pieces.items()}
        return f"Merger({len(self._shards)} shards, pieces={waiting}, ended={sorted(self.ended)})"

    @property
    def waits_for_pieces(self) -> bool:
        """Whether some shards have sent their pieces of a batch, and others have not."""
        return bool(self._pieces)

    # -------------------------------------------------------------------------------------------------- outgoing

    def outgoing(self, message: Message, arrays: Sequence[Array] = ()) -> list[Part]:
        """The parts of a message, for the shards that they are for."""
        match message:
            case LearnerStarted():
                return [(shard, self._own_start(shard, message), ()) for shard in self._shards]
            case TasksOffered():
                return self._offer(message, arrays)
            case BatchWanted(version):
                held_up = {shard for shard in self._shards if self._trains_without(shard)}
                passed_over = {*held_up, *self._pieces.get(version, {})}
                return [(shard, message, ()) for shard in self._shards if shard not in passed_over]
            case BatchTrained():
                return self._trained(message)
            case EvalWanted(eval_id, have):
                own = dict[int, list[str]]((shard, []) for shard in self._shards)
                for rollout_id in have:
                    own[shard_of(task_of(rollout_id), len(self._shards))].append(rollout_id)
                outstanding = self._evaluation(eval_id).outstanding
                return [(shard, EvalWanted(eval_id, tuple(own[shard])), ()) for shard in outstanding]
            case SnapshotWanted():
                self._owes_snapshot = {shard for shard in self._shards if shard not in self.ended}
            case _:
                pass
        return [(shard, message, arrays) for shard in self._shards]

    def _trains_without(self, shard: int) -> bool:
        """The learner has a batch of which this shard has no piece."""
        return any(not batch.trained and shard not in batch.ids for batch in self._batches.values())

    def _own_start(self, shard: int, message: LearnerStarted) -> LearnerStarted:
        places = of_shard([task.task_id for task in message.open], shard, len(self._shards))
        return replace(message, open=tuple(message.open[place] for place in places))

    def _offer(self, message: TasksOffered, arrays: Sequence[Array]) -> list[Part]:
        parts: list[Part] = []
        for shard in self._shards:
            places = of_shard([task.task_id for task in message.tasks], shard, len(self._shards))
            if not places and message.tasks and not message.last:
                continue
            own = tuple(message.tasks[place] for place in places)
            n_train = sum(task.kind == "train" for task in own)
            self._tasks_wanted[shard] = max(0, self._tasks_wanted[shard] - n_train)
            for task in own:
                if task.kind == "eval":
                    outstanding = self._evaluation(task.eval_id).outstanding
                    outstanding[shard] = outstanding.get(shard, 0) + task.group_size
            parts.append((shard, replace(message, tasks=own), [arrays[place] for place in places]))
        return parts

    def _evaluation(self, eval_id: str) -> _Evaluation:
        """The newest one from now on. Those that are over are forgotten in the end."""
        evaluation = self._evaluations[eval_id] = self._evaluations.pop(eval_id, None) or _Evaluation()
        over = [other for other, one in self._evaluations.items() if one is not evaluation and one.over]
        for other in over[:-REMEMBERED]:
            del self._evaluations[other]
        return evaluation

    def _trained(self, message: BatchTrained) -> list[Part]:
        """To each shard its piece; one that had none is asked for the next."""
        batch = self._batches.get(message.batch_id)
        if batch is None:
            raise ValueError(f"batch {message.batch_id} is none of the last: {list(self._batches)}")
        unknown = [rollout_id for rollout_id in message.masked if rollout_id not in batch.owners]
        if unknown:
            raise ValueError(f"left out of batch {message.batch_id}, which does not have them: {unknown}")
        batch.trained = True
        parts: list[Part] = []
        for shard in self._shards:
            if shard not in batch.ids:
                parts.append((shard, BatchWanted(message.version), ()))
                continue
            masked = tuple(rollout_id for rollout_id in message.masked if batch.owners[rollout_id] == shard)
            parts.append((shard, replace(message, batch_id=batch.ids[shard], masked=masked), ()))
        return parts

    # -------------------------------------------------------------------------------------------------- incoming

    def incoming(self, shard: int, received: Received) -> Received | None:
        """Take in a message of a shard. Returns what the peer is to see, if anything is new to it."""
        message = received.message
        handle = self._handlers.get(type(message))
        return received if handle is None else handle(self, shard, received)

    def _batch(self, shard: int, received: Received) -> Received | None:
        batch = received.message
        assert isinstance(batch, Batch)
        if any(one.version == batch.version for one in self._batches.values()):
            return None  # once more: the shard had lost its learner, or the learner was impatient
        pieces = self._pieces.setdefault(batch.version, {})
        pieces.setdefault(shard, received)
        if len(pieces) < len(self._shards):
            return None
        del self._pieces[batch.version]
        return self._put_together(batch.version, dict(sorted(pieces.items())))

    def _put_together(self, version: WeightVersion, pieces: dict[int, Received]) -> Received:
        parts = {shard: part for shard, piece in pieces.items() if isinstance(part := piece.message, Batch)}
        items = tuple(item for part in parts.values() for item in part.items)
        full = {shard: part.batch_id for shard, part in parts.items() if part.items}
        batch_id = self._next_batch_id if full else 0
        if full:
            self._next_batch_id += 1
            owners = {item.rollout_id: shard_of(item.task_id, len(self._shards)) for item in items}
            self._batches[batch_id] = _Whole(version, full, owners)
            if len(self._batches) > REMEMBERED:
                self._batches.popitem(last=False)
        whole = Batch(
            batch_id=batch_id,
            version=version,
            items=items,
            staleness=dict(sorted(summed(part.staleness for part in parts.values()).items())),
            settled=tuple(one for part in parts.values() for one in part.settled),
            snapshot=whole_snapshot([part.snapshot for part in parts.values()]),
        )
        return Received(whole, tuple(array for piece in pieces.values() for array in piece.arrays))

    def _trained_ack(self, shard: int, received: Received) -> Received | None:
        ack = received.message
        assert isinstance(ack, BatchTrainedAck)
        for batch_id, batch in self._batches.items():
            if batch.ids.get(shard) == ack.batch_id:
                batch.acknowledged.add(shard)
                whole = batch.acknowledged == batch.ids.keys()
                return Received(replace(ack, batch_id=batch_id), ()) if whole else None
        return None  # of a batch that was acknowledged long ago

    def _tasks_ack(self, shard: int, received: Received) -> Received:
        ack = received.message
        assert isinstance(ack, TasksAck)
        self._tasks_wanted[shard] = ack.tasks_wanted
        return Received(replace(ack, tasks_wanted=sum(self._tasks_wanted.values())), ())

    def _membership(self, shard: int, received: Received) -> Received | None:
        """Nothing before every shard has said who is there: a weight group of a part of the actors would be made in
        vain."""
        assert isinstance(received.message, Membership)
        self._members[shard] = received.message
        if len(self._members) < len(self._shards):
            return None
        members = [self._members[one] for one in self._shards]
        actors = tuple(name for one in members for name in one.actors)
        return Received(Membership(actors, tuple(name for one in members for name in one.incarnations)), ())

    def _eval_result(self, shard: int, received: Received) -> Received:
        result = received.message
        assert isinstance(result, EvalResult)
        evaluation = self._evaluation(result.eval_id)
        evaluation.failed[shard], evaluation.outstanding[shard] = result.failed, result.outstanding
        whole = replace(
            result, failed=sum(evaluation.failed.values()), outstanding=sum(evaluation.outstanding.values())
        )
        return Received(whole, received.arrays)

    def _snapshot(self, shard: int, received: Received) -> Received | None:
        """When all have answered the last request."""
        assert isinstance(received.message, Snapshot)
        self._snapshots[shard] = received.message
        if shard not in self._owes_snapshot:
            return None
        self._owes_snapshot.discard(shard)
        if self._owes_snapshot:
            return None
        return Received(whole_snapshot([self._snapshots[one] for one in self._shards]), ())

    def _shutdown(self, shard: int, received: Received) -> Received | None:
        """A run that failed is over at once."""
        assert isinstance(received.message, Shutdown)
        self.ended[shard] = received.message
        over = len(self.ended) == len(self._shards) or not self._waits_for_all or not received.message.ok
        return received if over else None

    _handlers: Final[dict[type[Any], Callable[[Merger, int, Received], Received | None]]] = {
        Batch: _batch,
        BatchTrainedAck: _trained_ack,
        TasksAck: _tasks_ack,
        Membership: _membership,
        EvalResult: _eval_result,
        Snapshot: _snapshot,
        Shutdown: _shutdown,
    }
