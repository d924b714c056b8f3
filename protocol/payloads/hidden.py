"""A teacher's last hidden states at some tokens, in bfloat16: 2 bytes times the hidden size each. The learner applies
the teacher's output head to them, so that a divergence is over the whole vocabulary. NumPy only.

    payload   header | states, bfloat16 [T, H]      little-endian
    header    "HS", version uint8, 0, T uint32, H uint32, head uint64

`head` identifies the output head that the states belong to (`models.logprobs.LmHead.identity`); 0: not known.

NumPy has no bfloat16: arrays hold the bits as uint16, which are the upper half of a float32.

Legend: T tokens, H hidden size of the teacher, R rows of one teacher.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from stillhouse.protocol.errors import EncodeError, MalformedMessage
from stillhouse.protocol.payloads.kind import (
    Encoder,
    EngineNeed,
    ModelSizes,
    Packed,
    PayloadError,
    PayloadKind,
    PayloadOptions,
    PayloadPart,
    PayloadRows,
    ScoreOptions,
    ScoreResult,
    TopIds,
)

Bits: TypeAlias = npt.NDArray[np.uint16]

_HEADER: Final = struct.Struct("<2sBxIIQ")
_MAGIC: Final = b"HS"
_VERSION: Final = 2
HEADER_BYTES: Final = _HEADER.size
_EXPONENT: Final = np.uint16(0x7F80)
"""All bits of the exponent: infinity or NaN."""
_WHAT: Final = "hidden-state payload"
HIDDEN_STATES: Final = EngineNeed("teacher", "gives its last hidden states")


@runtime_checkable
class GivesHiddenStates(Protocol):
    """A ScoringEngine (engines.base) that also gives the states from which its output head computes the logits."""

    @property
    def hidden_size(self) -> int:
        """H."""
        ...

    @property
    def head_identity(self) -> int:
        """`models.logprobs.LmHead.identity` of its output head; 0: not known."""
        ...


class HiddenStates(PayloadKind):
    payload: ClassVar[str] = "hidden"
    what: ClassVar[str] = "the hidden states"
    magic: ClassVar[bytes] = _MAGIC
    header_bytes: ClassVar[int] = HEADER_BYTES
    needs: ClassVar[tuple[EngineNeed, ...]] = (HIDDEN_STATES,)
    needs_head: ClassVar[bool] = True

    @classmethod
    def chosen_by(cls, options: PayloadOptions) -> bool:
        return options.payload == cls.payload

    @staticmethod
    def mistake(options: PayloadOptions) -> str:
        if options.payload != "hidden" or not options.top_k:
            return ""
        return f"top_k: got {options.top_k} with payload = hidden, expected 0: hidden states take the place of sets"

    def setting(self, key: str) -> tuple[str, object]:
        return f"{key}.payload", self.payload

    def most_bytes(self, sizes: ModelSizes) -> int | None:
        return None if sizes.hidden is None else 2 * sizes.hidden

    def encoder(self, engine: Any, vocab_tokens: int) -> HiddenEncoder:
        if not isinstance(engine, GivesHiddenStates):
            raise ValueError(
                f"teacher.payload = hidden: {type(engine).__name__} has log-probs only; expected teacher.engine = torch"
            )
        return HiddenEncoder(engine)

    @classmethod
    def n_tokens(cls, payload: Packed) -> int:
        return _read_header(payload)[0]

    @classmethod
    def read(cls, teacher: str, pieces: Sequence[PayloadPart], vocab_tokens: int) -> HiddenRows:
        for one in pieces:
            if (n_tokens := cls.n_tokens(one.body)) != one.n_tokens:
                raise PayloadError(f"teacher {teacher!r}: hidden states of {n_tokens} tokens, expected {one.n_tokens}")
        states = [(decode_hidden(one.body)[one.rows], head_of_states(one.body)) for one in pieces]
        return HiddenRows.joined([HiddenRows(teacher, *one) for one in states])


@dataclass(frozen=True)
class HiddenEncoder(Encoder):
    engine: GivesHiddenStates
    options = ScoreOptions(hidden=True)

    def encode(self, result: ScoreResult, place: slice, given: TopIds | None) -> bytes:
        if result.hidden is None:
            return encode_hidden(np.zeros((0, self.engine.hidden_size), np.uint16))
        return encode_hidden(result.hidden[place], self.engine.head_identity)


@dataclass(frozen=True)
class HiddenRows(PayloadRows):
    """One teacher's last hidden states, to which the learner applies the teacher's output head."""

    teacher: str
    """Its pool."""
    states_RH: Bits
    """Bits of bfloat16."""
    head: int = 0
    """Identity of the head that they belong to; 0: not known."""

    @property
    def n_rows(self) -> int:
        return len(self.states_RH)

    def at(self, rows: npt.NDArray[np.int64]) -> HiddenRows:
        return HiddenRows(self.teacher, self.states_RH[rows], self.head, uniform_RS=self.drawn(rows))

    @classmethod
    def joined(cls, parts: Sequence[HiddenRows]) -> HiddenRows:
        """Raises PayloadError for states of different sizes or heads."""
        sizes = sorted({part.states_RH.shape[1] for part in parts})
        if len(sizes) > 1:
            raise PayloadError(f"teacher {parts[0].teacher!r} sent hidden states of {sizes} numbers; expected one size")
        heads = {part.head for part in parts if part.head}
        if len(heads) > 1:
            raise PayloadError(
                f"teacher {parts[0].teacher!r} sent hidden states of {len(heads)} output heads; expected one"
            )
        states_RH = np.concatenate([part.states_RH for part in parts])
        drawn_RS = np.concatenate([part.uniform_RS for part in parts])
        return cls(parts[0].teacher, states_RH, max(heads, default=0), uniform_RS=drawn_RS)


def encode_hidden(states_TH: Bits, head: int = 0) -> bytes:
    """`head`: the identity of the head of the states. Raises EncodeError for another shape or dtype, and for states
    that are not finite."""
    if states_TH.ndim != 2 or states_TH.dtype != np.uint16 or states_TH.shape[1] < 1:
        raise EncodeError(f"hidden states {states_TH.dtype} {states_TH.shape}; expected uint16 [T, H], H >= 1")
    if (wrong := _not_finite(states_TH)) is not None:
        raise EncodeError(f"a hidden state is not finite, that of token {wrong}; it cannot be sent")
    header = _HEADER.pack(_MAGIC, _VERSION, *states_TH.shape, head)
    return header + np.ascontiguousarray(states_TH, "<u2").tobytes()


def decode_hidden(payload: bytes | memoryview) -> Bits:
    """[T, H], a view of the payload. Raises only MalformedMessage, whatever the bytes are."""
    n_tokens, hidden_size, _ = _read_header(payload)
    states_TH = np.frombuffer(payload, "<u2", offset=HEADER_BYTES).reshape(n_tokens, hidden_size)
    if (wrong := _not_finite(states_TH)) is not None:
        raise MalformedMessage(_WHAT, got=f"infinity or NaN in the state of token {wrong}", expected="finite numbers")
    return states_TH


def head_of_states(payload: bytes | memoryview) -> int:
    """The identity of the head of a payload's states; 0 if it is not known. Raises MalformedMessage."""
    return _read_header(payload)[2]


def _read_header(payload: bytes | memoryview) -> tuple[int, int, int]:
    """T, H and the identity of the head."""
    if len(payload) < _HEADER.size:
        raise MalformedMessage(_WHAT, got=f"{len(payload)} bytes", expected=f"at least {_HEADER.size}")
    magic, version, n_tokens, hidden_size, head = _HEADER.unpack_from(payload)
    if (magic, version) != (_MAGIC, _VERSION) or not hidden_size:
        got = f"{magic!r} {version}, a hidden size of {hidden_size}"
        raise MalformedMessage(_WHAT, got=got, expected=f"{_MAGIC!r} {_VERSION}, a size above 0")
    expected = HEADER_BYTES + n_tokens * 2 * hidden_size
    if len(payload) != expected:
        raise MalformedMessage(_WHAT, got=f"{len(payload)} bytes", expected=f"{expected}")
    return n_tokens, hidden_size, head


def _not_finite(states_TH: Bits) -> int | None:
    wrong_T = ((states_TH & _EXPONENT) == _EXPONENT).any(axis=1)
    return int(wrong_T.argmax()) if wrong_T.any() else None
