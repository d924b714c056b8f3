"""A process group on a CPU that fails, delays and aborts as torch's NCCL group does, for ranks that are all in this
process. What is known of NCCL's, with the functions of torch where it was read, is in docs/decisions/nccl.md; here:

    first operation    blocks until every rank is there, without limit; cannot be aborted      initNCCLComm
    operation          done when all ranks have started theirs and the "GPU" has come to it;
                       a peer that hangs is not reported, and one that died not always
    failed             is_completed(), and wait() raises and aborts             WorkNCCL::isCompleted, wait
    limit              the group's timeout when it was started; then the        assignTimeoutToWork
                       watchdog does what TORCH_NCCL_ASYNC_ERROR_HANDLING       Watchdog::runLoop
                       says: 0 nothing, 2 abort, 1 and 3 end the process
    aborted            is_completed(), and wait() does not raise, although      isCompleted (isAborted)
                       nothing arrived; the next operation raises               NCCLComm::getNcclComm
    abort()            may raise                                                ProcessGroupNCCL::abort

Put `Fabric.group_class()` where torch has ProcessGroupNCCL. Its ranks share a clock and a lock; bytes move when
somebody asks whether they have.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, Final, Literal, TypeAlias

from torch import Tensor

FaultKind: TypeAlias = Literal[
    "error", "start_error", "hang", "delay", "silent", "death", "init_error", "init_hang", "abort_fails"
]
AT_INIT: Final[frozenset[FaultKind]] = frozenset({"init_error", "init_hang"})
NOTICE_S: Final = 0.05
"""After which a peer's end is noticed, if it is."""
WATCHDOG_S: Final = 0.1


class Death(BaseException):
    """The rank's process ends here: nothing may be done any more."""


@dataclass(slots=True)
class Fault:
    """Strikes once, at a rank, in the so-many-th operation that it starts from now on."""

    kind: FaultKind
    """silent: this rank's part is aborted by its watchdog; all others may be done."""
    rank: int
    after: int = 0
    noticed: bool = True
    """Whether the peers see the failure."""
    delay_s: float = 0.0


@dataclass(slots=True)
class _Operation:
    tensors: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    limits_s: dict[int, float] = field(default_factory=dict[int, float])
    not_before_s: float = 0.0
    stuck: bool = False
    done: bool = False
    without: set[int] = field(default_factory=set[int])
    """Ranks that it passes by."""


class Fabric:
    """All communicators of a test, and the faults that wait for their moment."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.struck: Counter[FaultKind] = Counter()
        self.ended: list[str] = []
        """Processes that torch's watchdog would have ended."""
        self._armed: list[Fault] = []
        self._communicators: dict[str, _Communicator] = {}
        self._over = False

    def group_class(self) -> type[LikeNccl]:
        return type("ProcessGroupNCCL", (LikeNccl,), {"fabric": self})

    def arm(self, *faults: Fault) -> None:
        with self.changed:
            self._armed = list(faults)

    def end(self) -> None:
        """Whoever is still stuck gets an error."""
        with self.changed:
            self._over = True
            self.changed.notify_all()

    @property
    def over(self) -> bool:
        return self._over

    def strikes(self, rank: int, kinds: frozenset[FaultKind] | None = None) -> Fault | None:
        """The fault for this moment of a rank, which is over with it. `kinds`: only these, whatever they wait for."""
        with self.changed:
            for fault in self._armed:
                if fault.rank != rank or (kinds is not None and fault.kind not in kinds):
                    continue
                if kinds is None and fault.kind in (*AT_INIT, "abort_fails"):
                    continue
                if kinds is None and fault.after > 0:
                    fault.after -= 1
                    continue
                self._armed.remove(fault)
                self.struck[fault.kind] += 1
                return fault
        return None

    def communicator(self, unique_id: str, size: int) -> _Communicator:
        with self.changed:
            return self._communicators.setdefault(unique_id, _Communicator(self, size))


