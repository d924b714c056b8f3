"""Operations of one process group with a deadline on each, on one rank. Same code over gloo and NCCL.

Process groups are made directly on a TCP store, never through torch.distributed's global default group, so that many
may follow one another in a process, and the learner's own (torchrun) group is not touched.

torch and gloo cannot take a started operation back, so each operation carries its deadline itself, and `close` leaves a
stuck one to a thread of its own, which ends at that deadline. What differs with NCCL, and where torch says so, is in
docs/decisions/nccl.md.

A TCPStore looks up the name of every peer that connects, in its one thread, and each client does the same: where
reverse DNS is slow, that costs seconds. Hence the listening socket is bound by us to the address family of the host
(127.0.0.1 is then found in /etc/hosts).
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Final, Literal, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import BroadcastOptions, ProcessGroupGloo, Work
from torch.distributed import PrefixStore as _PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed import Store as _AnyStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed import TCPStore as _TCPStore  # pyright: ignore[reportPrivateImportUsage]

from weights.buckets import BucketLayout, byte_views
from weights.deadlines import in_thread, wait_patiently
from weights.sink import GroupBroken, GroupInterrupted, Interrupted

log = logging.getLogger(__name__)

T = TypeVar("T")

BackendName: TypeAlias = Literal["gloo", "nccl"]
Store: TypeAlias = _TCPStore
AnyStore: TypeAlias = _AnyStore

WAIT_SLICE_S: Final = 0.1
"""How soon an interruption is noticed inside an operation."""
CLOSE_WAIT_S: Final = 0.3
"""`close` waits this long for the group's own threads; a stuck one is left to end at its deadline."""
BUFFERS: Final = 2
"""Operations under way at one time."""
POLL_S: Final = 0.0005
"""Between two looks at what a GPU is doing."""
WATCHDOG_SLACK_S: Final = 30.0
"""By so much torch's own limit on an NCCL operation is behind our deadline, which is thus always the first."""
ABORT_S: Final = 60.0
"""Within this NCCL has let go of what it was doing, or never will."""
_NCCL_ENVIRONMENT: Final = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else the watchdog aborts, or ends the process, for one hung member
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # so would the thread that watches the watchdog
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # four times this the watchdog sleeps, and a group's destructor with it
}
"""What a group of ours is made under, whatever is set for others: deadlines are ours."""


def choose_backend(wanted: Literal["auto", "gloo", "nccl"], device: torch.device) -> BackendName:
    """`auto`: gloo, which works with every layout of ranks. Whether NCCL could is decided by who knows all members and
    where they are: the launcher (launch.checks.placement), which says nccl or gloo. Raises ValueError when NCCL is
    wanted and cannot be had."""
    if wanted == "nccl" and not (device.type == "cuda" and dist.is_nccl_available()):
        raise ValueError(
            f"backend = nccl with weights on {device} and NCCL {'' if dist.is_nccl_available() else 'not '}built into "
            "this torch; expected both a GPU and NCCL: set backend to gloo"
        )
    return "nccl" if wanted == "nccl" else "gloo"


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
        raise GroupBroken(f"no TCP store at {host}:{port} after {timeout_s:.1f} s: {first_line(error)}") from None


