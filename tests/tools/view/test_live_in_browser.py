"""The live page in a real Chromium: new rollouts appear, and the reader's place stays as it was."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from stillhouse.tools.view.live_record import LiveRecord
from stillhouse.tools.view.serve import LiveView, serving
from stillhouse.tools.view.vocabulary import TokenTexts
from tests.patience import PATIENCE_S, Limit
from tests.tools.view import made_record as made
from tests.tools.view.browser import Tab, chromium, tab
from tests.tools.view.slow_reader import recorded
from tests.tools.view.test_in_browser import EVERYTHING, same_token
from tests.tools.view.test_live import MB, append, facts, rollouts

pytestmark = pytest.mark.slow
Go = Callable[[Tab, str, LiveView], Coroutine[Any, Any, None]]


@pytest.fixture(autouse=True)
def browser() -> str:
    return chromium()


def live(run: Path, go: Go, max_bytes: int = 10 * MB) -> None:
    async def body() -> None:
        with LiveRecord(run / "batches.record", TokenTexts(None), max_bytes) as record:
            view = LiveView(run, record, facts)
            async with serving(view, 0) as address, tab(run.parent / "profile") as page:
                await page.open(address)
                await go(page, address, view)

    asyncio.run(body())


async def until(page: Tab, expression: str) -> None:
    limit = Limit(PATIENCE_S)
    while not await page.value(expression):
        assert not limit.passed, f"{expression} did not become true; {page.errors}"
        await asyncio.sleep(0.05)


def test_the_page_decodes_what_came_later_as_what_it_came_with(tmp_path: Path) -> None:
    run = made.everything(tmp_path)

    async def go(page: Tab, address: str, view: LiveView) -> None:
        more = [made.batch((0, 3 + n), rollouts(3 + n, f"n{n}-0", f"n{n}-1", tag=made.HOSTILE[n])) for n in range(3)]
        for n, batch in enumerate(more):
            append(run, batch)
            await until(page, f"nRollouts === {8 + 2 * (n + 1)}")
        expected = list(recorded((run / "batches.record").read_bytes()).values())
        shown: list[Any] = await page.value(EVERYTHING)
        assert [name for name, _ in shown] == [one.id for one in expected]
        for (_, tokens), one in zip(shown, expected, strict=True):
            assert len(tokens) == len(one.tokens) and all(map(same_token, tokens, one.tokens))
        tags = await page.value("[...byId('tag').options].map((option) => option.textContent)")
        assert {made.HOSTILE[0], made.HOSTILE[1]} <= set(tags)
        assert await page.value("typeof window.hit") == "undefined"
        assert page.errors == [] and all(url.startswith(address) for url in page.requests)

    live(run, go)


def test_the_reader_stays_at_the_same_rollout_token_row_and_filter(tmp_path: Path) -> None:
    steps = [made.batch((0, n), rollouts(n % 3, *(f"s{n}-{i}" for i in range(40)))) for n in range(8)]
    run = made.write_run(tmp_path, *steps[:3])

    async def go(page: Tab, address: str, view: LiveView) -> None:
        await page.value("byId('down').checked = true; applyFilters(); choose(listed[30]); goTo(3)")
        await page.value("byId('detail').scrollTop = 40")
        focus, scrolled = "Number(document.activeElement.dataset.i)", "byId('detail').scrollTop"
        place = f"[shown.id, current, {focus}, {scrolled}, byId('down').checked]"
        top = "listed[Math.round(byId('list').scrollTop / ROW_PIXELS)]"
        await page.value("byId('list').scrollTop = 20 * ROW_PIXELS")
        before, row = await page.value(place), await page.value(top)
        assert before[1:3] == [3, 3] and before[3] == 40
        for n, step in enumerate(steps[3:]):
            append(run, step)
            await until(page, f"nRollouts === {40 * (4 + n)}")
            assert await page.value(place) == before and await page.value(top) == row
        assert await page.value("listed[0]") == 319, "the newest is first"
        assert await page.value("byId('count').textContent") == "320 of 320 rollouts"
        assert (await page.value("byId('same').textContent")).startswith("80 rollouts in this page")

    live(run, go)


def test_a_chosen_rollout_that_grows_is_shown_anew_and_one_that_is_abandoned_leaves_the_list(tmp_path: Path) -> None:
    (one,) = rollouts(0, "long", tokens=9)
    parts = [made.cut(one, 4, (1, 4)), made.cut(one, 10, (4, 10), final=True)]
    run = made.write_run(tmp_path, made.batch((0, 0), [parts[0]]))

    async def go(page: Tab, address: str, view: LiveView) -> None:
        await page.value("goTo(2)")
        append(run, made.batch((0, 1), [parts[1], *rollouts(1, "other")]))
        await until(page, "nRollouts === 2")
        assert await page.value("[shown.id, shown.length, current, document.activeElement.dataset.i]") == [
            *["long", 10, 2, "2"]
        ]
        await page.value("goTo(9)")
        append(run, made.resumed((1, 1), (0, 1)), made.batch((1, 1), rollouts(2, "again", epoch=1, version=1)))
        await until(page, "nRollouts === 3")
        assert await page.value("listed.map((i) => rollout(i).id)") == ["long", "again"]
        assert await page.value("[shown.id, shown.length]") == ["long", 4], "its rest is on the branch that was left"

    live(run, go)


def test_the_end_of_the_run_and_of_the_server_are_said(tmp_path: Path) -> None:
    run = made.write_run(tmp_path, made.batch((0, 0), rollouts(0, "a", "b")))

    async def body() -> None:
        async with tab(tmp_path / "profile") as page:
            with LiveRecord(run / "batches.record", TokenTexts(None), MB) as record:
                async with serving(LiveView(run, record, facts), 0) as address:
                    await page.open(address)
                    said = "byId('live').textContent"
                    assert await page.value(said) == "live, step 1"
                    (run / "summary.json").write_text('{"state": "finished"}')
                    await until(page, f"{said} === 'the run ended (finished) at step 1'")
                    for dark in (False, True):
                        await page.dark(dark)
                        await page.screenshot(tmp_path / f"live-{'dark' if dark else 'light'}.png")
            await until(page, f"{said}.startsWith('not live: the server does not answer')")
            await page.value("choose(1)")
            assert await page.value("shown.id") == "b"

    asyncio.run(body())


def test_a_page_that_is_made_anew_elsewhere_tells_the_old_one(tmp_path: Path) -> None:
    steps = [made.batch((0, n), rollouts(n, f"s{n}", tokens=1500)) for n in range(40)]
    run = made.write_run(tmp_path, *steps[:2])

    async def go(page: Tab, address: str, view: LiveView) -> None:
        append(run, *steps[2:])
        await until(page, "byId('live').textContent.includes('the page is full, and ')")
        kept = await page.value("nRollouts")
        await page.value(f"fetch({address!r}).then((answer) => answer.text()).then(() => 0)")
        await until(page, "byId('live').textContent.startsWith('not live any more')")
        assert await page.value("nRollouts") == kept
        await page.open(address)
        assert await page.value("byId('live').textContent") == "live, step 40"
        assert await page.value("byId('notes').textContent") == ""

    live(run, go, max_bytes=200_000)
