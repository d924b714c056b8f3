"""A teacher behind an OpenAI-style completions API: each request sends a whole text, and gets a log-prob per token.

    score --> one request per item, `max_concurrent` at a time, one deadline --> replies.score_of --> NaN where unusable

Nothing fails as a whole because of one answer: its tokens get NaN, are counted by reason, and the teacher reports the
item as failed. At the start the API is probed (engines.api.probe): which form of request it answers, and whether it has
our tokens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from stillhouse.engines.api.budget import Budget
from stillhouse.engines.api.config import ApiConfig, Form
from stillhouse.engines.api.link import Link, NotServed
from stillhouse.engines.api.replies import (
    Answer,
    Reason,
    Scored,
    Unusable,
    agreeing_tokens,
    read_answer,
    score_of,
    unscored,
)
from stillhouse.engines.base import LOGPROBS_ONLY, BudgetSpent, EngineLost, Int32s, ScoreRequest, check_scoring
from stillhouse.models.tokenizer_file import FileTokenizer
from stillhouse.protocol.payloads.kind import ScoreOptions, ScoreResult

log = logging.getLogger(__name__)
MOST_REMEMBERED: Final = 4096
"""Texts whose answers were unusable, which are not paid for again."""
_LASTING: Final[frozenset[Reason]] = frozenset({"count", "ids", "positive", "not_finite", "tokens", "refused"})
"""Reasons that another try would meet again."""
_BYTES_PER_ENTRY: Final = 400
"""Most bytes of an answer per token and per likeliest token: far more than any API sends."""


class Way(NamedTuple):
    """One way to ask an API."""

    form: Form
    text: bool
    """Send text, not ids."""
    names_ids: bool
    """Ask for ids in the answer, which not all APIs allow."""
    skip: int = 0
    """Tokens that the API puts before a text by itself (BOS)."""

    def __str__(self) -> str:
        return f"{self.form} with {'text' if self.text else 'token ids'}"


class ApiScorer:
    """A ScoringEngine (engines.base). `score` is called from one thread."""

    def __init__(
        self, link: Link, config: ApiConfig, budget: Budget, tokenizer: FileTokenizer, *, model: str, vocab_size: int
    ) -> None:
        self.link: Final = link
        self.budget: Final = budget
        self.tokenizer: Final = tokenizer
        self.way = Way("echo", text=False, names_ids=True)
        """Chosen by the probe."""
        self.max_context = 1 << 20
        """Tokens of a text. The probe learns it from the API."""
        self._config, self._model, self._vocab_size = config, model, vocab_size
        self._texts: dict[int, str] = {}
        self._lasting: dict[bytes, Reason] = {}
        self._masked: Counter[Reason] = Counter()

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def figures(self) -> Mapping[str, float]:
        return {
            "api_requests_total": float(self.link.requests_total),
            "api_waits_total": float(self.link.waits_total),
            "api_sent_tokens": float(self.budget.tokens),
            "api_money": self.budget.money,
            **{f"api_unscored_{reason}_total": float(n) for reason, n in self._masked.items()},
        }

    def score(self, requests: Sequence[ScoreRequest], options: ScoreOptions = LOGPROBS_ONLY) -> list[ScoreResult]:
        """See the interface; where there is no usable answer, log-probs are NaN. Raises BudgetSpent when a former call
        could not send all, and EngineLost where the API refuses everybody with this key, account or model."""
        if self.budget.refused:
            raise BudgetSpent(f"the budget of {self._config.url} does not allow the next text: {self.budget}")
        check_scoring(requests, options.top_k, vocab_size=self._vocab_size, max_tokens=self.max_context)
        if any(request.top_ids is not None for request in requests):
            raise ValueError("an API cannot score given tokens; expected teacher.top_k_of = teacher")
        if options.top_k and self.way.form != "prompt_logprobs":
            raise ValueError("the API's answers name the likeliest tokens by text only; expected top_k = 0")
        deadline_s = time.monotonic() + self._config.timeout_s
        try:
            scored = self.link.run(self._score_all(requests, options.top_k, deadline_s))
        except NotServed as error:
            raise EngineLost(str(error)) from None
        finally:
            self.budget.save()
        return [one.result for one in scored]

    def close(self) -> None:
        self.link.close()

    async def _score_all(self, requests: Sequence[ScoreRequest], top_k: int, deadline_s: float) -> list[Scored]:
        slots = asyncio.Semaphore(self._config.max_concurrent)

        async def one(request: ScoreRequest) -> Scored:
            async with slots:
                return await self.score_one(request, top_k, deadline_s)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(request)) for request in requests]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        scored = [task.result() for task in tasks]
        for result in scored:
            self._masked.update(result.masked)
        return scored

    async def score_one(self, request: ScoreRequest, top_k: int, deadline_s: float) -> Scored:
        """Raises NotServed."""
        ids_T, start = request.token_ids, request.start
        n = len(ids_T) - start
        if not n:
            return Scored(ScoreResult.empty(top_k), {})
        name = ids_T.tobytes()
        if (former := self._lasting.get(name)) is not None:
            return unscored(n, former, top_k)
        try:
            answer = await self.ask(self.way, ids_T, top_k, deadline_s)
            why: Reason = "tokens" if self.way.text else "ids"
            agreeing = agreeing_tokens(answer, ids_T, self.texts_of(ids_T))
            scored = score_of(answer, start, agreeing, why, top_k, self._vocab_size)
        except Unusable as error:
            self._say(error.reason, str(error))
            scored = unscored(n, error.reason, top_k)
        if scored.masked.keys() & _LASTING:
            if len(self._lasting) == MOST_REMEMBERED:
                del self._lasting[next(iter(self._lasting))]
            self._lasting[name] = next(reason for reason in scored.masked if reason in _LASTING)
        return scored

    async def ask(self, way: Way, ids_T: Int32s, top_k: int, deadline_s: float) -> Answer:
        """Raises Unusable and NotServed."""
        prompt: str | list[int] = self._as_text(way, ids_T) if way.text else ids_T.tolist()
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": 1,  # not all take 0
            "temperature": 1.0,
            "top_p": 1.0,
        }
        if way.form == "prompt_logprobs":
            body["prompt_logprobs"] = top_k
        else:
            body |= {"echo": True, "logprobs": 1}
        if way.names_ids:
            body["return_token_ids"] = True
        if way.text and way.names_ids:
            body["add_special_tokens"] = False
        tokens = len(ids_T) + 1

        def sending(begins: bool) -> None:
            if not begins:
                self.budget.give_back(tokens)
            elif not self.budget.take(tokens):
                raise Unusable("budget", f"{self.budget}: {tokens} more are not allowed")

        most_bytes = (1 << 16) + _BYTES_PER_ENTRY * tokens * (top_k + 2)
        reply = await self.link.post(
            "/completions", body, deadline_s=deadline_s, most_bytes=most_bytes, sending=sending
        )
        try:
            answer = read_answer(reply, ids_T, way.form)
        except Unusable as error:
            raise Unusable(
                "tokens" if way.text and error.reason in ("count", "ids") else error.reason, str(error)
            ) from None
        self.budget.add(max(0, answer.charged_tokens + 1 - tokens))
        return answer

    def texts_of(self, ids_T: Int32s) -> list[str]:
        """The text of each token by itself."""
        for i in set(ids_T.tolist()) - self._texts.keys():
            self._texts[i] = self.tokenizer.decode([i], skip_special_tokens=False)
        return [self._texts[i] for i in ids_T.tolist()]

    def _as_text(self, way: Way, ids_T: Int32s) -> str:
        """Raises Unusable for ids that are not those of their own text."""
        ids = ids_T.tolist()[way.skip :]
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        if not text or self.tokenizer.encode(text, add_special_tokens=False) != ids:
            raise Unusable("tokens", "the tokens are not those of their text, so they cannot be sent as text")
        return text

    def _say(self, reason: Reason, said: str) -> None:
        """Once per reason; further ones are counted."""
        if not self._masked[reason]:
            log.warning("tokens have no score (%s): %s; further ones are counted", reason, said)
