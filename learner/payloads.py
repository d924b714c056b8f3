"""Reads the payloads that teachers send beside their log-probs: rows for the tokens to train, of one teacher each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from stillhouse.protocol.errors import MalformedMessage
from stillhouse.protocol.messages import EXPERT_IDS, KEPT_IDS, BatchItem, ExpertShape, TopKPiece
from stillhouse.protocol.payloads.aligned import AlignedScores, AlignedSets
from stillhouse.protocol.payloads.expert_ids import ExpertRows, decode_experts
from stillhouse.protocol.payloads.kind import PayloadError, PayloadPart, PayloadRows
from stillhouse.protocol.payloads.registry import kind_of_bytes
from stillhouse.protocol.payloads.student_sets import read_kept, without_sampled
from stillhouse.protocol.payloads.top_k import TopRows

NO_ROWS: Final[PayloadRows] = TopRows.joined([])


def _bodies(item: BatchItem, payloads: npt.NDArray[np.uint8]) -> Iterator[tuple[TopKPiece, memoryview]]:
    at = 0
    for piece in item.top_k:
        yield piece, payloads[at : at + piece.n_bytes].data
        at += piece.n_bytes


def aligned_teachers(item: BatchItem, payloads: npt.NDArray[np.uint8]) -> set[str]:
    """Teachers with another tokenizer, whose payloads belong to their log-probs."""
    return {
        item.teachers[piece.teacher]
        for piece, body in _bodies(item, payloads)
        if bytes(body[:2]) in (AlignedScores.magic, AlignedSets.magic) and 0 <= piece.teacher < len(item.teachers)
    }


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
    for piece, body in _bodies(item, payloads):
        if piece.teacher in (KEPT_IDS, EXPERT_IDS):
            continue
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


class KeptRows(NamedTuple):
    """The ids that each of N tokens was sampled from."""

    ids_NK: npt.NDArray[np.int32]
    """Distinct within a row's first columns; those after them are ignored."""
    counts_N: npt.NDArray[np.int64]
    """0: the whole vocabulary."""

    def at(self, rows: npt.NDArray[np.int64]) -> KeptRows:
        return KeptRows(self.ids_NK[rows], self.counts_N[rows])

    @staticmethod
    def joined(parts: Sequence[KeptRows | None], sizes: Sequence[int]) -> KeptRows | None:
        """Joins items with so many tokens each. None if no item has any."""
        widest = max((one.ids_NK.shape[1] for one in parts if one is not None), default=0)
        if not widest:
            return None
        whole = [KeptRows(np.zeros((n, 0), np.int32), np.zeros(n, np.int64)) for n in sizes]
        rows = [one or none for one, none in zip(parts, whole, strict=True)]
        ids = [np.pad(one.ids_NK, ((0, 0), (0, widest - one.ids_NK.shape[1]))) for one in rows]
        return KeptRows(np.concatenate(ids), np.concatenate([one.counts_N for one in rows]))


def kept_rows(
    item: BatchItem,
    payloads: npt.NDArray[np.uint8],
    tokens_L: npt.NDArray[np.int32],
    trained: npt.NDArray[np.int64],
    vocab_tokens: int,
) -> KeptRows | None:
    """What the tokens at the ascending offsets `trained` were sampled from; None: the whole vocabulary. Raises
    PayloadError for sets that are missing for some of them, malformed, or without the token sampled from them."""
    ids, counts, offsets = list[npt.NDArray[np.int32]](), list[npt.NDArray[np.int64]](), list[range]()
    for piece, body in _bodies(item, payloads):
        if piece.teacher != KEPT_IDS:
            continue
        try:
            ids_S, counts_T = read_kept(body, vocab_tokens)
        except MalformedMessage as error:
            raise PayloadError(f"the kept ids: {error}") from error
        if len(counts_T) != piece.end - piece.start or not 0 <= piece.start < piece.end <= len(tokens_L):
            raise PayloadError(f"kept ids of {len(counts_T)} tokens, expected [{piece.start}, {piece.end})")
        if n := without_sampled(ids_S, counts_T, tokens_L[piece.start : piece.end]):
            raise PayloadError(f"{n} sets of kept ids do not have the token that was sampled from them")
        ids.append(ids_S)
        counts.append(counts_T)
        offsets.append(range(piece.start, piece.end))
    if not offsets:
        return None
    sent, counts_P = np.concatenate([np.asarray(one) for one in offsets]), np.concatenate(counts)
    if not np.isin(trained, sent).all() or (np.diff(sent) <= 0).any():
        raise PayloadError("kept ids are missing for some tokens to be trained, or overlap; expected those of each")
    filled_PK = np.arange(int(counts_P.max())) < counts_P[:, None]
    ids_PK = np.zeros(filled_PK.shape, np.int32)
    ids_PK[filled_PK] = np.concatenate(ids)
    return KeptRows(ids_PK, counts_P).at(np.searchsorted(sent, trained))


def expert_rows(item: BatchItem, payloads: npt.NDArray[np.uint8], shape: ExpertShape) -> ExpertRows:
    """By token of the item, what the engine's routers chose in the pass that predicted it. Raises PayloadError for
    choices of another model, or malformed ones."""
    found = ExpertRows.none(item.end, shape)
    for piece, body in _bodies(item, payloads):
        if piece.teacher != EXPERT_IDS:
            continue
        if not 0 <= piece.start < piece.end <= item.end:
            raise PayloadError(f"experts of the tokens [{piece.start}, {piece.end}); there are {item.end}")
        try:
            rows = decode_experts(body, piece.end - piece.start, shape)
        except MalformedMessage as error:
            raise PayloadError(f"the experts of the routers: {error}") from error
        for whole, part in zip(found, rows, strict=True):
            whole[piece.start : piece.end] = part
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
