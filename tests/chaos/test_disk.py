"""The small file system is full when it is told to be, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.chaos.disk import mounted_at, small_disk


def test_full_then_free_then_gone(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    try:
        with small_disk(path, 2 << 20) as disk:
            assert mounted_at(path)
            disk.fill()
            with pytest.raises(OSError, match="No space left"):
                (path / "more").write_bytes(bytes(8192))
            disk.free()
            (path / "more").write_bytes(bytes(8192))
    except PermissionError as reason:
        pytest.skip(f"no mounts here: {reason}")
    assert not mounted_at(path)
