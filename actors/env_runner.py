"""Environments run here, each episode on a thread of its own (actors.env_thread): no environment holds up decoding or
another rollout, whether it awaits, blocks or never returns.

The actor's main loop opens an episode under a key, submits one call at a time, later takes its outcome, and finishes
the episode, which closes its environment. Every call has a deadline. Where one passes it and its thread does not come
back, the rollout fails all the same; the thread is left behind and counted. With too many of those the actor ends:
only the end of the process gets rid of them.
"""

from __future__ import annotations

import logging
import queue
import resource
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from actors.env_thread import EnvCall, EnvironmentTimeout, EnvThread, Outcome

log = logging.getLogger(__name__)
CLOSE_TIMEOUT_S: Final = 5.0
"""How long all environments together may take to close at the end."""
GRACE_S: Final = 1.0
"""How long after its deadline a call may still be ended by its own event loop, before its thread counts as stuck."""
LOOK_EVERY_S: Final = 0.1
"""How often deadlines are looked at."""
FILES_PER_THREAD: Final = 4
"""An event loop takes three; one more for what the environment opens."""

Method = Callable[[], Coroutine[Any, Any, Any]]


class TooManyStuck(RuntimeError):
    """Threads of environments do not come back; the message says where one of them is."""


class EnvRunner:
    """Owns the threads. Nothing starts before the first `open`, so that a process may be forked before."""

    def __init__(self, max_threads: int, on_outcome: Callable[[], None] = lambda: None) -> None:
        """At most `max_threads` at once, those of episodes that close included; half of them may be stuck. `on_outcome`
        is called, from another thread, whenever there is something to take."""
        self._max_threads = max_threads
        self._on_outcome = on_outcome
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._open: dict[str, tuple[EnvThread, Method, float]] = {}
        """By key: thread, closing method and its deadline."""
        self._leaving: list[EnvThread] = []
        """Of episodes that are finished: their environments close."""
        self._stuck: list[EnvThread] = []
        """Of both: those that passed a deadline and have not come back."""
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
        """That there are."""
        self._leaving = [thread for thread in self._leaving if thread.alive]
        return len(self._open) + len(self._leaving)

    @property
    def stuck(self) -> int:
        """Threads that passed a deadline and have not come back."""
        self._stuck = [thread for thread in self._stuck if thread.inside]
        return len(self._stuck)

    @property
    def has_room(self) -> bool:
        """May an episode be opened?"""
        return self.threads < self._max_threads

    def allow_files(self) -> None:
        """Raise this process's own limit of open files, as far as the system lets it, to what the threads may need."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = soft + FILES_PER_THREAD * self._max_threads
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft != resource.RLIM_INFINITY and allowed > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))

    def open(self, key: str, close: Method, timeout_s: float) -> None:
        """Begin an episode; `close` is called at its end, whatever happened, and may take `timeout_s`.

        Raises OSError or RuntimeError where the machine has no more threads."""
        self._open[key] = (EnvThread(key), close, timeout_s)

    def submit(self, key: str, what: str, method: Method, timeout_s: float) -> None:
        """Start the method called `what`; its outcome appears in `take` within about `timeout_s` seconds."""
        self._pending += 1
        self._open[key][0].submit(EnvCall(key, what, method, timeout_s, self._put))

    def finish(self, key: str) -> None:
        """End an episode: what runs is cancelled, and the environment closed. The outcome of a cancelled call is
        still to be taken."""
        thread, close, timeout_s = self._open.pop(key)
        self._leaving.append(thread)
        thread.finish(EnvCall(key, "close", close, timeout_s, self._closed))

    def take(self, timeout_s: float = 0.0) -> list[Outcome]:
        """Outcomes that are there, waiting up to `timeout_s` for the first. Raises TooManyStuck."""
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
        """Close all environments and join their threads; idempotent. Those that are stuck are left to the process."""
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        for key in list(self._open):
            self.finish(key)
        for thread in self._leaving:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if self.threads:
            keys = ", ".join(f"{each.key} ({each.where()})" for each in self._leaving[:5])
            log.warning("%d threads of environments have not come back; the first: %s", self.threads, keys)

    def _give_up_overdue(self) -> None:
        """Settle calls that are past their deadline and whose thread does nothing about it."""
        now_s = time.monotonic()
        self._look_s = now_s + LOOK_EVERY_S
        where = ""
        for thread in [*(entry[0] for entry in self._open.values()), *self._leaving]:
            call = thread.newest
            if call is None or call.settled or now_s <= call.deadline_s + GRACE_S:
                continue
            where = thread.where() or "a place that cannot be seen"
            log.warning("rollout %s: its environment does not come back; it is in\n%s", thread.key, thread.stack())
            blocks = f"{call.what} has blocked its thread for {call.timeout_s:g} s, at {where}"
            call.settle(None, EnvironmentTimeout(blocks))
            thread.interrupt()
            if thread not in self._stuck:
                self._stuck.append(thread)
                self.counts["environment_threads_stuck_total"] += 1
        if where and self.stuck > self._max_threads // 2:
            raise TooManyStuck(
                f"{self.stuck} threads of environments do not come back, expected at most {self._max_threads // 2}; "
                f"one is at {where}. Give what the environment waits for a timeout of its own, below step_timeout_s, "
                "or raise step_timeout_s (actor.environments)"
            )

    def _put(self, outcome: Outcome) -> None:
        self._outcomes.put(outcome)
        self._on_outcome()

    def _closed(self, outcome: Outcome) -> None:
        """From the episode's thread, as a rule. Spoils nothing any more, so that it is only counted and logged."""
        if outcome.error is not None:
            with self._count_lock:
                self.counts["environment_close_errors_total"] += 1
            log.warning("rollout %s: closing its environment failed: %r", outcome.key, outcome.error)
