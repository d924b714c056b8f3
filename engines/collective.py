"""An elastic group of processes through which rank 0 broadcasts weights. Same code over gloo and NCCL.

A group lives as long as one WeightPlan: torch has no way to add or remove a member, so a change of membership makes a
new one. Process groups are made directly on a TCP store, never through torch.distributed's global default group, so
that many may follow one another in a process, and the learner's own (torchrun) group is not touched.

One broadcast of a version, both sides in lockstep:

    rank 0    gather 0 | gather 1   | gather 2   | ...        two bucket buffers: while one is on its way, the bytes
    wire               | bucket 0   | bucket 1   | ...        of the next are copied into the other (unless they lie
    member             |            | check 0    | ...        ready) and summed; they land in place, without a copy
    then one int64 tensor: the checksum of every bucket, and the number of the round

Nothing waits here without a deadline. torch and gloo cannot take a started operation back, so each operation carries
its deadline itself, and `close` leaves a stuck one to a thread of its own, which ends at that deadline.

Measured with gloo 2.13 on loopback: its broadcast is a binomial tree, connected on first use (`lazy_init`), which makes
a group of 33 in 0.04 s where the full mesh takes 0.28 s. A TCPStore looks up the name of every peer that connects, in
its one thread, and each client does the same: where reverse DNS is slow, that costs seconds. Hence the listening socket
is bound by us to the address family of the host (127.0.0.1 is then found in /etc/hosts), and members keep one
connection for all groups of a learner.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import BroadcastOptions, ProcessGroupGloo, Work
from torch.distributed import PrefixStore as _PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed import TCPStore as _TCPStore  # pyright: ignore[reportPrivateImportUsage]

from engines.buckets import Layout, byte_views, checksum

BackendName: TypeAlias = Literal["gloo", "nccl"]
Store: TypeAlias = _TCPStore

WAIT_SLICE_S: Final = 0.1
"""How soon an interruption is noticed inside an operation."""
CLOSE_WAIT_S: Final = 0.3
"""`close` waits this long for the group's own threads; a stuck one is left to end at its deadline."""
_BUFFERS: Final = 2


class GroupBroken(Exception):
    """An operation of the group failed or missed its deadline: a member is dead, hung or unreachable. The group is of
    no more use; close it and wait for the next plan."""


class GroupInterrupted(Exception):
    """The owner asked to stop waiting; the message is its reason. Close the group."""


class WeightsRefused(Exception):
    """What arrived is not what was announced (checksum or round differ)."""


def choose_backend(wanted: Literal["auto", "gloo", "nccl"], device: torch.device) -> BackendName:
    """Raises ValueError when NCCL is wanted and cannot be had."""
    can_nccl = device.type == "cuda" and dist.is_nccl_available()
    if wanted == "nccl" and not can_nccl:
        raise ValueError(
            f"backend = nccl with weights on {device} and NCCL {'' if dist.is_nccl_available() else 'not '}built into "
            "this torch; expected both a GPU and NCCL: set backend to gloo"
        )
    return "nccl" if can_nccl and wanted != "gloo" else "gloo"


