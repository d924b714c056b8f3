"""Games of the real package gymnasium, played by scripts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stillhouse.actors.envs.registry import check_options
from tests.actors.adapters.conftest import MADE_BY, Play

pytest.importorskip("gymnasium", reason=MADE_BY)

LAKE: dict[str, object] = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}}
SHORTEST = ("down", "down", "right", "right", "down", "right")
GRID = """
import gymnasium
from gymnasium import spaces

class Echo(gymnasium.Env):
    '''Ends after the first action; the reward is its number.'''
    metadata = {"render_modes": ["ansi"]}
    def __init__(self, space="dict", render_mode=None):
        self.render_mode = render_mode
        self.action_space = spaces.Sequence(spaces.Discrete(2)) if space == "sequence" else spaces.Dict(
            {"go": spaces.Discrete(3), "by": spaces.Box(0.0, 9.0, (2,))}
        )
        self.observation_space = spaces.Dict({"near": spaces.Text(9), "at": spaces.MultiDiscrete([5, 5])})
    def reset(self, *, seed=None, options=None):
        return {"near": "a wall", "at": (1, 4)}, {}
    def step(self, action):
        return {"near": "a door", "at": (1, 3)}, float(action["go"]) + float(action["by"][1]), True, False, {}
    def render(self):
        return "\\x1b[31m#\\x1b[0m."

gymnasium.register("Echo-v0", entry_point=Echo)
"""


@pytest.fixture(scope="module")
def own_game(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A module in the working directory that registers a game of its own, which the package allows once."""
    folder = tmp_path_factory.mktemp("own_game")
    (folder / "own_game.py").write_text(GRID)
    before, where = list(sys.path), Path.cwd()
    os.chdir(folder)
    yield
    os.chdir(where)
    sys.path[:] = before


def test_the_shortest_way_over_the_lake_gives_the_reward(play: Play) -> None:
    played = play("gymnasium", SHORTEST, LAKE, row={"prompt": "Win.", "seed": 3})
    assert played.prompt.startswith("<|im_start|>user\nWin.\n\nCross the frozen lake")
    assert "left (0), down (1), right (2) or up (3).\n\nxFFF\nFHFH\n" in played.prompt
    assert played.prompt.endswith("You are in row 0, column 0.<|im_end|>\n<|im_start|>assistant\n")
    assert "SFFF\nFHFH\nxFFH\nHFFG\nYou are in row 2, column 0." in played.heard[1]
    assert (played.end.finish_reason, played.reward) == ("stop", 1.0)
    assert [played.total(f"gymnasium_{name}") for name in ("steps", "reward", "terminated")] == [6.0, 1.0, 1.0]


@pytest.mark.parametrize("turn", ["jump", "", "7", "-1", "1.5", "downhill"])
def test_an_invalid_action_is_told_and_changes_nothing(play: Play, turn: str) -> None:
    played = play("gymnasium", [turn, *SHORTEST], LAKE | {"invalid_action_reward": -0.5})
    assert "Invalid action. Expected: left (0), down (1), right (2) or up (3)." in played.heard[0]
    assert (played.reward, played.total("gymnasium_invalid_actions")) == (0.5, 1.0)
    assert played.total("gymnasium_steps") == 6


def test_after_too_many_invalid_actions_the_episode_ends(play: Play) -> None:
    played = play("gymnasium", ["what?"] * 5, LAKE | {"max_invalid_actions": 2, "invalid_action_reward": -0.25})
    assert [answer.reward for answer in played.answers] == [-0.25, -0.25]


def test_a_pattern_of_ones_own_finds_the_action(play: Play) -> None:
    pattern = r"<act>(.*?)</act>"
    played = play("gymnasium", ["<act>down</act> and not up", "up"], LAKE | {"answer_pattern": pattern})
    assert "row 1" in played.heard[0] and "Invalid" in played.heard[1]


def test_the_games_own_limit_truncates(play: Play) -> None:
    limited = {"is_slippery": False, "max_episode_steps": 3}
    played = play("gymnasium", ["left"] * 9, {"id": "FrozenLake-v1", "kwargs": limited})
    assert len(played.answers) == 3
    ends = ("terminated", "truncated", "turns_used_up")
    assert [played.total(f"gymnasium_{name}") for name in ends] == [0.0, 1.0, 0.0]


def test_the_last_turn_still_counts(play: Play) -> None:
    won = play("gymnasium", SHORTEST, LAKE, max_turns=6)
    assert (won.end.finish_reason, won.reward) == ("stop", 1.0)
    out = play("gymnasium", SHORTEST, LAKE, max_turns=5)
    assert (out.reward, out.total("gymnasium_turns_used_up"), out.total("gymnasium_steps")) == (0.0, 1.0, 5.0)


def test_a_turn_cut_in_the_middle_is_no_action(play: Play) -> None:
    """Else a student that never ends would be better off than one that errs."""
    options = LAKE | {"invalid_action_reward": -0.5}
    played = play("gymnasium", SHORTEST, options, end="length")
    assert (played.end.finish_reason, played.reward) == ("length", -0.5)
    assert (played.total("gymnasium_steps"), played.total("gymnasium_invalid_actions")) == (5.0, 1.0)


