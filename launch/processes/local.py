"""The process backend for this machine: workers are forked (launch.processes.forkserver) or spawned.

Only poll() waits, up to its timeout: for the fork server, for SIGCHLD, or for a signal to the launcher.

Until the fork server is warm, workers to fork wait in a queue. If it refuses to fork, all later workers are spawned. If
it is killed, its workers die with it and it is started again. If it is stopped, it is continued; if it hangs, killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection
from typing import Final

import msgspec

from stillhouse import SOURCES
from stillhouse.launch.processes import forkserver
from stillhouse.launch.processes.activity import Activity, vitals_of
from stillhouse.launch.processes.backend import Event, Notice, ProcessBackend, Vitals, WorkerExited, WorkerStarted
from stillhouse.launch.workers.launch_plan import LaunchPlan
from stillhouse.launch.workers.start_role import THREAD_VARIABLES, StartRole, WorkFolder
from stillhouse.protocol.atomic_file import not_a_link
from stillhouse.protocol.children import kill_group, reap

FORKSERVER: Final = "forkserver"
"""Name of its log and of its vitals."""
FORKSERVER_END_S: Final = 5.0
FORKSERVER_STARTS: Final = 4
"""If the fork server dies this often, workers are spawned from then on."""
PING_EVERY_S: Final = 2.0
ANSWER_S: Final = 5.0
"""A fork server that is silent for this long is inspected: is it stopped, or does it compute?"""
HANGS_S: Final = 60.0
"""A fork server that was silent and idle for this long is killed."""
ALLOCATOR_VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Both set torch's allocator of GPU memory; the first is the newer name."""


def worker_environment(threads: int = 1) -> dict[str, str]:
    """Environment of every child: our packages can be imported from any working folder, there are `threads` native
    threads (a worker takes its number from its StartRole), and no tokenizer thread pool (it would not survive a fork).

    Batches differ in size from step to step. Torch's allocator would keep a block of GPU memory for each size, so it is
    told to use segments that grow, unless the user has settings of their own. docs/gpu.md has what this saves."""
    own_allocator = any(name in os.environ for name in ALLOCATOR_VARIABLES)
    return {
        **({} if own_allocator else {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        **os.environ,
        **dict.fromkeys(THREAD_VARIABLES, str(threads)),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # is_available() must not initialise CUDA before a fork
        "PYTHONPATH": python_path(),
    }


def python_path() -> str:
    """PYTHONPATH of a child: the user's own, and then the folder of this package, which need not be installed."""
    return os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(SOURCES))))


