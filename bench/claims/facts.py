"""Made-up facts as running text: the documents of claim 5. No torch.

bokilu has 417. desafi has 902. ...
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

COUNT: Final = 32
PER_DOCUMENT: Final = 8


@dataclass(frozen=True, slots=True)
class Fact:
    name: str
    answer: str

    @property
    def prompt(self) -> str:
        """Running text, without a chat template."""
        return f"{self.name} has"


def facts(seed: int) -> list[Fact]:
    """COUNT facts, each of another name; the same ones for the same seed."""
    rng, names = random.Random(seed), dict[str, None]()
    while len(names) < COUNT:
        names["".join(rng.choice("bdfgklmnprst") + rng.choice("aeiou") for _ in range(3))] = None
    return [Fact(name, f"{rng.randrange(1000):03}") for name in names]


def documents(known: Sequence[Fact], seed: int) -> Iterator[str]:
    """Endless: PER_DOCUMENT facts in each, in a new order once all have been told."""
    rng = random.Random(seed)
    while True:
        order = rng.sample(known, len(known))
        for first in range(0, len(order), PER_DOCUMENT):
            some = order[first : first + PER_DOCUMENT]
            yield " ".join(f"{one.prompt} {one.answer}." for one in some)
