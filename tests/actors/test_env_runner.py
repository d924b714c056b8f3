"""Threads of environments: every call comes back once, in time, as a result or an error; nothing outlives close."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import pytest

import stillhouse.actors.env_runner
from stillhouse.actors.env_runner import EnvRunner, TooManyStuck
from stillhouse.actors.env_thread import EnvironmentTimeout, Outcome
from tests.patience import PATIENCE_S, Limit


@pytest.fixture
def runner() -> Iterator[EnvRunner]:
    threads = set(threading.enumerate())
    runner = EnvRunner(64)
    yield runner
    runner.close()
    assert set(threading.enumerate()) <= threads, "a thread outlived close"


class Rollout:
    """Opens an episode, submits its calls, and notes its closing."""

    def __init__(self, runner: EnvRunner, key: str, close_timeout_s: float = PATIENCE_S) -> None:
        self.key, self._runner = key, runner
        self.closed_in: list[threading.Thread] = []
        runner.open(key, self._close, close_timeout_s)

    def call(self, call: Callable[[], Coroutine[Any, Any, Any]], timeout_s: float = PATIENCE_S) -> None:
        self._runner.submit(self.key, "step", call, timeout_s)

    def finish(self) -> None:
        self._runner.finish(self.key)

    async def _close(self) -> None:
        self.closed_in.append(threading.current_thread())


async def answer(value: object) -> object:
    await asyncio.sleep(0)
    return value


async def fail(error: BaseException) -> object:
    await asyncio.sleep(0)
    raise error


def outcomes(runner: EnvRunner, n: int) -> dict[str, Outcome]:
    """The next `n` outcomes by key."""
    found: list[Outcome] = []
    limit = Limit()
    while len(found) < n:
        assert not limit.passed, f"{found} came, expected {n}"
        found += runner.take(0.05)
    assert len(found) == n
    return {outcome.key: outcome for outcome in found}


def until(met: Callable[[], bool]) -> None:
    limit = Limit()
    while not met():
        assert not limit.passed, "it never came to that"
        time.sleep(0.01)


class Hanging:
    """A call that never ends by itself, and says what ended it."""

    def __init__(self) -> None:
        self.running = threading.Event()
        self.cancelled = threading.Event()

    async def call(self) -> None:
        self.running.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


class Blocking:
    """A call that blocks its thread until the test lets it go, as `time.sleep` would."""

    def __init__(self) -> None:
        self.running = threading.Event()
        self.let_go = threading.Event()

    async def call(self) -> str:
        self.running.set()
        self.let_go.wait()
        return "too late"


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads count as stuck right after their deadline."""
    monkeypatch.setattr(stillhouse.actors.env_runner, "GRACE_S", 0.2)
    monkeypatch.setattr(stillhouse.actors.env_runner, "CLOSE_TIMEOUT_S", PATIENCE_S)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()], ids=repr)
def test_what_would_end_the_event_loop_ends_its_own_call_only(runner: EnvRunner, error: BaseException) -> None:
    """A verifier that runs the student's program meets exit(); a client library may cancel itself."""
    bad = Rollout(runner, "bad")
    bad.call(partial(fail, error))
    found = outcomes(runner, 1)
    assert isinstance(found["bad"].error, RuntimeError) and type(error).__name__ in str(found["bad"].error)
    bad.call(partial(answer, 7))
    assert outcomes(runner, 1)["bad"].result == 7


def test_a_task_of_the_environments_own_that_says_exit_ends_nothing_else(runner: EnvRunner) -> None:
    async def starts_one() -> str:
        asyncio.get_running_loop().create_task(fail(SystemExit(3)))  # as a careless environment would
        await asyncio.sleep(0.05)
        return "still here"

    rollout = Rollout(runner, "r")
    rollout.call(starts_one)
    assert outcomes(runner, 1)["r"].result == "still here"
    rollout.finish()
    until(lambda: runner.threads == 0)
    assert len(rollout.closed_in) == 1


def test_calls_of_an_episode_share_one_event_loop_and_background_tasks_go_on_between_them(runner: EnvRunner) -> None:
    ticks: list[asyncio.AbstractEventLoop] = []

    async def tick() -> None:
        while True:
            ticks.append(asyncio.get_running_loop())
            await asyncio.sleep(0.001)

    tasks: list[asyncio.Task[None]] = []

    async def begin() -> asyncio.AbstractEventLoop:
        tasks.append(asyncio.create_task(tick()))
        return asyncio.get_running_loop()

    rollout = Rollout(runner, "r")
    rollout.call(begin)
    loop = outcomes(runner, 1)["r"].result
    n = len(ticks)
    until(lambda: len(ticks) > n + 3)
    rollout.finish()
    until(lambda: runner.threads == 0)
    assert set(ticks) == {loop} and tasks[0].cancelled()


def test_a_timeout_of_the_environments_own_is_not_taken_for_its_deadline(runner: EnvRunner) -> None:
    Rollout(runner, "r").call(partial(fail, TimeoutError("the sandbox did not answer")))
    error = outcomes(runner, 1)["r"].error
    assert type(error) is TimeoutError


