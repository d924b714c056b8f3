"""Sessions of the real package openenv. Its dependencies do not fit into this environment, so these tests run in its
own, which lacks only what is ours: the last test starts that."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stillhouse.actors.envs.registry import check_options
from stillhouse.actors.failures import Failure
from stillhouse.actors.running_episode import EpisodeEnd
from tests.actors.adapters import openenv_server
from tests.actors.adapters.conftest import Talk
from tests.patience import PATIENCE_S

HAS_PACKAGE = importlib.util.find_spec("openenv") is not None
inside = pytest.mark.skipif(not HAS_PACKAGE, reason="run by the last test, in the environment of openenv")
SESSIONS = "tests.actors.adapters.openenv_sessions"
OPTIONS: Mapping[str, Any] = {"factory": f"{SESSIONS}:Counters"}


def add(n: object) -> str:
    return json.dumps({"name": "add", "arguments": {"n": n}})


def ended(end: EpisodeEnd | Failure) -> EpisodeEnd:
    assert isinstance(end, EpisodeEnd), end
    return end


@inside
def test_the_reward_is_that_of_verify_and_of_the_last_result(talk: Talk) -> None:
    sessions = importlib.import_module(SESSIONS)
    talked = talk("openenv_session", [add(3), add("x"), add(4), "never asked"], OPTIONS, row={"task": {"goal": 7}})
    assert "seed 5" in talked.prompt and "reach 7" in talked.prompt and "adds to the counter" in talked.prompt
    assert '{"sum": 3}' in talked.heard[0]
    assert "error: n: expected a whole number" in talked.heard[1]
    assert len(talked.heard) == 2, "the session was done"
    end = ended(talked.end)
    assert end.reward == 1.0
    assert dict(end.info) == {"openenv_calls": 3.0, "openenv_errors": 1.0, "openenv_sum": 7.0}
    assert sessions.CLOSED[-1] == "train-0-0-0"
    roles = [message["role"] for message in sessions.VERIFIED[-1]]
    assert roles == ["system", "user", *["assistant", "tool"] * 3]
    assert sessions.VERIFIED[-1][2]["tool_calls"] == [{"name": "add", "arguments": {"n": 3}}]


@inside
def test_a_student_that_stops_early_is_verified_too(talk: Talk) -> None:
    end = ended(talk("openenv_session", [add(3), "enough"], OPTIONS, row={"task": {"goal": 7}}).end)
    assert end.reward == 0.0 and end.info["openenv_sum"] == 3.0


@inside
def test_a_reward_that_verify_makes_up_fails_the_rollout(talk: Talk) -> None:
    lying = {**OPTIONS, "options": {"lies": True}}
    end = talk("openenv_session", [add(7)], lying, row={"task": {"goal": 7}}).end
    assert isinstance(end, Failure) and "verify said the reward 2.0, the last tool result 1.0" in end.detail


def test_a_factory_that_cannot_be_loaded_is_refused() -> None:
    with pytest.raises(ValueError, match="factory: cannot load 'no_such_module:Factory'"):
        check_options("openenv_session", {"factory": "no_such_module:Factory"})
    with pytest.raises(ValueError, match="is a str, expected a class or a function"):
        check_options("openenv_session", {"factory": f"{__name__}:SESSIONS"})


RUN = """
import sys
sys.path.append({ours!r})
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", {file!r}]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not openenv_server.PYTHON.exists(), reason=openenv_server.MADE_BY)
@pytest.mark.skipif(HAS_PACKAGE, reason="this is that environment")
def test_all_of_this_in_the_environment_of_openenv() -> None:
    program = RUN.format(ours=sysconfig.get_path("purelib"), file=str(Path(__file__)))
    done = subprocess.run(
        [str(openenv_server.PYTHON), "-c", program],
        cwd=openenv_server.ROOT,
        capture_output=True,
        text=True,
        timeout=5 * PATIENCE_S,  # a whole run of pytest, which starts servers
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.startswith("....s"), "four played, and this one did not start itself"
