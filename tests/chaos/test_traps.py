"""A process dies exactly before or after the function that was named."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from functools import reduce
from pathlib import Path
from types import FunctionType

import pytest

from tests.sim.chaos.traps import POINTS, Side, Traps

PROGRAM = """
from victims import step, Worker   # by name: what was patched is what is imported
import sys
for n in range(1, 4):
    step(n)
    Worker().work(n)
print("over", flush=True)
"""
MODULE = """
def step(n):
    print("step", n, flush=True)

class Worker:
    def work(self, n):
        print("work", n, flush=True)
"""


@pytest.mark.parametrize(
    ("point", "side", "n", "said"),
    [
        ("victims:step", "before", 2, "step 1 work 1"),
        ("victims:step", "after", 2, "step 1 work 1 step 2"),
        ("victims:Worker.work", "before", 1, "step 1"),
        ("victims:Worker.work", "after", 3, "step 1 work 1 step 2 work 2 step 3 work 3"),
    ],
)
def test_a_process_dies_there_and_takes_another_along(
    tmp_path: Path, point: str, side: Side, n: int, said: str
) -> None:
    (tmp_path / "victims.py").write_text(MODULE)
    traps = Traps(tmp_path / "traps", ("victims:step", "victims:Worker.work"))
    environment = {**os.environ, **traps.environment(str(tmp_path))}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        program = f"input()\n{PROGRAM}"
        victim = subprocess.Popen(
            [sys.executable, "-c", program], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert victim.stdin is not None and victim.stdout is not None
        start = victim.stdin

        def go() -> bool:
            """The trap is set now."""
            if not start.closed:
                start.write("\n")
                start.close()
            return True

        assert traps.catch(point, side, victim.pid, n=n, others=(other.pid,), timeout_s=30, alive=go)
        assert (victim.wait(30), other.wait(30)) == (-signal.SIGKILL, -signal.SIGKILL)
        assert victim.stdout.read().split() == said.split()
        victim.stdout.close()


def test_a_process_that_is_spared_goes_on_and_the_other_dies(tmp_path: Path) -> None:
    (tmp_path / "victims.py").write_text(MODULE)
    traps = Traps(tmp_path / "traps", ("victims:step",))
    environment = {**os.environ, **traps.environment(str(tmp_path))}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        program = [sys.executable, "-c", f"input()\n{PROGRAM}"]
        with subprocess.Popen(program, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as passer:

            def go() -> bool:
                if passer.stdin and not passer.stdin.closed:
                    passer.stdin.write(b"\n")
                    passer.stdin.close()
                return True

            others = (other.pid,)
            assert traps.catch("victims:step", "before", passer.pid, others=others, spare=True, timeout_s=30, alive=go)
            assert (passer.wait(30), other.wait(30)) == (0, -signal.SIGKILL)


def test_a_trap_for_another_process_lets_this_one_pass(tmp_path: Path) -> None:
    (tmp_path / "victims.py").write_text(MODULE)
    traps = Traps(tmp_path / "traps", ("victims:step", "victims:Worker.work"))
    (tmp_path / "traps" / "victims:step.before").write_text("1 1")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **traps.environment(str(tmp_path))},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.endswith("over\n")
    assert not traps.catch("victims:step", "before", os.getpid(), timeout_s=0.1)
    assert not list((tmp_path / "traps").glob("*.before"))


@pytest.mark.parametrize("point", [point for points in POINTS.values() for point in points])
def test_every_point_is_a_function_of_the_product(point: str) -> None:
    name, _, inside = point.partition(":")
    path, _, last = inside.rpartition(".")
    owner = reduce(getattr, filter(None, path.split(".")), importlib.import_module(name))
    function = vars(owner)[last]
    assert isinstance(function, FunctionType) and function.__module__ == name, "patched where it is defined"
