"""Runs what a student wrote, apart from its host (`actors.sandbox.isolation`) and with limits.

    async with Sandbox("bubblewrap", Limits()) as sandbox:
        ran = await sandbox.python("import math; math.pi")

Files in /work and /tmp stay from call to call; processes do not, nor does anything outlive the sandbox. It begins with
the first call, which takes about 0.1 s."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast

from stillhouse.actors.env_thread import CURRENT_CALL
from stillhouse.actors.sandbox.isolation import (
    Isolation,
    Limits,
    Start,
    checked_isolation,
    checked_limits,
    checked_python,
    start_of,
)
from stillhouse.actors.sandbox.syscalls import seccomp_filter

log = logging.getLogger(__name__)
START_S: Final = 30.0
"""Longest time for a sandbox to begin."""
WAIT_S: Final = 10.0
"""A call may take this much longer than its seconds of computing: it may wait, and the machine may be busy."""
ANSWER_S: Final = 10.0
"""Longest time, behind that, for the supervisor to end a call and answer."""
CLOSE_S: Final = 7.0
"""Longest time for the supervisor to end everything in it (`supervise.SWEEP_S`) and itself."""
MAX_TEXT: Final = 1 << 20
"""Characters of a program, and of its input, and bytes that can be kept of an output."""

Ended: TypeAlias = Literal["exit", "time", "waited", "busy", "memory", "processes", "files", "lost"]
"""How a call ended: by itself; with its seconds of computing, its time, its memory, its processes or its number of
files used up (busy: its time, most of which it waited for a processor); or together with its sandbox."""

_SLOTS: Final = threading.BoundedSemaphore(len(os.sched_getaffinity(0)))
"""Calls that run at the same time in this process, all sandboxes together: more would only take each other's time."""


class SandboxFailed(RuntimeError):
    """A sandbox cannot begin; the message says why."""


class Ran(NamedTuple):
    """What a call did."""

    ended: Ended
    code: int | None
    """The exit code, a negative signal number, or None where it was stopped."""
    stdout: str
    stderr: str
    omitted: int
    """Bytes of output that were left out."""
    cpu_s: float
    """Seconds of computing."""


_LOST: Final = Ran("lost", None, "", "", 0, 0.0)


