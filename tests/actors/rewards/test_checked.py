"""The rewards `math` and `json_schema` with the real packages, in their processes."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillhouse.actors.rewards import Answered, checked, checkers, make_reward
from stillhouse.actors.rewards.base import Verdict
from stillhouse.actors.rewards.checked import _PLAIN  # pyright: ignore[reportPrivateUsage]
from stillhouse.actors.rewards.checkers import CHECKERS, CheckerLost, Checkers
from tests.actors.adapters.conftest import needs
from tests.actors.rewards.conftest import Judge
from tests.patience import PATIENCE_S

pytestmark = [needs("math_verify"), needs("jsonschema")]
TOO_HARD = Verdict(0.0, {"reward_too_hard": 1.0})
PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    CHECKERS.close()


@pytest.fixture
def own() -> Iterator[Checkers]:
    made = Checkers(1)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("response", "ground_truth", "reward"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"so \boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"$(x+1)^2$", r"$x^2+2x+1$", 1.0),
        ("it is 1234", "1,234", 1.0),
        (r"$\{2,1\}$", r"\{1,2\}", 1.0),
        ("it is 7", "8", 0.0),
        ("I cannot say", "8", 0.0),
        ("it is 7", None, None),
    ],
)
def test_math(judge: Judge, response: str, ground_truth: str | None, reward: float | None) -> None:
    assert judge("math", response, ground_truth).reward == reward


@settings(max_examples=12, deadline=None)
@given(st.from_regex(_PLAIN, fullmatch=True).filter(lambda text: len(text) < 12))
def test_what_is_called_readable_without_the_package_is_so_by_the_package(text: str) -> None:
    assert not CHECKERS.ask({"check": "math", "limit_s": 5.0, "ground_truth": text}, wait_s=PATIENCE_S)


def test_math_where_a_pattern_says(judge: Judge) -> None:
    pattern = r"#\s*(\S+)"
    assert judge("math", "7 #1/2 8", "0.5", answer_pattern=pattern).reward == 1.0
    assert judge("math", "0.5", "0.5", answer_pattern=pattern).reward == 0.0


def test_math_without_a_readable_ground_truth_is_unscored(judge: Judge) -> None:
    verdict = judge("math", "7", "")
    assert (verdict.reward, verdict.info["reward_unscored_ground_truth_unreadable"]) == (None, 1.0)


def test_math_works_on_threads_side_by_side(judge: Judge) -> None:
    def of(number: int) -> Verdict:
        return judge("math", f"it is {number}", str(number // 2 * 2))

    with ThreadPoolExecutor(8) as threads:
        verdicts = list(threads.map(of, range(16)))
    assert [verdict.reward for verdict in verdicts] == [1.0, 0.0] * 8


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine half a second of a processor takes long, and an answer that takes longer is unscored."""
    monkeypatch.setattr(checked, "WAIT_S", PATIENCE_S)


def test_a_formula_without_end_is_wrong_and_counted_and_the_next_one_is_judged(judge: Judge) -> None:
    assert judge("math", "$9^{9^{9^9}}$", "9", limit_s=0.5) == TOO_HARD
    assert judge("math", "9", "9").reward == 1.0


def test_a_rollout_that_no_longer_waits_leaves_the_processes_usable(judge: Judge) -> None:
    async def cancelled() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await make_reward("math", limit_s=0.4)(Answered("$9^{9^{9^9}}$", "9"))

    asyncio.run(cancelled())
    assert judge("math", "9", "9").reward == 1.0


def test_a_check_that_keeps_the_lock_in_c_is_ended_by_the_system(judge: Judge) -> None:
    """Python's `re` lets no signal through."""
    schema = {"type": "string", "pattern": "^(a|a|aa)+$"}
    assert judge("json_schema", '"' + "a" * 40 + 'b"', schema=schema, limit_s=0.3) == TOO_HARD
    assert judge("json_schema", '"aaa"', schema=schema, limit_s=0.3).reward == 1.0


def test_a_process_that_was_killed_leaves_unscored_and_is_replaced(own: Checkers) -> None:
    request = {"check": "json_schema", "limit_s": 5.0, "response": "7", "schema": {}}
    assert own.ask(request, wait_s=PATIENCE_S) == {"reward": 1.0}
    process: Any = own._all[0]._process  # pyright: ignore[reportPrivateUsage]
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(CheckerLost) as lost:
        own.ask(request, wait_s=PATIENCE_S)
    assert (lost.value.reason, lost.value.too_hard) == ("checker_lost", False)
    assert own.ask(request, wait_s=PATIENCE_S) == {"reward": 1.0}


def test_no_free_process_is_unscored_not_wrong(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stillhouse.actors.rewards.checked.CHECKERS", Checkers(0))
    monkeypatch.setattr("stillhouse.actors.rewards.checked.WAIT_S", 0.05)
    verdict = judge("math", "7", "7", limit_s=0.05)
    assert (verdict.reward, verdict.info["reward_unscored_checkers_busy"]) == (None, 1.0)


def test_the_process_gets_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "secret")
    process = checkers._start()  # pyright: ignore[reportPrivateUsage]
    try:
        assert b"secret" not in Path(f"/proc/{process.pid}/environ").read_bytes()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ('{"age": 7}', 1.0),
        ('Here it is:\n```json\n{"age": 7}\n```\nDone.', 1.0),
        ('{"age": "7"}', 0.0),
        ('{"age": 7} and more', 0.0),
        ('{"age": NaN}', 0.0),
        ("[" * 100_000, 0.0),
        ("", 0.0),
    ],
)
def test_json_schema(judge: Judge, response: str, reward: float) -> None:
    assert judge("json_schema", response, schema=PERSON).reward == reward


def test_a_schema_that_is_none_is_refused_and_none_is_fetched(judge: Judge) -> None:
    with pytest.raises(ValueError, match=r"'json_schema': schema: not a JSON schema, at \$.type"):
        judge("json_schema", "1", schema={"type": "integr"})
    elsewhere = judge("json_schema", "1", schema={"$ref": "http://127.0.0.1:1/schema"})
    assert elsewhere.info["reward_unscored_schema_reference"] == 1.0


def test_a_schema_that_refers_to_a_server_does_not_reach_it(judge: Judge) -> None:
    asked: list[str] = []

    class Schemas(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"type": "integer"}')

    with ThreadingHTTPServer(("127.0.0.1", 0), Schemas) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            schema = {"$ref": f"http://127.0.0.1:{server.server_port}/schema"}
            assert judge("json_schema", "1", schema=schema).info["reward_unscored_schema_reference"] == 1.0
        finally:
            server.shutdown()
            thread.join()
    assert not asked
