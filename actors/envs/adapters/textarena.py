"""Games of the package textarena (tried: 0.7.4), played in words (docs/agents/textarena.md).

One game is one rollout. The prompt says the rules and what is to be seen; each turn of the student is a move, and the
answer is what the game and the other player have said since. The reward is the game's.
"""

from __future__ import annotations

import contextlib
import difflib
import random
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from stillhouse.actors.agent import Context, EpisodeOver, options_checked_by
from stillhouse.actors.envs.adapters.shared.chat import own_prompt, whole_number
from stillhouse.actors.envs.adapters.shared.packages import import_package
from stillhouse.actors.envs.base import EnvTask
from stillhouse.actors.envs.single_turn import AnswerCheck
from stillhouse.actors.row_options import row_may_set
from stillhouse.protocol.plugins import load_callable

_package = import_package("textarena", environment="textarena", package="textarena", extra="textarena")

GAME_PLACE: Final = "{game}"
"""Stands for what the game says first in a row's prompt; without it that follows the prompt."""
_ONE_AT_A_TIME: Final = threading.Lock()
"""Games draw from the random numbers that all of Python shares, and each must draw its own."""


class _Heard(NamedTuple):
    """What a player is told before its turn."""

    rules: str
    news: str
    """All but the rules and its own words."""
    invalid_moves: int
    """How many of its moves the game complains about."""


class _Game:
    """One game, whose random numbers follow from its seed alone. Raises whatever the package raises."""

    def __init__(self, id: str, kwargs: Mapping[str, Any], players: int, seed: int) -> None:
        self._random = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed % 2**32).get_state()
        self._turn_moves: list[Callable[[str], str]] = []
        with self._drawing():
            game = _package.make(id, **kwargs)
            # Its wrappers show the whole history again at every turn, or less than that. The student has read it.
            while isinstance(game, _package.Wrapper):
                if isinstance(game, _package.ActionWrapper):
                    self._turn_moves.append(game.action)
                game = game.env
            self._game: Any = game
            self._game.reset(num_players=players, seed=seed)

    def next(self) -> tuple[int, _Heard]:
        """The player whose turn it is, and what it has not heard yet."""
        with self._drawing():
            player, messages = self._game.get_observation()
        kinds = _package.ObservationType
        rules = [text for _, text, kind in messages if kind is kinds.PROMPT]
        news = [
            text if sender == _package.GAME_ID else f"[Player {sender}] {text}"
            for sender, text, kind in messages
            if kind is not kinds.PROMPT and sender != player
        ]
        invalid = sum(kind is kinds.GAME_ADMIN for _, _, kind in messages)
        return player, _Heard("\n".join(rules).strip(), "\n".join(news).strip(), invalid)

    def move(self, text: str) -> bool:
        """Make a move for the player whose turn it is. True when the game is over."""
        for turned in self._turn_moves:
            text = turned(text)
        with self._drawing():
            done, _ = self._game.step(text)
        return bool(done)

    def reward(self, player: int) -> float | None:
        """Once the game is over."""
        rewards: Mapping[int, float] | None = self._game.state.rewards
        return None if rewards is None or player not in rewards else float(rewards[player])

    def ended_invalid(self, player: int) -> bool:
        """Whether the game ended because this player's moves were invalid."""
        return bool(self._game.state.game_info.get(player, {}).get("invalid_move"))

    @contextlib.contextmanager
    def _drawing(self) -> Generator[None]:
        with _ONE_AT_A_TIME:
            outside = random.getstate(), np.random.get_state()
            random.setstate(self._random)
            np.random.set_state(self._numpy)
            try:
                yield
            finally:
                self._random, self._numpy = random.getstate(), np.random.get_state()
                random.setstate(outside[0])
                np.random.set_state(outside[1])


