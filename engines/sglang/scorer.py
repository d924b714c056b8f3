"""A teacher on an SGLang server: prompt log-probs of only the new tokens, many requests at once.

A growing rollout returns with a longer prefix each time. Log-probs are requested from `start - 1` on, so that the
server's prefix cache serves everything before, and the reply has only new values.

A server scores one list of given tokens at all positions of a request. Where each position has its own (`top_ids`),
the request is divided into pieces of a few positions, and each piece asks for all ids that occur in it. A piece is
sent when the one before has been answered, because the server then has its prefix.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from stillhouse.engines.base import Int32s, ScoreRequest, ScoreResult
from stillhouse.engines.config import ServerLinkConfig
from stillhouse.engines.http.scorer import ScorerOnServer
from stillhouse.engines.http.stream import StreamError
from stillhouse.engines.sglang.features import SCORED, Features, detect_features
from stillhouse.engines.sglang.http import SGLangLink
from stillhouse.engines.sglang.memory import ServerMemory

_Entry: TypeAlias = tuple[float | None, int, Any]


class _Meta(msgspec.Struct, frozen=True):
    input_token_logprobs: list[_Entry]
    input_top_logprobs: list[list[_Entry] | None] | None = None
    input_token_ids_logprobs: list[list[_Entry] | None] | None = None
    cached_tokens: int = 0


class _Reply(msgspec.Struct, frozen=True):
    meta_info: _Meta


_DECODER: Final = msgspec.json.Decoder(_Reply)
_PIECE: Final = 32
"""Positions per request where each has its own ids. All values of a reply are those of up to 32 k ids per position."""


class SGLangScorer(ScorerOnServer[Features]):
    def __init__(
        self, url: str, config: ServerLinkConfig, *, vocab_size: int, api_key: str = "", away: bool = False
    ) -> None:
        """`away`: see SGLangEngine."""
        self._cached_tokens = 0
        link = SGLangLink(url, config, api_key=api_key)
        self._memory = ServerMemory.at_home(link, away=away)
        super().__init__(link, config, vocab_size=vocab_size)

    def give_back(self) -> None:
        """See protocol.turns.SharesDevice. Raises ServerLost."""
        self._memory.release()

    def take_again(self, *, weights_only: bool = False) -> None:
        """Raises ServerLost."""
        self._memory.resume()

    async def _detect(self) -> Features:
        return await detect_features(self.server)

    @property
    def stats(self) -> dict[str, float]:
        """Running totals, for heartbeats and measurements."""
        return {
            "http_requests_total": float(self.server.requests_total),
            "http_sent_bytes_total": float(self.server.sent_bytes_total),
            "http_received_bytes_total": float(self.server.received_bytes_total),
            "prompt_tokens_cached_total": float(self._cached_tokens),
        }

    async def _score_request(self, request: ScoreRequest, top_k: int) -> ScoreResult:
        if request.top_ids is None:
            return await self._score_one(request, top_k)
        return joined([await self._score_one(piece, 0) for piece in pieces(request)])

    async def _score_one(self, request: ScoreRequest, top_k: int) -> ScoreResult:
        body: dict[str, Any] = {
            "input_ids": request.token_ids.tolist(),
            "sampling_params": SCORED,
            "return_logprob": True,
            "logprob_start_len": request.start - 1,
        }
        if top_k:
            body["top_logprobs_num"] = top_k
        given_U = None if request.top_ids is None else np.unique(request.top_ids)
        if given_U is not None:
            body["token_ids_logprob"] = given_U.tolist()
        meta = _DECODER.decode(await self._post("/generate", body)).meta_info
        self._cached_tokens += meta.cached_tokens
        scores = read_scores(request, meta.input_token_logprobs, meta.input_top_logprobs, top_k, self._vocab_size)
        if given_U is None or request.top_ids is None:
            return scores
        of_given_NK = read_given(request.top_ids, given_U, meta.input_token_ids_logprobs)
        return ScoreResult(scores.logprobs, request.top_ids, of_given_NK)


def pieces(request: ScoreRequest) -> list[ScoreRequest]:
    """The request in pieces of at most `_PIECE` positions, in order."""
    assert request.top_ids is not None
    cuts = [*range(request.start, len(request.token_ids), _PIECE), len(request.token_ids)]
    return [
        ScoreRequest(
            request.token_ids[:end], start, top_ids=request.top_ids[start - request.start : end - request.start]
        )
        for start, end in itertools.pairwise(cuts)
    ]


def joined(results: Sequence[ScoreResult]) -> ScoreResult:
    """One result from those of the pieces of a request with `top_ids`."""
    ids = [result.top_ids for result in results if result.top_ids is not None]
    logprobs = [result.top_logprobs for result in results if result.top_logprobs is not None]
    return ScoreResult(
        np.concatenate([result.logprobs for result in results]), np.concatenate(ids), np.concatenate(logprobs)
    )


def read_given(
    wanted_NK: Int32s, given_U: Int32s, rows: Sequence[list[_Entry] | None] | None
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Log-probs [N, K] of `wanted_NK` out of a reply about the U ids `given_U` (ascending) at each position. The first
    row is of `start - 1` and is skipped. Raises StreamError for rows of other ids, or not finite ones."""
    got_NU, logprobs_NU = _table(rows, len(wanted_NK), len(given_U), f"{len(given_U)} given tokens")
    if not (got_NU == given_U).all():
        raise StreamError("got log-probs of other tokens than the given ones, or in another order")
    return np.take_along_axis(logprobs_NU, np.searchsorted(given_U, wanted_NK), axis=1)


