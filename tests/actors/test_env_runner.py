"""The environments' event loop: every call comes back once, as a result or as an error, and nothing outlives close."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from actors.env_runner import EnvRunner, Outcome
from tests.patience import PATIENCE_S, Limit

WAIT_S = PATIENCE_S


@pytest.fixture
def runner() -> Iterator[EnvRunner]:
    threads = set(threading.enumerate())
    runner = EnvRunner()
    yield runner
    runner.close()
    assert set(threading.enumerate()) == threads, "a thread outlived close"


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


def test_each_call_comes_back_once_under_its_key(runner: EnvRunner) -> None:
    for i in range(20):
        runner.submit(f"r{i}", answer(i), WAIT_S)
    assert runner.pending == 20
    assert {key: outcome.result for key, outcome in outcomes(runner, 20).items()} == {f"r{i}": i for i in range(20)}
    assert (runner.pending, runner.take()) == (0, [])


def test_nothing_is_waited_for_while_nothing_is_asked(runner: EnvRunner) -> None:
    """A take that waited here would hang the test: there is no such call."""
    assert runner.take(timeout_s=3600.0) == []


def test_an_exception_is_the_outcome_of_its_own_call_only(runner: EnvRunner) -> None:
    error = KeyError("tool")
    runner.submit("bad", fail(error), WAIT_S)
    runner.submit("good", answer(7), WAIT_S)
    found = outcomes(runner, 2)
    assert found["bad"] == Outcome("bad", None, error)
    assert found["good"] == Outcome("good", 7, None)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()], ids=repr)
def test_what_would_end_the_event_loop_ends_its_own_call_only(runner: EnvRunner, error: BaseException) -> None:
    """A verifier that runs the student's program meets exit(); a client library may cancel itself."""
    hanging = Hanging()
    runner.submit("slow", hanging.call(), WAIT_S)
    runner.submit("bad", fail(error), WAIT_S)
    found = outcomes(runner, 1)
    assert isinstance(found["bad"].error, RuntimeError) and type(error).__name__ in str(found["bad"].error)
    runner.submit("good", answer(7), WAIT_S)
    assert outcomes(runner, 1)["good"].result == 7
    assert not hanging.cancelled.is_set()


def test_a_call_past_its_deadline_ends_as_a_timeout_and_is_cancelled(runner: EnvRunner) -> None:
    hanging = Hanging()
    runner.submit("slow", hanging.call(), 0.05)
    runner.submit("quick", answer(1), WAIT_S)
    found = outcomes(runner, 2)
    assert isinstance(found["slow"].error, TimeoutError) and found["quick"].error is None
    assert hanging.cancelled.is_set()


def test_a_slow_call_does_not_hold_up_the_others(runner: EnvRunner) -> None:
    hanging = Hanging()
    runner.submit("slow", hanging.call(), WAIT_S)
    runner.submit("quick", answer(1), WAIT_S)
    assert set(outcomes(runner, 1)) == {"quick"}
    assert runner.pending == 1 and not hanging.cancelled.is_set()


def test_the_owner_is_woken_once_there_is_something_to_take() -> None:
    woken = threading.Semaphore(0)
    runner = EnvRunner(lambda: woken.release())
    for key, call in (("good", answer(1)), ("bad", fail(ValueError("no")))):
        runner.submit(key, call, WAIT_S)
        assert woken.acquire(timeout=WAIT_S)
        assert [outcome.key for outcome in runner.take()] == [key]
    runner.close()
    assert not woken.acquire(blocking=False)


def test_close_cancels_what_runs_and_ends_the_thread(runner: EnvRunner) -> None:
    calls = [Hanging() for _ in range(3)]
    for i, hanging in enumerate(calls):
        runner.submit(f"r{i}", hanging.call(), WAIT_S)
    assert all(hanging.running.wait(WAIT_S) for hanging in calls)
    runner.close()
    assert all(hanging.cancelled.is_set() for hanging in calls)
    assert "environments" not in {thread.name for thread in threading.enumerate()}
    runner.close()


def test_close_lets_calls_clean_up_before_the_thread_ends(runner: EnvRunner) -> None:
    cleaned = threading.Event()
    hanging = Hanging()

    async def tidy() -> None:
        try:
            await hanging.call()
        finally:
            await asyncio.sleep(0)  # letting go may itself take a turn of the loop
            cleaned.set()

    runner.submit("tidy", tidy(), WAIT_S)
    assert hanging.running.wait(WAIT_S)
    runner.close()
    assert cleaned.is_set()


def test_a_call_submitted_right_before_close_is_not_left_over(runner: EnvRunner) -> None:
    """Whether it began or not, nothing complains of a coroutine that was never awaited (warnings are errors)."""
    for i in range(50):
        runner.submit("r", answer(i), WAIT_S)
    runner.close()


def test_an_unused_runner_has_no_thread_and_may_be_closed() -> None:
    threads = set(threading.enumerate())
    unused = EnvRunner()
    assert set(threading.enumerate()) == threads, "a thread before the fork"
    unused.close()
