"""Any change that the link makes to a message is detected."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_digest

from stillhouse.protocol.sockets import CHECKSUM_BYTES, checksum, damage

FRAMES = [b"header", b"", bytes(range(256)) * 5, memoryview(b"masks")]


def test_the_sum_is_xxh3_of_the_frames_one_behind_the_other() -> None:
    assert checksum(FRAMES) == xxh3_64_digest(b"".join(FRAMES))
    assert checksum([b""]).hex() == "2d06800538d394c2"  # of XXH3's own test vectors
    assert len(checksum(FRAMES)) == CHECKSUM_BYTES
    assert damage(FRAMES, checksum(FRAMES)) is None


@given(st.data())
def test_no_flipped_bit_escapes(data: st.DataObject) -> None:
    sent = [bytes(frame) for frame in FRAMES]
    which = data.draw(st.sampled_from([n for n, frame in enumerate(sent) if frame] + [len(sent)]))
    frames = [*sent, checksum(sent)]
    changed = bytearray(frames[which])
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    frames[which] = bytes(changed)
    assert damage(frames[:-1], frames[-1]) is not None


@pytest.mark.parametrize("frames", [[], [b"header"], [b"header", b""], [b"header", bytes(CHECKSUM_BYTES)]])
def test_the_error_for_a_missing_checksum_names_it(frames: list[bytes]) -> None:
    sent = frames[-1] if frames else b""
    with pytest.raises(Exception, match="XXH3"):
        raise damage(frames[:-1], sent) or AssertionError("taken for whole")
