"""A teacher's last hidden states at some tokens, in bfloat16. Its output head turns each into the distribution that
predicts the token. NumPy only.

    payload   header | states, bfloat16 [T, H]      little-endian
    header    "HS", version uint8, 0, T uint32, H uint32, head uint64

`head` identifies the output head that the states belong to (`models.logprobs.LmHead.identity`); 0: not known. Version 1
had none.

NumPy has no bfloat16: arrays hold the bits as uint16, which are the upper half of a float32.

Legend: T tokens, H hidden size of the teacher.
"""

from __future__ import annotations

import struct
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from stillhouse.protocol.errors import EncodeError, MalformedMessage

Bits: TypeAlias = npt.NDArray[np.uint16]

_HEADER: Final = struct.Struct("<2sBxII")
_MAGIC: Final = b"HS"
_HEAD: Final = struct.Struct("<Q")
_VERSION: Final = 2
HEADER_BYTES: Final = _HEADER.size + _HEAD.size
_EXPONENT: Final = np.uint16(0x7F80)
"""All bits of the exponent: infinity or NaN."""
_WHAT: Final = "hidden-state payload"


def is_hidden(payload: bytes | memoryview) -> bool:
    """Whether a teacher's payload claims to hold hidden states; the other kind is `protocol.topk_codec`."""
    return bytes(payload[:2]) == _MAGIC


def most_bytes(hidden_size: int) -> int:
    """Bytes that one token takes, without the header."""
    return 2 * hidden_size


def encode_hidden(states_TH: Bits, head: int = 0) -> bytes:
    """`head`: the identity of the head of the states. Raises EncodeError for another shape or dtype, and for states
    that are not finite."""
    if states_TH.ndim != 2 or states_TH.dtype != np.uint16 or states_TH.shape[1] < 1:
        raise EncodeError(f"hidden states {states_TH.dtype} {states_TH.shape}; expected uint16 [T, H], H >= 1")
    if (wrong := _not_finite(states_TH)) is not None:
        raise EncodeError(f"a hidden state is not finite, that of token {wrong}; it cannot be sent")
    header = _HEADER.pack(_MAGIC, _VERSION, *states_TH.shape)
    return header + _HEAD.pack(head) + np.ascontiguousarray(states_TH, "<u2").tobytes()


def decode_hidden(payload: bytes | memoryview) -> Bits:
    """[T, H], a view of the payload. Raises only MalformedMessage, whatever the bytes are."""
    n_tokens, hidden_size, begin = _read_header(payload)
    states_TH = np.frombuffer(payload, "<u2", offset=begin).reshape(n_tokens, hidden_size)
    if (wrong := _not_finite(states_TH)) is not None:
        raise MalformedMessage(_WHAT, got=f"infinity or NaN in the state of token {wrong}", expected="finite numbers")
    return states_TH


def check_hidden(payload: bytes | memoryview) -> int:
    """T of a payload. Checks that its length fits its header, but not its numbers. Raises MalformedMessage."""
    return _read_header(payload)[0]


def head_of_states(payload: bytes | memoryview) -> int:
    """The identity of the head of a payload's states; 0 if it is not known. Raises MalformedMessage."""
    begin = _read_header(payload)[2]
    return 0 if begin == _HEADER.size else int(_HEAD.unpack_from(payload, _HEADER.size)[0])


def _read_header(payload: bytes | memoryview) -> tuple[int, int, int]:
    """T, H and the place of the states."""
    if len(payload) < _HEADER.size:
        raise MalformedMessage(_WHAT, got=f"{len(payload)} bytes", expected=f"at least {_HEADER.size}")
    magic, version, n_tokens, hidden_size = _HEADER.unpack_from(payload)
    if magic != _MAGIC or version not in (1, _VERSION) or not hidden_size:
        got = f"{magic!r} {version}, a hidden size of {hidden_size}"
        raise MalformedMessage(_WHAT, got=got, expected=f"{_MAGIC!r} {_VERSION}, a size above 0")
    begin = _HEADER.size + (_HEAD.size if version == _VERSION else 0)
    expected = begin + n_tokens * most_bytes(hidden_size)
    if len(payload) != expected:
        raise MalformedMessage(_WHAT, got=f"{len(payload)} bytes", expected=f"{expected}")
    return n_tokens, hidden_size, begin


def _not_finite(states_TH: Bits) -> int | None:
    """The first token with a state that is not finite."""
    wrong_T = ((states_TH & _EXPONENT) == _EXPONENT).any(axis=1)
    return int(wrong_T.argmax()) if wrong_T.any() else None
