"""Runs environments, each episode on its own thread (actors.env_thread), so that no environment delays decoding or
another rollout, whether it awaits, blocks or never returns.

The actor's main loop opens an episode under a key, submits one call at a time, later takes its outcome, and finishes
the episode, which closes its environment. Every call has a deadline. When a call passes it and its thread does not
return, the rollout fails anyway, and the thread is abandoned and counted as stuck. Too many stuck threads end the
actor, because only the end of the process can remove them.
"""

from __future__ import annotations

import logging
import queue
import resource
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from stillhouse.actors.env_thread import EnvCall, EnvironmentTimeout, EnvThread, Outcome

log = logging.getLogger(__name__)
CLOSE_TIMEOUT_S: Final = 5.0
"""Longest time for all environments together to close at the end."""
GRACE_S: Final = 1.0
"""Time after its deadline in which a call may still be ended by its own event loop, before its thread counts as
stuck."""
LOOK_EVERY_S: Final = 0.1
"""Interval between two checks of the deadlines."""
FILES_PER_THREAD: Final = 4
"""An event loop takes three; one more for what the environment opens."""

Method = Callable[[], Coroutine[Any, Any, Any]]


class TooManyStuck(RuntimeError):
    """Too many environment threads do not return; the message says where one of them is."""


class EnvRunner:
    """Owns the threads. Starts none before the first `open`, so that the process may still be forked until then."""

    def __init__(self, max_threads: int, on_outcome: Callable[[], None] = lambda: None) -> None:
        """Allows `max_threads` threads at once, including those of closing episodes; half of them may be stuck.
        `on_outcome` is called from another thread whenever there is something to take."""
        self._max_threads = max_threads
        self._on_outcome = on_outcome
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._open: dict[str, tuple[EnvThread, Method, float]] = {}
        """By key: thread, closing method and its timeout."""
        self._leaving: list[EnvThread] = []
        """Threads of finished episodes, whose environments are closing."""
        self._stuck: list[EnvThread] = []
        """Threads of both kinds that passed a deadline and have not returned."""
        self._pending = 0
        self._look_s = 0.0
        self.counts = {"environment_threads_stuck_total": 0.0, "environment_close_errors_total": 0.0}
        self._count_lock = threading.Lock()

    @property
    def pending(self) -> int:
        """Calls submitted whose outcome was not taken yet."""
        return self._pending

    @property
    def threads(self) -> int:
        """Number of live threads."""
        self._leaving = [thread for thread in self._leaving if thread.alive]
        return len(self._open) + len(self._leaving)

    @property
    def stuck(self) -> int:
        """Number of threads that passed a deadline and have not returned."""
        self._stuck = [thread for thread in self._stuck if thread.inside]
        return len(self._stuck)

    @property
    def has_room(self) -> bool:
        """True when another episode may be opened."""
        return self.threads < self._max_threads

    def allow_files(self) -> None:
        """Raise this process's limit of open files to what the threads may need, as far as the system allows."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = soft + FILES_PER_THREAD * self._max_threads
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft != resource.RLIM_INFINITY and allowed > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))

    def open(self, key: str, close: Method, timeout_s: float) -> None:
        """Begin an episode. `close` is always called at its end, and may take `timeout_s`.

        Raises OSError or RuntimeError when the system gives no more threads."""
        self._open[key] = (EnvThread(key), close, timeout_s)

    def submit(self, key: str, what: str, method: Method, timeout_s: float) -> None:
        """Start the method called `what`; its outcome appears in `take` within about `timeout_s` seconds."""
        self._pending += 1
        self._open[key][0].submit(EnvCall(key, what, method, timeout_s, self._put))

    def finish(self, key: str) -> None:
        """End an episode: cancel the running call and close the environment. The outcome of a cancelled call must still
        be taken."""
        thread, close, timeout_s = self._open.pop(key)
        self._leaving.append(thread)
        thread.finish(EnvCall(key, "close", close, timeout_s, self._closed))

    def take(self, timeout_s: float = 0.0) -> list[Outcome]:
        """Available outcomes, after waiting up to `timeout_s` for the first. Raises TooManyStuck."""
        if time.monotonic() >= self._look_s:
            self._give_up_overdue()
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

    def close(self) -> None:
        """Close all environments and join their threads, except stuck ones, which end with the process. Idempotent."""
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        for key in list(self._open):
            self.finish(key)
        for thread in self._leaving:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if self.threads:
            keys = ", ".join(f"{each.key} ({each.where()})" for each in self._leaving[:5])
            log.warning("%d environment threads have not returned; the first: %s", self.threads, keys)

    def _give_up_overdue(self) -> None:
        """Settle overdue calls whose own event loop did not end them."""
        now_s = time.monotonic()
        self._look_s = now_s + LOOK_EVERY_S
        where = ""
        for thread in [*(entry[0] for entry in self._open.values()), *self._leaving]:
            call = thread.newest
            if call is None or call.settled or now_s <= call.deadline_s + GRACE_S:
                continue
            where = thread.where() or "a place that cannot be seen"
            log.warning("rollout %s: its environment does not return; it is in\n%s", thread.key, thread.stack())
            blocks = f"{call.what} has blocked its thread for {call.timeout_s:g} s, at {where}"
            call.settle(None, EnvironmentTimeout(blocks))
            thread.interrupt()
            if thread not in self._stuck:
                self._stuck.append(thread)
                self.counts["environment_threads_stuck_total"] += 1
        if where and self.stuck > self._max_threads // 2:
            raise TooManyStuck(
                f"{self.stuck} environment threads do not return, expected at most {self._max_threads // 2}; "
                f"one is at {where}. Give the calls that the environment waits for a timeout below step_timeout_s, "
                "or raise step_timeout_s (actor.environments)"
            )

    def _put(self, outcome: Outcome) -> None:
        self._outcomes.put(outcome)
        self._on_outcome()

    def _closed(self, outcome: Outcome) -> None:
        """Usually called from the episode's thread. An error here no longer affects the rollout, so it is only
        counted."""
        if outcome.error is not None:
            with self._count_lock:
                self.counts["environment_close_errors_total"] += 1
            log.warning("rollout %s: closing its environment failed: %r", outcome.key, outcome.error)