def test_an_episode_that_is_finished_before_its_call_begins_ends_at_once(runner: EnvRunner) -> None:
    """Both may reach the thread in one turn of its event loop; the call must not begin then, and has an outcome."""
    for i in range(50):
        rollout = Rollout(runner, f"r{i}")
        rollout.call(Hanging().call, timeout_s=3600.0)
        rollout.finish()
    assert len(outcomes(runner, 50)) == 50
    until(lambda: runner.threads == 0)


@pytest.mark.usefixtures("soon")
def test_an_endless_loop_is_ended(runner: EnvRunner) -> None:
    """Its thread would take its share of every other's time for ever."""

    async def spin() -> None:
        while True:
            pass

    rollout = Rollout(runner, "spins")
    rollout.call(spin, 0.05)
    assert isinstance(outcomes(runner, 1)["spins"].error, EnvironmentTimeout)
    rollout.finish()
    until(lambda: runner.threads == 0)
    assert len(rollout.closed_in) == 1


@pytest.mark.usefixtures("soon")
def test_a_call_that_will_not_be_cancelled_is_given_up(runner: EnvRunner) -> None:
    async def stubborn() -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    rollout = Rollout(runner, "r")
    rollout.call(stubborn, 0.05)
    assert isinstance(outcomes(runner, 1)["r"].error, EnvironmentTimeout)
    rollout.finish()
    until(lambda: runner.threads == 0)


@pytest.mark.usefixtures("soon")
def test_with_too_many_stuck_threads_it_says_so_and_what_to_do() -> None:
    runner = EnvRunner(4)
    calls = [Blocking() for _ in range(3)]
    for i, blocking in enumerate(calls):
        Rollout(runner, f"r{i}").call(blocking.call, 0.05)
    with pytest.raises(
        TooManyStuck, match=r"3 environment threads .* expected at most 2; one is at test_env_runner.py:\d+ in call"
    ):
        until(lambda: bool(runner.take() and False))
    for blocking in calls:
        blocking.let_go.set()
    runner.close()
    assert runner.threads == 0


def test_many_threads_may_open_their_files() -> None:
    """A process may mostly have 1,024, and an event loop takes three."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        runner = EnvRunner(100)
        runner.allow_files()
        for i in range(100):
            Rollout(runner, f"r{i}")
        runner.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert runner.threads == 0


def test_a_closing_that_fails_is_counted_and_said(runner: EnvRunner, caplog: pytest.LogCaptureFixture) -> None:
    runner.open("r", partial(fail, OSError("the sandbox is gone")), PATIENCE_S)
    runner.finish("r")
    until(lambda: runner.threads == 0)
    assert runner.counts["environment_close_errors_total"] == 1 and "the sandbox is gone" in caplog.text


def test_the_owner_is_woken_once_there_is_something_to_take() -> None:
    woken = threading.Semaphore(0)
    runner = EnvRunner(4, lambda: woken.release())
    for key, call in (("good", partial(answer, 1)), ("bad", partial(fail, ValueError("no")))):
        Rollout(runner, key).call(call)
        assert woken.acquire(timeout=PATIENCE_S)
        assert [outcome.key for outcome in runner.take()] == [key]
    runner.close()
    assert not woken.acquire(blocking=False)


def test_finishing_an_episode_cancels_what_runs_and_closes_behind_it(runner: EnvRunner) -> None:
    cleaned = threading.Event()
    hanging = Hanging()

    async def tidy() -> None:
        try:
            await hanging.call()
        finally:
            await asyncio.sleep(0)  # letting go may itself take a turn of the loop
            cleaned.set()

    rollout = Rollout(runner, "tidy")
    rollout.call(tidy)
    assert hanging.running.wait(PATIENCE_S)
    rollout.finish()
    until(lambda: runner.threads == 0)
    assert cleaned.is_set() and len(rollout.closed_in) == 1 and set(outcomes(runner, 1)) == {"tidy"}


def test_close_cancels_what_runs_closes_all_and_ends_the_threads(runner: EnvRunner) -> None:
    of_others = set(threading.enumerate())
    calls = [Hanging() for _ in range(3)]
    rollouts = [Rollout(runner, f"r{i}") for i in range(3)]
    for rollout, hanging in zip(rollouts, calls, strict=True):
        rollout.call(hanging.call)
    assert all(hanging.running.wait(PATIENCE_S) for hanging in calls)
    runner.close()
    assert all(hanging.cancelled.is_set() for hanging in calls)
    assert all(len(rollout.closed_in) == 1 for rollout in rollouts)
    own = set(threading.enumerate()) - of_others
    assert not any(thread.name.startswith("environment") for thread in own)
    runner.close()


def test_an_unused_runner_has_no_thread_and_may_be_closed() -> None:
    threads = set(threading.enumerate())
    unused = EnvRunner(4)
    assert set(threading.enumerate()) <= threads, "a thread before the fork"
    unused.close()