class Sandbox:
    """A sandbox, for one event loop at a time. It ends with its `async with` block."""

    def __init__(self, isolation: Isolation, limits: Limits, python: str = "") -> None:
        """`python`: absolute path of the interpreter inside; default: this one, without its packages. Raises
        ValueError for what there is none of."""
        self.limits = limits
        self._isolation: Isolation = isolation
        self._python = checked_python(python)
        self._process: asyncio.subprocess.Process | None = None
        self._folder: str | None = None
        """Its working folder on the host, where it is not isolated."""
        self._one = asyncio.Lock()
        self.link: tuple[int, ...] = ()
        """File descriptors that the Python of its one call gets, as 3 (to read) and 4. Set before it begins."""

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def python(self, source: str, stdin: str = "", *, cell: bool = True, **options: Any) -> Ran:
        """Run Python. `cell`: the value of a last expression is printed, as in a notebook. `options`: as of `_call`."""
        return await self._call((), source, stdin, cell=cell, **options)

    async def bash(self, source: str, stdin: str = "", **options: Any) -> Ran:
        return await self._call(("/bin/bash", "{source}"), source, stdin, **options)

    async def _call(
        self,
        argv: Sequence[str],
        source: str,
        stdin: str,
        *,
        cell: bool = False,
        merge: bool = False,
        most: int = 64 * 1024,
        time_limit_s: float | None = None,
        takes_slot: bool = True,
    ) -> Ran:
        """Run Python, or a program `argv`, to whose argument `{source}` the text `source` is given as a file. `merge`:
        both outputs in `stdout`, in their order. `most`: bytes to keep of an output, its first and its last part.
        `time_limit_s`: in place of the sandbox's own. `takes_slot`: False for the second of two calls that need each
        other. A call at a time.

        Raises SandboxFailed where a sandbox cannot begin, and ValueError for a text that is too long."""
        for name, text in (("source", source), ("stdin", stdin)):
            if len(text) > MAX_TEXT:
                raise ValueError(f"{name}: {len(text)} characters, expected at most {MAX_TEXT}")
        cpu_s = self.limits.time_limit_s if time_limit_s is None else time_limit_s
        wall_s = cpu_s + WAIT_S
        request = {
            "argv": [*argv],
            "source": source.encode(errors="replace").decode(),  # half a character cannot be sent
            "stdin": stdin.encode(errors="replace").decode(),
            "cpu_s": cpu_s,
            "wall_s": wall_s,
            "cell": cell,
            "merge": merge,
            "max_output": min(most, MAX_TEXT),
        }
        async with self._one, _slot() if takes_slot else contextlib.nullcontext():
            process = await self._running()
            assert process.stdin and process.stdout
            try:
                process.stdin.write(json.dumps(request).encode() + b"\n")
                line = await asyncio.wait_for(process.stdout.readline(), wall_s + ANSWER_S)
                said = json.loads(line)
            except (OSError, TimeoutError, ValueError) as error:  # ValueError: the line is cut off, or too long
                await self.close()
                log.warning("a sandbox was lost in a call: %r%s", error, await _last_words(process))
                return _LOST
            except BaseException:
                await self.close()  # the answer of a call that nobody waits for must not be taken for the next one's
                raise
            if said.pop("stuck") or said["ended"] == "files":  # with too many files, all later calls would end too
                await self.close()
            return Ran(**said)

    async def close(self) -> None:
        """End it. The next call begins a new one, without the files."""
        process, self._process = self._process, None
        folder, self._folder = self._folder, None
        if process is not None or folder is not None:
            await _to_its_end(_end(process, folder))

    async def begin(self) -> None:
        """Begin it before its first call. Raises SandboxFailed."""
        async with self._one:
            await self._running()

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        await self.close()
        try:
            await _to_its_end(self._begin())
            process = cast(asyncio.subprocess.Process, self._process)
            await self._greeted(process)
        except BaseException:
            await self.close()
            raise
        return process

    async def _begin(self) -> None:
        if self._isolation == "none":
            self._folder = tempfile.mkdtemp(prefix="stillhouse-sandbox-")
        start = start_of(self._isolation, self.limits, self._python, self._folder, self.link)
        with _filter(start) as (argv, fds):
            self._process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=start.env,
                cwd=start.folder,
                pass_fds=(*fds, *self.link),
                start_new_session=True,
                limit=16 * MAX_TEXT,  # JSON writes some bytes as six
            )

    async def _greeted(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout and process.stderr
        try:
            line = await asyncio.wait_for(process.stdout.readline(), START_S)
        except TimeoutError:
            raise SandboxFailed(f"the sandbox did not begin within {START_S:g} s") from None
        if not line:
            said = await asyncio.wait_for(process.stderr.read(), START_S)
            lines = said.decode(errors="replace").strip().splitlines()
            raise SandboxFailed(f"the sandbox cannot begin: {lines[-1] if lines else 'it said nothing'}")


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Wait for `work`, which takes seconds at most. A caller that is cancelled meanwhile is cancelled behind it: what
    is half begun or half ended would stay behind."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # taken, so that nothing is said of it later
        raise cancelled
    task.result()


async def _end(process: asyncio.subprocess.Process | None, folder: str | None) -> None:
    try:
        if process is not None:
            await _end_process(process)
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


async def _end_process(process: asyncio.subprocess.Process) -> None:
    try:
        with contextlib.suppress(OSError):
            cast(asyncio.StreamWriter, process.stdin).close()  # for the supervisor: end what runs, then yourself
        try:
            await asyncio.wait_for(process.wait(), CLOSE_S)
        except TimeoutError:
            process.kill()  # bubblewrap's child dies with it, and all processes inside with that
            await process.wait()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        raise
    finally:
        process._transport.close()  # type: ignore[attr-defined]  # pyright: ignore


async def _last_words(process: asyncio.subprocess.Process) -> str:
    """What a supervisor that has ended wrote to its standard error, if anything."""
    assert process.stderr
    said = (await process.stderr.read()).decode(errors="replace").strip()
    return f": {said.splitlines()[-1][:500]}" if said else ""


@contextlib.contextmanager
def _filter(start: Start) -> Any:
    """The arguments that give bubblewrap its filter of system calls, and the file descriptors to hand over."""
    program = seccomp_filter() if start.folder is None else None
    if program is None:
        yield start.argv, ()
        return
    end, begin = os.pipe()
    try:
        os.write(begin, program)  # some hundred bytes: a pipe holds more
    finally:
        os.close(begin)
    try:
        yield (start.argv[0], "--seccomp", str(end), *start.argv[1:]), (end,)
    finally:
        os.close(end)


@contextlib.asynccontextmanager
async def _slot() -> AsyncGenerator[None]:
    if not _SLOTS.acquire(blocking=False):
        episode = CURRENT_CALL.get(None)
        if episode is not None:
            episode.pause()  # its own time does not run while it waits for others
        try:
            while not _SLOTS.acquire(blocking=False):
                await asyncio.sleep(0.005)  # callers are in many event loops, so none can wake another
        finally:
            if episode is not None:
                episode.resume()
    try:
        yield
    finally:
        _SLOTS.release()


def make_sandbox(isolation: object, python: object, **limits: Any) -> Callable[[], Sandbox]:
    """Makes sandboxes with these options of a configuration, after one of them was tried on this host.

    Raises ValueError for an option that makes no sense, and where such a sandbox cannot begin here."""
    if not isinstance(python, str):
        raise ValueError(f"python: got {python!r}, expected the absolute path of an interpreter")
    checked = checked_isolation(isolation), checked_limits(**limits), checked_python(python)
    _try(*checked)
    return functools.partial(Sandbox, *checked)


_trying = threading.Lock()
_tried: set[tuple[Isolation, Limits, str]] = set()


def _try(isolation: Isolation, limits: Limits, python: str) -> None:
    """Run one call in a sandbox with these options. What worked is not tried again."""
    with _trying:
        if (isolation, limits, python) in _tried:
            return
        said: list[str] = []

        def run() -> None:
            try:
                asyncio.run(_hello(isolation, limits, python, said))
            except (SandboxFailed, ValueError, OSError) as error:
                said.append(str(error))

        # In a thread of its own: the caller's may have an event loop that runs.
        thread = threading.Thread(target=run, name="try sandbox", daemon=True)
        thread.start()
        thread.join()
        if said:
            raise ValueError(
                f"isolation {isolation!r} does not work here: {said[0]}. What it needs, and the choice without: "
                "docs/agents/sandbox.md"
            )
        _tried.add((isolation, limits, python))


async def _hello(isolation: Isolation, limits: Limits, python: str, said: list[str]) -> None:
    async with Sandbox(isolation, limits, python) as sandbox:
        for tried in (sandbox.python, sandbox.bash):
            ran = await tried("1 + 1" if tried == sandbox.python else "echo 2")
            if (ran.ended, ran.code, ran.stdout) != ("exit", 0, "2\n"):
                said.append(f"a first program ended with {ran}")
                return
