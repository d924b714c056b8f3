"""Reads the payloads that teachers send beside their log-probs: rows for the tokens to train, of one teacher each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from stillhouse.protocol.errors import MalformedMessage
from stillhouse.protocol.messages import BatchItem
from stillhouse.protocol.payloads.aligned import AlignedScores
from stillhouse.protocol.payloads.kind import PayloadError, PayloadPart, PayloadRows
from stillhouse.protocol.payloads.registry import kind_of_bytes
from stillhouse.protocol.payloads.top_k import TopRows

NO_ROWS: Final[PayloadRows] = TopRows.joined([])


def aligned_teachers(item: BatchItem, payloads: npt.NDArray[np.uint8]) -> set[str]:
    """Teachers with another tokenizer, whose payloads belong to their log-probs."""
    found, at = set[str](), 0
    for piece in item.top_k:
        if payloads[at : at + 2].tobytes() == AlignedScores.magic and 0 <= piece.teacher < len(item.teachers):
            found.add(item.teachers[piece.teacher])
        at += piece.n_bytes
    return found


def join_rows(parts: Sequence[PayloadRows]) -> PayloadRows:
    """Concatenated rows of one teacher. Raises PayloadError where it sent payloads of two kinds."""
    if not parts:
        return NO_ROWS
    kinds = {type(part) for part in parts}
    if len(kinds) > 1:
        names = " and ".join(sorted(kind.__name__ for kind in kinds))
        raise PayloadError(f"a teacher sent payloads of two kinds, {names}; expected one of them")
    return kinds.pop().joined(parts)


def read_payloads(
    item: BatchItem,
    payloads: npt.NDArray[np.uint8],
    trained: npt.NDArray[np.int64],
    vocab_tokens: int,
    *,
    teachers: Collection[str] | None = None,
) -> dict[str, PayloadRows]:
    """Teacher -> rows for the tokens at the ascending offsets `trained`. `teachers`: those whose
    payloads are read; default: all of the item. Raises PayloadError if one is missing, or does not fit its tokens or
    the vocabulary."""
    read = [name for name in item.teachers if teachers is None or name in teachers]
    pieces: dict[str, list[PayloadPart]] = {name: [] for name in read}
    offsets: dict[str, list[npt.NDArray[np.int64]]] = {name: [] for name in read}
    at = 0
    for piece in item.top_k:
        body = payloads[at : at + piece.n_bytes].data
        at += piece.n_bytes
        if not 0 <= piece.teacher < len(item.teachers):
            raise PayloadError(f"a payload of teacher {piece.teacher}; it has {len(item.teachers)}")
        if (name := item.teachers[piece.teacher]) in pieces:
            inside = trained[(trained >= piece.start) & (trained < piece.end)]
            pieces[name].append(PayloadPart(body, piece.end - piece.start, inside - piece.start))
            offsets[name].append(inside)
    found = {name: _rows(name, own, vocab_tokens) for name, own in pieces.items()}
    for name, own in offsets.items():
        sent = np.concatenate(own) if own else np.zeros(0, np.int64)
        if not np.array_equal(sent, trained):
            missing = np.setdiff1d(trained, sent)
            raise PayloadError(
                f"teacher {name!r} sent no top-k set for {len(missing)} of the {len(trained)} tokens to be trained "
                f"(first: {missing[:1].tolist()}), nor its hidden state; the divergence needs one for each: set "
                "teacher.top_k, e.g. to 256, or teacher.payload = hidden"
                if len(missing)
                else f"the payloads of teacher {name!r} overlap or are not in order"
            )
    return found


def _rows(name: str, pieces: Sequence[PayloadPart], vocab_tokens: int) -> PayloadRows:
    if not pieces:
        return NO_ROWS
    kinds = {kind_of_bytes(one.body) for one in pieces}
    if len(kinds) > 1:
        sent = " and ".join(sorted(kind.what for kind in kinds))
        raise PayloadError(f"teacher {name!r} sent {sent}; expected one of them")
    try:
        return kinds.pop().read(name, pieces, vocab_tokens)
    except MalformedMessage as error:
        raise PayloadError(f"teacher {name!r}: {error}") from error
