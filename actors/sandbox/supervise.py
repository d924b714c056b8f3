"""The program inside a sandbox: runs one call after the other, with limits, and ends whatever a call leaves behind.

Requests and answers are JSON, one per line, on standard input and output (`actors.sandbox.sandbox` has the other side).
The interpreter inside may be older than the actor's, so this file needs Python 3.9 and no more.

Python that a student wrote runs in a copy of this process, made by fork: an interpreter that starts anew takes ten
times as long. The copy has none of this process's pipes.

Limits that the kernel holds for a single process do not bound what many processes use together, and the number of
processes is not limited for root. So the sums are also measured here, every POLL_S.

In a process namespace of its own this process is the first one: the kernel lets no program in there stop or kill it."""

# ruff: noqa: PTH123, PTH208 - runs every POLL_S, and competes with what it watches
from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import io
import json
import os
import resource
import selectors
import signal
import sys
import time
from _ast import Expr, Expression, PyCF_ONLY_AST
from typing import Any

POLL_S = 0.02
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
MOST_FILES = 10_000
"""Files and folders that a call may leave in /work and /tmp together."""
SWEEP_S = 5.0
"""Longest time for killed processes to be gone."""
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
MB = 1 << 20


class Kept:
    """The first and the last part of an output, and how many bytes were left out between them."""

    def __init__(self, most: int) -> None:
        self._half = most // 2
        self._first = b""
        self._last = b""
        self.omitted = 0

    def add(self, data: bytes) -> None:
        room = self._half - len(self._first)
        self._first += data[:room]
        last = self._last + data[max(room, 0) :]
        self.omitted += max(len(last) - self._half, 0)
        self._last = last[max(len(last) - self._half, 0) :]

    def text(self) -> str:
        gap = f"\n[{self.omitted} bytes left out]\n".encode() if self.omitted else b""
        return (self._first + gap + self._last).decode("utf-8", "replace")


