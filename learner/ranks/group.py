"""The ranks of a learner: processes that train one student together (`learner.ranks`).

Each rank holds a share of every parameter, gradient and optimizer moment (FSDP2, torch.distributed.fsdp.fully_shard):
before a layer runs, its weights are gathered; after its backward pass, the ranks' gradients are added up and each keeps
its share. All ranks must therefore make the same passes in the same order.

    rank 0    the learner's loop. Each call of its trainer that the others must join is announced first (`announce`)
    others    wait for what is announced, and make the same call of their own trainers (learner.follow)

An announcement goes through the store, a small server of torch's, because waiting there can go on for as long as the
buffer has no batch. Everything behind it is a collective, and ends with an error after `timeout_s`. A decision that
rests on what single ranks have seen is made by all from the same list of what each has seen (`all_gather`).

`Ranks` itself is the case of one process.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar, cast

import msgspec
import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from transformers import PreTrainedModel

from stillhouse.learner.batch import BatchError, EmptyBatchError, NonFiniteError, UnreadableScores
from stillhouse.learner.ranks.mesh import Mesh
from stillhouse.learner.ranks.staging import ShareLink, StagingByRanks
from stillhouse.models.divided import RankGroup
from stillhouse.weights.staged_weights import StagedWeights, Staging

T = TypeVar("T")
Call: TypeAlias = Literal["begin", "step", "skip", "weights", "stage", "checkpoint", "logprobs", "end"]
"""What all ranks do together: methods of a trainer, its beginning and its end."""
ERRORS: Final[dict[str, type[BatchError]]] = {
    error.__name__: error for error in (BatchError, EmptyBatchError, UnreadableScores, NonFiniteError)
}
LOOK_AGAIN_S: Final = (0.001, 0.01)
"""Shortest and longest time between two looks at the store. Waiting there in torch would keep Python's signals out."""

log = logging.getLogger(__name__)


class Announced(NamedTuple):
    call: Call
    payload: bytes


class _Header(msgspec.Struct, frozen=True):
    call: Call
    n_bytes: int


class _Result(msgspec.Struct, frozen=True):
    """What a rank says where all must agree."""

    value: msgspec.Raw
    error: str = ""
    """Name of the class, one of ERRORS; empty: none."""
    message: str = ""
    rollout_ids: tuple[str, ...] = ()


class Ranks:
    """One process, which is all ranks: nothing is announced, gathered or added up."""

    rank = 0
    mesh = Mesh()
    context_group: RankGroup | None = None
    """The ranks with which this one divides each of its sequences; None: it has them whole."""

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    @property
    def writes(self) -> bool:
        """Whether this rank sends and writes its share of the parameters."""
        return self.mesh.writes(self.rank)

    @property
    def device(self) -> torch.device | None:
        """The device on which this rank computes. None: the model's."""
        return None

    def announce(self, call: Call, payload: Callable[[], bytes] = bytes) -> None:
        """On rank 0: have all other ranks make this call, with what `payload` gives. It is asked only if there are
        others."""

    def shard(self, model: PreTrainedModel, *, bfloat16: bool) -> None:
        """Leave on each rank its share of the parameters of rank 0. Must come before an optimizer has them. `bfloat16`:
        products are in it."""

    def forward(self, forward: Callable[[], T]) -> T:
        """Run a forward pass of the sharded model, at the same time as all other ranks."""
        return forward()

    def all_gather(self, make: Callable[[], T], kind: Any) -> list[T]:
        """What `make` gives on each rank, in their order; `kind` is its type. If it raises a BatchError on any of them,
        all raise an error of that class, with the rollouts of all."""
        return [make()]

    def on_all(self, make: Callable[[], T]) -> T:
        """What `make` gives here, once it has succeeded on all ranks; errors as in `all_gather`."""
        return make()

    def all_reduce(self, tensors: list[Tensor]) -> None:
        """Replace each tensor by its sum over the ranks."""

    def post(self, subject: str, said: bytes) -> None:
        """On any rank that writes but 0, once per subject: leave rank 0 some text. From any thread; nothing is waited
        for."""

    def collected(self, subject: str) -> list[bytes]:
        """On rank 0: what each other rank that writes has posted about it, in their order. From any thread;
        waits as long as it takes. Raises RuntimeError when the process of one of them is gone."""
        return []

    @property
    def staging(self) -> Staging:
        """Makes the copies of weights that are being sent (`weights.publisher`)."""
        return StagedWeights

    def close(self) -> None: ...


