"""The live page over real sockets: only its own address is answered, and an open page gets what was recorded."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import pytest

from stillhouse.tools.view import live_record
from stillhouse.tools.view.command import main
from stillhouse.tools.view.live_record import LiveRecord
from stillhouse.tools.view.page import Facts
from stillhouse.tools.view.rollouts import FoundRollout
from stillhouse.tools.view.serve import LiveView, serving
from stillhouse.tools.view.vocabulary import TokenTexts
from tests.patience import PATIENCE_S, Limit
from tests.tools.view import made_record as made
from tests.tools.view.slow_reader import recorded

ROOT = Path(__file__).parents[3]
MB = 1_000_000


def facts(found: Sequence[FoundRollout]) -> Facts:
    return Facts(run="r", record="f", writer="student", n_rollouts=len(found), alternatives_of="teacher", notes=())


def rollouts(step: int, *names: str, tokens: int = 5, **more: Any) -> list[Any]:
    random = np.random.default_rng(step)
    return [
        made.rollout(random, name, prompt=[7 + step % 30], task=step, sample=i, turns=((tokens, 0),), **more)
        for i, name in enumerate(names)
    ]


class Browser:
    """What a page does with the server's answers, done again: it keeps columns, blocks and texts."""

    def __init__(self, session: aiohttp.ClientSession, address: str) -> None:
        self._session = session
        self.address = address
        self.rows: dict[int, dict[str, float]] = {}
        self.blocks: list[bytearray] = []
        self.ids: list[int] = []
        self.status: dict[str, Any] = {}
        self.cursor: dict[str, int] = dict.fromkeys(
            ("changes", "prompts", "pieces", "tags", "finishes", "blocks", "last_block_bytes"), 0
        )
        self.cursor["page"] = 1

    async def ask(self, **changes: int) -> int:
        """Ask for what is new; returns the HTTP status."""
        have = json.dumps(self.cursor | changes)
        async with self._session.get(f"{self.address}new", params={"have": have}) as answer:
            if answer.status == 200:
                self._take(await answer.json())
            return answer.status

    async def all(self) -> None:
        """Ask until nothing more comes at once."""
        await asyncio.sleep(0)
        more = True
        while more:
            assert await self.ask() == 200
            more = self.status["more"]

    def _take(self, got: dict[str, Any]) -> None:
        index = np.frombuffer(base64.b64decode(got["index"]), "<u4").tolist()
        columns = {name: np.frombuffer(base64.b64decode(raw), dtype) for name, (dtype, raw) in got["columns"].items()}
        for i, row in enumerate(index):
            self.rows[row] = {name: column[i].item() for name, column in columns.items()}
        for number, more in got["blocks"]:
            if number == len(self.blocks):
                self.blocks.append(bytearray())
            self.blocks[number] += base64.b64decode(more)
        self.ids += np.frombuffer(base64.b64decode(got["pieces"]["ids"]), "<i4").tolist()
        assert len(self.rows) == got["n_rollouts"] and got["cursor"]["pieces"] == len(self.ids)
        self.cursor, self.status = got["cursor"], {**got["status"], "more": got["more"]}

    def rollout(self, row: int) -> tuple[dict[str, Any], list[int]]:
        """Details of a rollout, and the ids of its tokens after the prompt."""
        block, at = self.blocks[int(self.rows[row]["block"])], int(self.rows[row]["at"])
        n_json, n_tokens, _ = np.frombuffer(block, "<u4", 3, at).tolist()
        numbers = np.frombuffer(block, "<u4", n_tokens, at + 12 + n_json).tolist()
        return json.loads(block[at + 12 : at + 12 + n_json]), [self.ids[number] for number in numbers]

    @property
    def names(self) -> list[str]:
        """Ids of the rollouts that are not on an abandoned branch, by row."""
        return [self.rollout(row)[0]["id"] for row in sorted(self.rows) if not int(self.rows[row]["flags"]) & 8]