class Supervisor:
    """Runs calls."""

    def __init__(self, config: dict[str, Any]) -> None:
        """`config`: limits (`memory_mb`, `disk_mb`, `max_processes`), `folders` that are counted, `alone`: this process
        is the first one in a process namespace, and `remove`: a folder that goes with it, or None."""
        self._config = config
        self._ticks: dict[tuple[int, int], int] = {}
        """Clock ticks of computing that were seen of each process of this call, by its id and start."""
        if config["alone"] and (os.getpid(), all_processes()) != (1, [1]):
            raise SystemExit("there are other processes in what should be a process namespace of its own")

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run `source` as Python (`cell`: and print the value of a last expression), or the program `argv`, where
        {source} stands for a path to `source`. It gets `stdin`, `cpu_s` seconds of computing and `wall_s` in all.
        `merge`: standard error goes to standard output."""
        stdin_end, stdin_start = os.pipe()
        source_end, source_start = os.pipe()
        inputs = {stdin_start: request["stdin"].encode()}
        if request["argv"]:
            inputs[source_start] = request["source"].encode()
        output_pipes = [os.pipe()] if request["merge"] else [os.pipe(), os.pipe()]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        deadline = time.monotonic() + request["wall_s"]
        self._ticks = {}
        child = os.fork()
        if child == 0:
            self._become(request, stdin_end, [start for _, start in output_pipes], source_end)
        for fd in self._config["link"]:  # so that the other side hears when the call has ended
            os.close(fd)
        self._config["link"] = []
        for fd in (stdin_end, source_end, *(start for _, start in output_pipes), *({source_start} - inputs.keys())):
            os.close(fd)
        outputs = {end: Kept(request["max_output"]) for end, _ in output_pipes}
        ended, status, gone = self._watch(request, child, inputs, outputs, before, deadline)
        for fd in (*inputs, *outputs):
            os.close(fd)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        code = None if status is None else os.waitstatus_to_exitcode(status)
        if ended is None and code == -signal.SIGXCPU:
            ended = "time"
        if ended is None and self._n_files() > MOST_FILES:
            ended = "files"
        texts = [kept.text() for kept in outputs.values()]
        return {
            "ended": ended or "exit",
            "code": code,
            "stdout": texts[0],
            "stderr": texts[1] if len(texts) > 1 else "",
            "omitted": sum(kept.omitted for kept in outputs.values()),
            "cpu_s": max(seconds_between(before, used), self._seen_s()),
            "stuck": not gone,
        }

    def _watch(
        self,
        request: dict[str, Any],
        child: int,
        inputs: dict[int, bytes],
        outputs: dict[int, Kept],
        before: resource.struct_rusage,
        deadline: float,
    ) -> tuple[str | None, int | None, bool]:
        """Feed and read a program until it ends or has to. Returns why it had to end, its status, and whether all that
        it started is gone."""
        ended: str | None = None
        status: int | None = None
        with selectors.DefaultSelector() as selector:
            exited = os.pidfd_open(child)
            selector.register(exited, selectors.EVENT_READ)
            selector.register(sys.stdin.fileno(), selectors.EVENT_READ)  # its end: the actor is gone
            for fd in inputs:
                os.set_blocking(fd, False)
                selector.register(fd, selectors.EVENT_WRITE)
            for fd in outputs:
                os.set_blocking(fd, False)
                selector.register(fd, selectors.EVENT_READ)
            measured = time.monotonic()
            while status is None and ended is None:
                for key, _ in selector.select(POLL_S):
                    if key.fd == sys.stdin.fileno():
                        ended = "lost"
                    elif key.fd in inputs:
                        self._feed(selector, inputs, key.fd)
                    elif key.fd in outputs:
                        self._read(selector, outputs, key.fd)
                status = self._reap(child)
                now = time.monotonic()
                if status is None and now - measured >= POLL_S:
                    measured = now
                    ended = self._waited(request["wall_s"]) if now > deadline else self._over(before, request["cpu_s"])
            gone = self._sweep()
            for fd in list(outputs):
                self._read(selector, outputs, fd)
            os.close(exited)
        return ended, status, gone

    def _become(self, request: dict[str, Any], stdin: int, outputs: list[int], source: int) -> None:
        """Become the program of a call: this is its process. Does not return."""
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL if request["argv"] else signal.default_int_handler)
        for fd, number in ((stdin, 0), (outputs[0], 1), (outputs[-1], 2)):
            os.dup2(fd, number)
        self._limit(request["cpu_s"])
        set_dumpable(1)
        if request["argv"]:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.set_inheritable(source, True)  # all others close by themselves
            try:
                os.execv(
                    request["argv"][0], [word.replace("{source}", f"/dev/fd/{source}") for word in request["argv"]]
                )
            except OSError as error:
                os.write(2, f"{request['argv'][0]}: {error.strerror}\n".encode())
                os._exit(127)
        link = [fcntl.fcntl(fd, fcntl.F_DUPFD, 200) for fd in self._config["link"]]
        for number, fd in enumerate(link, start=3):
            os.dup2(fd, number)
        os.closerange(3 + len(link), 256)
        open_standard_streams()
        sys.exit(run_python(request["source"], cell=request["cell"]))  # past the loop of main, to the interpreter's end

    def _limit(self, cpu_s: float) -> None:
        """The kernel's own limits for the process that is about to begin, each a little above what is measured."""
        most = self._config
        for kind, value in (
            (resource.RLIMIT_CPU, int(cpu_s) + 1),
            (resource.RLIMIT_AS, 2 * most["memory_mb"] * MB + 1024 * MB),
            (resource.RLIMIT_FSIZE, most["disk_mb"] * MB),
            (resource.RLIMIT_NOFILE, 256),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_MEMLOCK, MB),
            (resource.RLIMIT_MSGQUEUE, 0),
        ):
            hard = resource.getrlimit(kind)[1]
            value = value if hard < 0 else min(value, hard)
            resource.setrlimit(kind, (value, value))

    @staticmethod
    def _feed(selector: selectors.BaseSelector, inputs: dict[int, bytes], fd: int) -> None:
        try:
            inputs[fd] = inputs[fd][os.write(fd, inputs[fd][:65536]) :]
        except BlockingIOError:
            return
        except OSError:  # nobody reads it
            inputs[fd] = b""
        if not inputs[fd]:
            selector.unregister(fd)
            os.close(fd)
            del inputs[fd]

    @staticmethod
    def _read(selector: selectors.BaseSelector, outputs: dict[int, Kept], fd: int) -> None:
        """What is there now. Bounded, because a process may write faster than this reads."""
        for _ in range(64):
            try:
                data = os.read(fd, 65536)
            except BlockingIOError:
                return
            if not data:
                if fd in selector.get_map():
                    selector.unregister(fd)
                return
            outputs[fd].add(data)

    @staticmethod
    def _reap(main: int) -> int | None:
        """Take the exit statuses of ended processes, orphans among them. Returns that of `main`, or None."""
        status = None
        while True:
            try:
                pid, value = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return status
            if pid == 0:
                return status
            if pid == main:
                status = value

    def _over(self, before: Any, cpu_s: float) -> str | None:
        """The limit that the processes together exceed, if any."""
        seconds = seconds_between(before, resource.getrusage(resource.RUSAGE_CHILDREN))
        tasks = memory = 0
        pids = self._processes()
        if len(pids) > self._config["max_processes"]:
            return "processes"  # before anything that takes longer: they become more meanwhile
        for pid in pids:
            own, reaped, threads, pages, start = usage(pid)
            seconds += (own + reaped) / TICKS
            self._ticks[pid, start] = own
            tasks += threads
            memory += pages * PAGE
        if max(seconds, self._seen_s()) > cpu_s:
            return "time"
        if memory > self._config["memory_mb"] * MB:
            return "memory"
        if tasks > self._config["max_processes"]:
            return "processes"
        return "files" if self._n_files() > MOST_FILES else None

    def _waited(self, wall_s: float) -> str:
        """Whether a call whose time is over slept, or waited for a processor for half of it."""
        queued_s = 0.0
        for pid in self._processes():
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/schedstat", "rb") as file:
                queued_s += int(file.read().split()[1]) / 1e9
        return "busy" if queued_s > wall_s / 2 else "waited"

    def _seen_s(self) -> float:
        """Seconds of computing that were seen. Those of a process whose parent ignores SIGCHLD are nowhere else when it
        has ended."""
        return sum(self._ticks.values()) / TICKS

    def _n_files(self) -> int:
        """In the sandbox's own file systems. Without them nothing is counted."""
        found = [os.statvfs(folder) for folder in self._config["folders"]]
        return sum(each.f_files - each.f_ffree for each in found)

    def _sweep(self) -> bool:
        """Kill what is left of a call. False: something did not end."""
        deadline = time.monotonic() + SWEEP_S
        while time.monotonic() < deadline:
            # -1: all but this process, at once, so that none can begin another meanwhile.
            for pid in (-1,) if self._config["alone"] else self._processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._reap(0)
            if not self._processes():
                return True
            time.sleep(0.001)
        return False

    def _processes(self) -> list[int]:
        if self._config["alone"]:
            return [pid for pid in all_processes() if pid != 1]
        return descendants()


