"""Waiting for what cannot be interrupted: with a deadline, and an owner who may say that it is enough. No torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Final, TypeVar

from weights.sink import GroupBroken, GroupInterrupted, Interrupted

T = TypeVar("T")

_SLICE_S: Final = 0.05


def in_thread(act: Callable[[], T], *, name: str, daemon: bool) -> Future[T]:
    """A thread for one thing, which is left behind when nobody waits for it any more. `daemon`: the process may end
    before it."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(act())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=daemon).start()
    return done


def wait_patiently(future: Future[T], deadline_s: float, interrupted: Interrupted, missed: str) -> T:
    """Its result, or what it raised. Raises GroupInterrupted, and GroupBroken (`missed`) past the deadline; then it
    goes on by itself."""
    while not wait_for([future], _SLICE_S).done:
        reason = interrupted()
        if reason is not None:
            raise GroupInterrupted(reason)
        if time.monotonic() > deadline_s:
            raise GroupBroken(missed)
    return future.result()
