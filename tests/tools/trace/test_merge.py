"""The files of a run become one trace that a viewer can show: every slice, counter and arrow, on one clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stillhouse.launch.errors import LaunchError
from stillhouse.tools.trace.merge import merge
from tests.tools.trace.chrome_trace import faults, load

MS = 1_000_000


def write(folder: Path, worker: str, events: list[list[Any]], *, boot: str = "b", at: int = 0, more: str = "") -> Path:
    """A file of events whose monotonic clock is 1000 s behind the wall clock. `at`: when the process began, ms."""
    header = {
        "role": worker.split("-")[0],
        "worker": worker,
        "incarnation": f"i{at}",
        "pid": 7,
        "host": f"host of {boot}",
        "boot": boot,
        "monotonic_ns": at * MS,
        "unix_ns": at * MS + 1000 * 10**9,
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{worker}.i{at}.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in (header, *events)) + more)
    return file


def slice_(track: str, name: str, began_ms: float, ended_ms: float, **figures: Any) -> list[Any]:
    return ["X", track, name, int(began_ms * MS), int(ended_ms * MS), figures]


def sent(began_ms: float, ended_ms: float, start: int, end: int, rollout: str = "train-1-0-0") -> list[Any]:
    return slice_("segments", "send", began_ms, ended_ms, rollout=rollout, start=start, end=end, tokens=end - start)


def a_run(run: Path, *, actor_boot: str = "b", actor_shift_ms: int = 0) -> Path:
    """Two segments, three scorings (one by a second pool), two steps, one version."""
    shift = actor_shift_ms
    folder = run / "trace" if actor_boot == "b" else run / "joined" / "far" / "trace"
    write(
        folder,
        "actor-0",
        [
            ["I", "ready", (5 + shift) * MS],
            sent(10 + shift, 11 + shift, 0, 8),
            sent(20 + shift, 21 + shift, 8, 12),
            slice_("slot 0", "turn", 6 + shift, 20 + shift, rollout="train-1-0-0", end="stop"),
            slice_("engine", "swap", 62 + shift, 63 + shift, version="0.1", running=1),
            ["end", (70 + shift) * MS],
        ],
        boot=actor_boot,
        at=shift,
    )
    write(
        run / "trace",
        "teacher-0",
        [
            ["I", "ready", 4 * MS],
            slice_("scoring", "score", 12, 15, items=[["train-1-0-0", 0, 8]], tokens=8, failed=0),
            slice_(
                "scoring", "score", 22, 25, items=[["train-1-0-0", 8, 12], ["eval-1-0-0", 0, 5]], tokens=9, failed=0
            ),
        ],
    )
    write(
        run / "trace",
        "teacher-1",
        [slice_("scoring", "score", 13, 16, items=[["train-1-0-0", 0, 8]], tokens=8, failed=0)],
    )
    write(
        run / "trace",
        "learner-0",
        [
            ["I", "ready", 3 * MS],
            slice_("learner", "decode", 3, 4, step=1),
            slice_("learner", "wait: data", 3, 30),
            slice_("learner", "train", 30, 40, step=1, items=[["train-1-0-0", 0, 8]], tokens=8),
            ["C", "staleness", 40 * MS, {"mean": 0.5, "max": 1}],
            slice_("learner", "train", 45, 60, step=2, items=[["train-1-0-0", 8, 12]], tokens=4),
            slice_("publication", "broadcast", 61, 65, version="0.1", bytes=10, members=1, ok=True),
        ],
    )
    return run


def arrows(trace: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Name, slice at which it begins, slice at which it ends, sorted; a slice by process and start in ms."""
    events = trace["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}

    def at(end: dict[str, Any]) -> str:
        own = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (end["pid"], end["tid"])]
        one = min((e for e in own if e["ts"] <= end["ts"] <= e["ts"] + e["dur"]), key=lambda e: e["dur"])
        return f"{names[end['pid']]} {one['name']} {one['dur'] / 1e3:g}"

    ends: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["ph"] in "sf":
            ends.setdefault(event["id"], {})[event["ph"]] = event
    return sorted((pair["s"]["name"], at(pair["s"]), at(pair["f"])) for pair in ends.values())


