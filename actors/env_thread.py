"""One episode's thread and event loop, on which the calls of its environment run one after the other.

An environment may therefore block: only its own rollout waits. Python cannot end a thread from outside. `interrupt`
raises an exception in it, which ends a computing loop at once and a sleeping thread when it wakes up.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final, NamedTuple

log = logging.getLogger(__name__)
TIDY_TIMEOUT_S: Final = 5.0
"""Longest time for tasks that an environment left behind to end after they are cancelled."""
_OURS: Final = str(Path(__file__).parent)


class EnvironmentTimeout(Exception):
    """An environment exceeded its time limit."""


class Outcome(NamedTuple):
    """The result of one call."""

    key: str
    result: Any
    error: Exception | None
    """Set when the call raised; EnvironmentTimeout when it passed its deadline."""


class EnvCall:
    """One call of an environment. It is settled once: by its thread, or by the runner when it is overdue."""

    def __init__(
        self,
        key: str,
        what: str,
        make: Callable[[], Coroutine[Any, Any, Any]],
        timeout_s: float,
        on_settled: Callable[[Outcome], None],
    ) -> None:
        """`what`: the name of the method."""
        self.key = key
        self.what = what
        self.make = make
        self.timeout_s = timeout_s
        self.deadline_s = time.monotonic() + timeout_s
        self.settled = False
        self.limit: asyncio.Timeout | None = None
        """The same deadline for the event loop, while the call runs."""
        self._on_settled = on_settled
        self._lock = threading.Lock()

    def pause(self) -> None:
        """No deadline runs: the call waits for its actor. Called on its own thread, as is `resume`."""
        self.wait()
        self._reschedule(None)

    def resume(self) -> None:
        """Begin the call's time anew."""
        self.expect()
        self._reschedule(asyncio.get_running_loop().time() + self.timeout_s)

    def wait(self) -> None:
        """No deadline runs for the runner until the next `expect`, `pause` or `resume`. Thread-safe."""
        self.deadline_s = math.inf

    def expect(self) -> None:
        """Give the call its whole time from now on to come to its next `pause` or `resume`. Thread-safe."""
        self.deadline_s = time.monotonic() + self.timeout_s

    def _reschedule(self, when: float | None) -> None:
        if self.limit is not None:
            with contextlib.suppress(RuntimeError):  # the call is over: a task that it left behind is still waiting
                self.limit.reschedule(when)

    def settle(self, result: Any, error: Exception | None) -> None:
        """Only the first settlement counts. Thread-safe."""
        with self._lock:
            if self.settled:
                return
            self.settled = True
        self._on_settled(Outcome(self.key, result, error))


CURRENT_CALL: ContextVar[EnvCall] = ContextVar("CURRENT_CALL")
"""The call that the code of an environment runs in."""


class _Interrupted(BaseException):
    """Raised in the thread from outside, when its result is no longer needed."""


class EnvThread:
    """Runs until the call given to `finish` is over. All methods must be called from the creating thread."""

    def __init__(self, key: str) -> None:
        """Raises OSError or RuntimeError when the system gives no thread or event loop."""
        self.key = key
        self.newest: EnvCall | None = None
        """The latest submitted call."""
        self._loop = asyncio.new_event_loop()
        self._calls: asyncio.Queue[EnvCall | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._inside = False
        """A call is running. `_guard` keeps its end and an interruption apart."""
        self._guard = threading.Lock()
        self._thread = threading.Thread(target=self._main, name=f"environment {key}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._loop.close()
            raise

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def inside(self) -> bool:
        """True while the environment runs a call."""
        return self._inside and self.alive

    def submit(self, call: EnvCall) -> None:
        self.newest = call
        self._schedule(lambda: self._calls.put_nowait(call))

    def finish(self, close: EnvCall) -> None:
        """Cancel the running call, run `close`, then end the thread."""
        self.newest = close
        self._schedule(lambda: self._finish(close))

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def where(self) -> str:
        """The line the environment is at, e.g. `env.py:41 in step`; empty when unknown."""
        frames = self._frames()
        ours = [i for i, frame in enumerate(frames) if frame.filename.startswith(_OURS)]
        if not ours:
            return ""
        at = frames[min(ours[-1] + 1, len(frames) - 1)]
        return f"{Path(at.filename).name}:{at.lineno} in {at.name}"

    def stack(self) -> str:
        """The innermost stack frames, for a log."""
        return "".join(traceback.format_list(self._frames()[-8:]))

    def interrupt(self) -> None:
        """Raise an exception in the environment's code, if it is running."""
        with self._guard:
            if self.inside and self._thread.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread.ident), ctypes.py_object(_Interrupted)
                )
        self._schedule(lambda: None)  # wakes an idle loop

    def _frames(self) -> traceback.StackSummary:
        frame = sys._current_frames().get(self._thread.ident or 0)  # pyright: ignore[reportPrivateUsage] - documented
        return traceback.extract_stack(frame) if frame is not None else traceback.StackSummary()

    def _schedule(self, what: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(what)
        except RuntimeError:  # the loop has ended
            if self.newest is not None:
                self.newest.settle(None, RuntimeError("the thread of the environment has ended"))

    # ------------------------------------------------------------------------------------------- in the thread

    def _main(self) -> None:
        serving = self._loop.create_task(self._serve())
        try:
            while not serving.done():
                try:
                    self._loop.run_until_complete(serving)
                except _Interrupted:
                    break
                except BaseException as error:  # a task of the environment's own said exit(), for example
                    log.warning("a task of the environment of rollout %s raised %r", self.key, error)
            self._loop.run_until_complete(self._tidy())
        except BaseException as error:
            log.warning("the event loop of rollout %s did not end well: %r", self.key, error)
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        while (call := await self._calls.get()) is not None:
            self._task = asyncio.create_task(self._run(call))
            await asyncio.wait({self._task})
            self._cancelled(call)  # for a task that was cancelled before its first step
            self._task = None

    def _finish(self, close: EnvCall) -> None:
        if self._task is not None:
            self._task.cancel()
        while not self._calls.empty():  # submitted just now: it must not begin, or `close` would wait for its timeout
            if (waiting := self._calls.get_nowait()) is not None:
                self._cancelled(waiting)
        self._calls.put_nowait(close)
        self._calls.put_nowait(None)

    @staticmethod
    def _cancelled(call: EnvCall) -> None:
        """Settle a call that never began; no effect on a settled one."""
        call.settle(None, RuntimeError(f"{call.what} was cancelled before it began"))

    async def _run(self, call: EnvCall) -> None:
        result, error = None, None
        call.limit = limit = asyncio.timeout(call.timeout_s)
        CURRENT_CALL.set(call)
        try:
            self._inside = True
            async with limit:
                result = await call.make()
        except Exception as raised:  # a user's environment may raise anything; its class is the reported error
            late = isinstance(raised, TimeoutError) and limit.expired()
            error = EnvironmentTimeout(f"{call.what} took longer than {call.timeout_s:g} s") if late else raised
        except BaseException as raised:  # a program of the student's may say exit(), a library may cancel itself
            error = RuntimeError(f"{call.what} raised {type(raised).__name__}: {raised}")
            error = error.with_traceback(raised.__traceback__)
        with self._guard:
            self._inside = False
        call.settle(result, error)

    async def _tidy(self) -> None:
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=TIDY_TIMEOUT_S)
        await self._loop.shutdown_asyncgens()
