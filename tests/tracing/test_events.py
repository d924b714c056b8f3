"""The events of one process: what is in its file, whatever happens to the process, the disk or the limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stillhouse.tracing import events
from tests.patience import PATIENCE_S


@pytest.fixture(autouse=True)
def nothing_is_left_on() -> Iterator[None]:
    yield
    events.end()


def begin(folder: Path, **more: Any) -> Path:
    events.begin(folder, role="actor", worker="actor-0", incarnation="ab", **more)
    return folder / "actor-0.ab.jsonl"


def lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_without_begin_nothing_is_written_or_remembered(tmp_path: Path) -> None:
    lanes = events.Lanes()
    lanes.take("a")
    lanes.done("a", "slot", "turn")
    events.counter("queue", tokens=1)
    events.mark("ready")
    with events.span("engine", "swap") as figures:
        figures["version"] = "0.1"
    assert not events.tracing() and not list(tmp_path.iterdir())


def test_slices_counters_and_marks_are_lines_behind_the_header(tmp_path: Path) -> None:
    file = begin(tmp_path)
    began_ns = events.now_ns()
    events.mark("ready")
    events.counter("queue", tokens=3, tickets=1.5)
    with events.span("engine", "swap", running=2) as figures:
        figures["version"] = "0.7"
    with pytest.raises(KeyError), events.span("engine", "broken"):
        raise KeyError
    events.end()
    header, mark, counter, swap, broken, end = lines(file)
    assert (header["worker"], header["pid"], header["role"]) == ("actor-0", os.getpid(), "actor")
    assert mark[:2] == ["I", "ready"] and counter[:2] == ["C", "queue"] and counter[3] == {"tokens": 3, "tickets": 1.5}
    assert swap[:3] == ["X", "engine", "swap"] and swap[5] == {"running": 2, "version": "0.7"}
    assert broken[2] == "broken", "a slice also ends by an error"
    times = [began_ns, mark[2], counter[2], swap[3], swap[4], broken[3], broken[4], end[1]]
    assert times == sorted(times) and header["monotonic_ns"] <= began_ns


def test_lanes_take_the_lowest_free_number(tmp_path: Path) -> None:
    file = begin(tmp_path)
    lanes = events.Lanes()
    for key in ("a", "b", "c"):
        lanes.take(key)
    lanes.done("b", "slot", "turn", of="b")
    lanes.take("d")
    for key in ("d", "a", "c", "never taken"):
        lanes.done(key, "slot", "turn", of=key)
    events.end()
    found = [(event[1], event[5]["of"]) for event in lines(file)[1:] if event[0] == "X"]
    assert found == [("slot 1", "b"), ("slot 1", "d"), ("slot 0", "a"), ("slot 2", "c")]


def test_a_file_ends_at_its_limit_and_says_how_many_events_are_missing(tmp_path: Path) -> None:
    file = begin(tmp_path, max_bytes=10_000)
    for number in range(1000):
        events.counter("n", value=number)
    events.end()
    found = lines(file)[1:]
    kept = [event for event in found if event[0] == "C"]
    dropped = [event[1] for event in found if event[0] == "dropped"]
    assert kept[-1][3]["value"] == len(kept) - 1, "the first ones are kept"
    assert dropped[-1] == 1000 - len(kept) and dropped == sorted(dropped)
    assert file.stat().st_size < 10_000 + 20 * len(dropped) + 50


def test_a_killed_process_has_said_at_least_half_of_what_is_missing(tmp_path: Path) -> None:
    file = begin(tmp_path, max_bytes=2_000)
    for number in range(1000):
        events.counter("n", value=number)
    found = lines(file)[1:]  # without end()
    missing = 1000 - sum(event[0] == "C" for event in found)
    assert missing / 2 <= [event[1] for event in found if event[0] == "dropped"][-1] <= missing


def test_a_process_that_is_killed_keeps_what_it_wrote(tmp_path: Path) -> None:
    script = f"""
        import os, signal
        from pathlib import Path
        from stillhouse.tracing import events
        events.FLUSH_S = 0.0
        events.begin(Path({str(tmp_path)!r}), role="actor", worker="actor-0", incarnation="ab")
        for number in range(100):
            events.counter("n", value=number)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=PATIENCE_S, check=False)
    assert done.returncode == -signal.SIGKILL
    found = lines(tmp_path / "actor-0.ab.jsonl")
    assert [event[3]["value"] for event in found[1:]] == list(range(100))


def test_a_full_disk_loses_events_counts_them_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(events, "FLUSH_S", 0.0)
    file = begin(tmp_path)
    write = os.write
    events.counter("n", value=0)
    for room in (10, 0):  # torn in the middle of a line, then nothing at all

        def full(descriptor: int, data: bytes, room: int = room) -> int:
            if not room:
                raise OSError(28, "No space left on device")
            return write(descriptor, data[:room])

        monkeypatch.setattr(os, "write", full)
        events.counter("n", value=1)
    monkeypatch.setattr(os, "write", write)
    events.counter("n", value=2)
    events.end()
    assert sum("trace events are lost" in record.message for record in caplog.records) == 1
    good: list[Any] = []
    bad = 0
    for line in file.read_text().splitlines()[1:]:
        try:
            good.append(json.loads(line))
        except ValueError:
            bad += 1
    assert bad == 1, "the torn line stands alone"
    assert [event[3]["value"] for event in good if event[0] == "C"] == [0, 2]
    assert [event[1] for event in good if event[0] == "dropped"] == [2]


def test_threads_write_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "HELD_BYTES", 300)
    file = begin(tmp_path)

    def count(name: str) -> None:
        for number in range(500):
            events.counter(name, value=number)

    threads = [threading.Thread(target=count, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    events.end()
    found = lines(file)[1:-1]
    for name in "abc":
        assert [event[3]["value"] for event in found if event[1] == name] == list(range(500))


def test_a_fork_does_not_write_what_its_parent_holds(tmp_path: Path) -> None:
    script = f"""
        import os
        from pathlib import Path
        from stillhouse.tracing import events
        events.begin(Path({str(tmp_path)!r}), role="actor", worker="actor-0", incarnation="ab")
        events.counter("n", value=1)
        child = os.fork()
        if child:
            os.waitpid(child, 0)
        events.counter("n", value=2 if child else 3)
        events.end()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=PATIENCE_S, check=True)
    found = lines(tmp_path / "actor-0.ab.jsonl")[1:]
    assert [event[3]["value"] for event in found[:-1]] == [1, 2] and found[-1][0] == "end"