Go = Callable[[Browser, LiveView], Coroutine[Any, Any, None]]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question reads the record."""
    monkeypatch.setattr("stillhouse.tools.view.serve.REFRESH_S", 0.0)


def live(run: Path, go: Go, max_bytes: int = 10 * MB) -> None:
    async def body() -> None:
        with LiveRecord(run / "batches.record", TokenTexts(None), max_bytes) as record:
            view = LiveView(run, record, facts)
            async with serving(view, 0) as address, aiohttp.ClientSession() as session:
                await go(Browser(session, address), view)

    asyncio.run(asyncio.wait_for(body(), PATIENCE_S))


def append(run: Path, *records: bytes) -> None:
    with (run / "batches.record").open("ab") as file:
        file.write(b"".join(records))


# -------------------------------------------------------------------------------------------------------- the door


def test_only_the_whole_address_with_its_own_host_is_answered(tmp_path: Path) -> None:
    run = made.write_run(tmp_path, made.batch((0, 0), rollouts(0, "a")))

    async def go(browser: Browser, view: LiveView) -> None:
        root, port = browser.address.removesuffix(f"{view.token}/"), browser.address.split(":")[2].split("/")[0]
        async with aiohttp.ClientSession() as session:

            async def status(url: str, **headers: str) -> int:
                async with session.get(url, headers=headers) as answer:
                    assert answer.headers["Cache-Control"] == "no-store"
                    assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
                    assert "Access-Control-Allow-Origin" not in answer.headers
                    return answer.status

            other = view.token[:-1] + ("x" if view.token[-1] != "x" else "y")
            assert await status(browser.address) == 200
            assert await status(browser.address, Host=f"localhost:{port}") == 200
            for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port}.evil.example"):
                assert await status(browser.address, Host=host) == 403, host
                assert await status(f"{browser.address}new", Host=host) == 403, host
            for path in ("", "/", f"{view.token}", f"{other}/", "x/", "é/", f"{view.token}/../x/", "x/new"):
                assert await status(f"{root}{path}") == 404, path
            async with session.post(browser.address) as answer:
                assert answer.status in (404, 405)
        assert len(view.token) >= 32

    live(run, go)


def test_each_start_has_another_token_and_listens_on_loopback_only(tmp_path: Path) -> None:
    run = made.write_run(tmp_path, made.batch((0, 0), rollouts(0, "a")))
    tokens = set[str]()

    async def go(browser: Browser, view: LiveView) -> None:
        tokens.add(view.token)
        port = int(browser.address.split(":")[2].split("/")[0])
        bound = [one.laddr for one in psutil.Process().net_connections() if one.status == psutil.CONN_LISTEN]
        assert [address.ip for address in bound if address.port == port] == ["127.0.0.1"]

    live(run, go)
    live(run, go)
    assert len(tokens) == 2


@pytest.mark.parametrize("have", ["", "{}", "[]", '{"page": -1}', '{"page": 1, "changes": 1e99}', "x" * 9000])
def test_what_is_no_cursor_is_refused(tmp_path: Path, have: str) -> None:
    run = made.write_run(tmp_path, made.batch((0, 0), rollouts(0, "a")))

    async def go(browser: Browser, view: LiveView) -> None:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{browser.address}new", params={"have": have}) as answer,
        ):
            assert answer.status == 400
        assert await browser.ask(page=7) == 410
        assert await browser.ask(changes=99) == 410

    live(run, go)


# ------------------------------------------------------------------------------------------------- what is recorded


def test_an_open_page_gets_what_a_reader_that_shares_no_code_finds_in_the_record(tmp_path: Path) -> None:
    """Batch by batch; one is there in part only, as its writer is at work."""
    run = made.everything(tmp_path)
    whole = (run / "batches.record").read_bytes()
    extra = [made.batch((0, 3 + n), rollouts(3 + n, f"new-{n}-0", f"new-{n}-1", tag=f"t{n}")) for n in range(4)]

    async def go(browser: Browser, view: LiveView) -> None:
        await browser.all()
        for record in extra:
            append(run, record[:40])
            before = len(browser.rows)
            await browser.all()
            assert len(browser.rows) == before
            append(run, record[40:])
            await browser.all()
            assert len(browser.rows) == before + 2
        expected = recorded((run / "batches.record").read_bytes())
        assert len(expected) == len(browser.rows) == 16
        for row, one in enumerate(expected.values()):
            details, ids = browser.rollout(row)
            assert details["id"] == one.id and ids == [token.id for token in one.tokens[one.n_prompt :]]
        assert browser.status["n_recorded"] == 16 and browser.status["steps"] == 7

    live(run, go)
    assert (run / "batches.record").read_bytes().startswith(whole)


def test_a_rollout_that_comes_in_parts_is_one_row_that_changes(tmp_path: Path) -> None:
    (one,) = rollouts(0, "long", tokens=9)
    parts = [made.cut(one, 4, (1, 4)), made.cut(one, 7, (4, 7)), made.cut(one, 10, (7, 10), final=True)]
    run = made.write_run(tmp_path, made.batch((0, 0), [parts[0]]))

    async def go(browser: Browser, view: LiveView) -> None:
        trained: list[tuple[int, int, int]] = []
        for step in (1, 2, 3):
            await browser.all()
            row = browser.rows[0]
            trained.append((len(browser.rows), int(row["length"]), int(row["trained"])))
            if step < 3:
                append(run, made.batch((0, step), [parts[step]]))
        assert trained == [(1, 3, 3), (1, 6, 6), (1, 9, 9)]
        assert [part[:2] for part in browser.rollout(0)[0]["trained"]] == [[1, 4], [4, 7], [7, 10]]

    live(run, go)


def test_what_a_learner_went_back_behind_is_hidden_and_what_it_made_again_is_there(tmp_path: Path) -> None:
    steps = [made.batch((0, n), rollouts(n, f"s{n}")) for n in range(4)]
    run = made.write_run(tmp_path, *steps)

    async def go(browser: Browser, view: LiveView) -> None:
        await browser.all()
        assert browser.names == ["s0", "s1", "s2", "s3"]
        append(run, made.resumed((1, 2), (0, 2)), made.batch((1, 2), rollouts(2, "again", epoch=1, version=2)))
        await browser.all()
        assert browser.names == ["s0", "s1", "again"]

    live(run, go)


def test_a_full_page_takes_nothing_more_and_says_what_it_leaves_out_until_it_is_loaded_again(tmp_path: Path) -> None:
    steps = [made.batch((0, n), rollouts(n, f"s{n}", tokens=1500)) for n in range(60)]
    run = made.write_run(tmp_path, *steps[:2])

    async def go(browser: Browser, view: LiveView) -> None:
        append(run, *steps[2:])
        await browser.all()
        n_shown = len(browser.rows)
        assert 5 < n_shown < 30 and browser.names == [f"s{n}" for n in range(n_shown)]
        assert browser.status["n_not_shown"] == 60 - n_shown and browser.status["n_recorded"] == 60
        size = sum(map(len, browser.blocks))
        await browser.all()
        assert sum(map(len, browser.blocks)) == size
        async with aiohttp.ClientSession() as session, session.get(browser.address) as answer:
            page = await answer.text()
        assert '"page":2' in page
        assert await browser.ask() == 410, "the old page is told"
        again = Browser(aiohttp.ClientSession(), browser.address)
        again.cursor["page"] = 2
        await again.all()
        await again._session.close()  # pyright: ignore[reportPrivateUsage]
        places = [int(name[1:]) for name in again.names]
        assert max(places) > 40 and len(places) < 20 and again.status["n_not_shown"] == 0

    live(run, go, max_bytes=200_000)


def test_one_question_reads_a_bounded_part_of_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_record, "REFRESH_BYTES", 1)
    run = made.write_run(tmp_path, made.batch((0, 0), rollouts(0, "s0")))

    async def go(browser: Browser, view: LiveView) -> None:
        append(run, *(made.batch((0, n), rollouts(n, f"s{n}")) for n in range(1, 6)))
        seen: list[int] = []
        for _ in range(6):
            assert await browser.ask() == 200
            seen.append(len(browser.rows))
        assert seen == [2, 3, 4, 5, 6, 6] and not browser.status["more"]

    live(run, go)


def test_a_record_that_is_damaged_or_replaced_is_said_and_the_page_stays(tmp_path: Path) -> None:
    run = made.write_run(tmp_path, made.batch((0, 0), rollouts(0, "s0")), made.batch((0, 1), rollouts(1, "s1")))

    async def go(browser: Browser, view: LiveView) -> None:
        await browser.all()
        assert browser.status["error"] == ""
        (run / "batches.record").write_bytes(b"short")
        await browser.all()
        assert "is shorter than it was" in browser.status["error"] and browser.names == ["s0", "s1"]

    live(run, go)


# ---------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def sigint_is_heard() -> Iterator[None]:
    """A shell has the programs that it starts in the background ignore SIGINT, and their children with them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("sigint_is_heard")
