"""`launch.share = turns`: no two roles of a run compute at the same time, and everything else is as it was."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from stillhouse.sglang_server.servers import DEFAULT_PYTHON
from tests.integration.conftest import Launched
from tests.integration.test_sglang_run import leader_at, servers
from tests.integration.test_whole_run import assert_balanced
from tests.tools.trace.overlaps import computing, overlap_s

Launch = Callable[..., Launched]
on_servers = pytest.mark.skipif(not DEFAULT_PYTHON.exists(), reason="no .venv-sglang: make sglang-cpu")
SERVED: Final = (
    *("--launch.share=turns", "--device=cpu", "--actor.engine=sglang", "--teacher.engine=sglang", "--actors=1"),
    *("--teachers=1", "--teacher.payload=top_k", "--teacher.top_k=64", "--learner.eval_every=0"),
    *("--actor.server.args=--log-level-http,info", "--teacher.server.args=--log-level-http,info"),
)


@pytest.mark.parametrize("staleness", [0, 1])
def test_in_turns_no_two_roles_compute_at_the_same_time(launch: Launch, tmp_path: Path, staleness: int) -> None:
    trace = tmp_path / "run.json"
    run = launch(
        *("--launch.share=turns", "--actors=1", "--teachers=1", "--steps=5", "--learner.eval_every=5"),
        *(f"--max-staleness={staleness}", f"--trace={trace}", "--buffer.heartbeat_s=0.1"),
    )
    assert run.wait() == 0, run.text()
    assert_balanced(run.summary())
    assert set(overlap_s(trace).values()) == {0.0}
    assert len(computing(trace)["learner"]) == 5 and all(computing(trace).values())
    turns = {who: sum(r.get(f"turns/{who}_turns", 0) for r in run.steps()) for who in ("learner", "actors", "teachers")}
    assert turns["learner"] == 5 and min(turns.values()) >= 2
    assert sum(r.get("turns/teachers_turn_wait_s", 0) for r in run.steps()) > 0, "what was written waited for its turn"


def test_without_turns_roles_compute_at_the_same_time(launch: Launch, tmp_path: Path) -> None:
    """So the test above can fail."""
    trace = tmp_path / "run.json"
    run = launch("--actors=1", "--teachers=1", "--steps=5", "--max-staleness=2", f"--trace={trace}")
    assert run.wait() == 0, run.text()
    assert sum(overlap_s(trace).values()) > 0.1


@pytest.mark.slow
def test_the_turn_of_a_killed_worker_is_over(launch: Launch) -> None:
    """Each role is killed in its turn: the file of the turn names its holder."""
    run = launch("--launch.share=turns", "--actors=1", "--teachers=1", "--steps=12", "--learner.eval_every=0")
    for number, role in enumerate(("actor", "teacher", "learner"), 1):
        run.until(lambda n=number: len(run.steps()) >= 3 * n, f"step {3 * number}")
        (victim,) = run.workers(role)
        run.until(lambda name=role: (run.run_dir / "turn").read_text().startswith(name), f"the turn of the {role}")
        victim.send_signal(signal.SIGKILL)
    assert run.wait() == 0, run.text()
    assert_balanced(run.summary())


def expect_in_order(run: Launched, worker: str) -> list[str]:
    """What the server itself logged, which is its word and not ours: nothing is generated without both weights and
    cache, no weights arrive where there are none. A release takes both away; each is resumed by a request of its own.
    Returns the routes."""
    log = (run.run_dir / "logs" / f"server-{worker}.log").read_text()
    calls: list[str] = re.findall(r"POST (/\w+) HTTP|(?:Started server) (process)", log)
    routes = ["".join(call) for call in calls]
    there = 2
    for at, route in enumerate(routes):
        match route:
            case "process":
                there = 2
            case "/release_memory_occupation":
                assert there, f"released twice: {routes[:at][-9:]}"
                there = 0
            case "/resume_memory_occupation":
                there += 1
                assert there <= 2, f"resumed thrice: {routes[:at][-9:]}"
            case "/generate":
                assert there == 2, f"generated without memory: {routes[:at][-9:]}"
            case "/update_weights_from_distributed" | "/update_weights_from_disk" | "/weights_checker":
                assert there, f"weights without memory: {routes[:at][-9:]}"
            case _:
                pass
    return routes


@pytest.mark.slow
@on_servers
@pytest.mark.parametrize("staleness", [0, 1])
def test_servers_have_released_their_memory_when_the_turn_is_anothers(
    launch: Launch, tmp_path: Path, staleness: int
) -> None:
    trace = tmp_path / "run.json"
    run = launch(*SERVED, "--steps=4", f"--max-staleness={staleness}", f"--trace={trace}")
    assert run.wait() == 0, run.text()
    assert_balanced(run.summary())
    assert run.expect_clean_audit().clean
    assert set(overlap_s(trace).values()) == {0.0} and all(computing(trace).values())
    actor, teacher = (expect_in_order(run, worker) for worker in ("actor-0", "teacher-0"))
    assert actor.count("/update_weights_from_distributed") >= 4
    assert min(routes.count("/release_memory_occupation") for routes in (actor, teacher)) >= 3


@pytest.mark.slow
@on_servers
def test_a_server_killed_while_it_is_away_and_the_server_of_a_killed_worker_start_again(launch: Launch) -> None:
    run = launch(*SERVED, "--steps=8", "--max-staleness=1")

    def in_turn(role: str) -> bool:
        return (run.run_dir / "turn").read_text().startswith(role)

    run.until(lambda: len(run.steps()) >= 2 and in_turn("teacher"), "the turn of the teacher")
    leader_at(servers(run, "actor-0")["url"]).send_signal(signal.SIGKILL)
    run.until(lambda: len(run.steps()) >= 4 and in_turn("teacher"), "another turn of the teacher")
    run.workers("teacher")[0].send_signal(signal.SIGKILL)
    assert run.wait() == 0, run.text()
    assert_balanced(run.summary())
    assert run.expect_clean_audit().clean
    assert {name: one["restarts"] for name, one in run.summary()["servers"].items()} == {
        "server-actor-0": 1,
        "server-teacher-0": 1,
    }
    for worker in ("actor-0", "teacher-0"):
        assert expect_in_order(run, worker).count("process") == 2