def decode_scores(reply: bytes, request: ScoreRequest, *, vocab_size: int) -> ScoreResult:
    """The scores in a reply of /generate. Raises StreamError, and msgspec.DecodeError for a malformed reply."""
    return read_scores(request, _DECODER.decode(reply).meta_info.input_token_logprobs, None, 0, vocab_size)


def read_scores(
    request: ScoreRequest,
    entries: Sequence[_Entry],
    top: Sequence[list[_Entry] | None] | None,
    top_k: int,
    vocab_size: int,
) -> ScoreResult:
    """The server's entries start at `start - 1`, whose log-prob is skipped. Raises StreamError when the entries are of
    other tokens, or not finite. SGLang (0.5.17 and 0.5.23) returns the last id of the vocabulary as 0, with the right
    log-prob, because it takes the id for padding."""
    wanted_N = request.token_ids[request.start :]
    entries = entries[1:]
    got_N = np.array([entry[1] for entry in entries], np.int32)
    if len(got_N) == len(wanted_N):
        got_N[(wanted_N == vocab_size - 1) & (got_N == 0)] = vocab_size - 1
    if not np.array_equal(got_N, wanted_N):
        raise StreamError(
            f"got log-probs of {len(got_N)} tokens, or of other tokens; expected those of {len(wanted_N)}"
        )
    logprobs_N = _finite([entry[0] for entry in entries])
    if not top_k:
        return ScoreResult(logprobs_N)
    return ScoreResult(logprobs_N, *_table(top, len(wanted_N), top_k, f"the top {top_k}"))


def _table(
    rows: Sequence[list[_Entry] | None] | None, n_rows: int, width: int, asked: str
) -> tuple[Int32s, np.ndarray[Any, np.dtype[np.float32]]]:
    """Ids and log-probs [n_rows, width] of a reply's rows, without the first one. Raises StreamError for another number
    of complete rows, or log-probs that are not finite."""
    kept = [row for row in (rows or ())[1:] if row is not None and len(row) == width]
    if len(kept) != n_rows:
        raise StreamError(f"asked for {asked} at {n_rows} positions, got {len(kept)} such rows")
    ids = np.array([[entry[1] for entry in row] for row in kept], np.int32)
    return ids, _finite([entry[0] for row in kept for entry in row]).reshape(ids.shape)


def _finite(values: Sequence[float | None]) -> np.ndarray[Any, np.dtype[np.float32]]:
    array = np.array([math.nan if value is None else value for value in values], np.float32)
    if not np.isfinite(array).all():
        raise StreamError(f"log-prob {int(np.flatnonzero(~np.isfinite(array))[0])} of a reply is not a finite number")
    return array
