"""What an API is, found out before it is believed: its model, how it is asked, whether it has our tokens, and whether
it agrees with itself.

Costs two texts of some dozen tokens, and one of up to COMPARED tokens."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec
import numpy as np

from stillhouse.engines.api.config import ApiConfig
from stillhouse.engines.api.link import Link, NotServed
from stillhouse.engines.api.replies import Answer, Unusable, agreeing_tokens, same_text, score_of
from stillhouse.engines.api.scorer import ApiScorer, Way
from stillhouse.engines.base import BudgetSpent, EngineLost, EngineMismatch, Float32s, Int32s, ScoreRequest
from stillhouse.engines.config import ScorerSettings
from stillhouse.models.tokenizer_file import spread

log = logging.getLogger(__name__)
TEXT: Final = "To add 17 and 25, add the tens and the ones: 10 + 20 = 30, 7 + 5 = 12. So 17 + 25 = 42."
COMPARED: Final = 512
"""Most ids whose text is compared with the student's, at equal distances."""
OTHER_TEXTS: Final = 0.02
"""Share of them from which on it is another tokenizer: some servers show single tokens in ways of their own."""
UNSTEADY_NATS: Final = 0.5
"""An API whose log-prob of a token changes by more from one request to the next is refused, and"""
LOUD_NATS: Final = 0.05
"""above this there is a warning."""
FIRST_S: Final = 300.0
"""Longest time for a request of the probe, where api.timeout_s is shorter: a server may compile what it needs for its
first request (vLLM 0.32, for log-probs of prompts: 52 s on a busy CPU)."""
REFERENCE_NATS: Final = 0.15
"""Largest mean difference from the same weights in float32. 8-bit weights stay below it; another model does not."""


