"""Random conversations of an agent with an engine, and a slow second account of what is to be trained of them.

Nothing here imports the token graph. Every sampled token gets a log-prob of its own, a serial number, so that a trained
token can be recognised wherever it appears. Tokens come from a tiny vocabulary: prompts share beginnings and responses
collide all the time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Tokens = tuple[int, ...]


@dataclass(slots=True)
class Asked:
    """One call: what the engine read, and what it wrote so far."""

    prompt: Tokens
    group: int
    """Calls whose caller asked for several responses at once share one."""
    has_logprobs: bool
    response: Tokens = ()
    serials: list[int] = field(default_factory=list[int])
    first_token_at: int = -1
    """Order in which responses began."""
    open: bool = True
    delivered: bool = True
    followed: bool = False

    @property
    def full(self) -> Tokens:
        return self.prompt + self.response


@dataclass(slots=True)
class Event:
    """begin (prompt of call `call`), extend (by `tokens`) or end."""

    kind: Literal["begin", "extend", "end"]
    call: int
    tokens: Tokens = ()
    serials: tuple[int, ...] = ()
    choice_of: int | None = None
    has_logprobs: bool = True
    delivered: bool = True


class Conversation:
    """Draws the events of one episode. `book`: what happened, by call."""

    def __init__(self, seed: int, *, n_events: int, vocabulary: int) -> None:
        self._random = random.Random(seed)
        self._vocabulary = vocabulary
        self._serial = 0
        self.book: list[Asked] = []
        self.events: list[Event] = []
        while len(self.events) < n_events:
            self._turn()
        for i, asked in enumerate(self.book):
            if asked.open:
                self._end(i)

    def _turn(self) -> None:
        open_calls = [i for i, asked in enumerate(self.book) if asked.open]
        if open_calls and self._random.random() < 0.65:
            call = self._random.choice(open_calls)
            if self._random.random() < 0.35:
                self._end(call)
            else:
                self._extend(call)
        else:
            self._begin()

    def _tokens(self, most: int) -> Tokens:
        return tuple(self._random.randrange(self._vocabulary) for _ in range(self._random.randint(1, most)))

    def _begin(self) -> None:
        choice_of: int | None = None
        if not self.book:
            prompt = self._tokens(6)
        else:
            draw: list[Callable[[Asked], Tokens]] = [
                lambda a: a.full + self._tokens(4),  # the next turn
                lambda a: a.full + self._tokens(4),
                lambda a: a.full,  # "go on"
                lambda a: a.prompt,  # a retry
                lambda a: a.full[: self._random.randint(1, len(a.full))] + self._tokens(4),  # a changed history
                lambda a: self._tokens(3) + a.full[-3:],  # a summary, or a sub-agent
                lambda a: self._tokens(6),
            ]
            # Mostly a recent call; sometimes an old one.
            recent = self.book[-4:] if self._random.random() < 0.7 else self.book
            i = self._random.randrange(len(recent)) + len(self.book) - len(recent)
            prompt = self._random.choice(draw)(self.book[i])
            if self._random.random() < 0.1:
                prompt, choice_of = self.book[i].prompt, i
        group = len(self.book) if choice_of is None else self.book[choice_of].group
        if choice_of is None:
            self._note_followed(prompt)
        self.book.append(Asked(prompt, group, has_logprobs=self._random.random() < 0.9))
        self.events.append(Event("begin", len(self.book) - 1, prompt, choice_of=choice_of))

    def _note_followed(self, prompt: Tokens) -> None:
        """A new prompt goes on from at most one response: the one with which it shares most tokens."""
        if any(asked.prompt == prompt for asked in self.book):
            return  # a retry follows whatever the first one followed
        longest = max((shared(asked.full, prompt) for asked in self.book), default=0)
        found = [a for a in self.book if a.response and shared(a.full, prompt) == longest > len(a.prompt)]
        if found:
            max(found, key=lambda a: (len(a.full) == longest, a.first_token_at)).followed = True

    def _extend(self, call: int) -> None:
        asked, tokens = self.book[call], self._tokens(4)
        serials = tuple(range(self._serial + 1, self._serial + 1 + len(tokens)))
        self._serial += len(tokens)
        if not asked.response:
            asked.first_token_at = self._serial
        asked.response += tokens
        asked.serials += serials
        self.events.append(Event("extend", call, tokens, serials, has_logprobs=asked.has_logprobs))

    def _end(self, call: int) -> None:
        asked = self.book[call]
        asked.open, asked.delivered = False, self._random.random() < 0.9
        self.events.append(Event("end", call, delivered=asked.delivered))

    # ------------------------------------------------------------------------------------------ the second account

    def to_train(self) -> dict[int, int]:
        """Serial number of every token to train -> its call."""
        kept: dict[int, int] = {}
        for i, asked in enumerate(self.book):
            if asked.has_logprobs and asked.response and self._is_kept(asked):
                kept |= dict.fromkeys(asked.serials, i)
        return kept

    def _is_kept(self, asked: Asked) -> bool:
        same = [other for other in self.book if other.prompt == asked.prompt and other.response]
        if not (asked.delivered or asked.followed):
            return False
        groups = {other.group for other in same if other.followed}
        if not groups:
            groups = {[other for other in same if other.delivered][-1].group}
        return asked.group in groups


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Leading tokens that both have."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def check_sequences(talk: Conversation, sequences: Iterable[tuple[Tokens, list[float], list[bool]]]) -> None:
    """Each token to train is trained once, behind exactly the tokens that the engine had read and written before it.
    `sequences`: token ids, log-probs and train mask of each. Raises AssertionError."""
    expected = talk.to_train()
    seen: set[int] = set()
    for ids, logprobs, mask in sequences:
        assert any(mask), "a sequence with nothing to train"
        for i, trained in enumerate(mask):
            if not trained:
                continue
            serial = int(logprobs[i])
            assert serial in expected, f"token {serial} is trained and should not be"
            assert serial not in seen, f"token {serial} is trained twice"
            seen.add(serial)
            asked = talk.book[expected[serial]]
            before = asked.full[: len(asked.prompt) + asked.serials.index(serial) + 1]
            assert ids[: i + 1] == before, f"token {serial} stands behind {ids[:i]}, the engine had {before[:-1]}"
    assert seen == set(expected), f"not trained: {sorted(set(expected) - seen)}"