class ProcessGroup(Ranks):
    """A rank of several. The process group is torch's default one, which this makes."""

    def __init__(self, *, device: torch.device, timeout_s: float, replicas: int = 1, context: int = 1) -> None:
        """For a process that torch's elastic launcher started: rank and size come from its environment. `timeout_s`:
        of each collective. `context`: ranks that divide each sequence. Raises ValueError for a number of ranks that is
        no multiple of it or of `replicas`."""
        timeout = timedelta(seconds=timeout_s)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        self._store, self.rank, size = next(rendezvous("env://", timeout=timeout))
        self._store.set_timeout(timeout)
        self.mesh = Mesh.of(size, replicas, context)
        dist.init_process_group(
            backend,
            store=PrefixStore("learner", self._store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
        self._node = os.environ.get("GROUP_RANK", "0")
        self._store.set(f"pid/{self.rank}", f"{self._node}:{os.getpid()}")
        self._device = device
        self.shares = ShareLink(self.rank, self.mesh, timeout_s=timeout_s)
        for members in self.mesh.context_groups:
            handle = dist.new_group(members, timeout=timeout)  # all ranks make all of them
            if self.rank in members:
                self.context_group = RankGroup(cast(dist.ProcessGroup, handle), members.index(self.rank), len(members))
        self._announced = 0
        self._root: Any = None

    @property
    def device(self) -> torch.device:
        return self._device

    def announce(self, call: Call, payload: Callable[[], bytes] = bytes) -> None:
        if self.rank:
            return
        data = payload()
        self._store.set(self._key(), msgspec.json.encode(_Header(call, len(data))).decode())
        self._announced += 1
        if data:
            dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), src=0)
        if call == "end":
            self.shares.stop()

    def announcements(self) -> Iterator[Announced]:
        """For the other ranks: what rank 0 announces, up to and with the end. Waits as long as it takes. Raises
        RuntimeError when the store or the process of rank 0 is gone."""
        while True:
            header = msgspec.json.decode(self._wait(self._key(), 0), type=_Header)
            self._announced += 1
            data = torch.empty(header.n_bytes, dtype=torch.uint8)
            if header.n_bytes:
                dist.broadcast(data, src=0)
            yield Announced(header.call, data.numpy().tobytes())
            if header.call == "end":
                return

    def _wait(self, key: str, rank: int) -> bytes:
        """What that rank has under the key. Raises RuntimeError when its process is gone, as seen on its own host; the
        launchers watch other hosts, and end this process (launch.workers.hosts)."""
        pause_s, longest_s = LOOK_AGAIN_S
        node, _, process = self._store.get(f"pid/{rank}").decode().partition(":")
        while not self._store.check([key]):
            if node == self._node and _has_ended(int(process)):
                raise RuntimeError(f"rank {rank} has ended without a word")
            time.sleep(pause_s)
            pause_s = min(1.1 * pause_s, longest_s)
        return self._store.get(key)

    def _key(self) -> str:
        return f"announced/{self._announced}"

    def shard(self, model: PreTrainedModel, *, bfloat16: bool) -> None:
        from stillhouse.learner.ranks.shards import sharded  # loads torch's FSDP

        self._root = sharded(model, self.device, self.mesh, bfloat16=bfloat16)

    def forward(self, forward: Callable[[], T]) -> T:
        return cast(T, self._root(forward))

    def all_gather(self, make: Callable[[], T], kind: Any) -> list[T]:
        said = [msgspec.msgpack.decode(one, type=_Result) for one in self._gather(msgspec.msgpack.encode(_tried(make)))]
        wrong = [(rank, one) for rank, one in enumerate(said) if one.error]
        if wrong:
            rollout_ids = list(dict.fromkeys(name for _, one in wrong for name in one.rollout_ids))
            message = "; ".join(f"rank {rank}: {one.message}" for rank, one in wrong)
            raise ERRORS[wrong[0][1].error](message, rollout_ids)
        return [msgspec.msgpack.decode(one.value, type=kind) for one in said]

    def on_all(self, make: Callable[[], T]) -> T:
        made: list[T] = []
        self.all_gather(lambda: made.append(make()), None)
        return made[0]

    def _gather(self, data: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(data)]))
        longest = max(int(size) for size in sizes)
        own = torch.zeros(longest, dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        gathered = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(gathered, own)
        return [one[: int(size)].numpy().tobytes() for one, size in zip(gathered, sizes, strict=True)]

    def all_reduce(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)

    def post(self, subject: str, said: bytes) -> None:
        self._store.set(f"posted/{subject}/{self.rank}", said.decode())

    def collected(self, subject: str) -> list[bytes]:
        return [
            self._wait(f"posted/{subject}/{rank}", rank) for rank in range(1, self.world_size) if self.mesh.writes(rank)
        ]

    @property
    def staging(self) -> Staging:
        return StagingByRanks(
            self.shares, self.mesh, lambda stage: self.announce("stage", lambda: msgspec.json.encode(stage))
        )

    def close(self) -> None:
        self.shares.join()
        dist.destroy_process_group()


def _has_ended(process: int) -> bool:
    """Also if its parent has not noticed yet."""
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _tried(make: Callable[[], Any]) -> _Result:
    try:
        return _Result(msgspec.Raw(msgspec.msgpack.encode(make())))
    except BatchError as error:
        kind = next(cls for cls in type(error).__mro__ if cls.__name__ in ERRORS)
        return _Result(msgspec.Raw(b"\xc0"), kind.__name__, str(error), error.rollout_ids)
