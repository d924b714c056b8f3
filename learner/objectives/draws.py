"""Random numbers that belong to tokens: which step, rollout and teacher, and nothing else, decides them.

No generator has a state here. So a resumed or replayed run draws what the first one drew, and neither packing, nor the
order of a batch, nor a second pass over it (a gradient that is only looked at, the search for a bad rollout) changes
what the next step draws.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np
import numpy.typing as npt


def uniforms(
    seed: int, step: int, rollout_id: str, teacher: str, offsets: npt.NDArray[np.int64], n_each: int
) -> npt.NDArray[np.float64]:
    """[R, n_each] in [0, 1) for the tokens at R offsets of a rollout. Of a rollout that comes in parts each token has
    the numbers that it would have in the whole."""
    if not len(offsets) or not n_each:
        return np.zeros((len(offsets), n_each))
    key = hashlib.blake2b(json.dumps([seed, step, rollout_id, teacher]).encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    return generator.random((int(offsets.max()) + 1, n_each))[offsets]