def _check(
    *,
    id: str,
    kwargs: Mapping[str, Any] | None = None,
    opponent: str = "",
    player: int = 0,
    instructions: str | None = None,
    answer_pattern: str | None = None,
    unfinished_reward: float = 0.0,
) -> None:
    """Begin a game once. Raises ValueError for options with which it cannot be played."""
    known: Sequence[str] = _package.envs.registration.ENV_REGISTRY.keys()
    if id not in known:
        close = difflib.get_close_matches(id, known, n=3)
        raise ValueError(f"id: there is no game {id!r}; the nearest are {', '.join(close) or 'none'}")
    if player not in ((0, 1) if opponent else (0,)):
        raise ValueError(f"player: got {player}, expected 0, or with an opponent 0 or 1")
    if answer_pattern is not None:
        AnswerCheck(answer_pattern)
    _opponent(opponent)
    try:
        _Game(id, kwargs or {}, players=2 if opponent else 1, seed=0)
    except Exception as error:
        said = " ".join(str(error).replace("*", "").split())
        detail = f"{type(error).__name__}: {said[:120]}"
        raise ValueError(
            f"{id!r} cannot be played {'against an opponent' if opponent else 'alone'} with kwargs = "
            f"{dict(kwargs or {})}: {detail}"
        ) from error


@row_may_set("id", "player", "instructions", "answer_pattern")
@options_checked_by(_check)
async def textarena(
    ctx: Context,
    task: EnvTask,
    *,
    id: str,
    kwargs: Mapping[str, Any] | None = None,
    opponent: str = "",
    player: int = 0,
    instructions: str | None = None,
    answer_pattern: str | None = None,
    unfinished_reward: float = 0.0,
) -> None:
    """`id`, `kwargs`: what `textarena.make` gets. `opponent`: the other player of a game for two, a function
    `module:function` that is given what it was told so far and returns its move; `player`: the student's number there.
    `instructions`: text in place of the game's rules; empty: none. `answer_pattern`: a regular expression with one
    group; its last match is the move. `unfinished_reward`: for a game that tokens or turns did not suffice for."""
    seed = whole_number(task.row, "seed")
    game = _Game(id, kwargs or {}, players=2 if opponent else 1, seed=task.seed if seed is None else seed)
    answers = AnswerCheck(answer_pattern) if answer_pattern else None
    other = _opponent(opponent)
    told_other = ""
    line: Context | None = None
    while True:
        turn_of, heard = game.next()
        if turn_of != player:
            told_other = "\n".join(part for part in (told_other, heard.rules, heard.news) if part)
            if game.move(other(told_other)):
                break
            continue
        ctx.note(textarena_invalid_moves=heard.invalid_moves)
        if line is None:
            rules = heard.rules if instructions is None else instructions
            text = "\n\n".join(part for part in (rules, heard.news) if part)
            line = ctx.root(own_prompt(ctx.tokenizer, task.row, text, place=GAME_PLACE))
        else:
            line.observe(heard.news if ctx.tokenizer.has_template else f"\n{heard.news}\n")
        try:
            turn = await line.generate()
        except EpisodeOver:
            _unfinished(ctx, unfinished_reward)
            raise
        if turn.finish_reason == "length":  # what was cut in the middle is not what the student wanted to say
            _unfinished(ctx, unfinished_reward)
            return
        move = turn.text if answers is None else answers.find(turn.text) or ""
        ctx.note(textarena_moves=1.0)
        if game.move(move):
            break
    ctx.note(textarena_finished=1.0, textarena_invalid_moves=float(game.ended_invalid(player)))
    reward = game.reward(player)
    if reward is not None:
        ctx.reward(reward)


def _unfinished(ctx: Context, reward: float) -> None:
    ctx.note(textarena_unfinished=1.0)
    ctx.reward(reward)


def _opponent(path: str) -> Callable[[str], str]:
    return load_callable(path, "opponent") if path else _nobody


def _nobody(told: str) -> str:
    raise ValueError("the game has more players than the student: name an opponent")
