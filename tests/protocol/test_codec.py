"""Frames to messages and back. The examples are those of tests.sim.messages."""

from __future__ import annotations

from typing import Any, cast, get_args

import msgpack
import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from stillhouse.protocol import codec
from stillhouse.protocol import messages as m
from stillhouse.protocol.codec import Array, Frame, decode, encode
from stillhouse.protocol.errors import EncodeError, MalformedMessage, MessageTooLarge, RemoteProtocolError
from stillhouse.protocol.sockets import new_socket, receive_from_router, send_frames
from tests.patience import PATIENCE_S
from tests.sim.messages import EXAMPLES, SEGMENT, SNAPSHOT, ids, logprobs, mask

each_message = pytest.mark.parametrize(
    ("message", "arrays"), EXAMPLES, ids=[type(message).__name__ for message, _ in EXAMPLES]
)


def pack(value: object) -> bytes:
    return cast(bytes, msgpack.packb(value))


def as_bytes(frames: list[Frame]) -> list[bytes]:
    return [bytes(frame) for frame in frames]


def test_there_is_an_example_of_every_message() -> None:
    assert sorted(type(message).__name__ for message, _ in EXAMPLES) == sorted(t.__name__ for t in get_args(m.Message))


@each_message
def test_every_message_comes_back_equal_over_a_real_socket(message: m.Message, arrays: tuple[Array, ...]) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router, dealer = new_socket(context, zmq.ROUTER), new_socket(context, zmq.DEALER)
    try:
        dealer.connect(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
        send_frames(dealer, encode(message, arrays))
        assert router.poll(int(PATIENCE_S * 1000))
        got = receive_from_router(router)
    finally:
        context.destroy(linger=0)
    assert got is not None and got.damage is None
    received = decode(got.frames)
    assert received.message == message
    assert len(received.arrays) == len(arrays)
    for got, sent in zip(received.arrays, arrays, strict=True):
        assert got.dtype == sent.dtype
        assert not got.flags.writeable
        np.testing.assert_array_equal(got, sent)


@each_message
def test_headers_are_plain_messagepack_for_other_languages(message: m.Message, arrays: tuple[Array, ...]) -> None:
    header, *rest = encode(message, arrays)
    unpacked = msgpack.unpackb(header, strict_map_key=False)
    assert unpacked["type"] == type(message).__name__
    assert list(unpacked)[1:] == list(message.__struct_fields__)
    assert decode([pack(unpacked), *rest]).message == message


def test_integer_keys_stay_integers_with_both_libraries() -> None:
    header = bytes(encode(SNAPSHOT)[0])
    assert msgpack.unpackb(header, strict_map_key=False)["staleness_hist"] == {0: 5, 3: 2}
    decoded = decode([header]).message
    assert isinstance(decoded, m.Snapshot)
    assert decoded.staleness_hist == {0: 5, 3: 2}


def test_c_contiguous_arrays_are_not_copied_either_way() -> None:
    segment, (token_ids, lps, loss_mask) = SEGMENT
    token_ids = token_ids.copy()
    frames = encode(segment, (token_ids, lps, loss_mask))
    token_ids[0] = 99
    assert np.frombuffer(frames[1], np.int32)[0] == 99
    assert np.shares_memory(decode(frames).arrays[0], token_ids)


def test_a_final_segment_may_hold_no_token() -> None:
    empty = msgspec.structs.replace(SEGMENT[0], start=5, end=5)
    received = decode(encode(empty, (ids(0), logprobs(0), mask(0))))
    assert [array.shape for array in received.arrays] == [(0,), (0,), (0,)]


def test_strided_arrays_are_sent_as_their_elements() -> None:
    segment, (_, lps, loss_mask) = SEGMENT
    strided = np.arange(6, dtype=np.int32)[::2]
    np.testing.assert_array_equal(decode(encode(segment, (strided, lps, loss_mask))).arrays[0], [0, 2, 4])


# --------------------------------------------------------------------------------------------- our own mistakes


@pytest.mark.parametrize(
    ("message", "arrays", "expected"),
    [
        (SEGMENT[0], (), "got 0 arrays, expected 3"),
        (SEGMENT[0], (ids(4), logprobs(3), mask(3)), r"token ids: got int32 \[4\], expected int32 \[3\]"),
        (SEGMENT[0], (ids(3).astype(np.int64), logprobs(3), mask(3)), "got int64"),
        (SEGMENT[0], (ids(3).astype(">i4"), logprobs(3), mask(3)), "got >i4"),
        (SEGMENT[0], (ids(3), logprobs(3), mask(3).astype(bool)), "loss mask: got bool"),
        (m.Scores((1,)), (logprobs(0),), r"expected float32 \[n >= 1\]"),
        (m.Scores((1,)), (logprobs(1, 3),), r"got float32 \[1, 3\]"),
        (m.Goodbye("x"), (ids(1),), "got 1 arrays, expected 0"),
        (msgspec.structs.replace(SEGMENT[0], end=1), SEGMENT[1], "of -1 tokens"),
        (m.Membership(("a",), ()), (), "0 incarnations for 1 actors"),
        (m.Shutdown(True, cast(str, np.int64(3))), (), "cannot encode"),
        (m.CancelRollout("\ud800", ""), (), "cannot encode"),
        (m.Goodbye("x" * codec.MAX_HEADER_BYTES), (), "at most"),
    ],
)
def test_the_error_for_an_invalid_message_says_what_was_expected(
    message: m.Message, arrays: tuple[Array, ...], expected: str
) -> None:
    with pytest.raises(EncodeError, match=expected):
        encode(message, arrays)


# ------------------------------------------------------------------------------------------- the peer's mistakes


def segment_with(**fields: Any) -> list[bytes]:
    frames = as_bytes(encode(*SEGMENT))
    return [msgspec.msgpack.encode(msgspec.structs.replace(SEGMENT[0], **fields)), *frames[1:]]


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([], "no frames"),
        ([b""], "unreadable header"),
        ([b"\xc1"], "unreadable header"),
        ([pack({"type": "Nonsense"})], "Nonsense"),
        ([pack({"type": "Goodbye", "reason": 3})], "Expected `str`, got `int`"),
        ([pack({"type": "Goodbye", "reason": "x"}) + b"tail"], "trailing"),
        ([b"\x82\xa4type\xa7Goodbye\xa6reason\xa1\xff"], "utf-8"),
        ([b"\x82\xa4type\xa7Goodbye\xa6unknow" + b"\x91" * 200_000 + b"\xc0"], "recursion"),
        ([b"\x82\xa4type\xabScoreFailed\xa6leases\xdd\xff\xff\xff\xff"], "truncated"),
        (segment_with(end=6), "length of token ids: got 12 bytes, expected 16 bytes"),
        (segment_with(end=2**62), "length of token ids"),
        (segment_with(end=-5), "contradicts itself"),
        (as_bytes(encode(*SEGMENT))[:-1], "got 2 arrays, expected 3 arrays"),
        ([*as_bytes(encode(*SEGMENT)), b""], "got 4 arrays"),
        ([msgspec.msgpack.encode(m.Scores((1,))), b"abc"], "multiple of 4"),
        ([msgspec.msgpack.encode(m.Scores((1,))), b""], "multiple of 4"),
        ([msgspec.msgpack.encode(m.ScoresAck((1,), (), ()))], "0 statuses for 1 leases"),
    ],
)
def test_what_cannot_be_is_malformed(frames: list[Frame], expected: str) -> None:
    with pytest.raises(MalformedMessage, match=expected):
        decode(frames)


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([b"\x81" + bytes(codec.MAX_HEADER_BYTES)], "header of"),
        ([b""] * (codec.MAX_FRAMES + 1), "frames"),
        ([b"", bytes(codec.MAX_FRAME_BYTES + 1)], "a frame of"),
        ([b"", *[bytes(codec.MAX_FRAME_BYTES)] * 17], "in total"),
    ],
)
def test_size_limits_are_checked_before_anything_is_parsed(frames: list[Frame], expected: str) -> None:
    with pytest.raises(MessageTooLarge, match=expected):
        decode(frames)


