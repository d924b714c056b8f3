"""Environments run here: one thread with an event loop, so that a slow tool never holds up decoding.

The actor's main loop submits a coroutine under a key and later takes (key, outcome) pairs; an outcome is the
coroutine's result or the exception it ended with. Every call has a deadline."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, NamedTuple

CLOSE_TIMEOUT_S: Final = 5.0


class Outcome(NamedTuple):
    """What became of one environment call."""

    key: str
    result: Any
    error: Exception | None
    """Set when the call raised, or TimeoutError when it passed its deadline."""


class EnvRunner:
    """Owns the event loop thread. Not for use before a fork: the thread starts with the first submit."""

    def __init__(self, on_outcome: Callable[[], None] = lambda: None) -> None:
        """`on_outcome` is called from the runner's thread whenever there is something to take."""
        self._on_outcome = on_outcome
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pending = 0
        self._calls: set[asyncio.Task[Any]] = set()
        """Those under way; the loop thread's own."""

    @property
    def pending(self) -> int:
        """Calls submitted whose outcome was not taken yet."""
        return self._pending

    def submit(self, key: str, call: Coroutine[Any, Any, Any], timeout_s: float) -> None:
        """Start `call`; its outcome appears in `take` within about `timeout_s` seconds."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="environments", daemon=True)
            self._thread.start()
        self._pending += 1
        asyncio.run_coroutine_threadsafe(self._run(key, call, timeout_s), self._loop)

    def take(self, timeout_s: float = 0.0) -> list[Outcome]:
        """Outcomes that are there, waiting up to `timeout_s` for the first."""
        taken: list[Outcome] = []
        if self._pending == 0:
            return taken
        try:
            taken.append(self._outcomes.get(block=timeout_s > 0, timeout=timeout_s if timeout_s > 0 else None))
            while True:
                taken.append(self._outcomes.get_nowait())
        except queue.Empty:
            pass
        self._pending -= len(taken)
        return taken

    async def _run(self, key: str, call: Coroutine[Any, Any, Any], timeout_s: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        try:
            result = await asyncio.wait_for(_contained(call), timeout_s)
        except asyncio.CancelledError as error:
            if task.cancelling():
                raise  # by close
            gave_up = RuntimeError("the environment let a CancelledError of its own out")
            gave_up.__cause__ = error
            self._put(Outcome(key, None, gave_up))
        except Exception as error:  # a user's environment may raise anything; the rollout fails by that name
            self._put(Outcome(key, None, error))
        else:
            self._put(Outcome(key, result, None))
        finally:
            self._calls.discard(task)
            call.close()  # cancelled before it began

    def _put(self, outcome: Outcome) -> None:
        self._outcomes.put(outcome)
        self._on_outcome()

    def close(self) -> None:
        """Cancel what runs and join the thread; idempotent."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        self._loop = self._thread = None
        cancelled = asyncio.run_coroutine_threadsafe(self._cancel_all(), loop)
        try:
            cancelled.result(CLOSE_TIMEOUT_S)
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(CLOSE_TIMEOUT_S)
            if not thread.is_alive():
                loop.close()

    async def _cancel_all(self) -> None:
        """Calls first, each once: a second cancellation would cut short what they do to clean up."""
        calls = list(self._calls)
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        left_over = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for task in left_over:
            task.cancel()
        await asyncio.gather(*left_over, return_exceptions=True)


async def _contained(call: Coroutine[Any, Any, Any]) -> Any:
    """`call`, with what would end the event loop turned into an error: a program of the student's may say exit()."""
    try:
        return await call
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"the environment raised {type(error).__name__}: {error}") from error
