"""Words in planes against one long integer per plane, alone and several arrays joined."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stillhouse.protocol.bit_words import MOST_BITS, n_bytes, pack_words, unpack_words
from tests.protocol.slow_planes import slow_pack, slow_unpack


@given(width=st.integers(0, MOST_BITS), sizes=st.lists(st.integers(0, 60), min_size=1, max_size=4), seed=st.integers(0))
@settings(max_examples=60)
def test_words_are_packed_and_read_as_the_bits_of_long_integers(width: int, sizes: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    arrays = [random.integers(0, 1 << width, size, dtype=np.uint64) for size in sizes]
    packed = [pack_words(words, width) for words in arrays]
    for words, got in zip(arrays, packed, strict=True):
        assert got.tobytes() == slow_pack(words.tolist(), width)
        assert len(got) == n_bytes(len(words), width)
        assert slow_unpack(got.tobytes() + b"more", len(words), width) == (words.tolist(), b"more")
    words = unpack_words([one.tobytes() for one in packed], sizes, width)
    assert words.tolist() == np.concatenate(arrays).tolist()
    assert words.dtype == np.min_scalar_type((1 << width) - 1)
