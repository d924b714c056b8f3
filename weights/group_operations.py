"""Operations of one rank of a process group, each with a deadline. The same code serves gloo and NCCL.

Process groups are made directly on a TCP store, never through torch.distributed's global default group, so that a
process can have many, one after the other, and the learner's own (torchrun) group is not touched.

torch and gloo cannot cancel a started operation, so each operation carries its deadline itself, and `close` leaves a
stuck one to a thread of its own, which ends at that deadline. For the differences of NCCL, and their places in torch's
sources, see docs/decisions/nccl.md.

A TCPStore resolves the name of every peer that connects, in its one thread, and so does each client: where reverse DNS
is slow, that costs seconds. So we bind the listening socket ourselves, to the address family of the host (127.0.0.1 is
then found in /etc/hosts).
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
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

from stillhouse.weights.buckets import BucketLayout, Content
from stillhouse.weights.config import own_nccl_host
from stillhouse.weights.deadlines import in_thread, wait_patiently
from stillhouse.weights.errors import GroupBroken, GroupInterrupted, Interrupted

log = logging.getLogger(__name__)

T = TypeVar("T")

BackendName: TypeAlias = Literal["gloo", "nccl"]
Store: TypeAlias = _TCPStore
AnyStore: TypeAlias = _AnyStore

WAIT_SLICE_S: Final = 0.1
"""Time within which an interruption is noticed inside an operation."""
CLOSE_WAIT_S: Final = 0.3
"""`close` waits this long for the group's threads; a stuck one is abandoned and ends at its deadline."""
BUFFERS: Final = 2
"""Operations under way at a time."""
POLL_S: Final = 0.0005
"""Interval between checks of a GPU operation."""
WATCHDOG_SLACK_S: Final = 30.0
"""torch's own limit on an NCCL operation is this much later than our deadline, so that ours always comes first."""
ABORT_S: Final = 60.0
"""An NCCL abort that takes longer than this will never end."""
_NCCL_ENVIRONMENT: Final = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else the watchdog aborts, or ends the process, for one hung member
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # the thread that monitors the watchdog would do the same
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # the watchdog, and a group's destructor, sleep four times this
}
"""Set while one of our groups is made, whatever applies to other groups, because we handle deadlines ourselves."""


def choose_backend(wanted: Literal["auto", "gloo", "nccl"], device: torch.device) -> BackendName:
    """`auto`: gloo, which works with every placement of ranks. The launcher, which knows all members and where they
    are, decides whether NCCL works (launch.checks.placement), and sets nccl or gloo. Raises ValueError when NCCL
    is wanted but not available."""
    if wanted == "nccl" and not (device.type == "cuda" and dist.is_nccl_available()):
        raise ValueError(
            f"backend = nccl with weights on {device} and NCCL {'' if dist.is_nccl_available() else 'not '}built into "
            "this torch; expected both a GPU and NCCL: set backend to gloo"
        )
    return "nccl" if wanted == "nccl" else "gloo"


