"""Packed words against one long integer."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.bit_words import n_bytes, pack_words, unpack_words


@given(width=st.integers(1, 48), n=st.integers(0, 100), seed=st.integers(0, 2**32))
@settings(deadline=None, max_examples=200)
def test_words_are_packed_and_read_as_the_bits_of_one_long_integer(width: int, n: int, seed: int) -> None:
    words = np.random.default_rng(seed).integers(0, 1 << width, n, dtype=np.uint64)
    number = sum(word << (i * width) for i, word in enumerate(words.tolist()))
    packed = pack_words(words, width)
    assert packed.tobytes() == number.to_bytes(n_bytes(n, width), "little")
    assert unpack_words(packed, n, width).tolist() == words.tolist()
