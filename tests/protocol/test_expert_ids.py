"""Expert ids on the wire: what is written is read, its size, and no bytes that harm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillhouse.protocol.errors import EncodeError, MalformedMessage
from stillhouse.protocol.messages import ExpertShape
from stillhouse.protocol.payloads.expert_ids import decode_experts, encode_experts, most_bytes

SHAPE = ExpertShape((0, 2), 5, 2)


def drawn(n_tokens: int, shape: ExpertShape, share: float, seed: int) -> dict[int, Any]:
    rng = np.random.default_rng(seed)

    def row() -> Any:
        return np.stack([rng.permutation(shape.experts)[: shape.chosen] for _ in shape.layers]).astype(np.uint16)

    return {token: row() for token in range(n_tokens) if rng.random() < share}


@given(
    st.integers(0, 40),
    st.integers(1, 5),
    st.sampled_from([1, 2, 5, 8, 60, 128, 256, 300, 512]),
    st.integers(1, 4),
    st.floats(0, 1),
    st.integers(0, 99),
)
@settings(max_examples=60)
def test_what_is_written_is_read(
    n_tokens: int, layers: int, experts: int, chosen: int, share: float, seed: int
) -> None:
    shape = ExpertShape(tuple(range(layers)), experts, min(chosen, experts))
    rows = drawn(n_tokens, shape, share, seed)
    told = encode_experts(rows, n_tokens, shape)
    found = decode_experts(told, n_tokens, shape)
    assert set(np.flatnonzero(found.given_T).tolist()) == set(rows)
    assert all((found.ids_TLK[token] == row).all() for token, row in rows.items())
    assert not found.ids_TLK[~found.given_T].any()
    assert len(told) <= 16 + n_tokens * most_bytes(shape)


@pytest.mark.parametrize(
    ("layers", "experts", "chosen", "expected"),
    [(48, 128, 8, 336), (94, 128, 8, 658), (58, 256, 8, 464), (60, 384, 8, 540), (36, 128, 4, 126)],
    ids=["Qwen3-30B-A3B", "Qwen3-235B-A22B", "DeepSeek-V3", "Kimi-K2", "gpt-oss-120b"],
)
def test_bytes_of_a_token(layers: int, experts: int, chosen: int, expected: int) -> None:
    """SGLang's own int32 take four bytes per id: 1,536 for Qwen3-30B-A3B."""
    shape, n_tokens = ExpertShape(tuple(range(layers)), experts, chosen), 64
    told = encode_experts(drawn(n_tokens, shape, 1.0, 0), n_tokens, shape)
    assert len(told) == 16 + n_tokens // 8 + n_tokens * expected


@pytest.mark.parametrize(
    "row",
    [[[0, 1], [4, 4]], [[0, 5], [1, 2]], [[0, 1]], [[0, 1, 2], [0, 1, 2]], [[-1, 1], [0, 1]]],
    ids=["twice", "too large", "a layer short", "too many", "negative"],
)
def test_what_no_router_chooses_is_neither_written_nor_read(row: list[list[int]]) -> None:
    ids = np.array(row)
    with pytest.raises(EncodeError):
        encode_experts({1: ids}, 3, SHAPE)  # pyright: ignore[reportArgumentType]
    if ids.min() < 0:
        return
    other = ExpertShape(tuple(range(len(ids))), 8, ids.shape[1])
    good = bytearray(encode_experts({1: drawn(2, other, 1.0, 0)[1]}, 3, other))
    if ids.shape == (2, 2):  # the same header and bitmap, with these words
        from stillhouse.protocol.bit_words import pack_words

        good[:16] = encode_experts({}, 3, SHAPE)[:16]
        good[17:] = pack_words(ids.ravel().astype(np.uint16), 3).tobytes()
    with pytest.raises(MalformedMessage):
        decode_experts(bytes(good), 3, SHAPE)


@given(st.binary(max_size=60), st.integers(0, 60), st.integers(0, 5))
@settings(max_examples=60)
def test_arbitrary_bytes_are_refused_or_read(noise: bytes, cut: int, n_tokens: int) -> None:
    good = encode_experts(drawn(4, SHAPE, 0.7, 1), 4, SHAPE)
    for told in (noise, good[:cut] + noise, good[:16] + noise):
        try:
            found = decode_experts(told, n_tokens, SHAPE)
        except MalformedMessage:
            continue
        assert found.ids_TLK.max(initial=0) < 5 and len(found.given_T) == n_tokens