def host_store(host: str, port: int = 0) -> Store:
    """The store of rank 0, listening on `host` only. Port 0: the system chooses; read it from `.port`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=1024)
    port = listener.getsockname()[1]
    return Store(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
        master_listen_fd=listener.detach(),  # the store owns it from now on
    )


def connect_store(host: str, port: int, timeout_s: float) -> Store:
    """A member's connection to the store of rank 0, which exists before any plan names it. Raises GroupBroken; at once
    if the connection is refused, where TCPStore itself would retry until the timeout."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError as error:
        raise GroupBroken(f"no TCP store at {host}:{port}: {error}") from None
    try:
        return Store(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise GroupBroken(f"no TCP store at {host}:{port} after {timeout_s:.1f} s: {first_line(error)}") from None


def local_address_towards(host: str, port: int) -> str:
    """This machine's address for reaching `host`, to which gloo binds. Sends nothing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def prefixed(store: AnyStore, *prefixes: str) -> AnyStore:
    """The part of a store whose keys begin with these prefixes, the first one outermost."""
    for prefix in prefixes:
        store = _PrefixStore(prefix, store)
    return store


class GroupOperations:
    """One rank of one group, for one thread. Subclasses define how the group is made and what is sent through it."""

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
        """`device`: the device of the sent bytes (cpu for gloo). `address`: this machine's, for gloo."""
        self._rank = rank
        self._world_size = world_size
        self._backend: BackendName = backend
        self._device = torch.device(device)
        self._address = address
        self._interrupted = interrupted
        # Any, because torch's type stubs have no `broadcast` for process groups.
        self._group: Any = None
        # The only reference to operations. A local variable would be kept alive by the traceback of a failed one, and
        # with it the sockets, which must close so that the other members notice.
        self._under_way: deque[Work] = deque()
        self._buffers_b: dict[int, Tensor] = {}
        self._connects_late = backend == "nccl"

    def __repr__(self) -> str:
        state = "joined" if self._group is not None else "not joined"
        return f"{type(self).__name__}(rank={self._rank}/{self._world_size}, {self._backend}, {state})"

    def close(self) -> None:
        """Leave the group; peers see closed connections. Returns soon even when an operation is stuck."""
        if self._group is None:
            return
        doomed: list[Any] = [self._under_way, self._group]
        self._group, self._under_way = None, deque()
        self._buffers_b = {}
        # Not a daemon: torch's destructors must not return into an interpreter that is shutting down.
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
        if self._backend == "nccl":  # it uses the group's timeout at the start of an operation instead
            self._group._set_default_timeout(timedelta(seconds=left_s + WATCHDOG_SLACK_S))
        if self._connects_late:
            # NCCL's first operation connects all ranks, and blocks until they are all there.
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
        content: Content,
        pieces: Iterable[tuple[int, int]],
        deadline_s: float,
        each: Callable[[Tensor], None] = lambda bucket_b: None,
    ) -> None:
        """Rank 0: start a broadcast of each piece, bytes [start, end) of the run, after calling `each` with it. A run
        on the group's device is sent in place; otherwise a piece is copied while the one before is being sent."""
        run_B = content.in_place(layout)
        for index, (start, end) in enumerate(pieces):
            if len(self._under_way) == BUFFERS:
                self._finish_oldest(deadline_s)  # so the buffer of piece index - 2 is free again
            bucket_b = self._bucket(layout, content, run_B, start, end, index)
            each(bucket_b)
            self._start(bucket_b, deadline_s)

    def _bucket(
        self, layout: BucketLayout, content: Content, run_B: Tensor | None, start: int, end: int, index: int
    ) -> Tensor:
        """Bytes [start, end) of the run, on the group's device: in place, or in the buffer for piece `index`. `run_B`:
        `content.in_place(layout)`."""
        if run_B is not None and run_B.device == self._device:
            return run_B[start:end]
        bucket_b = self._buffer(index, layout.largest_bytes)[: end - start]
        if run_B is not None:
            bucket_b.copy_(run_B[start:end])
        else:
            content.read(layout, start, end, bucket_b)
        return bucket_b

    def _patiently(self, act: Callable[[], T], deadline_s: float) -> T:
        """Run a torch call that cannot be interrupted in a thread. If the wait ends first, the thread is abandoned; it
        ends at its own timeout, or with the store or the group. Raises GroupBroken or GroupInterrupted."""
        stream = _present_stream(self._device)

        def run() -> T:
            try:
                with stream:
                    return act()
            except RuntimeError as error:
                raise GroupBroken(f"{self!r}: {first_line(error)}") from None

        # A daemon with NCCL, which waits forever for a missing rank: the process must be able to end anyway.
        started = in_thread(run, name="weight-group-connect", daemon=self._backend == "nccl")
        return wait_patiently(started, deadline_s, self._interrupted, f"{self!r}: not every rank came in time")

    def _finish_all(self, deadline_s: float) -> None:
        while self._under_way:
            self._finish_oldest(deadline_s)

    def _finish_oldest(self, deadline_s: float) -> None:
        """Wait for the oldest operation."""
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
        """Wait up to `wait_s` for the oldest operation. Raises GroupBroken if it failed."""
        if self._backend == "nccl":
            return self._finished_on_gpu(time.monotonic() + wait_s)
        completed = self._under_way[0].is_completed()
        try:
            self._under_way[0].wait(timedelta(seconds=wait_s))
        except RuntimeError as error:  # raised by torch for both "not yet" and "failed"
            if completed:
                raise GroupBroken(f"{self!r}: {first_line(error)}") from None
            return False
        return True

    def _finished_on_gpu(self, until_s: float) -> bool:
        """Polls, because a wait with a timeout would abort the communicator at its end. `wait` without one only orders
        the present stream after the operation, and raises if that failed; failed operations count as completed."""
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
        """The buffer for piece `index`, of at least `n_bytes`; the buffers take turns."""
        place = index % BUFFERS
        if place not in self._buffers_b or self._buffers_b[place].numel() < n_bytes:
            self._buffers_b[place] = torch.zeros(n_bytes, dtype=torch.uint8, device=self._device)
        return self._buffers_b[place]

    def _make_group(self, store: AnyStore, timeout_s: float, *, lazy: bool) -> Any:
        """`lazy`: gloo connects on first use; all ranks must agree on this. NCCL always connects on first use."""
        timeout = timedelta(seconds=timeout_s)
        # torch would record the last 2000 operations for a dump that we never use: 2 MB that fill up during a run's
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
    """Raises GroupBroken if torch has no NCCL. Tests replace this by a group that behaves like NCCL's."""
    nccl: Any = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is None:
        raise GroupBroken("this torch was built without NCCL; set the backend to gloo")
    options = nccl.Options()
    options._timeout = timeout
    if rank > 0:
        os.environ.update(own_nccl_host(os.environ, f"{socket.gethostname()}-{os.getpid()}"))
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
"""Groups that could not be aborted, with their buffers, into which a kernel may still write."""


def _destroy(doomed: list[Any], backend: BackendName) -> None:
    """Drop the last references, in a thread that may block: gloo's destructor waits for running operations, and NCCL's
    kernels spin until the abort."""
    if backend == "nccl":
        try:
            doomed[1]._set_default_timeout(timedelta(seconds=ABORT_S))
            doomed[1].abort()
        except RuntimeError as error:
            log.error("a weight group could not be aborted, so its memory is not reused: %s", first_line(error))
            _never_freed.append(doomed)
            return
    doomed.clear()


def wait_for_device(device: torch.device, deadline_s: float, interrupted: Interrupted) -> None:
    """Wait until everything that this thread has queued on a GPU is done, like a synchronisation but with a deadline
    and interruption. Returns at once for a CPU, which queues nothing. Raises GroupBroken or GroupInterrupted."""
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
            raise GroupBroken(f"{device} had not finished its queued work at the deadline")


def _present_stream(device: torch.device) -> AbstractContextManager[Any]:
    """This thread's stream, for use in another thread, which would otherwise use the default stream and not wait for
    work queued here."""
    return torch.cuda.stream(torch.cuda.current_stream(device)) if device.type == "cuda" else nullcontext()


def _event_behind_all(device: torch.device) -> Any:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def first_line(error: BaseException) -> str:
    """The first line of a torch error, whose text continues with a stack trace."""
    return str(error).strip().split("\n", 1)[0][:300]