class _Model(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None
    context_length: int | None = None


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


def find_model(link: Link, config: ApiConfig) -> tuple[str, int | None]:
    """(name, its context in tokens if the API says it). Raises EngineMismatch, EngineLost."""
    try:
        listed = _listed(link.run(link.get("/models", time.monotonic() + config.timeout_s)))
    except (Unusable, NotServed) as error:
        if isinstance(error, Unusable) and error.reason == "unavailable":
            raise EngineLost(f"{config.url}: {error}") from None
        if config.model:  # not every gateway has a list
            return config.model, None
        raise EngineMismatch(f"api.model: {config.url}/models names none ({error}); expected a name") from None
    names = [one.id for one in listed]
    if not config.model and len(listed) == 1:
        found = listed[0]
    elif not config.model:
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        raise EngineMismatch(f"api.model: {config.url} serves {len(names)} models ({shown}); expected the name of one")
    else:  # lists of some gateways are not complete
        found = next((one for one in listed if one.id == config.model), _Model(config.model))
    window = found.max_model_len or found.context_length
    return found.id, window if window is not None and window > 1 else None


def _listed(body: bytes) -> list[_Model]:
    for kind in (_Models, list[_Model]):  # Together sends the list itself
        try:
            read: Any = msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError:
            continue
        return read.data if isinstance(read, _Models) else read
    raise Unusable("malformed", "no list of models")


def probe(scorer: ApiScorer, config: ApiConfig, top_k: int) -> None:
    """Choose the way of asking, and check that the API can be believed. Raises EngineMismatch, EngineLost and
    BudgetSpent."""
    ids_T = np.array(scorer.tokenizer.encode(TEXT, add_special_tokens=True), np.int32)
    first_N = _choose_way(scorer, config, ids_T, top_k)
    second_N = _scores(scorer, config, scorer.way, ids_T, top_k)
    apart = float(np.abs(first_N - second_N).max())
    if apart > UNSTEADY_NATS:
        raise EngineMismatch(
            f"{config.url}: the log-prob of a token changed by {apart:.3g} nats between two equal requests; expected "
            f"at most {UNSTEADY_NATS}"
        )
    if apart > LOUD_NATS:
        log.warning("log-probs change by up to %.3g nats between equal requests: a reverse KL below it is noise", apart)
    _compare_tokens(scorer, config)
    if config.reference:
        _compare_with_reference(config.reference, ids_T, first_N)
    log.info("%s: %s; equal requests agree to %.2g nats; %s", config.url, scorer.way, apart, scorer.budget)


def _ways(scorer: ApiScorer, config: ApiConfig, ids_T: Int32s) -> Iterator[Way]:
    bare = scorer.tokenizer.encode(TEXT, add_special_tokens=False)
    skips = [0] if len(bare) == len(ids_T) else [0, len(ids_T) - len(bare)]
    for text in (False, True):
        if config.send == ("ids" if text else "text"):
            continue
        for form in ("prompt_logprobs", "echo"):
            if config.form in ("auto", form):
                yield from (Way(form, text, True, skip) for skip in (skips if text else [0]))
                if form == "echo":
                    yield from (Way(form, text, False, skip) for skip in (skips if text else [0]))


def _choose_way(scorer: ApiScorer, config: ApiConfig, ids_T: Int32s, top_k: int) -> Float32s:
    """The first way whose answer can be used for every token. Returns its log-probs."""
    said: list[str] = []
    for way in _ways(scorer, config, ids_T):
        if top_k and way.form != "prompt_logprobs":
            said.append(f"{way}: top_k needs prompt_logprobs, which names tokens by id")
            continue
        try:
            scores_N = _scores(scorer, config, way, ids_T, top_k)
        except Unusable as error:
            if error.reason == "budget":
                raise BudgetSpent(f"{config.url}: {error}") from None
            if error.reason == "unavailable":
                raise EngineLost(f"{config.url}: {error}") from None
            said.append(f"{way}: {error}")
            continue
        scorer.way = way
        return scores_N
    raise EngineMismatch(
        f"{config.url} cannot be a teacher: {'; '.join(dict.fromkeys(said))}. Expected log-probs of a given text "
        "(prompt_logprobs, or echo with logprobs) by the student's tokens"
    )


def _scores(scorer: ApiScorer, config: ApiConfig, way: Way, ids_T: Int32s, top_k: int) -> Float32s:
    """Raises Unusable unless every token has a score."""
    answer = _ask(scorer, config, way, ids_T, top_k)
    agreeing = agreeing_tokens(answer, ids_T, scorer.texts_of(ids_T))
    scored = score_of(answer, 1, agreeing, "tokens" if way.text else "ids", top_k, scorer.vocab_size)
    if scored.masked:
        reason = next(iter(scored.masked))
        raise Unusable(reason, f"{sum(scored.masked.values())} of {len(ids_T) - 1} tokens have no score: {reason}")
    return scored.result.logprobs


def _ask(scorer: ApiScorer, config: ApiConfig, way: Way, ids_T: Int32s, top_k: int) -> Answer:
    try:
        return scorer.link.run(scorer.ask(way, ids_T, top_k, time.monotonic() + max(config.timeout_s, FIRST_S)))
    except NotServed as error:
        raise EngineMismatch(str(error)) from None
    finally:
        scorer.budget.save()


def _compare_tokens(scorer: ApiScorer, config: ApiConfig) -> None:
    """The texts of ids all over the vocabulary, where the API takes ids and names texts."""
    unknown = "the API does not tell what its token ids mean beyond the probe's; the tokenizer here is assumed"
    if scorer.way.text:
        return  # every text is compared, token by token
    ids = sorted(set(scorer.tokenizer.get_vocab().values()))
    ids = spread([i for i in ids if i < scorer.vocab_size], min(COMPARED, scorer.max_context - 1))
    ids_T = np.array(ids, np.int32)
    try:
        answer = _ask(scorer, config, scorer.way, ids_T, 0)
    except Unusable as error:
        log.warning("%s (%s)", unknown, error)
        return
    ours_T = scorer.texts_of(ids_T)
    pairs = [(i, ours, theirs) for i, ours, theirs in zip(ids, ours_T, answer.texts_T, strict=True) if theirs]
    if len(pairs) < len(ids) / 2:
        log.warning("%s", unknown)
        return
    other = [pair for pair in pairs if not same_text(pair[2], pair[1])]
    first = ", ".join(f"{i} is {ours!r} here and {theirs!r} there" for i, ours, theirs in other[:3])
    if len(other) > OTHER_TEXTS * len(pairs):
        raise EngineMismatch(
            f"{config.url} has another tokenizer than expected: {len(other)} of {len(pairs)} ids stand for other "
            f"text, first {first}; expected the student's, or with tokenizer = other that of the model's folder"
        )
    if other:
        log.warning("%d of %d ids are shown with other text: %s", len(other), len(pairs), first)


def _compare_with_reference(folder: str, ids_T: Int32s, scores_N: Float32s) -> None:
    from stillhouse.engines.torch.scorer import TorchScorer

    scorer = TorchScorer.load(Path(folder), ScorerSettings(device="cpu", dtype="float32", prefix_cache_mb=0))
    try:
        expected_N = scorer.score([ScoreRequest(ids_T, 1)])[0].logprobs
    finally:
        scorer.close()
    mean = float(np.abs(expected_N - scores_N).mean())
    if not mean <= REFERENCE_NATS:
        _refuse(folder, mean)
    log.info("the API's log-probs are those of %s to %.3g nats on average", folder, mean)


def _refuse(folder: str, mean: float) -> NoReturn:
    raise EngineMismatch(
        f"api.reference: the API's log-probs differ by {mean:.3g} nats per token from those of {folder}; expected at "
        f"most {REFERENCE_NATS}, so it serves other weights"
    )
