"""The page in a real Chromium: what it shows, its keys, its colours, and 100,000 rollouts."""

from __future__ import annotations

import asyncio
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stillhouse.tools.view.command import main
from tests.tools.view import made_record as made
from tests.tools.view.browser import Tab, chromium, tab
from tests.tools.view.slow_reader import Seen, recorded

pytestmark = pytest.mark.slow
EVERYTHING = """
Array.from({ length: nRollouts }, (_, index) => rollout(index)).map((one) => [
  one.id,
  Array.from(one.tokens, (number, i) => [
    tokenIds[number], one.version[i], one.trained[i]?.version ?? null, one.student(i),
    one.teachers.map((_, m) => one.teacher(m, i)),
  ]),
])
"""
COLOURS = """
(() => {
  const paint = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const paper = getComputedStyle(document.body).backgroundColor;
  const rgb = (...fills) => {
    for (const fill of fills) { paint.fillStyle = fill; paint.fillRect(0, 0, 1, 1); }
    return [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const classes = Object.entries(LAYER_CLASSES).flatMap(([layer, names]) => names.map((name) => `${layer}-${name}`));
  return [...classes, "absent", "row"].map((name) => {
    const probe = make("span", { className: name }, "x");
    byId("text").append(probe);
    const style = getComputedStyle(probe), found = [name, rgb(paper, style.color), rgb(paper, style.backgroundColor)];
    probe.remove();
    return found;
  });
})()
"""
"""(class, colour of the text, colour behind it), painted by the browser itself."""
CLASSES = (
    "window.LAYER_CLASSES = { gap: [0,1,2,3,4,5,6,7,8], version: [0,1,2,3,4,5,6,7], origin: Object.keys(ORIGINS) }; 0"
)


@pytest.fixture(autouse=True)
def browser() -> str:
    return chromium()


def view(run: Path, *arguments: str) -> Path:
    assert main([str(run), "--no-open", *arguments]) == 0
    return run / "view.html"


def close(shown: float | None, expected: float | None) -> bool:
    return (
        shown is expected if shown is None or expected is None else math.isclose(shown, expected, abs_tol=0.51 / 1024)
    )


def luminance(rgb: list[int]) -> float:
    """WCAG 2.2, relative luminance."""
    linear = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: list[int], other: list[int]) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_browser_decodes_what_the_record_has_runs_no_text_and_loads_nothing(tmp_path: Path) -> None:
    run = made.everything(tmp_path)
    file, expected = view(run), list(recorded((run / "batches.record").read_bytes()).values())

    async def go(page: Tab) -> None:
        await page.open(file)
        shown: list[Any] = await page.value(EVERYTHING)
        assert [name for name, _ in shown] == [one.id for one in expected]
        for (_, tokens), one in zip(shown, expected, strict=True):
            assert all(map(same_token, tokens, one.tokens)) and len(tokens) == len(one.tokens)
        for index in range(len(expected)):
            await page.value(f"choose({index})")
            for i in range(len(expected[index].tokens)):
                await page.value(f"goTo({i})")
        text = await page.value("document.body.innerText")
        assert made.HOSTILE[0] in text and made.HOSTILE[1] in text and "\\u202e" in text and "\u202e" not in text
        assert await page.value("typeof window.hit") == "undefined"
        assert await page.value("document.querySelectorAll('img, iframe, object, link').length") == 0
        assert (page.errors, page.requests) == ([], [file.as_uri()])

    asyncio.run(_with_tab(tmp_path, go))


def same_token(shown: list[Any], expected: Any) -> bool:
    token_id, version, trained, student, teachers = shown
    return (
        (token_id, version, trained) == (expected.id, expected.version, expected.trained)
        and close(student, expected.student)
        and len(teachers) == len(expected.teachers)
        and all(map(close, teachers, expected.teachers))
    )


