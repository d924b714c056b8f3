from __future__ import annotations

import os
from pathlib import Path

import pytest

from stillhouse.protocol.atomic_file import replacing, write_atomic
from tests.power_cut import PowerCut


def names(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir()]


def test_a_file_is_replaced_and_no_draft_is_left(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    for content in (b"old", b"new"):
        write_atomic(file, content)
        assert file.read_bytes() == content and names(tmp_path) == ["run.json"]


def test_an_error_leaves_the_former_file_and_no_draft(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_bytes(b"old")
    with pytest.raises(OSError, match="No space left"), replacing(file) as draft:
        draft.write_bytes(b"ne")
        raise OSError(28, "No space left on device")
    assert file.read_bytes() == b"old" and names(tmp_path) == ["run.json"]


def test_the_draft_of_a_writer_that_was_killed_goes_with_the_next_one(tmp_path: Path) -> None:
    """A SIGKILL between the draft and its rename (found by bench/faults/chaos.py)."""
    (tmp_path / ".buffer.json.1234").write_text("{")
    write_atomic(tmp_path / "buffer.json", b"{}")
    assert names(tmp_path) == ["buffer.json"]


def test_the_content_is_on_the_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is synced by somebody else never has less than the whole content behind it."""
    folder = tmp_path / "run"
    folder.mkdir()
    power = PowerCut(monkeypatch)
    write_atomic(folder / "run.json", b"whole")
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    power.copy(folder, tmp_path / "left")
    assert (tmp_path / "left" / "run.json").read_bytes() == b"whole"
