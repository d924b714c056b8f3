"""Limits of waits grow with a slow machine; the lists of slow tests name files that there are."""

from __future__ import annotations

import pytest

from tests import patience
from tests.conftest import HERE, QUICK_FILES_OF_THEM, REPRESENTATIVE, SLOW_FILES, SLOW_FOLDERS
from tests.patience import PATIENCE_S, Limit, eventually


class Clock:
    """Stands in for `time` and for the measuring of the machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.slowness = 0.0, patience.SLOWNESS
        monkeypatch.setattr(patience, "time", self)
        monkeypatch.setattr(patience, "measure", lambda: self.slowness)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_limit_passes_when_its_time_is_over(clock: Clock) -> None:
    limit = Limit(10.0)
    clock.now_s = 9.9
    assert not limit.passed
    clock.now_s = 10.1
    assert limit.passed and str(limit) == "10 s"


def test_a_limit_is_moved_when_the_machine_became_slower_and_only_then(clock: Clock) -> None:
    limit = Limit(10.0)
    clock.now_s, clock.slowness = 10.1, 3.0 * patience.SLOWNESS
    assert not limit.passed
    clock.now_s = 29.9
    assert not limit.passed
    clock.now_s, clock.slowness = 30.1, patience.SLOWNESS
    assert limit.passed


def test_what_never_happens_is_named(clock: Clock) -> None:
    with pytest.raises(AssertionError, match=r"not within \d+ s: a word"):
        eventually(lambda: False, "a word")
    assert clock.now_s > PATIENCE_S


def test_every_folder_and_file_that_is_slow_or_not_exists() -> None:
    for path in (*SLOW_FOLDERS, *SLOW_FILES, *QUICK_FILES_OF_THEM, REPRESENTATIVE):
        assert (HERE / path).exists(), f"tests/conftest.py names {path}"
