"""Work on the texts of callers, apart from the loop that all episodes share: a template's rendering and the tokenizer.

Each session has one piece of work at a time, so none can take all threads. Long requests have threads of their own:
what is short never waits for them. Nothing can end a thread, so the work itself is bounded: by MAX_MESSAGES, by what
the context can hold (`expect_fitting`), and by the run's own chat template, which no caller replaces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from stillhouse.actors.endpoint.requests import SMALL_BYTES, Refusal

MAX_MESSAGES: Final = 8192
"""Messages of a request. Some templates look at all of them once for each."""
WAIT_S: Final = 60.0
"""Longest time until a request's text is tokens."""
ResultT = TypeVar("ResultT")


class TextThreads:
    """For all sessions of a server. Starts no thread before it is needed."""

    def __init__(self) -> None:
        self.short: Final = ThreadPoolExecutor(4, "endpoint-text")
        self.long: Final = ThreadPoolExecutor(2, "endpoint-long-text")

    def close(self) -> None:
        for pool in (self.short, self.long):
            pool.shutdown(wait=False, cancel_futures=True)


class TextWork:
    """One session's."""

    def __init__(self, threads: TextThreads) -> None:
        self._threads = threads
        self._turn = asyncio.Lock()
        self._last: asyncio.Future[Any] | None = None
        """The work before, which may go on when its request is gone."""

    async def do(self, n_bytes: int, work: Callable[[], ResultT]) -> ResultT:
        """The result of `work` for a request of `n_bytes`. Raises Refusal after WAIT_S, and what `work` raises."""
        try:
            async with asyncio.timeout(WAIT_S), self._turn:
                if self._last is not None:
                    await asyncio.wait({self._last})
                pool = self._threads.short if n_bytes <= SMALL_BYTES else self._threads.long
                future = self._last = asyncio.get_running_loop().run_in_executor(pool, work)
                future.add_done_callback(_look)
                await asyncio.wait({future})
                return future.result()
        except TimeoutError as error:
            raise Refusal("timeout", f"the text was not tokenised within {WAIT_S:g} s; send less of it") from error


def _look(future: asyncio.Future[Any]) -> None:
    """An error that nobody waits for any more is none of the log's."""
    if not future.cancelled():
        future.exception()