def test_a_trace_has_every_slice_and_the_arrows_from_sample_to_score_to_step(tmp_path: Path) -> None:
    written = merge(a_run(tmp_path), tmp_path / "out.json")
    trace = load(written.path)
    assert faults(trace) == [] and trace["otherData"]["clocks"] == []
    assert arrows(trace) == [
        ("scored", "actor-0 send 1", "teacher-0 score 3"),
        ("scored", "actor-0 send 1", "teacher-0 score 3"),
        ("scored", "actor-0 send 1", "teacher-1 score 3"),
        ("trained", "teacher-0 score 3", "learner-0 train 10"),
        ("trained", "teacher-0 score 3", "learner-0 train 15"),
        ("trained", "teacher-1 score 3", "learner-0 train 10"),
        ("weights", "learner-0 broadcast 4", "actor-0 swap 1"),
    ]
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(slices) == 12 and min(e["ts"] for e in slices) == 3000, "times begin with the first process"
    assert [e["args"] for e in trace["traceEvents"] if e["ph"] == "C"] == [{"mean": 0.5, "max": 1}]


def test_without_teachers_the_arrows_go_to_the_step(tmp_path: Path) -> None:
    a_run(tmp_path)
    for file in (tmp_path / "trace").glob("teacher*"):
        file.unlink()
    found = arrows(load(merge(tmp_path, tmp_path / "out.json").path))
    assert [one[0] for one in found] == ["trained", "trained", "weights"]


def test_a_compressed_trace_is_the_same(tmp_path: Path) -> None:
    a_run(tmp_path)
    plain, packed = merge(tmp_path, tmp_path / "out.json").path, merge(tmp_path, tmp_path / "new" / "out.json.gz").path
    assert packed.read_bytes()[:2] == b"\x1f\x8b" and load(plain) == load(packed)
    assert [file.name for file in packed.parent.iterdir()] == ["out.json.gz"], "no draft is left"


def test_a_restarted_worker_has_a_process_of_its_own(tmp_path: Path) -> None:
    a_run(tmp_path)
    write(tmp_path / "trace", "actor-0", [sent(95, 96, 0, 4, "train-2-0-0")], at=90)
    trace = load(merge(tmp_path, tmp_path / "out.json").path)
    names = [e["args"]["name"] for e in trace["traceEvents"] if e.get("name") == "process_name"]
    assert names == ["learner-0", "teacher-0", "teacher-1", "actor-0", "actor-0 (process 2)"] and not faults(trace)


def test_what_cannot_be_read_is_counted(tmp_path: Path) -> None:
    a_run(tmp_path)
    (tmp_path / "trace" / "actor-9.x.jsonl").write_text('{"role": "ac')
    write(tmp_path / "trace", "actor-1", [["dropped", 2], ["dropped", 5]], more='["C", "n\n\n["X","engine","swap",1')
    written = merge(tmp_path, tmp_path / "out.json")
    lost = written.lost
    assert (lost.dropped, lost.torn, lost.damaged, lost.files) == (5, 1, 1, 1)
    assert not faults(load(written.path))


def test_a_machine_with_another_clock_is_moved_until_no_arrow_goes_back(tmp_path: Path) -> None:
    """Its wall clock is 1000 s ahead of its monotonic clock, as on the learner's machine, but the monotonic one began
    500 ms later; so by the wall clocks alone its segments would be sent after they were scored."""
    written = merge(a_run(tmp_path, actor_boot="far", actor_shift_ms=500), tmp_path / "out.json")
    trace = load(written.path)
    assert not faults(trace)
    (said,) = written.clocks
    assert "host of far" in said and "moved by" in said and "right to within" in said
    send = next(e for e in trace["traceEvents"] if e["ph"] == "X" and e["name"] == "send")
    swap = next(e for e in trace["traceEvents"] if e["ph"] == "X" and e["name"] == "swap")
    score = next(e for e in trace["traceEvents"] if e["ph"] == "X" and e["name"] == "score")
    broadcast = next(e for e in trace["traceEvents"] if e["ph"] == "X" and e["name"] == "broadcast")
    assert send["ts"] <= score["ts"] and broadcast["ts"] <= swap["ts"]


def test_a_run_that_was_not_traced_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="--trace FILE"):
        merge(tmp_path, tmp_path / "out.json")