class _Communicator:
    """State that the ranks share, under the fabric's lock."""

    def __init__(self, fabric: Fabric, size: int) -> None:
        self._fabric = fabric
        self._size = size
        self._here: set[int] = set()
        self._started: Counter[int] = Counter()
        self._operations: list[_Operation] = []
        self._modes: dict[int, int] = {}
        self._errors: dict[int, tuple[float, str]] = {}
        """Error of each rank, and the time from which it is visible."""
        self.aborted: set[int] = set()

    def meet(self, rank: int, mode: int) -> None:
        with self._fabric.changed:
            self._here.add(rank)
            self._modes[rank] = mode
            self._fabric.changed.notify_all()
            self._fabric.changed.wait_for(lambda: len(self._here) == self._size or self._fabric.over)
            if len(self._here) < self._size:
                raise RuntimeError("NCCL error: unhandled system error; the campaign is over")

    def start(self, rank: int, tensor: Tensor, timeout_s: float, fault: Fault | None) -> _Operation:
        with self._fabric.changed:
            index = self._started[rank]
            self._started[rank] += 1
            while len(self._operations) <= index:
                self._operations.append(_Operation())
            operation = self._operations[index]
            operation.tensors[rank] = tensor
            operation.limits_s[rank] = time.monotonic() + timeout_s
            match fault.kind if fault else None:
                case "hang":
                    operation.stuck = True
                case "delay":
                    assert fault is not None
                    operation.not_before_s = time.monotonic() + fault.delay_s
                case "error":
                    assert fault is not None
                    operation.stuck = True
                    self.fail(rank, "unhandled cuda error", noticed=fault.noticed)
                case "silent":
                    operation.without.add(rank)
                    operation.stuck = rank == 0
                    self.aborted.add(rank)
                case _:
                    pass
            return operation

    def fail(self, rank: int, error: str, *, noticed: bool) -> None:
        with self._fabric.changed:
            now_s = time.monotonic()
            self._errors.setdefault(rank, (now_s, f"NCCL error: {error}"))
            if noticed:
                for peer in set(range(self._size)) - {rank}:
                    self._errors.setdefault(peer, (now_s + NOTICE_S, "NCCL error: remote process exited"))

    def abort(self, rank: int) -> None:
        with self._fabric.changed:
            self.aborted.add(rank)
            for operation in self._operations:
                if not operation.done and rank in operation.tensors:
                    operation.stuck = True  # the peers wait for a kernel that is gone

    def error_of(self, rank: int) -> str | None:
        seen_s, error = self._errors.get(rank, (0.0, ""))
        return error if error and time.monotonic() >= seen_s else None

    def progress(self) -> None:
        """Advance the simulated GPUs and watchdogs to the current time."""
        now_s = time.monotonic()
        for operation in self._operations:
            if operation.done:
                continue
            for rank, limit_s in operation.limits_s.items():
                seen_s, _ = self._errors.get(rank, (now_s, ""))
                if rank not in self.aborted and (now_s > limit_s or now_s > seen_s + WATCHDOG_S):
                    self._watchdog(rank)
            if operation.stuck or len(operation.tensors) < self._size or now_s < operation.not_before_s:
                return
            for rank, tensor in operation.tensors.items():
                if rank and rank not in operation.without and rank not in self.aborted:
                    tensor.copy_(operation.tensors[0])
            operation.done = True
            operation.tensors = {}

    def _watchdog(self, rank: int) -> None:
        if self._modes[rank] == 2:
            self.abort(rank)
        elif self._modes[rank] != 0:
            self.aborted.add(rank)
            self._fabric.ended.append(f"rank {rank}: the watchdog caught an error or a timeout")


class _Work:
    def __init__(self, fabric: Fabric, communicator: _Communicator, rank: int, operation: _Operation) -> None:
        self._fabric = fabric
        self._communicator = communicator
        self._rank = rank
        self._operation = operation
        self._error: str | None = None

    def is_completed(self) -> bool:
        with self._fabric.changed:
            self._communicator.progress()
            aborted = self._rank in self._communicator.aborted
            if not aborted and self._error is None:
                self._error = self._communicator.error_of(self._rank)
            return self._error is not None or self._operation.done or aborted

    def kernel_has_ended(self) -> bool:
        """Whether a device synchronisation would return. An error alone does not end the kernel."""
        with self._fabric.changed:
            self._communicator.progress()
            return self._operation.done or self._rank in self._communicator.aborted

    def wait(self) -> bool:
        if self._error is not None:
            self._communicator.abort(self._rank)
            raise RuntimeError(self._error)
        return True


class LikeNccl:
    """In place of torch's ProcessGroupNCCL."""

    fabric: ClassVar[Fabric]

    class Options:
        _timeout = timedelta(minutes=10)
        handling: int | None = None
        """Only here: instead of the environment's, for ranks that would be other processes."""

    def __init__(self, store: Any, rank: int, size: int, options: LikeNccl.Options) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout_s = options._timeout.total_seconds()  # pyright: ignore[reportPrivateUsage]
        mode = options.handling
        self._mode = int(os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")) if mode is None else mode
        self._communicator: _Communicator | None = None
        self._aborted = False

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def broadcast(self, tensors: list[Tensor], options: Any) -> _Work:
        if self._aborted:
            raise RuntimeError(f"NCCL communicator was aborted on rank {self._rank}.")
        communicator = self._communicator = self._communicator or self._connect()
        if self._rank in communicator.aborted:
            raise RuntimeError(f"NCCL communicator was aborted on rank {self._rank}.")
        fault = self.fabric.strikes(self._rank)
        if fault is not None and fault.kind == "start_error":
            communicator.fail(self._rank, "unhandled system error", noticed=fault.noticed)
            raise RuntimeError("NCCL error: unhandled system error")
        if fault is not None and fault.kind == "death":
            communicator.fail(self._rank, "this process is gone", noticed=fault.noticed)
            self.die()
            raise Death
        operation = communicator.start(self._rank, tensors[0], self._timeout_s, fault)
        return _Work(self.fabric, communicator, self._rank, operation)

    def abort(self) -> None:
        self._aborted = True
        if self.fabric.strikes(self._rank, frozenset({"abort_fails"})):
            raise RuntimeError("ProcessGroup abort timed out")
        if self._communicator is not None:
            self._communicator.abort(self._rank)

    def die(self) -> None:
        """End the process and its kernels, without notice to the peers."""
        self._aborted = True
        if self._communicator is not None:
            self._communicator.abort(self._rank)

    def _connect(self) -> _Communicator:
        fault = self.fabric.strikes(self._rank, AT_INIT)
        if self._rank == 0:
            unique_id = uuid.uuid4().hex
            self._store.set("0", unique_id)
        else:
            unique_id = self._store.get("0").decode()  # waits as long as the store lets it
        if fault is not None and fault.kind == "init_error":
            raise RuntimeError("NCCL error: ncclCommInitRank: unhandled system error")
        if fault is not None:
            with self.fabric.changed:
                self.fabric.changed.wait_for(lambda: self.fabric.over)
            raise RuntimeError("NCCL error: the campaign is over")
        communicator = self.fabric.communicator(unique_id, self._size)
        communicator.meet(self._rank, self._mode)
        return communicator