def test_everything_is_reached_by_keyboard_and_each_token_says_its_values(tmp_path: Path) -> None:
    run = made.everything(tmp_path)
    file, expected = view(run), list(recorded((run / "batches.record").read_bytes()).values())

    async def go(page: Tab) -> None:
        await page.open(file)
        await page.press("l")
        for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowUp", "j", "k"):
            await page.press(key)
        assert await page.value("[document.activeElement.id, chosen]") == ["list", 2]
        one = expected[2]
        await page.press("t")
        for step in range(3):
            i = one.n_prompt + step
            token = one.tokens[i]
            assert await page.value("Number(document.activeElement.dataset.i)") == i
            said = await page.value("document.activeElement.getAttribute('aria-label')")
            assert said == await page.value("byId('readout').textContent")
            for part in (
                f"token {i} ",
                f"(id {token.id})",
                f"version {token.version}",
                f"trained from version {token.trained}",
            ):
                assert part in said, (part, said)
            assert abs(number(r"student (\S+) ·", said) - (token.student or 0)) < 0.001
            assert abs(number(r"teacher (\S+) ·", said) - (token.teachers[0] or 0)) < 0.001
            assert abs(number(r"student − teacher (\S+) nats", said) - difference(one, i)) < 0.002
            await page.press("ArrowRight")
        await page.press("2")
        versions = await page.value("[...byId('text').children].map((span) => span.className.split(' ')[0])")
        assert {name for name in versions if name.startswith("version-")} == {"version-0", "version-1"}
        places = sorted(range(len(one.tokens)), key=lambda i: -difference(one, i))[:8]
        worst = [i for i in places if difference(one, i) >= 0.1]
        now = one.n_prompt + 3
        for _ in range(3):  # "w" goes to the next of them, from elsewhere to the first
            await page.press("w")
            now = worst[(worst.index(now) + 1) % len(worst)] if now in worst else worst[0]
            assert await page.value("Number(document.activeElement.dataset.i)") == now
        await page.value("goTo(0)")  # of the prompt, so none of the worst
        await page.press("W")
        assert await page.value("Number(document.activeElement.dataset.i)") == worst[-1]
        await page.press("/")
        await page.type("w2")
        found = [one.id for one in expected if 9 in [token.id for token in one.tokens[: one.n_prompt]]]
        assert await page.value("listed.map((i) => rollout(i).id)") == found and len(found) == 5
        assert await page.value("byId('count').textContent") == "5 of 8 rollouts"
        await page.value("byId('search').value = ''; byId('staleness-to').value = '9'; applyFilters()")
        known = [one.id for one in expected if one.id not in ("written", "train-3-0-0")]
        assert await page.value("listed.map((i) => rollout(i).id)") == known and len(known) == 6

    asyncio.run(_with_tab(tmp_path, go))


def test_turns_are_a_tree_in_which_a_branch_stands_inside_the_turn_that_it_leaves(tmp_path: Path) -> None:
    """Token 9 follows token 4, inside the first response; token 12 begins a new root."""
    file = view(made.everything(tmp_path))
    inside = "[...document.querySelectorAll('#turns li')].map((li) => [li.firstChild.textContent, depth(li)])"
    depth = (
        "window.depth = (li) => { let n = 0; while ((li = li.parentElement.closest('#turns li'))) n++; return n; }; 0"
    )

    async def go(page: Tab) -> None:
        await page.open(file)
        await page.value("choose(3)")
        await page.value(depth)
        assert await page.value(inside) == [
            ["prompt, tokens 0 to 2", 0],
            ["student, tokens 3 to 4", 0],
            ["student, tokens 9 to 11", 1],
            ["student, tokens 5 to 6", 0],
            ["given, tokens 7 to 8", 0],
            ["student, tokens 12 to 14", 0],
        ]
        text = await page.value("byId('turns').innerText")
        assert (
            text.count("reward") == 2 and "tokens 9 to 11 reward 0.75" in text and "tokens 5 to 6 reward 0.25" in text
        )
        assert "tokens 12 to 14 (a new root)" in text
        await page.value("document.querySelectorAll('#turns button')[2].click()")
        assert await page.value("Number(document.activeElement.dataset.i)") == 9
        await page.value("choose(0)")
        assert await page.value("byId('turns-part').hidden")

    asyncio.run(_with_tab(tmp_path, go))


