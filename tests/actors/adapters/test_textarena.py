"""Games of the real package textarena, played by scripts."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from stillhouse.actors.envs.registry import check_options
from tests.actors.adapters.conftest import Talk, needs

pytestmark = needs("textarena")

GUESS: dict[str, Any] = {"id": "GuessTheNumber-v0"}
OFFLINE = (
    "2048-v0",
    "Bandit-v0",
    "Blackjack-v0",
    "Countdown-v0",
    "Crosswords-v0",
    "Cryptarithm-v0",
    "FifteenPuzzle-v0",
    "FrozenLake-v0",
    "GuessTheNumber-v0",
    "LightsOut-v0",
    "LogicPuzzle-v0",
    "Mastermind-v0",
    "Minesweeper-v0",
    "PegJump-v0",
    "RushHour-v0",
    "Secretary-v0",
    "Set-v0",
    "Slitherlink-v0",
    "Sokoban-v0",
    "Sudoku-v0",
    "ThreeCardMonte-v0",
    "TowerOfHanoi-v0",
)
"""The games of one player that need nothing that the package does not bring (docs/agents/textarena.md)."""
TAKER = '''
def takes_one(told):
    """Takes one object of the first pile that has any."""
    piles = told.rpartition("Current Pile:")[2].split("\\n")[1:]
    sizes = [int(line.rpartition(":")[2]) for line in piles if "pile" in line]
    return f"[{next(i for i, size in enumerate(sizes) if size)} 1]"

def nothing(told):
    return "I resign"

number = 7
'''


@pytest.fixture(scope="module", autouse=True)
def own_opponent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("own_opponent")
    (folder / "own_opponent.py").write_text(TAKER)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


def secret(seed: int) -> int:
    return random.Random(seed).randint(1, 20)


def test_the_right_guess_gives_the_games_reward(talk: Talk) -> None:
    number = secret(3)
    wrong = number % 20 + 1
    talked = talk(
        "textarena", [f"perhaps [{wrong}]", str(number), "never said"], GUESS, row={"prompt": "Win.", "seed": 3}
    )
    assert talked.prompt.startswith("<|im_start|>user\nWin.\n\nYou are Player 0. You are playing Guess The Number.\n")
    hint = "lower" if wrong > number else "higher"
    assert talked.heard == [f"\n<|im_start|>user\nThe target number is {hint}.<|im_end|>\n<|im_start|>assistant\n"]
    assert talked.reward == 1.0
    assert dict(talked.info) == {"textarena_moves": 2.0, "textarena_finished": 1.0, "textarena_invalid_moves": 0.0}


def test_without_a_seed_in_the_row_the_rollouts_own_counts(talk: Talk) -> None:
    assert talk("textarena", [str(secret(41))], GUESS, seed=41).reward == 1.0


def test_invalid_moves_are_told_and_counted_and_end_the_game(talk: Talk) -> None:
    talked = talk("textarena", ["what?", "how?", "never said"], GUESS, row={"seed": 3})
    assert len(talked.heard) == 1 and "You attempted an invalid move." in talked.heard[0]
    assert (talked.reward, talked.info["textarena_invalid_moves"]) == (0.0, 2.0)


def test_a_game_that_turns_did_not_suffice_for(talk: Talk) -> None:
    talked = talk("textarena", [str(secret(3) % 20 + 1)], GUESS | {"unfinished_reward": -0.5}, row={"seed": 3})
    assert (talked.reward, talked.info["textarena_unfinished"]) == (-0.5, 1.0)
    assert getattr(talked.end, "finish_reason", None) == "length"


def test_the_rules_and_the_form_of_a_move_can_be_ones_own(talk: Talk) -> None:
    form: dict[str, Any] = {"instructions": "1 to 20?", "answer_pattern": r"#\s*(\d+)"}
    played = talk("textarena", [f"[1] #{secret(3)}"], GUESS | form, row={"prompt": "{game}", "seed": 3})
    assert played.prompt == "<|im_start|>user\n1 to 20?<|im_end|>\n<|im_start|>assistant\n"
    assert played.reward == 1.0


def test_a_move_against_another_player_is_answered(talk: Talk) -> None:
    nim: dict[str, Any] = {"id": "Nim-v0", "kwargs": {"piles": [1, 2]}, "opponent": "own_opponent:takes_one"}
    won = talk("textarena", ["[1 1]", "[1 1]"], nim)  # 1 1, then 0 1
    assert "Welcome to Nim, Player 0!" in won.prompt and "pile 1: 2" in won.prompt
    assert "Player 1 removes 1 from pile 0." in won.heard[0]
    assert won.reward == 1.0
    second = talk("textarena", ["[1 1]", "never said"], nim | {"player": 1})  # it took pile 0; 0 1 is left for it
    assert "Welcome to Nim, Player 1!" in second.prompt
    assert second.prompt.count("[Player 0] [0 1]") == 1
    assert second.reward == -1.0


def test_a_game_is_won_when_the_opponent_makes_no_valid_move(talk: Talk) -> None:
    nim: dict[str, Any] = {"id": "Nim-v0", "opponent": "own_opponent:nothing"}
    talked = talk("textarena", ["[0 1]", "never said"], nim)
    assert (talked.reward, talked.info["textarena_invalid_moves"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    "id",
    # Two of them take seconds to make a board.
    [pytest.param(id, marks=[pytest.mark.slow] * (id in ("RushHour-v0", "Sokoban-v0"))) for id in OFFLINE],
)
def test_games_that_need_no_download_begin_and_answer(talk: Talk, id: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # some of its files have them when they are compiled
        talked = talk("textarena", ["[1]"], {"id": id}, row={"seed": 7})
        assert len(talked.prompt) > 100
        assert "reward" in talked.end._fields, talked.end
        again = talk("textarena", ["[1]"], {"id": id}, row={"seed": 7})
    assert (again.prompt, again.heard) == (talked.prompt, talked.heard)


def test_games_that_are_played_at_the_same_time_draw_their_own_random_numbers() -> None:
    from stillhouse.actors.envs.adapters.textarena import _Game  # pyright: ignore[reportPrivateUsage]

    def boards(seed: int) -> list[str]:
        """2048 draws a tile after each move."""
        game = _Game("2048-v0", {}, 1, seed)
        seen: list[str] = []
        for move in ("[left]", "[up]", "[right]", "[down]") * 3:
            seen.append(game.next()[1].news)
            game.move(move)
        return seen

    alone = [boards(seed) for seed in range(8)]
    assert len({str(board) for board in alone}) == 8
    random.seed(1)
    outside = random.getstate()
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(boards, range(8))) == alone
    assert random.getstate() == outside, "what the rest of Python draws does not change"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"id": "GuessTheNumbr-v0"}, "no game 'GuessTheNumbr-v0'; the nearest are GuessTheNumber-v0"),
        ({"id": "GuessTheNumber-v0", "kwargs": {"highest": 3}}, "cannot be played alone with kwargs .*highest"),
        ({"id": "Nim-v0"}, "cannot be played alone .*number of players has to be 2"),
        ({"id": "Nim-v0", "opponent": "own_opponent:nobody"}, "opponent: cannot load 'own_opponent:nobody'"),
        ({"id": "Nim-v0", "opponent": "own_opponent:number"}, "is a int, expected a function"),
        ({"id": "Nim-v0", "opponent": "own_opponent:nothing", "player": 2}, "player: got 2, expected 0, or with an"),
        ({"id": "GuessTheNumber-v0", "player": 1}, "player: got 1, expected 0"),
        ({"id": "GuessTheNumber-v0", "answer_pattern": "x"}, "0 groups"),
        ({"id": "TwentyQuestions-v0"}, "OpenRouter API key not found"),
        ({}, "missing a required .*argument: 'id'"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(
    options: dict[str, object], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(ValueError, match=complaint) as raised:
        check_options("textarena", options)
    assert not re.search(r"\n|\*\*", str(raised.value)), "one line"