def host_store(host: str, port: int = 0) -> Store:
    """The store of rank 0, listening on `host` only. Port 0: the system chooses, read it from `.port`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=1024)
    port = listener.getsockname()[1]
    return Store(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
        master_listen_fd=listener.detach(),  # the store owns it from here on
    )


def connect_store(host: str, port: int, timeout_s: float) -> Store:
    """A member's connection to the store of rank 0, which is there before any plan names it. Raises GroupBroken when
    there is none, at once where the connection is refused (TCPStore itself would try again until the timeout)."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError as error:
        raise GroupBroken(f"no TCP store at {host}:{port}: {error}") from None
    try:
        return Store(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise GroupBroken(f"no TCP store at {host}:{port} after {timeout_s:.1f} s: {_first_line(error)}") from None


def local_address_towards(host: str, port: int) -> str:
    """The address of this machine from which `host` is reached; gloo binds to it. Nothing is sent."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def _never() -> str | None:
    return None


class WeightGroup:
    """One rank of one group. Use from one thread: `join`, then `send` (rank 0) or `receive` (others), then `close`."""

    def __init__(
        self,
        store: Store,
        *,
        group_epoch: int,
        rank: int,
        world_size: int,
        backend: BackendName = "gloo",
        device: torch.device | str = "cpu",
        address: str = "127.0.0.1",
        interrupted: Callable[[], str | None] = _never,
    ) -> None:
        """`device`: where the bytes travel (cpu for gloo). `address`: this machine's, for gloo. `interrupted` is asked
        about every 0.1 s while waiting; a reason ends the wait with GroupInterrupted."""
        self._store = _PrefixStore(f"weights-{group_epoch}", store)
        self._group_epoch = group_epoch
        self._rank = rank
        self._world_size = world_size
        self._backend: BackendName = backend
        self._device = torch.device(device)
        self._address = address
        self._interrupted = interrupted
        # torch's type stubs leave `broadcast` out of the process groups.
        self._group: Any = None
        # Operations live here only: a local variable would be kept by the traceback of a failed one, and with it the
        # sockets that must close for the other members to notice.
        self._under_way: deque[Work] = deque()
        self._buffers_b: list[Tensor] = []
        self._run_B: Tensor | None = None

    def __repr__(self) -> str:
        state = "joined" if self._group is not None else "not joined"
        return f"WeightGroup(epoch={self._group_epoch}, rank={self._rank}/{self._world_size}, {self._backend}, {state})"

    def join(self, timeout_s: float) -> None:
        """Connect, and prove it with one small broadcast. All ranks call it at about the same time. Raises GroupBroken
        or GroupInterrupted."""
        deadline_s = time.monotonic() + timeout_s
        try:
            self._group = self._make_group(timeout_s)
        except RuntimeError as error:
            raise GroupBroken(f"{self!r} could not be made: {_first_line(error)}") from None
        hello = torch.tensor([self._group_epoch if self._rank == 0 else -1], device=self._device)
        self._start(hello, deadline_s)
        self._finish_all(deadline_s)
        if int(hello.item()) != self._group_epoch:
            raise GroupBroken(f"{self!r}: rank 0 greets group {int(hello.item())}, expected {self._group_epoch}")

    def send(self, round_number: int, layout: Layout, named: Sequence[tuple[str, Tensor]], timeout_s: float) -> None:
        """Rank 0: broadcast the tensors of `layout.manifest`, in its order. They must not change meanwhile. Views of a
        run on the group's device (`Layout.views`) go out as they lie, others are gathered bucket by bucket. Returns
        when the bytes have left this process, which says nothing about who has them."""
        deadline_s = time.monotonic() + timeout_s
        run_B = layout.run_of(named)
        ready_made = run_B is not None and run_B.device == self._device
        sources = [] if ready_made else byte_views(named)
        sums: list[Tensor] = []
        for index in range(layout.n_buckets):
            if len(self._under_way) == _BUFFERS:
                self._finish_oldest(deadline_s)  # the buffer of bucket index - 2 is free again
            start, end = layout.bounds(index)
            if ready_made and run_B is not None:
                bucket_b = run_B[start:end]
            else:
                bucket_b = self._buffer(index % _BUFFERS, layout)[: end - start]
                layout.gather(index, sources, bucket_b)
            sums.append(checksum(bucket_b))
            self._start(bucket_b, deadline_s)
        self._start(self._trailer(sums, round_number), deadline_s)
        self._finish_all(deadline_s)

    def receive(self, round_number: int, layout: Layout, timeout_s: float) -> list[tuple[str, Tensor]]:
        """Other ranks: take part in a broadcast; the named tensors, views of memory that the next `receive` uses again
        (fresh memory costs more than the transfer: its page faults). Raises GroupBroken, GroupInterrupted or
        WeightsRefused."""
        deadline_s = time.monotonic() + timeout_s
        if self._run_B is None or self._run_B.numel() != layout.total_bytes:
            self._run_B = torch.empty(layout.total_bytes, dtype=torch.uint8, device=self._device)
        run_B = self._run_B
        buckets_b = [run_B[slice(*layout.bounds(index))] for index in range(layout.n_buckets)]
        sums: list[Tensor] = []
        for index, bucket_b in enumerate(buckets_b):
            self._start(bucket_b, deadline_s)
            if index > 0:
                self._finish_oldest(deadline_s)
                sums.append(checksum(buckets_b[index - 1]))
        self._finish_oldest(deadline_s)
        sums.append(checksum(buckets_b[-1]))
        trailer = torch.zeros(layout.n_buckets + 1, dtype=torch.int64, device=self._device)
        self._start(trailer, deadline_s)
        self._finish_all(deadline_s)
        self._check(self._trailer(sums, round_number), trailer)
        return layout.views(run_B)

    def close(self) -> None:
        """Leave. Peers see closed connections. Returns soon even when an operation is stuck."""
        if self._group is None:
            return
        doomed: list[Any] = [self._under_way, self._group]
        self._group, self._under_way = None, deque()
        self._buffers_b = []
        # Not a daemon: torch's destructors must not come back to an interpreter that is being taken down.
        undertaker = threading.Thread(target=_destroy, args=(doomed, self._backend), name="weight-group-close")
        undertaker.start()
        undertaker.join(CLOSE_WAIT_S)

    # ------------------------------------------------------------------------------------------- operations

    def _start(self, tensor: Tensor, deadline_s: float) -> None:
        if self._group is None:
            raise GroupBroken(f"{self!r} is closed or was never joined")
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
        options.timeout = timedelta(seconds=max(deadline_s - time.monotonic(), 0.001))
        try:
            self._under_way.append(self._group.broadcast([tensor], options))
        except RuntimeError as error:
            raise GroupBroken(f"{self!r}: {_first_line(error)}") from None

    def _finish_all(self, deadline_s: float) -> None:
        while self._under_way:
            self._finish_oldest(deadline_s)

    def _finish_oldest(self, deadline_s: float) -> None:
        """Wait for the operation that was started first."""
        while True:
            reason = self._interrupted()
            if reason is not None:
                raise GroupInterrupted(reason)
            left_s = deadline_s - time.monotonic()
            if self._finished(min(WAIT_SLICE_S, max(left_s, 0.001))):
                self._under_way.popleft()
                return
            if left_s <= 0:
                raise GroupBroken(f"{self!r}: a broadcast missed its deadline")

    def _finished(self, wait_s: float) -> bool:
        """Wait a little for the oldest operation. Raises GroupBroken if it failed."""
        completed = self._under_way[0].is_completed()
        if self._backend == "nccl":
            # A wait with a timeout would abort the communicator at its end; without one it only orders the streams.
            if completed:
                self._under_way[0].wait()
            else:
                time.sleep(0.0005)
            return completed
        try:
            self._under_way[0].wait(timedelta(seconds=wait_s))
        except RuntimeError as error:  # torch's way to say both "not yet" and "failed"
            if completed:
                raise GroupBroken(f"{self!r}: {_first_line(error)}") from None
            return False
        return True

    def _buffer(self, index: int, layout: Layout) -> Tensor:
        if not self._buffers_b:
            size = min(layout.bucket_bytes, layout.total_bytes)
            self._buffers_b = [torch.zeros(size, dtype=torch.uint8, device=self._device) for _ in range(_BUFFERS)]
        return self._buffers_b[index]

    def _trailer(self, sums: Sequence[Tensor], round_number: int) -> Tensor:
        number = torch.tensor(round_number, dtype=torch.int64, device=self._device)
        return torch.stack([*sums, number])

    def _check(self, got: Tensor, announced: Tensor) -> None:
        if torch.equal(got, announced):
            return
        if int(got[-1].item()) != int(announced[-1].item()):
            raise WeightsRefused(f"rank 0 is in round {int(announced[-1].item())}, here is {int(got[-1].item())}")
        wrong = (got != announced).nonzero().view(-1).tolist()
        raise WeightsRefused(f"checksum differs in buckets {wrong[:8]} of {len(got) - 1}")

    def _make_group(self, timeout_s: float) -> Any:
        timeout = timedelta(seconds=timeout_s)
        if self._backend == "gloo":
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # pyright: ignore
            options._devices = [ProcessGroupGloo.create_device(hostname=self._address, lazy_init=True)]
            options._timeout = timeout
            options._threads = _BUFFERS
            return ProcessGroupGloo(self._store, self._rank, self._world_size, options)
        nccl: Any = getattr(dist, "ProcessGroupNCCL", None)
        if nccl is None:
            raise GroupBroken("this torch was built without NCCL; set the backend to gloo")
        # Deadlines are ours: torch's watchdog would end the whole process for one hung member.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
        options = nccl.Options()
        options._timeout = timeout
        return nccl(self._store, self._rank, self._world_size, options)


def _destroy(doomed: list[Any], backend: BackendName) -> None:
    """Drop the last references, in a thread that may block: gloo's destructor waits for running operations."""
    if backend == "nccl":
        doomed[1].abort()
    doomed.clear()


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0][:300]
