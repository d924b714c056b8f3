"""The experts that an engine's routers chose, from the actor to the learner (routing replay, arXiv 2510.11370).

A row belongs to a token and tells what the routers chose at the place before it, in the forward pass whose logits the
token was sampled from, or would have been: so a row is known as soon as its token is. The first token of a sequence has
none, and an engine may leave out any.

    payload   header | a bit per token: it has a row | expert ids, w bits each (protocol.bit_words)     little-endian
    header    "RX", version uint8, w uint8, layers with a router uint16, chosen uint16, experts uint32, T uint32

Ids are in the order in which the engine gave them. Legend: T tokens, R of them with a row, L layers with a router, K
chosen experts.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from stillhouse.protocol.bit_words import n_bytes, pack_words, unpack_words
from stillhouse.protocol.errors import EncodeError, MalformedMessage
from stillhouse.protocol.messages import ExpertShape
from stillhouse.protocol.payloads.kind import EngineNeed, Packed

ExpertIds = npt.NDArray[np.uint16]
REPORTS_EXPERTS: Final = EngineNeed("actor", "reports the experts that its routers chose")
MOST_EXPERTS: Final = 2**16
_HEADER: Final = struct.Struct("<2sBBHHII")
_MAGIC, _VERSION = b"RX", 1
_WHAT: Final = "payload of expert ids"


class ExpertRows(NamedTuple):
    """T tokens."""

    ids_TLK: ExpertIds
    """Distinct for a token and layer; 0 without a row."""
    given_T: npt.NDArray[np.bool_]

    @staticmethod
    def none(n_tokens: int, shape: ExpertShape) -> ExpertRows:
        ids_TLK = np.zeros((n_tokens, len(shape.layers), shape.chosen), np.uint16)
        return ExpertRows(ids_TLK, np.zeros(n_tokens, np.bool_))

    def at(self, tokens: npt.NDArray[np.int64]) -> ExpertRows:
        return ExpertRows(self.ids_TLK[tokens], self.given_T[tokens])

    @staticmethod
    def joined(parts: Sequence[ExpertRows]) -> ExpertRows:
        return ExpertRows(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def most_bytes(shape: ExpertShape) -> int:
    """Bytes of a token with a row, without the header's share."""
    return 1 + n_bytes(len(shape.layers) * shape.chosen, _width(shape))


def why_unfit(ids_RLK: npt.NDArray[np.integer], shape: ExpertShape) -> str:
    """What is wrong with ids from outside, as `got; expected`; else empty."""
    if ids_RLK.ndim != 3 or ids_RLK.shape[1:] != (len(shape.layers), shape.chosen):
        return f"experts of shape {ids_RLK.shape}; expected [n, {len(shape.layers)}, {shape.chosen}]"
    if ids_RLK.size and not 0 <= int(ids_RLK.min()) <= int(ids_RLK.max()) < shape.experts:
        return f"experts {ids_RLK.min()} to {ids_RLK.max()}; expected ids in [0, {shape.experts})"
    if (np.diff(np.sort(ids_RLK, axis=2), axis=2) == 0).any():
        return "an expert that a router chose twice for a token; expected distinct ones"
    return ""


def encode_experts(rows: Mapping[int, ExpertIds], n_tokens: int, shape: ExpertShape) -> bytes:
    """`rows`: by token, [L, K]. Raises EncodeError for ids that do not fit the shape."""
    tokens = sorted(rows)
    ids_RLK = np.stack([rows[token] for token in tokens]) if tokens else ExpertRows.none(0, shape).ids_TLK
    if shape.experts > MOST_EXPERTS:
        raise EncodeError(f"{shape.experts} experts; expected at most {MOST_EXPERTS}")
    if wrong := why_unfit(ids_RLK, shape):
        raise EncodeError(wrong)
    given_T = np.zeros(n_tokens, np.bool_)
    given_T[tokens] = True
    width = _width(shape)
    header = _HEADER.pack(_MAGIC, _VERSION, width, len(shape.layers), shape.chosen, shape.experts, n_tokens)
    return header + np.packbits(given_T, bitorder="little").tobytes() + pack_words(ids_RLK.ravel(), width).tobytes()


def decode_experts(payload: Packed, n_tokens: int, shape: ExpertShape) -> ExpertRows:
    """Raises only MalformedMessage: for anything but a payload of so many tokens and of this shape, whose ids are
    within bounds, and distinct for a token and layer."""
    if len(payload) < _HEADER.size:
        raise MalformedMessage(_WHAT, got=f"{len(payload)} bytes", expected=f"at least {_HEADER.size}")
    said, width = _HEADER.unpack_from(payload), _width(shape)
    wanted = (_MAGIC, _VERSION, width, len(shape.layers), shape.chosen, shape.experts, n_tokens)
    if said != wanted:
        raise MalformedMessage(_WHAT, got=f"{said}", expected=f"{wanted}")
    begins = _HEADER.size + (n_tokens + 7 >> 3)
    if len(payload) < begins:
        raise MalformedMessage(_WHAT, got=f"{len(payload)} bytes", expected=f"at least {begins}")
    bits = np.frombuffer(payload, np.uint8, begins - _HEADER.size, _HEADER.size)
    given_T = np.unpackbits(bits, count=n_tokens, bitorder="little").astype(np.bool_)
    found = ExpertRows.none(n_tokens, shape)
    n_ids = int(given_T.sum()) * len(shape.layers) * shape.chosen
    if len(payload) != begins + n_bytes(n_ids, width):
        raise MalformedMessage(_WHAT, got=f"{len(payload)} bytes", expected=f"{begins + n_bytes(n_ids, width)}")
    ids_RLK = unpack_words([payload[begins:]], [n_ids], width).reshape(-1, *found.ids_TLK.shape[1:])
    if wrong := why_unfit(ids_RLK, shape):
        got, _, expected = wrong.partition("; expected ")
        raise MalformedMessage(_WHAT, got=got, expected=expected)
    found.ids_TLK[given_T] = ids_RLK
    return ExpertRows(found.ids_TLK, given_T)


def _width(shape: ExpertShape) -> int:
    return max(1, (shape.experts - 1).bit_length())
