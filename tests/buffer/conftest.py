"""Fixtures of the buffer's tests."""

from __future__ import annotations

import pytest

from tests.buffer.driver import Driver


@pytest.fixture
def make() -> type[Driver]:
    """Driver, with the settings of a test: `make(staleness=2, release="segment")`."""
    return Driver
