"""A teacher on an inference server: many requests at once, each scored as its kind of server does it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from typing import Final, Generic, Protocol, TypeVar

from stillhouse.engines.base import LOGPROBS_ONLY, ScoreRequest, ScoreResult, check_scoring
from stillhouse.engines.config import ServerLinkConfig
from stillhouse.engines.http.link import ModelInfo, ServerLink, ServerUnavailable
from stillhouse.protocol.payloads.kind import ScoreOptions

log = logging.getLogger(__name__)


class ScoringFeatures(Protocol):
    """What a scorer needs to know of its server."""

    @property
    def max_prompt(self) -> int:
        """Tokens of a request."""
        ...

    def table(self) -> str:
        """For the log, a line per feature."""
        ...


FeaturesT = TypeVar("FeaturesT", bound=ScoringFeatures)


class ScorerOnServer(Generic[FeaturesT]):
    """A ScoringEngine (engines.base). `score` is called from one thread. A subclass for each kind of server says how
    its requests look."""

    def __init__(self, link: ServerLink, config: ServerLinkConfig, *, vocab_size: int) -> None:
        """Connects. Raises ServerUnavailable when the server does not answer within connect_timeout_s; the link is then
        closed."""
        self._config = config
        self._vocab_size = vocab_size
        self._answered_s = 0.0
        self._closed = False
        self.server: Final = link
        try:
            self.features: Final[FeaturesT] = self.server.run(self._detect(), timeout_s=2 * config.connect_timeout_s)
        except BaseException:
            self.server.close()
            raise
        self._model: ModelInfo | None = None
        self.server.on_info = self._note_info
        self.server.start_monitor()
        for line in (f"server at {link.url}", *self.features.table().splitlines()):
            log.info("%s", line)

    # ---------------------------------------------------------------------------- what a kind of server decides

    async def _detect(self) -> FeaturesT:
        """Measure the server's features. Raises as __init__ does."""
        raise NotImplementedError

    async def _score_request(self, request: ScoreRequest, top_k: int) -> ScoreResult:
        """Score at least one token. Raises ServerUnavailable, RequestRefused, and StreamError for wrong answers."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_context(self) -> int:
        """Tokens of a request."""
        return self.features.max_prompt

    def score(self, requests: Sequence[ScoreRequest], options: ScoreOptions = LOGPROBS_ONLY) -> list[ScoreResult]:
        """See the interface; results in the order of the requests. Also raises ValueError for more than max_context
        tokens and top_k outside [0, vocab_size], ServerUnavailable when one request got no answer in time (the others
        are cancelled, because repeating them is cheap), ServerLost when none did, RuntimeError after close()."""
        if self._closed:
            raise RuntimeError("the scorer is closed")
        self.server.raise_if_lost()
        top_k = options.top_k
        check_scoring(requests, top_k, vocab_size=self._vocab_size, max_tokens=self.max_context)
        one_s = self._config.start_timeout_s + self._config.stall_timeout_s
        rounds = 1 + math.ceil(len(requests) / self._config.max_concurrent)
        asked_s = time.monotonic()
        try:
            return self.server.run(self._score_all(requests, top_k), timeout_s=rounds * one_s)
        except ServerUnavailable as error:
            if self._answered_s < asked_s:
                self.server.declare_lost(f"no score in {time.monotonic() - asked_s:.0f} s: {error}")
            self.server.raise_if_lost()
            raise

    def close(self) -> None:
        """Idempotent."""
        self._closed = True
        self.server.close()

    def _note_info(self, info: ModelInfo, asked_s: float) -> None:
        """A teacher's weights never change. If they do, another server answers, or another run has taken this one."""
        if self._model is not None and info != self._model:
            self.server.declare_lost(f"it had {self._model} and has {info} now")
        self._model = self._model or info

    async def _score_all(self, requests: Sequence[ScoreRequest], top_k: int) -> list[ScoreResult]:
        slots = asyncio.Semaphore(self._config.max_concurrent)

        async def score_in_turn(request: ScoreRequest) -> ScoreResult:
            if request.start == len(request.token_ids):
                return ScoreResult.empty(top_k if request.top_ids is None else request.top_ids.shape[1])
            async with slots:
                return await self._score_request(request, top_k)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(score_in_turn(request)) for request in requests]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _post(self, path: str, body: object) -> bytes:
        """As `ServerLink.post_again`, with the limits of the configuration."""
        deadline_s = time.monotonic() + self._config.start_timeout_s
        text = await self.server.post_again(path, body, timeout_s=self._config.stall_timeout_s, deadline_s=deadline_s)
        self._answered_s = time.monotonic()
        return text
