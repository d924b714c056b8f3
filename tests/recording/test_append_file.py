"""A full disk loses rows, counted and told seldom, and never tears one; writing goes on when there is room."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from stillhouse.recording import append_file
from stillhouse.recording.append_file import AppendFile, Unwritten
from tests.full_disk import fill, small_disk

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """`room(n)`: from now on n more bytes fit on the disk; None = all."""
    left: list[int | None] = [None]
    write = os.write

    def limited(descriptor: int, data: bytes) -> int:
        if left[0] is None:
            return write(descriptor, data)
        if left[0] == 0 and data:
            raise FULL
        done = write(descriptor, data[: left[0]])
        left[0] -= done
        return done

    def set_room(n: int | None) -> None:
        left[0] = n

    monkeypatch.setattr(append_file.os, "write", limited)
    return set_room


def test_a_row_that_does_not_fit_leaves_nothing_of_itself(tmp_path: Path, room: Callable[[int | None], None]) -> None:
    unwritten = Unwritten()
    file = AppendFile(tmp_path / "rows", unwritten)
    assert file.append(b"first\n", rows=1)
    room(3)
    assert not file.append(b"second\nthird\n", rows=2)
    assert (tmp_path / "rows").read_bytes() == b"first\n"
    room(None)
    assert file.append(b"fourth\n", rows=1)
    file.close()
    assert (tmp_path / "rows").read_bytes() == b"first\nfourth\n"
    assert unwritten.rows_total == 2


def test_a_torn_row_that_could_not_be_cut_off_is_cut_before_the_next_one(
    tmp_path: Path, room: Callable[[int | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise FULL

    file = AppendFile(tmp_path / "rows", Unwritten())
    room(3)
    with monkeypatch.context() as patch:
        patch.setattr(append_file.os, "ftruncate", refuse)
        assert not file.append(b"second\n", rows=1)
        room(None)
        assert not file.append(b"third\n", rows=1)
    assert file.append(b"fourth\n", rows=1)
    file.close()
    assert (tmp_path / "rows").read_bytes() == b"fourth\n"


def test_what_must_come_first_is_owed_until_there_is_room(tmp_path: Path, room: Callable[[int | None], None]) -> None:
    room(0)
    file = AppendFile(tmp_path / "rows", Unwritten(), first=b"head\n")
    assert not file.append(b"lost\n", rows=1)
    room(None)
    assert file.append(b"row\n", rows=1) and file.append(b"row\n", rows=1)
    file.close()
    assert (tmp_path / "rows").read_bytes() == b"head\nrow\nrow\n"


def test_a_file_that_cannot_be_made_yet_is_made_later(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("in the way")
    unwritten = Unwritten()
    file = AppendFile(tmp_path / "folder" / "rows", unwritten)
    assert not file.append(b"lost\n", rows=1)
    (tmp_path / "folder").unlink()
    assert file.append(b"row\n", rows=1)
    file.close()
    assert (tmp_path / "folder" / "rows").read_bytes() == b"row\n" and unwritten.rows_total == 1


def test_no_row_after_the_end(tmp_path: Path) -> None:
    file = AppendFile(tmp_path / "rows", Unwritten())
    file.close()
    file.close()
    with pytest.raises(ValueError, match="is closed"):
        file.append(b"row\n", rows=1)


def test_losses_are_told_once_in_a_while_and_in_all_at_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 0.0
    monkeypatch.setattr(append_file.time, "monotonic", lambda: now_s)
    caplog.set_level(logging.INFO)
    unwritten = Unwritten()
    for _ in range(100):
        unwritten.count("metrics.jsonl", 1, FULL)
    now_s = append_file.LOG_EVERY_S
    unwritten.count("learner.json", 1, FULL)
    unwritten.written("metrics.jsonl")
    unwritten.written("learner.json")
    for _ in range(5):  # room comes and goes
        unwritten.count("metrics.jsonl", 1, FULL)
        unwritten.written("metrics.jsonl")
    unwritten.close()
    told = [record.getMessage().split(":", 1)[1] for record in caplog.records]
    assert [line.split("; ")[0] for line in told] == [
        " 1 rows (metrics.jsonl 1): [Errno 28] No space left on device",
        " 101 rows (learner.json 1, metrics.jsonl 100): [Errno 28] No space left on device",
        " 101 rows (learner.json 1, metrics.jsonl 100)",
        " 106 rows (learner.json 1, metrics.jsonl 105) in all",
    ]
    assert told[2].endswith("all reports are being written again")


def test_a_really_full_disk_loses_whole_rows_only(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 64 << 10) as disk:
        unwritten = Unwritten()
        file = AppendFile(disk / "rows", unwritten)
        assert file.append(b"a" * 999 + b"\n", rows=1)
        ballast = fill(disk)
        kept = [file.append(b"b" * 2999 + b"\n", rows=1) for _ in range(4)]  # what is left of the page, then nothing
        assert kept[1:] == [False] * 3
        ballast.unlink()
        assert file.append(b"c\n", rows=1)
        file.close()
        lengths = [len(line) for line in (disk / "rows").read_bytes().splitlines()]
        assert lengths == [999, *([2999] if kept[0] else []), 1]
        assert unwritten.rows_total == kept.count(False)
