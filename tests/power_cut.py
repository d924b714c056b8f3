"""What a loss of power would leave of a folder: names and contents as of their last fsync, and nothing that was not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

CALLS: Final = ("fsync", "rename", "replace", "rmdir", "unlink")


class PowerCut:
    """Looks on at the calls of this process that make something last. A name or content that was deleted since is taken
    as gone, and one that was made or changed since as not yet there: the disk is free to do either."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, before_each: Callable[[], object] = lambda: None) -> None:
        """`before_each`: called before each such call; the power might go there."""
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._before_each, self._looking = before_each, False
        for name in CALLS:
            monkeypatch.setattr(os, name, self._watched(name, getattr(os, name)))

    def _watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._looking:  # what the onlooker does itself does not count
                self._looking = True
                self._before_each()
                self._looking = False
                if name == "fsync":
                    self._lasts(Path(f"/proc/self/fd/{args[0]}").readlink())
            return real(*args, **kwargs)

        return call

    def _lasts(self, path: Path) -> None:
        if path.is_dir():
            self._names[path.stat().st_ino] = {entry.name: entry.stat().st_ino for entry in path.iterdir()}
        else:
            self._contents[path.stat().st_ino] = path.read_bytes()

    def copy(self, folder: Path, to: Path) -> None:
        """Write what would be left of `folder` into `to`, which is made."""
        to.mkdir(parents=True)
        for name, inode in self._names.get(folder.stat().st_ino, {}).items():
            path = folder / name
            if not path.exists() or path.stat().st_ino != inode:
                continue
            if path.is_dir():
                self.copy(path, to / name)
            else:
                (to / name).write_bytes(self._contents.get(inode, b""))
