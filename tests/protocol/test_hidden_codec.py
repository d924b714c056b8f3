"""Hidden states as bytes: what goes in comes out, and nothing else is taken for a payload."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from stillhouse.protocol.errors import EncodeError, MalformedMessage
from stillhouse.protocol.payloads.hidden import (
    HiddenStates,
    decode_hidden,
    encode_hidden,
    head_of_states,
)
from stillhouse.protocol.payloads.registry import kind_of_bytes
from stillhouse.protocol.payloads.top_k import TopKSets
from stillhouse.protocol.topk_codec import encode_top_k

FINITE = np.array([[0x3F80, 0xBF80, 0x0000, 0x8001, 0x7F7F], [1, 2, 3, 0x4049, 0xFF7F]], np.uint16)


def test_bits_come_back_as_they_were() -> None:
    payload = encode_hidden(FINITE)
    assert kind_of_bytes(payload) is HiddenStates and HiddenStates.n_tokens(payload) == 2
    assert np.array_equal(decode_hidden(payload), FINITE)
    assert len(payload) == len(encode_hidden(FINITE[:0])) + 2 * 2 * 5
    assert decode_hidden(encode_hidden(FINITE[:0])).shape == (0, 5)


def test_the_bytes_are_the_upper_halves_of_little_endian_floats() -> None:
    body = encode_hidden(FINITE)[20:]
    values = [struct.unpack("<f", b"\0\0" + body[i : i + 2])[0] for i in (0, 2)]
    assert values == [1.0, -1.0]


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF])
def test_infinity_and_nan_are_neither_sent_nor_read(bits: int) -> None:
    states = FINITE.copy()
    states[1, 3] = bits
    with pytest.raises(EncodeError, match="not finite, that of token 1"):
        encode_hidden(states)
    payload = bytearray(encode_hidden(FINITE))
    payload[-4:-2] = struct.pack("<H", bits)
    assert HiddenStates.n_tokens(bytes(payload)) == 2
    with pytest.raises(MalformedMessage, match="token 1"):
        decode_hidden(bytes(payload))


@pytest.mark.parametrize("states", [FINITE[0], FINITE.astype(np.float32), FINITE[:, :0]])
def test_other_arrays_are_not_encoded(states: np.ndarray) -> None:  # type: ignore[type-arg]
    with pytest.raises(EncodeError, match="expected uint16"):
        encode_hidden(states)


def test_the_head_of_the_states_is_named_or_not_known() -> None:
    payload = encode_hidden(FINITE, 2**64 - 2)
    assert [head_of_states(one) for one in (payload, encode_hidden(FINITE))] == [2**64 - 2, 0]


def test_every_payload_that_is_cut_or_lies_is_refused() -> None:
    payload = encode_hidden(FINITE)
    wrong = [payload[:n] for n in range(len(payload))] + [payload + b"\0"]
    wrong += [payload[:i] + bytes([payload[i] ^ 1]) + payload[i + 1 :] for i in (0, 1, 2, 4, 7, 8, 11)]
    for one in wrong:
        with pytest.raises(MalformedMessage):
            HiddenStates.n_tokens(one)
        with pytest.raises(MalformedMessage):
            decode_hidden(one)


def test_top_k_sets_are_told_apart() -> None:
    ids = np.zeros((1, 1), np.int32)
    assert (
        kind_of_bytes(encode_top_k(ids, np.full((1, 1), -1.0, np.float32), vocab_size=9))
        is kind_of_bytes(b"")
        is TopKSets
    )