def test_taxi_tells_its_state_and_sums_its_rewards(play: Play) -> None:
    to_passenger = ["south", "south", "west", "west", "north", "north", "pickup"]
    way = [*to_passenger, "south", "south", "south", "south", "dropoff"]
    played = play("gymnasium", way, {"id": "Taxi-v4"}, row={"prompt": "", "seed": 3})
    assert "|R: |x: :G|" in played.prompt
    assert "Taxi: row 0, column 2. Passenger: at R. Destination: Y." in played.prompt
    assert "Taxi: row 0, column 0. Passenger: in the taxi. Destination: Y." in played.heard[6]
    assert (played.end.finish_reason, played.reward) == ("stop", -11.0 + 20.0)
    undrawn = play("gymnasium", ["dropoff"], {"id": "Taxi-v4", "draw": False}, row={"seed": 3})
    assert "+---" not in undrawn.prompt + undrawn.heard[0]
    assert undrawn.total("gymnasium_reward") == -10.0


def test_blackjack_names_its_actions(play: Play) -> None:
    played = play("gymnasium", ["hit", "stick"], {"id": "Blackjack-v1"}, row={"seed": 3})
    assert "stick (0) or hit (1).\n\nYour cards: 7. The dealer shows 10." in played.prompt
    assert "Your cards: 17. The dealer shows 10." in played.heard[0]
    assert played.reward in (-1.0, 0.0, 1.0)


def test_the_rows_seed_decides_the_game_and_else_the_rollouts(play: Play) -> None:
    def first(row: dict[str, object]) -> str:
        return play("gymnasium", [], {"id": "Blackjack-v1"}, row=row).prompt

    assert len({first({"seed": seed}) for seed in range(12)}) > 6
    assert first({"seed": 8}) == first({"seed": 8})
    assert first({}) == first({"seed": 5})  # the task's


@pytest.mark.parametrize("seed", [-1, "3", True, 1.5])
def test_a_senseless_seed_is_refused(play: Play, seed: object) -> None:
    with pytest.raises(ValueError, match=r"seed = .*expected a whole number"):
        play("gymnasium", [], LAKE, row={"seed": seed})


def test_numbers_that_nobody_named_are_described(play: Play) -> None:
    played = play("gymnasium", ["push 1", "2"], {"id": "CartPole-v1"}, row={"seed": 3})
    assert "You see: 4 numbers: from -4.8 to 4.8, of any size, from -0.4189 to 0.4189, of any size." in played.prompt
    assert "a whole number from 0 to 1.\n\n[-0.0414, -0.0263, 0.0301, 0.0082]" in played.prompt
    assert "[-0.042, 0.1684" in played.heard[0] and "Invalid" in played.heard[1]
    named = play("gymnasium", ["right"], {"id": "CartPole-v1", "action_names": ["left", "right"]})
    assert "left (0) or right (1)" in named.prompt and named.total("gymnasium_steps") == 1


@pytest.mark.usefixtures("own_game")
def test_a_game_of_ones_own_with_actions_of_several_parts(play: Play) -> None:
    played = play("gymnasium", ['{"go": 9}', 'So: {"go": 2, "by": [0.5, 4]} then'], {"id": "own_game:Echo-v0"})
    assert 'one action: a JSON object with "by": 2 numbers, each from 0 to 9; "go"' in played.prompt
    assert "\n\n#.\nat: [1, 4], near: a wall<|im_end|>" in played.prompt
    assert "Invalid" in played.heard[0] and played.reward == 6.0


def test_where_the_prompt_says_game_it_stands_there(play: Play) -> None:
    played = play("gymnasium", [], {"id": "Blackjack-v1", "instructions": ""}, row={"prompt": "{game}\nHurry."})
    assert played.prompt.startswith("<|im_start|>user\nYour cards: ") and "\nHurry.<|im_end|>" in played.prompt


def test_messages_of_a_row_stay_before_the_game(play: Play) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Play."}]
    played = play("gymnasium", [], LAKE, row={"messages": messages})
    assert played.prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nPlay.\n\nCross")
    assert messages[1]["content"] == "Play."


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"id": "FrozenLak-v1"}, "Did you mean: `FrozenLake`"),
        ({"id": "no_such_module:Game-v0"}, "no_such_module"),
        ({"id": "Taxi-v4", "kwargs": {"rain": True}}, "'Taxi-v4' cannot be made with kwargs = {'rain': True}"),
        ({"id": "Blackjack-v1", "answer_pattern": "x"}, "0 groups"),
        ({"id": "Blackjack-v1", "action_names": ["stay"]}, "one name for each action"),
        ({"id": "own_game:Echo-v0", "kwargs": {"space": "sequence"}}, "cannot be written: expected Discrete"),
        ({"id": "Blackjack-v1", "pattern": "x"}, "no option 'pattern'; did you mean 'answer_pattern'"),
        ({}, "missing a required .*argument: 'id'"),
    ],
)
@pytest.mark.usefixtures("own_game")
def test_wrong_options_are_refused_before_anything_starts(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        check_options("gymnasium", options)
