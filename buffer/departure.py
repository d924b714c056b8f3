"""When the next batch leaves, and when actors are asked for what they hold, where each moment costs tokens.

With a bound of 1, whatever is sampled after a batch has left and before the weights of the step before it arrive is too
old for the batch after it, and is lost. Such tokens *run out*. (With a higher bound they are trained a batch later.)
Where tokens run out,

- a batch leaves when the learner needs it, and not as soon as it is full, unless nothing more can come. It takes all
  tokens that may leave;
- shortly before that, actors are asked to send what they hold of unfinished segments. They take turns, in ever shorter
  rounds: all at once would be more than teachers can score in the time that is left. Each is one more segment to score,
  so none is asked where teachers could not answer in time: whole rollouts would be scored later for it.

The end of a step is known from the learner's pace in the step before. A batch leaves as much earlier as the last one
took from here to a learner that waited for it. While the learner never waits this time is taken for a little shorter
with each step: it is measured again as soon as it is too short."""

from __future__ import annotations

from typing import Final

ASK_SHARE: Final = 0.25
"""Actors are asked for what they hold when this share of the step is left, if teachers usually answer within it."""
SHORTEST_ROUND_S: Final = 0.1
"""Shortest time in which each of them is asked once."""
SHORTER: Final = 0.9
"""What a batch's way is multiplied by after each step for which the learner did not wait."""


class Departure:
    """The clock of the step that the learner makes."""

    def __init__(self) -> None:
        self._began_s: float | None = None
        """When the learner began the step that it makes."""
        self._n_tokens = 0
        """Tokens that it trains in it."""
        self._ended_s: float | None = None
        """When it ended the one before, if it has not begun another."""
        self._s_per_token: float | None = None
        """Its pace in the last step."""
        self._left_s: float | None = None
        """When the newest batch left, if the learner has not begun to train it."""
        self._awaited = False
        """The learner did nothing but wait for that batch."""
        self._way_s = 0.0
        """From there until the learner begins to train it."""
        self._looked_s: float | None = None
        """When `turns` was last called, since the newest batch left."""

    def __repr__(self) -> str:
        return f"Departure(began_s={self._began_s}, ends_s={self._ends_s}, way_s={self._way_s})"

    def batch_left(self, now_s: float, *, awaited: bool) -> None:
        """A batch left. `awaited`: the learner does nothing but wait for it."""
        self._left_s, self._awaited, self._looked_s = now_s, awaited, None

    def awaited(self) -> None:
        """The learner has nothing left to do but wait for the batch that left last."""
        self._awaited = True

    def step_began(self, now_s: float, n_tokens: int) -> None:
        """The learner trains the batch that left last: it asks for the one after it."""
        if self._left_s is not None:
            self._way_s = now_s - self._left_s if self._awaited else SHORTER * self._way_s
        self._left_s, self._began_s, self._n_tokens, self._ended_s = None, now_s, n_tokens, None

    def step_ended(self, now_s: float) -> None:
        """The learner has trained the batch."""
        if self._began_s is not None and self._n_tokens:
            self._s_per_token = (now_s - self._began_s) / self._n_tokens
        self._began_s, self._ended_s = None, now_s

    def due(self, now_s: float) -> bool:
        """The next batch would reach the learner just as it ends its step, or has ended it."""
        leaves_s = self._leaves_s
        return self._began_s is None or (leaves_s is not None and now_s >= leaves_s)

    def turns(self, now_s: float, round_s: float, scoring_s: float | None) -> float:
        """Share of the actors that are to be asked for what they hold, since this was last called. `round_s`: shortest
        time in which all of them may be asked. `scoring_s`: from a segment to its scores, if that is known."""
        leaves_s, looked_s = self._leaves_s, self._looked_s
        self._looked_s = now_s
        step_s = self._step_s
        if leaves_s is None or looked_s is None or scoring_s is None or step_s is None:
            return 0.0
        if scoring_s > ASK_SHARE * step_s:
            return 0.0
        if self._began_s is not None and leaves_s - now_s > ASK_SHARE * (leaves_s - self._began_s):
            return 0.0
        return (now_s - looked_s) / max(SHORTEST_ROUND_S, round_s, abs(leaves_s - now_s))

    @property
    def _step_s(self) -> float | None:
        """How long the learner's step takes, by its pace in the last one, or took."""
        return None if self._s_per_token is None else self._n_tokens * self._s_per_token

    @property
    def _ends_s(self) -> float | None:
        """When the learner's step ends, or has ended."""
        if self._began_s is None:
            return self._ended_s
        step_s = self._step_s
        return None if step_s is None else self._began_s + step_s

    @property
    def _leaves_s(self) -> float | None:
        """When the next batch should leave."""
        ends_s = self._ends_s
        return None if ends_s is None else ends_s - self._way_s
