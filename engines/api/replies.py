"""Reads the answers of completions APIs. Nothing in an answer is trusted: where it cannot be used, its tokens get NaN.

Two forms, by the sources of vLLM (entrypoints/openai/completion/serving.py) and SGLang (entrypoints/openai/
serving_completions.py) and the references of Fireworks and Together:

    prompt_logprobs   choices[0].prompt_logprobs: per token of the prompt a map id -> {logprob, decoded_token}, of the
                      token itself and the likeliest ones; null for the first
    echo              choices[0].logprobs: lists tokens and token_logprobs, of the prompt, then of the answer. Ids are
                      in prompt_token_ids of the choice (vLLM, SGLang, Fireworks), token_ids beside the log-probs
                      (Fireworks, Together), or in tokens as `token_id:17` (vLLM). Together has the prompt's part in
                      prompt[0].logprobs

Legend: T tokens that were sent, N = T - start tokens that are scored, K likeliest ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from stillhouse.engines.base import Float32s, Int32s
from stillhouse.models.tokenizer_file import bare
from stillhouse.protocol.payloads.kind import ScoreResult

Reason: TypeAlias = Literal[
    "malformed", "count", "ids", "not_finite", "positive", "tokens", "refused", "unavailable", "budget"
]
"""Why tokens have no score: the answer is not of the form that was asked for; it has another number of tokens, other
tokens than ours, or log-probs that are not finite or above 0; our text has other tokens there, or cannot be sent; the
API refused the request, or did not answer in time; the budget is spent."""
LOWEST: Final = -1000.0
"""A log-prob below it stands for minus infinity: vLLM sends -9999."""
ROUNDING: Final = 1e-4
"""A log-prob may be above 0 by as much."""
NO_TEXT: Final = "\N{REPLACEMENT CHARACTER}"
"""Stands for bytes of a token that are no text by themselves."""
_PLACEHOLDER: Final = "token_id:"


class Entry(msgspec.Struct, frozen=True):
    logprob: float | None = None
    decoded_token: str | None = None


Sets: TypeAlias = list[dict[int, Entry] | None]
"""Per token of a prompt the token itself and the likeliest ones; None for the first."""


class _Logprobs(msgspec.Struct, frozen=True):
    token_logprobs: list[float | None]
    tokens: list[str] | None = None
    token_ids: list[int] | None = None


class _Choice(msgspec.Struct, frozen=True):
    logprobs: _Logprobs | None = None
    prompt_logprobs: Sets | None = None
    prompt_token_ids: list[int] | None = None


class _Part(msgspec.Struct, frozen=True):
    logprobs: _Logprobs | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None


class _Reply(msgspec.Struct, frozen=True):
    choices: list[_Choice]
    prompt: Any = None
    usage: _Usage | None = None


class Unusable(Exception):
    """`reason`: what is counted."""

    def __init__(self, reason: Reason, said: str = "") -> None:
        super().__init__(said or reason)
        self.reason: Final[Reason] = reason


class Answer(NamedTuple):
    """What an answer says of the T tokens that were sent."""

    logprobs_T: list[float | None]
    ids_T: list[int] | None
    """None: it names no ids."""
    texts_T: list[str | None]
    """None where it has no text of the token."""
    sets_T: Sequence[Mapping[int, Entry] | None] | None
    """The token itself and the likeliest ones."""
    charged_tokens: int
    """Tokens of the prompt by the API's own count; 0: it does not say."""


def read_answer(body: bytes, ids_T: Int32s, form: str) -> Answer:
    """Raises Unusable for an answer that is not of this form, or says nothing of as many tokens."""
    try:
        reply = msgspec.json.decode(body, type=_Reply)
        parts = msgspec.convert(reply.prompt, list[_Part]) if isinstance(reply.prompt, list) else []
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise Unusable("malformed", f"it is not a completion: {error}") from None
    if len(reply.choices) != 1:
        raise Unusable("malformed", f"it has {len(reply.choices)} choices, expected 1")
    choice, n = reply.choices[0], len(ids_T)
    counted = reply.usage.prompt_tokens if reply.usage is not None else None
    charged = counted if counted is not None and 0 <= counted <= 2 * n + 64 else 0
    if form == "prompt_logprobs":
        return of_prompt_logprobs(choice.prompt_logprobs, choice.prompt_token_ids, ids_T, charged)
    lists = parts[0].logprobs if parts else choice.logprobs
    if lists is None:
        raise Unusable("malformed", "it has no logprobs of the prompt")
    answer = _of_echo(lists, choice, n, charged)
    if answer.ids_T is None and (lists.tokens is None or len(lists.tokens) < n):
        raise Unusable("malformed", "it names neither ids nor texts of tokens, so nobody knows what was scored")
    return answer


