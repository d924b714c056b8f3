"""A turn belongs to one process at a time, ends with it, and is not kept from the others."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stillhouse.protocol.turns import AFTER_DEATH_S, LINGER_S, EngineTurns, Turn, TurnTimeout

HOLDER = textwrap.dedent("""
    import sys, time
    from pathlib import Path
    from stillhouse.protocol.turns import Turn
    turn = Turn(Path(sys.argv[1]), "holder")
    turn.take(10.0)
    print("mine", flush=True)
    time.sleep(float(sys.argv[2]))
    turn.give_back()
    print("given back", flush=True)
    sys.stdin.read()
""")


def holder(path: Path, seconds: float) -> subprocess.Popen[str]:
    """A process that has the turn now."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), str(seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "mine\n"
    return process


@pytest.fixture
def turn(tmp_path: Path) -> Iterator[Turn]:
    made = Turn(tmp_path / "turn", "me")
    yield made
    made.close()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_a_turn_is_waited_for_and_the_limit_names_its_holder(turn: Turn, tmp_path: Path) -> None:
    other = holder(tmp_path / "turn", 60.0)
    try:
        assert not turn.try_take()
        with pytest.raises(TurnTimeout, match="holder kept the device for 0 s"):
            turn.take(0.1)
        other.kill()  # its turn ends with it
        began_s = time.monotonic()
        turn.take(10.0)
        assert turn.stats["turns_total"] == 1 and turn.stats["turn_wait_s_total"] >= 0.1
        assert time.monotonic() - began_s >= AFTER_DEATH_S, "its memory may be that of a server, which ends later"
        turn.give_back()
        began_s = time.monotonic()
        turn.take(10.0)
        assert time.monotonic() - began_s < AFTER_DEATH_S, "nobody has died since"
    finally:
        end(other)


def test_all_threads_of_a_process_have_the_turn_together(turn: Turn, tmp_path: Path) -> None:
    assert turn.try_take() and turn.try_take()
    turn.give_back()
    pid = os.fork()
    if pid == 0:  # a fork does not have it
        os._exit(int(Turn(tmp_path / "turn", "fork").try_take()))
    assert os.waitpid(pid, 0)[1] == 0, "another process took a turn that one thread still has"
    turn.give_back()
    end(holder(tmp_path / "turn", 0.0))


def test_who_gave_the_turn_back_lets_others_go_first(turn: Turn) -> None:
    turn.take(1.0)
    turn.give_back()
    assert not turn.try_take(), "at once it is for others"
    time.sleep(0.05)
    assert turn.try_take()


class Engine:
    """Says what it was asked for."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def give_back(self) -> None:
        self.said.append("away")

    def take_again(self, *, weights_only: bool = False) -> None:
        self.said.append("weights" if weights_only else "all")


def test_an_engine_gives_its_memory_back_before_the_turn_ends(turn: Turn, tmp_path: Path) -> None:
    engine = Engine()
    turn.take(1.0)
    turns = EngineTurns(turn, engine)
    assert turns.mine(wanted=True) and turns.mine(wanted=False), "the next item may be on its way"
    time.sleep(1.5 * LINGER_S)
    assert not turns.mine(wanted=False) and engine.said == ["away"]
    other = holder(tmp_path / "turn", 0.3)
    assert not turns.mine(wanted=True) and engine.said == ["away"] and turns.wait_s(5.0) < 0.1
    end(other)
    while not turns.mine(wanted=True):
        time.sleep(0.01)
    assert engine.said == ["away", "all"]


def test_weights_arrive_in_the_turn_of_another_and_leave_with_it(turn: Turn) -> None:
    engine = Engine()
    turn.take(1.0)
    turns = EngineTurns(turn, engine)
    with turns.lent():
        assert engine.said == [], "in its own turn all is there"
    time.sleep(1.5 * LINGER_S)
    turns.mine(wanted=False)
    began, go_on = threading.Event(), threading.Event()

    def receive() -> None:
        with turns.lent():
            began.set()
            go_on.wait(10.0)

    thread = threading.Thread(target=receive)
    thread.start()
    assert began.wait(10.0) and engine.said == ["away", "weights"]
    assert not turns.mine(wanted=True), "it must not compute before the weights are there"
    go_on.set()
    thread.join()
    assert engine.said == ["away", "weights", "away"]
