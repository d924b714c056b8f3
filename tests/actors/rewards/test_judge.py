"""The reward `judge` with a real HTTP server that is well, slow, broken, or writes nonsense."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aiohttp import web

from stillhouse.actors.rewards import Answered, Verdict, make_reward
from tests.actors.rewards.conftest import Judge
from tests.patience import PATIENCE_S


class Server:
    """An OpenAI-compatible server on a thread of its own. `say` answers its requests."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.says: list[Callable[[], web.StreamResponse | float]] = []
        """One after the other, the last one for ever; a number: seconds to wait before a good answer."""
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ready, self._stop = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)

    async def _serve(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        said = self.says[min(len(self.asked), len(self.says)) - 1]()
        if isinstance(said, float | int):
            await asyncio.sleep(said)
            return writes("[[10]]")()
        return said

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE_S)
        self._loop.close()


def writes(text: object) -> Callable[[], web.StreamResponse]:
    """A good answer with this text."""
    return lambda: web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}]})


def status(code: int) -> Callable[[], web.StreamResponse]:
    return lambda: web.Response(status=code, text="no", headers={"Location": "/v1/chat/completions"})


def body(text: str) -> Callable[[], web.StreamResponse]:
    return lambda: web.Response(text=text)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def unscored(reason: str) -> Verdict:
    return Verdict(None, {"reward_unscored": 1.0, f"reward_unscored_judge_{reason}": 1.0})


def test_the_judge_reads_all_three_and_its_last_score_counts(
    judge: Judge, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.says = [writes("Not [[2]]: it is right, [[7.5]]")]
    monkeypatch.setenv("JUDGE_KEY", "secret")
    options = {"base_url": server.url, "model": "m", "key_env": "JUDGE_KEY"}
    assert judge("judge", "two, {ground_truth}", "2", **options) == Verdict(0.75)
    text = server.asked[0]["messages"][0]["content"]
    assert "Task:\n1+1=\n" in text and "Expected answer:\n2\n" in text and "Response:\ntwo, {ground_truth}\n" in text
    assert (server.asked[0]["model"], server.keys) == ("m", ["Bearer secret"])


def test_own_prompt_pattern_and_scale(judge: Judge, server: Server) -> None:
    server.says = [writes('{"score": 4}')]
    options = {"prompt": 'Answer {"score": 1..5}: {response}', "score_pattern": r'"score": (\d)', "lowest": 1}
    assert judge("judge", "x", None, base_url=server.url, model="m", highest=5, **options) == Verdict(0.75)
    assert server.asked[0]["messages"][0]["content"] == 'Answer {"score": 1..5}: x'


@pytest.mark.parametrize(
    ("says", "verdict", "asked"),
    [
        ([status(500), status(429), writes("[[10]]")], Verdict(1.0), 3),
        ([status(503)], unscored("error"), 3),
        ([status(401)], unscored("refused"), 1),
        ([status(307)], unscored("refused"), 1),
        ([body("<html>"), writes("[[0]]")], Verdict(0.0), 2),
        ([body("[" * 100_000)], unscored("garbage"), 3),
        ([body('{"choices": []}')], unscored("garbage"), 3),
        ([writes(None)], unscored("garbage"), 3),
        ([body("x" * (5 << 20))], unscored("garbage"), 1),
        ([writes("I would rather not say")], unscored("unparsable"), 1),
        ([writes("[[11]]")], unscored("out_of_range"), 1),
        ([lambda: 3.0, writes("[[5]]")], Verdict(0.5), 2),
        ([lambda: 60.0], unscored("timeout"), 2),
    ],
)
def test_a_judge_that_is_not_well(
    judge: Judge,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    says: list[Callable[[], web.StreamResponse | float]],
    verdict: Verdict,
    asked: int,
) -> None:
    monkeypatch.setattr("stillhouse.actors.rewards.judge.FIRST_PAUSE_S", 0.01)
    server.says = says
    slow = (asked == 2 and "timeout" in str(verdict)) or verdict.reward == 0.5
    limits: dict[str, Any] = {"timeout_s": 3.0, "tries": 2} if slow else {"timeout_s": PATIENCE_S}
    assert judge("judge", "x", "y", base_url=server.url, model="m", **limits) == verdict
    assert len(server.asked) == asked


def test_a_judge_that_is_not_there(judge: Judge, server: Server) -> None:
    url = server.url.replace("127.0.0.1", "no-such-host.invalid")
    verdict = judge("judge", "x", "y", base_url=url, model="m", tries=1, timeout_s=PATIENCE_S)
    assert verdict == unscored("unreachable")


def test_all_tries_together_take_no_longer_than_the_limit(server: Server) -> None:
    """Pauses between tries count too."""
    server.says = [status(500)]
    reward = make_reward("judge", base_url=server.url, model="m", tries=100, timeout_s=0.5)

    async def bounded() -> Verdict:
        async with asyncio.timeout(PATIENCE_S):
            return await reward(Answered("x", "y"))

    assert asyncio.run(bounded()) in (unscored("error"), unscored("timeout"))  # a try has 5 ms
    assert len(server.asked) < 10


def test_without_ground_truth_the_judge_is_not_asked_for_one(judge: Judge, server: Server) -> None:
    verdict = judge("judge", "x", None, base_url=server.url, model="m")
    assert (verdict.reward, verdict.info["reward_unscored_no_ground_truth"]) == (None, 1.0)
    assert server.asked == []