def decodes_or_blames_the_peer(frames: list[Frame]) -> None:
    try:
        received = decode(frames)
    except RemoteProtocolError as error:
        assert error.got
        assert error.expected
    else:
        assert isinstance(received.message, get_args(m.Message))
        encode(received.message, received.arrays)  # what came in at the door can go out again


@settings(max_examples=50)
@given(st.lists(st.binary(max_size=200), max_size=5))
def test_any_bytes_decode_or_blame_the_peer(frames: list[Frame]) -> None:
    decodes_or_blames_the_peer(frames)


@settings(max_examples=50)
@given(data=st.data(), example=st.sampled_from(EXAMPLES))
def test_damaged_messages_decode_or_blame_the_peer(
    data: st.DataObject, example: tuple[m.Message, tuple[Array, ...]]
) -> None:
    frames = as_bytes(encode(*example))
    for _ in range(data.draw(st.integers(1, 3))):
        which = data.draw(st.integers(0, len(frames) - 1))
        at = data.draw(st.integers(0, len(frames[which])))
        cut = data.draw(st.integers(0, 4))
        frames[which] = frames[which][:at] + data.draw(st.binary(max_size=4)) + frames[which][at + cut :]
        if data.draw(st.booleans()):
            frames = data.draw(st.permutations(frames))
    decodes_or_blames_the_peer(list(frames))


_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=8,
)


@settings(max_examples=50)
@given(data=st.data(), kind=st.sampled_from(get_args(m.Message)))
def test_wrongly_typed_fields_decode_or_blame_the_peer(data: st.DataObject, kind: type[msgspec.Struct]) -> None:
    names = kind.__struct_fields__
    fields = data.draw(st.fixed_dictionaries({}, optional=dict.fromkeys(names, _values)))
    header = pack({"type": kind.__name__, **fields})
    decodes_or_blames_the_peer([header, *data.draw(st.lists(st.binary(max_size=40), max_size=4))])


def test_the_version_of_an_unreadable_hello_can_still_be_told() -> None:
    assert codec.claimed_version(pack({"type": "Hello", "protocol_version": 9, "shape": "new"})) == 9
    assert codec.claimed_version(pack({"type": "Hello"})) is None
    assert codec.claimed_version(b"\x91" * 100_000) is None


def test_a_heartbeat_is_small() -> None:
    fits = m.Heartbeat(None, {f"environment_{i}_total": 1.0 for i in range(4000)})
    assert decode(encode(fits)).message == fits
    with pytest.raises(MessageTooLarge, match="Heartbeat"):
        decode(encode(m.Heartbeat(None, {f"{i:200}": 1.0 for i in range(2000)})))