def test_a_long_rollout_is_shown_in_parts_and_a_strip_leads_to_each_token(tmp_path: Path) -> None:
    one = made.rollout(np.random.default_rng(0), "long", prompt=[7], turns=((9_999, 0),))
    file = view(made.write_run(tmp_path, made.batch((0, 0), [one])))

    async def go(page: Tab) -> None:
        await page.open(file)
        assert await page.value("byId('shown').textContent") == "tokens 0 to 3999 of 10000"
        await page.value("goTo(9_500)")
        assert await page.value("[byId('shown').textContent, document.activeElement.dataset.i]") == [
            "tokens 8000 to 9999 of 10000",
            "9500",
        ]
        click = "new MouseEvent('click', { clientX: box.left + box.width / 4, clientY: box.top + 5, bubbles: true })"
        strip = "document.querySelector('#strips canvas')"
        await page.value(f"{{ const box = {strip}.getBoundingClientRect(); {strip}.dispatchEvent({click}); }}")
        assert abs(int(await page.value("document.activeElement.dataset.i")) - 2500) < 20

    asyncio.run(_with_tab(tmp_path, go))


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found is not None, (pattern, text)
    return float(found[1].replace("−", "-"))


def difference(one: Seen, i: int) -> float:
    student, teachers = one.tokens[i].student, one.tokens[i].teachers
    return -math.inf if student is None or teachers[0] is None else student - teachers[0]


def test_text_is_readable_on_every_colour_by_day_and_in_the_dark(tmp_path: Path) -> None:
    file = view(made.everything(tmp_path))

    async def go(page: Tab) -> None:
        await page.open(file)
        await page.value(CLASSES)
        papers: list[float] = []
        for dark in (False, True):
            await page.dark(dark)
            found: list[tuple[str, list[int], list[int]]] = await page.value(COLOURS)
            assert len(found) == 23
            low = {name: round(contrast(ink, paper), 2) for name, ink, paper in found if contrast(ink, paper) < 4.5}
            assert not low, ("dark" if dark else "light", low)
            papers.append(luminance(found[-1][2]))
            await page.screenshot(tmp_path / f"{'dark' if dark else 'light'}.png")
        assert papers[0] > 0.8 and papers[1] < 0.05

    asyncio.run(_with_tab(tmp_path, go))


@pytest.mark.release
def test_of_a_hundred_thousand_rollouts_only_those_in_sight_are_drawn_and_all_are_filtered(tmp_path: Path) -> None:
    n, group = 100_000, 100
    random = np.random.default_rng(0)
    tags, rewards = ("sum", "difference", "product"), random.integers(0, 5, n).tolist()
    batches = [
        made.batch(
            (0, step),
            [
                made.rollout(
                    random, f"r{i}", prompt=[7 + step % 40, 8], task=step, sample=i % group, tag=tags[i % 3],
                    turns=((1 + i % 9, 0),), version=max(0, step - i % 3), reward=float(rewards[i]),
                )
                for i in range(step * group, (step + 1) * group)
            ],
        )
        for step in range(n // group)
    ]  # fmt: skip
    file = view(made.write_run(tmp_path, *batches), "--max-mb", "256")

    async def go(page: Tab) -> None:
        await page.open(file)
        assert await page.value("[nRollouts, listed.length]") == [n, n]
        rows = "document.querySelectorAll('#space .row').length"
        assert 10 < await page.value(rows) < 100
        await page.press("l")
        await page.press("End")
        assert await page.value("shown.id") == f"r{n - 1}" and 10 < await page.value(rows) < 100
        wanted = {
            "tag": "1",
            "reward-from": "2",
            "reward-to": "3",
            "length-to": "4",
            "staleness-from": "1",
            "search": "w3 ",
        }
        for name, text in wanted.items():
            await page.value(f"byId('{name}').value = {json.dumps(text)}")
        await page.value(
            "byId('search').dispatchEvent(new Event('input', {{ bubbles: true }}))".replace("{{", "{").replace(
                "}}", "}"
            )
        )
        expected = [
            i
            for i in range(n)
            if i % 3 == 1
            and 2 <= rewards[i] <= 3
            and 1 + i % 9 <= 4
            and min(i % 3, i // group) >= 1
            and (i // group) % 40 == 3
        ]
        assert await page.value("listed") == expected and len(expected) > 50
        assert page.errors == []

    asyncio.run(_with_tab(tmp_path, go))


async def _with_tab(folder: Path, go: Any) -> None:
    async with tab(folder / "profile") as page:
        await go(page)
