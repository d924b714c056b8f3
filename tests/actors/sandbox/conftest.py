"""Which isolations can be tried here, and a scripted student."""

from __future__ import annotations

import subprocess

import pytest

from tests.actors.adapters.conftest import talk

__all__ = ["ISOLATIONS", "MADE_BY", "needs_bubblewrap", "talk"]

MADE_BY = "bubblewrap does not work here: apt install bubblewrap, and allow user namespaces"


def bubblewrap_works() -> bool:
    """Asked of the program itself, and not of the code under test."""
    command = ["bwrap", "--unshare-all", "--unshare-user", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    try:
        return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
    except OSError:
        return False


needs_bubblewrap = pytest.mark.skipif(not bubblewrap_works(), reason=MADE_BY)
ISOLATIONS = [pytest.param("bubblewrap", marks=needs_bubblewrap), "none"]
