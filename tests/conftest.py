"""For all tests: which of them are slow, how long one may take on this machine, a line on each failure at once, and
what keeps the cost of many processes low."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Final

import hypothesis
import pytest

from tests.patience import SLOWNESS
from tests.release import SHORT, SHORT_FILES, SHORT_MARKS

# Tests start some thousand processes of Python. Without byte code, each would compile the sources again: containers
# often set this variable.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Several tests share the machine's cores: threads of one product that wait for each other then cost a factor of 2 to 7
# (docs/results/README.md). Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Its own limit of 200 ms for an example would fail tests of a busy machine.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

HERE: Final = Path(__file__).parent
# Processes that tests start find engines, environments and transports of tests/ by name.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE.parent), os.environ.get("PYTHONPATH"))))
SLOW_FOLDERS: Final = ("chaos", "hosts", "integration", "sglang", "vllm")
SLOW_FILES: Final = (
    *("actors/test_memory.py", "buffer/test_kill.py", "buffer/test_memory.py"),
    *(
        "builtin/test_topk_payloads.py",
        "weights/test_collective_memory.py",
        "weights/test_group_faults.py",
        "launch/test_recovery.py",
    ),
    *(
        "bench/race/test_evaluate_checkpoints.py",
        "tools/doctor/test_scoring.py",
    ),
    "learner/reports/test_tracker_packages.py",
)
"""Soaks, campaigns, what kills and stops whole launchers, and what writes or scores with models for many seconds."""
LONGEST: Final = (
    *("launch/render/test_slurm.py", "launch/ray", "chaos", "hosts", "learner/ranks"),
    *("integration/test_attribution.py", "integration/test_learner_ranks.py"),
    *("weights/test_group_faults.py", "learner/checkpoints", "tools/doctor", "launch/test_recovery.py"),
    *("sglang", "vllm", "integration"),
    *("launch/workers", "launch/servers", "launch/test_terminal.py", "replay"),
    *("actors/sandbox", "engines/torch/test_model_caches.py", "launch/checks", "launch/config"),
)
"""Files and folders that begin first, because they take long: one that begins last would run alone."""
QUICK_FILES_OF_THEM: Final = ("chaos/test_audit.py", "chaos/test_proxy.py", "chaos/test_traps.py")
QUICK_MARKS: Final = "not slow"
"""Of `make test`."""
REPRESENTATIVE: Final = "integration/test_whole_run.py"
"""Whole runs that `make test` keeps; those of them that are marked slow it leaves out too."""
TEST_S: Final = 300.0
SLOW_TEST_S: Final = 1200.0
"""After which a test is ended on a quiet machine: the last resort, as waits have limits of their own (patience.py)."""
SAID_CHARS: Final = 2000


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without looking for garbage, and never look for it again in what was imported and collected: a million
    objects that stay. Tests that look at garbage see only their own."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def _path_as_before() -> Generator[None]:
    """Users' modules are found in the working directory, which stays on the path: for later tests each folder in a
    directory of this one would be a package."""
    before = [*sys.path]
    yield
    sys.path[:] = before


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Only files that have some of what `make test` and `make test-slow` run are imported, once in each process."""
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    path = _name(collection_path)
    if config.option.markexpr == QUICK_MARKS:
        return True if _all_slow(path) else None
    return True if config.option.markexpr == SHORT_MARKS and path not in SHORT_FILES else None


@functools.cache
def _name(path: Path) -> str:
    """Of a file under tests/: its path from there."""
    return path.relative_to(HERE).as_posix() if path.is_relative_to(HERE) else path.name


@functools.cache
def _all_slow(path: str) -> bool:
    in_slow_folder = path.split("/")[0] in SLOW_FOLDERS and path not in (*QUICK_FILES_OF_THEM, REPRESENTATIVE)
    return in_slow_folder or path in SLOW_FILES


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow ones, give each test its time, and put those first that take longest."""
    for item in items:
        path = _name(item.path)
        if _all_slow(path):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("slow") and not item.nodeid.removeprefix("tests/").startswith(SHORT):
            item.add_marker(pytest.mark.release)
        if item.get_closest_marker("timeout") is None:
            limit_s = SLOW_TEST_S if item.get_closest_marker("slow") else TEST_S
            item.add_marker(pytest.mark.timeout(limit_s * SLOWNESS))
    items.sort(key=lambda item: _turn(item.path))


@functools.cache
def _turn(path: Path) -> int:
    """A file's place among those that take long; the others come after them, in the order in which they were found."""
    return next((turn for turn, name in enumerate(LONGEST) if path.is_relative_to(HERE / name)), len(LONGEST))


class _NamesFailures:
    """Prints each failure when it happens; the tracebacks come at the end, as always."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        where = f"{crash.path}:{crash.lineno}: {crash.message}" if crash else str(report.longrepr)
        self._terminal.write("\n")
        self._terminal.write_line(f"FAILED NOW ({report.when}) {report.nodeid}", red=True, bold=True)
        self._terminal.write_line(f"  {where[:SAID_CHARS]}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if isinstance(terminal, pytest.TerminalReporter):  # a worker of xdist has none
        config.pluginmanager.register(_NamesFailures(terminal), "names-failures")