def local_address_towards(host: str, port: int) -> str:
    """The address of this machine from which `host` is reached; gloo binds to it. Nothing is sent."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def prefixed(store: AnyStore, *prefixes: str) -> AnyStore:
    """The part of a store whose keys begin with these, the first one outermost."""
    for prefix in prefixes:
        store = _PrefixStore(prefix, store)
    return store


class GroupOperations:
    """One rank of one group. Use from one thread; subclasses say how the group is made and what is sent through it."""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        backend: BackendName,
        device: torch.device | str,
        address: str,
        interrupted: Interrupted,
    ) -> None:
        """`device`: where the bytes travel (cpu for gloo). `address`: this machine's, for gloo. `interrupted` is asked
        about every 0.1 s while waiting; a reason ends the wait with GroupInterrupted."""
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
        self._connects_late = backend == "nccl"

    def __repr__(self) -> str:
        state = "joined" if self._group is not None else "not joined"
        return f"{type(self).__name__}(rank={self._rank}/{self._world_size}, {self._backend}, {state})"

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
        left_s = max(deadline_s - time.monotonic(), 0.001)
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
        options.timeout = timedelta(seconds=left_s)
        if self._backend == "nccl":  # it looks at the group's timeout instead, when an operation is started
            self._group._set_default_timeout(timedelta(seconds=left_s + WATCHDOG_SLACK_S))
        if self._connects_late:
            # NCCL's first operation connects all ranks, and blocks until they are there.
            self._under_way.append(self._patiently(partial(self._group.broadcast, [tensor], options), deadline_s))
            self._connects_late = False
            return
        try:
            self._under_way.append(self._group.broadcast([tensor], options))
        except RuntimeError as error:
            raise GroupBroken(f"{self!r}: {first_line(error)}") from None

    def _send_buckets(
        self,
        layout: BucketLayout,
        named: Sequence[tuple[str, Tensor]],
        pieces: Iterable[tuple[int, int]],
        deadline_s: float,
        each: Callable[[Tensor], None] = lambda bucket_b: None,
    ) -> None:
        """Rank 0: start a broadcast for each piece, bytes [start, end) of the run, which `each` sees before. A run that
        lies on the group's device goes out as it lies; else a piece is copied while the one before is on its way."""
        run_B = layout.run_of(named)
        sources = byte_views(named) if run_B is None else []
        for index, (start, end) in enumerate(pieces):
            if len(self._under_way) == BUFFERS:
                self._finish_oldest(deadline_s)  # the buffer of piece index - 2 is free again
            if run_B is not None and run_B.device == self._device:
                bucket_b = run_B[start:end]
            else:
                bucket_b = self._buffer(index, layout.largest_bytes)[: end - start]
                if run_B is not None:
                    bucket_b.copy_(run_B[start:end])
                else:
                    layout.gather(start, end, sources, bucket_b)
            each(bucket_b)
            self._start(bucket_b, deadline_s)

    def _patiently(self, act: Callable[[], T], deadline_s: float) -> T:
        """Something of torch's that cannot be interrupted, in a thread: when nobody waits any more that is left to end
        at its own timeout, or when the store or the group ends. Raises GroupBroken or GroupInterrupted."""
        stream = _present_stream(self._device)

        def run() -> T:
            try:
                with stream:
                    return act()
            except RuntimeError as error:
                raise GroupBroken(f"{self!r}: {first_line(error)}") from None

        # NCCL never gives up on a rank that does not come, and a process must be able to end all the same.
        started = in_thread(run, name="weight-group-connect", daemon=self._backend == "nccl")
        return wait_patiently(started, deadline_s, self._interrupted, f"{self!r}: not every rank came in time")

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
        if self._backend == "nccl":
            return self._finished_on_gpu(time.monotonic() + wait_s)
        completed = self._under_way[0].is_completed()
        try:
            self._under_way[0].wait(timedelta(seconds=wait_s))
        except RuntimeError as error:  # torch's way to say both "not yet" and "failed"
            if completed:
                raise GroupBroken(f"{self!r}: {first_line(error)}") from None
            return False
        return True

    def _finished_on_gpu(self, until_s: float) -> bool:
        """A wait with a timeout would abort the communicator at its end; without one it only puts the present stream
        behind the operation, and raises if that has failed: then it is "completed", too."""
        try:
            while not self._under_way[0].is_completed():
                if time.monotonic() >= until_s:
                    return False
                time.sleep(POLL_S)
            self._under_way[0].wait()
        except RuntimeError as error:
            raise GroupBroken(f"{self!r}: {first_line(error)}") from None
        return True

    def _buffer(self, index: int, n_bytes: int) -> Tensor:
        """One of the buffers that take turns, of `n_bytes` at least."""
        if not self._buffers_b or self._buffers_b[0].numel() < n_bytes:
            self._buffers_b = [torch.zeros(n_bytes, dtype=torch.uint8, device=self._device) for _ in range(BUFFERS)]
        return self._buffers_b[index % BUFFERS]

    def _make_group(self, store: AnyStore, timeout_s: float, *, lazy: bool) -> Any:
        """`lazy`: gloo's connections are made on first use; all ranks must do the same. NCCL always does."""
        timeout = timedelta(seconds=timeout_s)
        # torch would note the last 2000 operations for a dump that nobody here asks for: 2 MB that fill over a run's
        # first thousand versions and look like a leak.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
        if self._backend == "gloo":
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # pyright: ignore
            options._devices = [ProcessGroupGloo.create_device(hostname=self._address, lazy_init=lazy)]
            options._timeout = timeout
            options._threads = BUFFERS
            return ProcessGroupGloo(store, self._rank, self._world_size, options)
        return new_nccl_group(store, self._rank, self._world_size, timeout)


def new_nccl_group(store: AnyStore, rank: int, world_size: int, timeout: timedelta) -> Any:
    """Raises GroupBroken where torch has no NCCL. (Tests put a group here that only behaves as NCCL's does.)"""
    nccl: Any = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is None:
        raise GroupBroken("this torch was built without NCCL; set the backend to gloo")
    options = nccl.Options()
    options._timeout = timeout
    with _environment(_NCCL_ENVIRONMENT):  # read by the constructor
        return nccl(store, rank, world_size, options)


@contextmanager
def _environment(wanted: Mapping[str, str]) -> Generator[None]:
    former = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


_never_freed: Final[list[list[Any]]] = []
"""Of groups that could not be aborted: a kernel may still write into their buffers."""


def _destroy(doomed: list[Any], backend: BackendName) -> None:
    """Drop the last references, in a thread that may block: gloo's destructor waits for running operations, and NCCL's
    kernels go on spinning until the abort."""
    if backend == "nccl":
        try:
            doomed[1]._set_default_timeout(timedelta(seconds=ABORT_S))
            doomed[1].abort()
        except RuntimeError as error:
            log.error("a weight group could not be aborted, its memory is not used again: %s", first_line(error))
            _never_freed.append(doomed)
            return
    doomed.clear()


def wait_for_device(device: torch.device, deadline_s: float, interrupted: Interrupted) -> None:
    """Until all that this thread has queued on a GPU is done; elsewhere nothing is ever queued. An ordinary
    synchronisation would be the same but for deadline and interruption. Raises GroupBroken or GroupInterrupted."""
    event = _event_behind_all(device)
    while event is not None:
        reason = interrupted()
        if reason is not None:
            raise GroupInterrupted(reason)
        until_s = time.monotonic() + WAIT_SLICE_S
        while time.monotonic() < until_s:
            if event.query():
                return
            time.sleep(POLL_S)
        if time.monotonic() > deadline_s:
            raise GroupBroken(f"{device} has not done at the deadline what was queued on it")


def _present_stream(device: torch.device) -> AbstractContextManager[Any]:
    """For another thread, which would otherwise use torch's default one and not come behind what is queued on ours."""
    return torch.cuda.stream(torch.cuda.current_stream(device)) if device.type == "cuda" else nullcontext()


def _event_behind_all(device: torch.device) -> Any:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def first_line(error: BaseException) -> str:
    """Of what torch says, which goes on with a stack trace."""
    return str(error).strip().split("\n", 1)[0][:300]
