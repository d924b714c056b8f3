"""In which order recorded batches are trained. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

Order: TypeAlias = Literal["recorded", "shuffled"]
ORDERS: Final[tuple[Order, ...]] = get_args(Order)


class Turn(NamedTuple):
    """One step of a replay."""

    epoch: int
    batch: int
    """Index in the recording."""


def turns(n_batches: int, *, epochs: int, order: Order, seed: int) -> Iterator[Turn]:
    """Every batch once per epoch; shuffled: in another order each time, the same for the same seed."""
    for epoch in range(epochs):
        places = np.arange(n_batches)
        if order == "shuffled":
            np.random.default_rng([seed, epoch]).shuffle(places)
        yield from (Turn(epoch, int(place)) for place in places)
