"""Limits of waits grow with a slow machine; a test session names failures at once, and leaves out the slow tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import patience
from tests.conftest import HERE, QUICK_FILES_OF_THEM, REPRESENTATIVE, SLOW_FILES, SLOW_FOLDERS
from tests.patience import PATIENCE_S, VARIABLE, Limit, eventually

ROOT = HERE.parent
SESSION = """
import os, time
import pytest

@pytest.mark.slow
def test_slow(): raise AssertionError("it was to be left out")

def test_fails():
    assert os.environ["{variable}"] == "a word that it is not"

def test_waits():
    while not os.path.exists({file!r}):
        time.sleep(0.02)

def test_limit(request):
    assert request.node.get_closest_marker("timeout").args == (1200.0,)
"""


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


@pytest.mark.parametrize("words", [(), ("-n", "2")], ids=["one process", "two processes"])
def test_a_failure_is_named_before_the_session_ends_and_workers_know_how_slow_it_is(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    """The second test waits until the first one's failure was read here."""
    seen = tmp_path / "seen"
    (tmp_path / "test_it.py").write_text(SESSION.format(file=str(seen), variable=VARIABLE))
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    with subprocess.Popen(
        [*command, "--import-mode=importlib", "-m", "not slow", *words, str(tmp_path)],
        cwd=ROOT, env=os.environ | {VARIABLE: "4.00"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            named = next((line for line in process.stdout if line.startswith("FAILED NOW (call)")), "")
            assert named.endswith("::test_fails\n") and process.poll() is None
            assert "a word that it is not" in process.stdout.readline()
            seen.touch()
            rest = process.stdout.read()
        finally:
            process.kill()
    assert "1 failed, 2 passed" in rest, rest


def test_every_folder_and_file_that_is_slow_or_not_exists() -> None:
    for path in (*SLOW_FOLDERS, *SLOW_FILES, *QUICK_FILES_OF_THEM, REPRESENTATIVE):
        assert (HERE / path).exists(), f"tests/conftest.py names {path}"