class LocalProcesses(ProcessBackend):
    """Worker processes as children (spawned) and grandchildren (forked) of the launcher."""

    def __init__(self, plan: LaunchPlan, folder: WorkFolder) -> None:
        launch = plan.config.launch
        forkable = sys.platform == "linux"
        if launch.start_method == "fork" and not forkable:
            raise ValueError(f"launch.start_method is fork, which is not safe on {sys.platform}; use auto or spawn")
        self._method = launch.start_method
        self._forking = forkable and self._method != "spawn"
        self._folder = folder
        self._preload = plan.preload
        self.environment = worker_environment() | plan.environment
        self.lifeline_fd, self._lifeline_held = os.pipe()
        self._forkserver: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._unread = b""
        self._decoder = msgspec.json.Decoder(forkserver.FromForkserver)
        self._warm = False
        self._starts = 0
        self._pinged_s = self._heard_s = 0.0
        self._activity = Activity()
        self._queued: list[StartRole] = []
        self._owed: list[tuple[str, int]] = []
        """(incarnation, signal) to send once the pending fork of that worker is done."""
        self._asked: dict[tuple[str, str], StartRole] = {}
        self._forked: dict[int, StartRole] = {}
        self._spawned: dict[int, tuple[StartRole, subprocess.Popen[bytes]]] = {}
        """Their stdin stays open, because it is their lifeline."""
        self._events: list[Event] = []
        self._woken, self._wake = socket.socketpair()
        for end in (self._woken, self._wake):
            end.setblocking(False)
        self._former_handler = signal.signal(signal.SIGCHLD, lambda _signum, _frame: None)
        self._former_wakeup = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)

    @property
    def pids(self) -> dict[str, int]:
        """Worker name -> pid, for running workers."""
        spawned = {start.name: pid for pid, (start, _) in self._spawned.items()}
        return spawned | {start.name: pid for pid, start in self._forked.items()}

    def vitals(self, names: Collection[str]) -> dict[str, Vitals]:
        """Vitals of these workers, and of the fork server while one of them is still to be forked."""
        pids = self.pids
        behind = {name: pids[name] for name in names if name in pids}
        if len(behind) < len(names) and self._forkserver is not None:
            behind[FORKSERVER] = self._forkserver.pid
        return {name: vitals for name, pid in behind.items() if (vitals := vitals_of(pid)) is not None}

    def prepare(self) -> None:
        """Start the fork server, unless workers are spawned."""
        if not self._forking:
            return
        self._starts += 1
        self._warm, self._unread = False, b""
        self._pinged_s = self._heard_s = time.monotonic()
        self._control, theirs = socket.socketpair()
        arguments = [theirs.fileno(), self.lifeline_fd, os.getpid(), self._folder.path, *self._preload]
        with theirs, open(self._folder.log_path(FORKSERVER), "ab", opener=not_a_link) as log:
            self._forkserver = subprocess.Popen(
                [sys.executable, "-P", "-m", "stillhouse.launch.processes.forkserver", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                pass_fds=(theirs.fileno(), self.lifeline_fd),
                start_new_session=True,  # Ctrl-C in the terminal reaches the launcher only
            )

    def start(self, start: StartRole, *, preloaded: bool) -> None:
        """A worker that is not `preloaded` is spawned in any case: it needs no torch, or must start before the fork
        server is warm."""
        if not (preloaded and self._forking):
            self._spawn(start)
        elif not self._warm:
            self._queued.append(start)
        else:
            self._asked[start.name, start.incarnation] = start
            self._send(start)

    def stop(self, name: str) -> None:
        self._signal(name, signal.SIGTERM)

    def kill(self, name: str) -> None:
        self._signal(name, signal.SIGKILL)

    def dump_stacks(self, name: str) -> None:
        self._signal(name, signal.SIGUSR1)  # faulthandler answers it

    def _signal(self, name: str, signum: int) -> None:
        """SIGKILL goes to the worker's whole process group. A worker whose fork is pending is signalled once it exists;
        one that is still in the queue is never started."""
        for start in [start for start in self._queued if start.name == name]:
            self._queued.remove(start)
            self._events.append(WorkerExited(name, start.incarnation, -signum))
        for asked_name, incarnation in self._asked:
            if asked_name == name:
                self._owed.append((incarnation, signum))
        for pid, start in self._forked.items():
            if start.name == name:
                self._send(forkserver.Signal(pid, signum))
        for pid, (start, _) in self._spawned.items():  # ours to reap: the pid is still its own
            if start.name == name:
                if signum == signal.SIGKILL:
                    kill_group(pid)
                os.kill(pid, signum)

    def poll(self, timeout_s: float) -> list[Event]:
        fds = [self._woken.fileno()] + ([self._control.fileno()] if self._control is not None else [])
        ready, _, _ = select.select(fds, [], [], 0 if self._events else timeout_s)
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass
        if self._control is not None and self._control.fileno() in ready:
            self._read_control()
        self._look_at_forkserver(time.monotonic())
        for pid, (start, process) in list(self._spawned.items()):
            if (code := reap(pid)) is not None:
                process.returncode = code  # Popen cannot know: we reaped it
                _close_stdin(process)
                del self._spawned[pid]
                self._events.append(WorkerExited(start.name, start.incarnation, code))
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._forkserver is not None:
            try:
                self._forkserver.wait(FORKSERVER_END_S if self._warm else 0)
            except subprocess.TimeoutExpired:
                self._forkserver.kill()
                self._forkserver.wait(FORKSERVER_END_S)
            self._forkserver = None
        self._forked.clear()
        for pid, (_, process) in self._spawned.items():
            kill_group(pid)
            process.kill()
            process.wait(FORKSERVER_END_S)
            _close_stdin(process)
        self._spawned.clear()
        if self._lifeline_held >= 0:
            signal.set_wakeup_fd(self._former_wakeup)
            signal.signal(signal.SIGCHLD, self._former_handler)
            os.close(self._lifeline_held)
            os.close(self.lifeline_fd)
            self._lifeline_held = -1
            self._woken.close()
            self._wake.close()

    def _spawn(self, start: StartRole) -> None:
        with open(self._folder.log_path(start.name), "ab", opener=not_a_link) as log:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "stillhouse.launch.workers.roles",
                    str(self._folder.path),
                    str(os.getpid()),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self.environment,
                start_new_session=True,
                bufsize=0,
            )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead already, which poll() tells
            process.stdin.write(msgspec.json.encode(start) + b"\n")
        self._spawned[process.pid] = (start, process)
        self._events.append(WorkerStarted(start.name, start.incarnation, _where(process.pid)))

    def _send(self, message: forkserver.ToForkserver) -> None:
        if self._control is None:
            return
        try:
            self._control.sendall(msgspec.json.encode(message) + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            self._forkserver_lost()

    def _read_control(self) -> None:
        assert self._control is not None
        self._heard_s = time.monotonic()
        try:
            received = self._control.recv(65536)
        except ConnectionResetError:
            received = b""
        *lines, self._unread = (self._unread + received).split(b"\n")
        for line in lines:
            self._take(self._decoder.decode(line))
        if not received:
            self._forkserver_lost()

    def _take(self, message: forkserver.FromForkserver) -> None:
        match message:
            case forkserver.Warm():
                self._warm = True
                queued, self._queued = self._queued, []
                for start in queued:
                    self.start(start, preloaded=True)
            case forkserver.Forked(name, incarnation, pid):
                self._forked[pid] = self._asked.pop((name, incarnation))
                self._events.append(WorkerStarted(name, incarnation, _where(pid)))
                for signum in [signum for owed, signum in self._owed if owed == incarnation]:
                    self._send(forkserver.Signal(pid, signum))
            case forkserver.ChildExited(pid, code):
                start = self._forked.pop(pid)
                self._events.append(WorkerExited(start.name, start.incarnation, code))
            case forkserver.ForkRefused(name, incarnation, reason):
                self._refused(self._asked.pop((name, incarnation)), reason)
            case forkserver.Pong():
                pass  # _heard_s is set already

    def _refused(self, start: StartRole, reason: str) -> None:
        if self._method == "fork":
            self._events.append(Notice(f"launch.start_method is fork, but {reason}; use auto or spawn", fatal=True))
            self._events.append(WorkerExited(start.name, start.incarnation, -signal.SIGKILL))
            return
        if self._forking:
            self._forking = False
            self._events.append(Notice(f"spawning instead of forking: {reason}", fatal=False))
        self._spawn(start)

    def _look_at_forkserver(self, now_s: float) -> None:
        """While it hangs, no death is reported and nothing is started again."""
        if self._control is None or self._forkserver is None or now_s - self._pinged_s < PING_EVERY_S:
            return
        if now_s - self._pinged_s > ANSWER_S:  # the launcher stood still, and with it perhaps the whole machine
            self._heard_s = now_s
        self._pinged_s = now_s
        silent_s = now_s - self._heard_s
        if silent_s > ANSWER_S:
            pid = self._forkserver.pid
            vitals = vitals_of(pid)
            if vitals is not None and vitals.stopped:
                self._events.append(Notice("the fork server was stopped (SIGSTOP); it is continued", fatal=False))
                os.kill(pid, signal.SIGCONT)
            elif self._activity.moved({FORKSERVER: vitals} if vitals is not None else {}):
                self._heard_s = now_s  # it is importing, or the machine is slow
            elif silent_s > HANGS_S:
                self._events.append(Notice(f"the fork server has hung for {silent_s:.0f} s; it is killed", fatal=False))
                os.kill(pid, signal.SIGKILL)
        if self._warm:
            self._send(forkserver.Ping())

    def _forkserver_lost(self) -> None:
        """The kernel kills its children with it. Report each as exited, so that nothing waits for them."""
        assert self._control is not None and self._forkserver is not None
        self._control.close()
        self._control = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._forkserver.wait(FORKSERVER_END_S)
        code = self._forkserver.returncode
        self._forkserver = None
        for start in (*self._forked.values(), *self._queued, *self._asked.values()):
            self._events.append(WorkerExited(start.name, start.incarnation, -signal.SIGKILL))
        for lost in (self._forked, self._asked, self._queued, self._owed):
            lost.clear()
        self._replace_forkserver(code)

    def _replace_forkserver(self, code: int | None) -> None:
        """The fork server ended with this code: start another one, or spawn from now on, or end the run."""
        log = self._folder.log_path(FORKSERVER)
        text = "the fork server died, and its workers with it"
        if code is None or code >= 0:
            self._events.append(Notice(f"{text}; see {log}", fatal=True))
        elif self._starts < FORKSERVER_STARTS:
            self._events.append(Notice(f"{text}; it is started again", fatal=False))
            self.prepare()
        elif self._method == "fork":
            self._events.append(Notice(f"{text}, {self._starts} times; see {log}", fatal=True))
        else:
            self._forking = False
            self._events.append(Notice(f"{text}, {self._starts} times; workers are spawned now", fatal=False))


def _where(pid: int) -> str:
    return f"process {pid}"


def _close_stdin(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