def test_the_command_waits_for_the_first_batch_says_when_the_run_ended_and_ends_by_ctrl_c(tmp_path: Path) -> None:
    run = made.write_run(tmp_path)
    command = [sys.executable, str(ROOT / "launch" / "cluster.py"), "view", str(run), "--live", "--no-open"]
    output = tmp_path / "said"
    with output.open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
    try:
        until(output, "waiting for the first batch")
        append(run, made.batch((0, 0), rollouts(0, "s0")))
        until(output, "live at http://127.0.0.1:")
        assert "has ended" not in output.read_text()
        (run / "summary.json").write_text('{"state": "finished"}')
        until(output, "the run has ended (finished); the page stays until Ctrl-C")
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0, output.read_text()
        assert "stopped" in output.read_text() and "Traceback" not in output.read_text()
    finally:
        process.kill()
        process.wait()


def until(output: Path, text: str) -> None:
    limit = Limit(PATIENCE_S)
    while text not in output.read_text(encoding="utf-8"):
        assert not limit.passed, f"{text!r} was not said: {output.read_text(encoding='utf-8')}"
        signal.sigtimedwait([], 0.05)


def test_a_run_that_ended_without_a_batch_and_a_port_without_live_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made.write_run(tmp_path)
    (run / "summary.json").write_text('{"state": "failed"}')
    assert main([str(run), "--live"]) == 2
    assert "the run ended (failed) and recorded no batch" in capsys.readouterr().err
    assert main([str(run), "--port", "80000", "--live"]) == 2
    assert "--port: got '80000', expected a number from 1 to 65535" in capsys.readouterr().err
    assert main([str(run), "--port", "8000"]) == 2
    assert "--port: only --live uses a port; add --live" in capsys.readouterr().err
