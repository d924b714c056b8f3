"""scripts/pip_install.py shows progress, whole errors, and nothing when there is nothing to do."""

from __future__ import annotations

import importlib.util
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "pip_install.py"
FAKE_PIP = """
import pathlib, sys, time
site, code = pathlib.Path(sys.argv[1]), int(sys.argv[2])
print("Collecting torch==2.13.0", flush=True)
print("  Downloading https://somewhere/torch-2.13.0-cp311.whl (800.5 MB)", flush=True)
time.sleep(0.4)
print("WARNING: a mirror is slow", file=sys.stderr, flush=True)
if code:
    sys.exit("ERROR: No matching distribution found for nothing")
print("Installing collected packages: sympy, torch", flush=True)
(site / "sympy-1.0.dist-info").mkdir()
time.sleep(0.4)
(site / "torch-2.13.0.dist-info").mkdir()
print("Successfully installed sympy-1.0 torch-2.13.0", flush=True)
"""


@pytest.fixture
def script() -> Any:
    spec = importlib.util.spec_from_file_location("pip_install", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shown(script: Any, site: Path, code: int, *, rewrites: bool = False) -> tuple[int, str]:
    out = io.StringIO()
    (site / "older-1.0.dist-info").mkdir()
    command = [sys.executable, "-c", FAKE_PIP, str(site), str(code)]
    return script.run(command, out, site, after_s=(0.1, 0.1), rewrites=rewrites), out.getvalue()


def test_it_says_what_pip_does_and_how_many_packages_are_there(script: Any, tmp_path: Path) -> None:
    code, text = shown(script, tmp_path, 0)
    assert code == 0
    lines = text.splitlines()
    assert any(line.endswith("s: 1 package found, downloading torch, 800.5 MB") for line in lines)
    assert any(line.endswith("s: 1 of 2 packages installed") for line in lines)
    assert lines[-2] == "WARNING: a mirror is slow" and lines[-1].startswith("  2 packages installed in ")


def test_on_a_terminal_a_line_takes_the_place_of_the_one_before(script: Any, tmp_path: Path) -> None:
    _, text = shown(script, tmp_path, 0, rewrites=True)
    before_the_end = text.partition("WARNING")[0]
    assert "\n" not in before_the_end and before_the_end.count("\r\033[K") >= 3
    assert before_the_end.endswith("\r\033[K")


def test_an_error_is_shown_with_all_that_pip_said(script: Any, tmp_path: Path) -> None:
    code, text = shown(script, tmp_path, 1)
    assert code == 1
    for line in ("Collecting torch==2.13.0", "WARNING: a mirror is slow", "ERROR: No matching distribution found"):
        assert line in text


def test_the_real_pip_says_nothing_when_all_is_there_and_all_when_it_fails() -> None:
    def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(SCRIPT), "install", "--no-index", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    there = pip("pip")
    assert (there.returncode, there.stderr) == (0, "")
    # On a slow machine it says that it is looking.
    assert [line for line in there.stdout.splitlines() if not re.match(r"  \d+ s: looking for packages$", line)] == []
    missing = pip("stillhouse-is-not-there")
    assert missing.returncode == 1
    assert "ERROR: No matching distribution found for stillhouse-is-not-there" in missing.stdout