def of_prompt_logprobs(
    sets: Sets | None, prompt_token_ids: list[int] | None, ids_T: Int32s, charged: int = 0
) -> Answer:
    """Raises Unusable for log-probs of other tokens, or of another number of them."""
    if sets is None:
        raise Unusable("malformed", "it has no prompt_logprobs")
    if len(sets) != len(ids_T):
        raise Unusable("count", f"it has log-probs of {len(sets)} tokens, expected {len(ids_T)}")
    own = [None if one is None else one.get(token) for one, token in zip(sets, ids_T.tolist(), strict=True)]
    if any(one is None for one in own[1:]):
        raise Unusable("ids", "it has no log-prob of a token that was sent")
    logprobs = [None if one is None else one.logprob for one in own]
    texts = [None if one is None else one.decoded_token for one in own]
    return Answer(logprobs, prompt_token_ids, texts, sets, charged)


def _of_echo(lists: _Logprobs, choice: _Choice, n: int, charged: int) -> Answer:
    """The token that the API had to write comes after the prompt's, and is left out."""
    if len(lists.token_logprobs) not in (n, n + 1):
        raise Unusable("count", f"it has log-probs of {len(lists.token_logprobs)} tokens, expected {n} and one more")
    texts: list[str | None] = [None] * n
    ids = choice.prompt_token_ids or (None if lists.token_ids is None else lists.token_ids[:n])
    if lists.tokens is not None and len(lists.tokens) >= n:
        texts = [*lists.tokens[:n]]
        if ids is None and all(text is not None and text.startswith(_PLACEHOLDER) for text in texts):
            try:
                ids = [int(text.removeprefix(_PLACEHOLDER)) for text in lists.tokens[:n]]
            except ValueError:
                raise Unusable("malformed", "a token_id is not a number") from None
            texts = [None] * n
    return Answer(lists.token_logprobs[:n], ids, texts, None, charged)


def agreeing_tokens(answer: Answer, ids_T: Int32s, ours_T: Sequence[str]) -> int:
    """How many tokens from the first on are those that we sent. `ours_T`: the text of each token by itself."""
    if answer.ids_T is not None:
        theirs = np.array(answer.ids_T[: len(ids_T)], np.int64)
        differs = np.flatnonzero(theirs != ids_T[: len(theirs)])
        return int(differs[0]) if len(differs) else len(theirs)
    pairs = zip(answer.texts_T, ours_T, strict=True)
    return next((i for i, (theirs, ours) in enumerate(pairs) if not same_text(theirs, ours)), len(ids_T))


def same_text(theirs: str | None, ours: str) -> bool:
    """Whether two texts of one token may be the same token's. APIs differ in white space and in what they show for
    bytes that are no text."""
    if theirs is None or not theirs or NO_TEXT in ours or NO_TEXT in theirs:
        return True
    return bare(theirs) == bare(ours)


class Scored(NamedTuple):
    """What became of one request."""

    result: ScoreResult
    masked: Mapping[Reason, int]
    """Tokens without a score, by reason. Their log-probs are NaN."""


def unscored(n: int, reason: Reason, top_k: int = 0) -> Scored:
    """For `n` tokens of which nothing is known."""
    none_NK = np.full((n, top_k), np.nan, np.float32)
    sets = (np.zeros((n, top_k), np.int32), none_NK) if top_k else (None, None)
    return Scored(ScoreResult(np.full(n, np.nan, np.float32), *sets), {reason: n} if n else {})


def score_of(answer: Answer, start: int, n_agreeing: int, why: Reason, top_k: int, vocab_size: int) -> Scored:
    """The scores of the tokens from `start` on; of those from `n_agreeing` on there are none, for the reason `why`.
    Raises Unusable for sets of fewer than `top_k` tokens, or of tokens outside the vocabulary."""
    values_T = np.array([math.nan if one is None else one for one in answer.logprobs_T], np.float64)
    scores_N = values_T[start:].astype(np.float32)
    masked: dict[Reason, int] = {}

    def mask(where_N: Any, reason: Reason) -> None:
        new_N = where_N & ~gone_N
        gone_N[new_N] = True
        if new_N.any():
            masked[reason] = int(new_N.sum())

    gone_N = np.zeros(len(scores_N), bool)
    mask(np.arange(start, len(values_T)) >= n_agreeing, why)
    mask(~np.isfinite(values_T[start:]) | (values_T[start:] < LOWEST), "not_finite")
    mask(values_T[start:] > ROUNDING, "positive")
    scores_N[gone_N] = np.nan
    sets = _sets(answer, start, top_k, vocab_size) if top_k else (None, None)
    return Scored(ScoreResult(np.minimum(scores_N, np.float32(0.0)), *sets), masked)


def _sets(answer: Answer, start: int, top_k: int, vocab_size: int) -> tuple[Int32s, Float32s]:
    assert answer.sets_T is not None
    ids, logprobs = list[list[int]](), list[list[float]]()
    for one in answer.sets_T[start:]:
        known = {} if one is None else {i: e.logprob for i, e in one.items() if e.logprob is not None}
        best = sorted(known.items(), key=lambda pair: -pair[1])[:top_k]
        if len(best) < top_k or not all(0 <= i < vocab_size and p <= ROUNDING for i, p in best):
            raise Unusable("malformed", f"a token has fewer than {top_k} likeliest ones, or impossible ones")
        ids.append([i for i, _ in best])
        logprobs.append([min(0.0, p) for _, p in best])
    return np.array(ids, np.int32), np.array(logprobs, np.float32)