def seconds_between(before: Any, after: Any) -> float:
    """Seconds of computing between two results of getrusage."""
    return float(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def all_processes() -> list[int]:
    """Every process that can be seen."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def descendants() -> list[int]:
    """The children of this process, theirs, and so on. A process whose parent ended is a child of this one."""
    found: list[int] = []
    ahead = [os.getpid()]
    while ahead:
        pid = ahead.pop()
        try:
            threads = os.listdir(f"/proc/{pid}/task")
        except OSError:
            continue
        for thread in threads:
            try:
                with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                    children = [int(word) for word in file.read().split()]
            except OSError:
                continue
            found += children
            ahead += children
    return found


def usage(pid: int) -> tuple[int, int, int, int, int]:
    """Clock ticks that a process has computed, and those of its reaped children, its threads, its pages in memory, and
    when it began."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # its name is any bytes
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0, 0, 0, 0, 0
    own, reaped = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
    return own, reaped, int(fields[17]), int(fields[21]), int(fields[19])


LIBC = ctypes.CDLL(None, use_errno=True)


def set_dumpable(value: int) -> None:
    """0: no other process may read this one's memory or open its pipes, though all inside have the same user."""
    prctl(PR_SET_DUMPABLE, value)


def prctl(option: int, value: int) -> None:
    if LIBC.prctl(option, value, 0, 0, 0) != 0:
        raise SystemExit(f"prctl({option}) failed: {os.strerror(ctypes.get_errno())}")


def open_standard_streams() -> None:
    """Anew, because those of the supervisor may have read ahead. Nothing that is printed waits in a buffer."""
    given = io.BufferedReader(io.FileIO(0, closefd=False))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(given, "utf-8", "surrogateescape")  # type: ignore[misc]
    output, errors = io.FileIO(1, "w", closefd=False), io.FileIO(2, "w", closefd=False)
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(output, "utf-8", "surrogateescape", write_through=True)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(errors, "utf-8", "backslashreplace", write_through=True)  # type: ignore[misc]


NAME = "call.py"


def run_python(source: str, *, cell: bool) -> int:
    """Run a program as `__main__`. `cell`: the value of a last expression is printed, as in a notebook. Returns the
    exit code."""
    main_module = type(sys)("__main__")
    sys.modules["__main__"] = main_module
    sys.argv = [NAME]
    sys.path.insert(0, "")
    last = None
    try:
        tree: Any = compile(source, NAME, "exec", PyCF_ONLY_AST)
        if cell and tree.body and isinstance(tree.body[-1], Expr):
            last = compile(Expression(tree.body.pop().value), NAME, "eval")
        body = compile(tree, NAME, "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return failed(error, source, 0)
    try:
        exec(body, main_module.__dict__)
        value = None if last is None else eval(last, main_module.__dict__)
        if value is not None:
            print(repr(value))
    except (Exception, KeyboardInterrupt) as error:
        return failed(error, source, None)
    return 0


def failed(error: BaseException, source: str, frames: int | None) -> int:
    """Print where it failed, with the lines of `source`."""
    import linecache
    import traceback

    linecache.cache[NAME] = (len(source), None, source.splitlines(keepends=True), NAME)
    behind = error.__traceback__ and error.__traceback__.tb_next  # without this program's own frame
    traceback.print_exception(type(error), error, behind, frames)
    return 1


def main() -> None:
    set_dumpable(0)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = json.loads(sys.argv[1])
    supervisor = Supervisor(config)
    gc.freeze()  # a copy of this process does not look through what it has of it, when it ends
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        answer = supervisor.call(json.loads(line))  # raises SystemExit in the copy that ran it
        try:
            print(json.dumps(answer), flush=True)
        except BrokenPipeError:  # the actor is gone
            break
    if config["remove"] is not None:
        import shutil

        shutil.rmtree(config["remove"], ignore_errors=True)  # the actor may be gone, and then nobody else does it


if __name__ == "__main__":
    main()
