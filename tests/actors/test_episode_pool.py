"""Episodes in processes beside the actor. Real processes; the engine is a script."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stillhouse.actors.agent import Context
from stillhouse.actors.config import ActorConfig, EnvConfig
from stillhouse.actors.envs.base import Action, Environment, EnvTask, Observation, StepResult, TextTokenizer
from stillhouse.actors.episode_pool import EnvironmentsUnusable, EpisodePool
from stillhouse.actors.episode_wire import Setup
from stillhouse.builtin import STUDENT_DIR
from tests.actors.in_hand import STOP, InHand, ScriptedEngine, ids_of, ticket
from tests.patience import Limit

HERE = __name__
REPOSITORY = Path(__file__).parents[2]


class Deadly(Environment):
    """Ends its process, or keeps Python's lock, where the row says so. Otherwise one turn, with the process id."""

    row_options = ("how",)

    def __init__(self, tokenizer: TextTokenizer, *, how: str = "") -> None:
        self._how = how

    async def reset(self, task: EnvTask) -> Observation:
        return Observation()

    async def step(self, action: Action) -> StepResult:
        match self._how:
            case "exit":
                os._exit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "lock":
                ctypes.PyDLL(None).sleep(1000)
            case "block":
                time.sleep(1000)
            case _:
                return StepResult(done=True, reward=1.0, info={"pid": float(os.getpid())})
        raise AssertionError("still there")


async def two_turns(ctx: Context, task: EnvTask) -> None:
    first = await ctx.generate(max_new_tokens=4)
    ctx.observe(ids_of(7, 7))
    second = await ctx.generate()
    ctx.reward(float(len(first.token_ids) + len(second.token_ids)))


CONFIG = ActorConfig(
    environments={
        "deadly": EnvConfig(name=f"{HERE}:Deadly", step_timeout_s=0.5),
        "patient": EnvConfig(name=f"{HERE}:Deadly"),
        "agent": EnvConfig(name=f"{HERE}:two_turns"),
    }
)


@contextmanager
def in_pool(
    engine: ScriptedEngine, tokenizer: TextTokenizer, n: int = 1, *, max_threads: int = 16, silence_s: float = 30.0
) -> Generator[tuple[InHand, EpisodePool]]:
    environments = CONFIG.environments_of("single_turn")
    pool = EpisodePool(n, Setup(environments, str(STUDENT_DIR), max_threads, (STOP,), 200, silence_s))
    try:
        yield InHand(engine, tokenizer, CONFIG, pool=pool), pool
    finally:
        pool.close()
    assert not processes_of_this_test()


