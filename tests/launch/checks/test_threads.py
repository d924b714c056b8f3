"""Threads per process: the sum fits the cores, and no other division makes the slowest process faster."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stillhouse.launch.checks import threads
from stillhouse.launch.checks.model_files import WeightFiles
from stillhouse.launch.checks.threads import Alike, Threads, plan_threads, share_cores, threads_alone
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build

ROOT = Path(__file__).parents[3]
LARGE = {"student": "/large/student", "teacher": "/large/teacher"}
MILLIONS = {"/large/student": 100, "/large/teacher": 200, "/small": 1}
EMBEDDED = {"actor": {"engine": "torch"}, "teacher": {"engine": "torch"}}


def slowest(groups: Sequence[Alike], each: Sequence[int]) -> float:
    return max(group.work / n for group, n in zip(groups, each, strict=True))


def best(cores: int, groups: Sequence[Alike]) -> float:
    """Work per thread of the slowest process in the best of all divisions, which are tried one by one."""
    choices = (range(1, min(group.most or cores, cores) + 1) for group in groups)
    fitting = (
        each
        for each in itertools.product(*choices)
        if sum(n * len(group.who) for group, n in zip(groups, each, strict=True)) <= cores
    )
    return min(slowest(groups, each) for each in fitting)


@pytest.mark.parametrize("cores", [4, 5, 6, 7, 8, 12])
@pytest.mark.parametrize("works", [(3.0, 1.0, 0.5), (1.0, 1.0, 1.0), (0.3, 0.2, 7.0), (3.0, 8.0, 2.9)])
@pytest.mark.parametrize("most", [None, 2])
def test_no_other_division_of_the_cores_is_faster(cores: int, works: Sequence[float], most: int | None) -> None:
    names = [("learner", 1), ("actors", 2), ("teachers", 1)]
    groups = [
        Alike(name, tuple(f"{name}-{i}" for i in range(n)), work, most if name == "teachers" else None)
        for (name, n), work in zip(names, works, strict=True)
    ]
    shared = share_cores(cores, groups)
    each = [shared[group.name] for group in groups]
    assert min(each) >= 1 and sum(n * len(group.who) for group, n in zip(groups, each, strict=True)) <= cores
    assert slowest(groups, each) == best(cores, groups)


def test_more_processes_than_cores_have_one_thread_each() -> None:
    groups = [Alike("learner", ("learner",), 3.0, None), Alike("actors", ("actor-0", "actor-1"), 1.0, None)]
    assert set(share_cores(2, groups).values()) == {1}


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that are known by their size only."""

    def look(_key: str, folder: Path) -> WeightFiles:
        return WeightFiles([], MILLIONS[str(folder)] * 10**6)

    monkeypatch.setattr(threads, "check_weights", look)


def plan(cores: float, seats: dict[str, int | None], *, learner_here: bool = True, **plain: Any) -> Threads:
    config = build(RunConfig, EMBEDDED | {"models": LARGE} | plain)
    return plan_threads(config, seats, cores, learner_here=learner_here)


CPU: dict[str, int | None] = {"learner": None, "teacher-0": None, "actor-0": None, "actor-1": None}
"""The learner has 300 to do per token, the teacher 200, each actor 50."""


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        (2, {"learner": 1, "teacher-0": 1, "actor-0": 1, "actor-1": 1}),
        (5.5, {"learner": 2, "teacher-0": 1, "actor-0": 1, "actor-1": 1}),
        (8, {"learner": 4, "teacher-0": 2, "actor-0": 1, "actor-1": 1}),
        (16, {"learner": 7, "teacher-0": 5, "actor-0": 2, "actor-1": 2}),
    ],
)
def test_cores_go_where_the_work_is(cores: float, expected: dict[str, int]) -> None:
    assert plan(cores, CPU).each == expected


@pytest.mark.usefixtures("sizes")
def test_what_the_plan_says() -> None:
    assert plan(8, CPU).text == "threads on 8 cores: learner 4, actors 1 each, teachers 2"
    assert plan(2, CPU).text == "1 thread per worker on 2 cores"
    chosen = plan(8, CPU, launch={"threads_per_worker": 3})
    assert set(chosen.each.values()) == {3}
    assert chosen.text == "3 threads per worker, as configured: 12 on 8 cores, where they wait for each other"
    assert plan(12, CPU, launch={"threads_per_worker": 3}).text == "3 threads per worker, as configured"


@pytest.mark.usefixtures("sizes")
def test_others_leave_fewer_cores() -> None:
    """A role on a GPU, a server on the CPU take one."""
    on_gpu = plan(8, CPU | {"teacher-0": 0})
    assert (on_gpu.each, on_gpu.text) == (
        {"learner": 5, "actor-0": 1, "actor-1": 1},
        "threads on 8 cores: learner 5, actors 1 each",
    )
    served: dict[str, Any] = {"teacher": {"engine": "sglang", "server": {"device": "cpu"}}, "teachers": 2}
    seats = {who: gpu for who, gpu in CPU.items() if who != "teacher-0"}
    assert plan(8, seats, **served).each == {"learner": 4, "actor-0": 1, "actor-1": 1}


@pytest.mark.usefixtures("sizes")
def test_ranks_and_pools_divide_the_work() -> None:
    ranks: dict[str, int | None] = {"learner": None, "learner rank 1": None}
    each = plan(10, CPU | ranks, learner={"ranks": 2}).each
    assert each["learner"] == each["learner rank 1"] == 2 and each["teacher-0"] == 4
    pools = {"a": {}, "b": {"model": "/small"}}
    routes: dict[str, Any] = {"learner": {"tasks": {"routes": {"a": [], "b": []}}}}
    found = plan(16, CPU | {"teacher-1": None}, pools=pools, teachers=2, **routes)
    assert found.text == "threads on 16 cores: learner 8, actors 2 each, teachers of a 3, teachers of b 1"


@pytest.mark.usefixtures("sizes")
def test_a_small_model_gets_two_threads_at_most() -> None:
    small: dict[str, Any] = {"models": {"student": "/small", "teacher": "/small"}}
    assert set(plan(64, CPU, **small).each.values()) == {2}


@pytest.mark.usefixtures("sizes")
def test_those_who_join_elsewhere_have_that_machine_to_themselves() -> None:
    seats: dict[str, int | None] = {"learner": None, "actor-0": None}
    joined = plan(4, seats, learner_here=False, actors=1, teachers=0)
    assert (joined.each, joined.text) == ({"actor-0": 4}, "threads on 4 cores: actors 4")
    beside = plan(0.0, seats, actors=1, teachers=0)
    assert (set(beside.each.values()), beside.text) == ({1}, "1 thread per worker")


def test_a_process_that_is_alone_has_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 6.5)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_alone(RunConfig()) == 6
    assert threads_alone(build(RunConfig, {"launch": {"threads_per_worker": 3}})) == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert threads_alone(RunConfig()) == 2


def test_a_fork_that_has_torch_takes_its_number_too() -> None:
    """As a worker of the fork server: torch was imported with one thread."""
    text = (
        "import os, torch; from stillhouse.launch.workers.roles import use_threads\n"
        "if os.fork(): os._exit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
        "use_threads(3); print(torch.get_num_threads(), os.environ['OMP_NUM_THREADS'], flush=True); os._exit(0)"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "3"]