def processes_of_this_test() -> list[int]:
    """Children of this process that run episodes, by the system's own list."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            if b"stillhouse.actors.episode_process" in command and parent == os.getpid():
                found.append(int(entry.name))
    return found


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


def answer(hand: InHand, engine: ScriptedEngine, *ids: int) -> None:
    """One request after the other gets these ids, until nothing is in hand."""

    def gone() -> bool:
        for request_id in list(engine.requests):
            engine.say(request_id, *(ids or (9, STOP)), end="stop")
            hand.rollouts.take_deltas(engine.poll(0.0))
        return not len(hand.rollouts)

    hand.until(gone)


def test_rollouts_are_those_of_episodes_in_threads(engine: ScriptedEngine, tokenizer: TextTokenizer) -> None:
    tickets = [ticket(0), *(ticket(i, env="agent") for i in (1, 2, 3))]
    sent: list[list[object]] = []
    with in_pool(engine, tokenizer, 2) as (hand, pool):
        assert pool.agents == {"agent"} and len(processes_of_this_test()) == 2
        for here in (hand, InHand(engine, tokenizer, CONFIG)):
            for one in tickets:
                here.rollouts.add(one, ids_of(1, 2, 3))
            answer(here, engine)
            assert not here.failures
            whole = [here.whole(one.rollout_id) for one in tickets]
            sent.append([(segments, *(array.tolist() for array in arrays)) for segments, *arrays in whole])
            here.environments.close()
    assert sent[0] == sent[1]


def test_a_crash_fails_the_episodes_of_its_process_alone(engine: ScriptedEngine, tokenizer: TextTokenizer) -> None:
    with in_pool(engine, tokenizer, 2) as (hand, pool):
        for i in range(4):
            row = b'{"env_options": {"how": "kill"}}' if i == 0 else b""
            hand.rollouts.add(ticket(i, env="patient", row=row), ids_of(1, 2))
        hand.until(lambda: len(engine.requests) == 4)
        engine.say("train-0-0-0/0", 9, STOP, end="stop")
        hand.until(lambda: len(hand.failures) == 2)
        answer(hand, engine)
        assert set(hand.failures) == {"train-0-0-0", "train-2-0-0"}, "they shared a process"
        assert all("signal SIGSEGV" in text and "EnvironmentProcessDied" in text for text in hand.failures.values())
        assert pool.gauges["environment_process_crash_total"] == 1
        hand.until(lambda: len(processes_of_this_test()) == 2)
        hand.rollouts.add(ticket(5, env="patient"), ids_of(1, 2))
        hand.rollouts.add(ticket(6, env="patient"), ids_of(1, 2))
        answer(hand, engine)
        assert len(hand.failures) == 2


@pytest.mark.slow
def test_an_environment_that_keeps_pythons_lock_costs_its_process_and_not_the_actor(
    engine: ScriptedEngine, tokenizer: TextTokenizer, capfd: pytest.CaptureFixture[str]
) -> None:
    with in_pool(engine, tokenizer, 2, silence_s=2.0) as (hand, pool):
        hand.rollouts.add(ticket(0, env="deadly", row=b'{"env_options": {"how": "lock"}}'), ids_of(1, 2))
        hand.rollouts.add(ticket(1, env="deadly"), ids_of(1, 2))
        hand.until(lambda: len(engine.requests) == 2)
        engine.say("train-0-0-0/0", 9, STOP, end="stop")
        hand.turn()
        answer(hand, engine)
        assert list(hand.failures) == ["train-0-0-0"] and "stood still for 2 s" in hand.failures["train-0-0-0"]
        assert pool.gauges["environment_process_hang_total"] == 1
    assert "in step" in capfd.readouterr().err, "the log says where"


@pytest.mark.slow
def test_threads_that_do_not_return_end_their_process(engine: ScriptedEngine, tokenizer: TextTokenizer) -> None:
    with in_pool(engine, tokenizer, max_threads=2) as (hand, pool):
        for i in range(3):
            hand.rollouts.add(ticket(i, env="deadly", row=b'{"env_options": {"how": "block"}}'), ids_of(1, 2))
        answer(hand, engine)
        hand.until(lambda: pool.gauges["environment_process_stuck_total"] >= 1)
        assert {"env_timeout", "env_error (EnvironmentProcessDied)"} >= {
            text.partition(":")[0] for text in hand.failures.values()
        }


def test_environments_that_cannot_be_imported_are_an_error_at_the_start(tokenizer: TextTokenizer) -> None:
    with pytest.raises(EnvironmentsUnusable, match=r"did not start: UnknownEnvironment: .*no_such_module"):
        EpisodePool(1, Setup({"x": EnvConfig(name="no_such_module:X")}, str(STUDENT_DIR), 4, (STOP,), 200, 30.0))
    assert not processes_of_this_test()


@pytest.mark.slow
def test_processes_that_die_again_and_again_end_the_actor(
    engine: ScriptedEngine, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stillhouse.actors.episode_pool.MAX_DEATHS", 1)
    dying = pytest.raises(RuntimeError, match=r"2 processes of environments died within .* ended with exit code 3")
    with in_pool(engine, tokenizer) as (hand, _), dying:
        for i in range(2):
            hand.rollouts.add(ticket(i, env="patient", row=b'{"env_options": {"how": "exit"}}'), ids_of(1, 2))
            hand.until(lambda: bool(engine.requests))
            answer(hand, engine)


@pytest.mark.slow
@pytest.mark.parametrize("busy", ["", "lock"])
def test_processes_end_with_an_actor_that_was_killed(tmp_path: Path, busy: str) -> None:
    """Also one in which an environment keeps Python's lock."""
    script = textwrap.dedent(
        f"""
        import sys, time
        from tests.actors.test_episode_pool import *
        from stillhouse.models.tokenizer_file import FileTokenizer
        environments = CONFIG.environments_of("single_turn")
        pool = EpisodePool(1, Setup(environments, str(STUDENT_DIR), 4, (STOP,), 200, 3.0))
        engine = ScriptedEngine()
        hand = InHand(engine, TextTokenizer(FileTokenizer(STUDENT_DIR)), CONFIG, pool=pool)
        hand.rollouts.add(ticket(0, env="deadly", row=b'{{"env_options": {{"how": "{busy}"}}}}'), ids_of(1, 2))
        hand.until(lambda: bool(engine.requests))
        engine.say("train-0-0-0/0", 9, STOP, end="stop")
        hand.turn()
        hand.turn()
        print(processes_of_this_test()[0], flush=True)
        time.sleep(1000)
        """
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=REPOSITORY, stdout=subprocess.PIPE) as actor:
        assert actor.stdout is not None
        pid = int(actor.stdout.readline())
        actor.kill()
    limit = Limit()
    while Path(f"/proc/{pid}").exists():
        assert not limit.passed, "it is still there"
        time.sleep(0.05)
