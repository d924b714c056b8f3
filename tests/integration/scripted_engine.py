"""A third engine, as an outsider would write it: it has no model, echoes the prompt's last token and stops.

Nothing of Stillhouse knows of it; tests/integration/test_third_engine.py installs it beside the project.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from stillhouse.engines.base import EngineStats, GenerationDelta, GenerationRequest
from stillhouse.engines.provider import EngineProvider, Student, StudentSource
from stillhouse.models.tokenizer_file import FileTokenizer
from stillhouse.protocol.messages import VersionSpan, WeightVersion
from stillhouse.protocol.settings import Settings

LOGPROB = -0.5


class ScriptedOptions(Settings, frozen=True, kw_only=True):
    """Options of the scripted engine: `actor.scripted.*`."""

    echoes: Annotated[int, Meta(ge=1, le=100)] = 3
    """Copies of the prompt's last token in each answer."""


class ScriptedEngine:
    """One token per request and `poll`."""

    works_in_poll = True

    def __init__(self, options: ScriptedOptions) -> None:
        self._echoes = options.echoes
        self.version = WeightVersion(0, 0)
        self._next: WeightVersion | None = None
        self._swaps = self._sampled = 0
        self._running: dict[str, tuple[GenerationRequest, deque[int]]] = {}

    @property
    def stats(self) -> EngineStats:
        return EngineStats(len(self._running), 0, 8, self._sampled, self._sampled, 0.0, self._swaps, self.version)

    def submit(self, request: GenerationRequest) -> None:
        words = [int(request.prompt_ids[-1])] * self._echoes + [request.stop_token_ids[0]]
        self._running[request.request_id] = (request, deque(words[: request.max_new_tokens]))

    def abort(self, request_id: str) -> None:
        if request_id in self._running:
            self._running[request_id][1].clear()

    def poll(self, timeout_s: float) -> list[GenerationDelta]:
        if self._next is not None:
            self.version, self._next, self._swaps = self._next, None, self._swaps + 1
        deltas: list[GenerationDelta] = []
        for name, (request, words) in list(self._running.items()):
            ids = [words.popleft()] if words else []
            self._sampled += len(ids)
            reason: Any = None
            if not words:
                stopped = bool(ids) and ids[0] in request.stop_token_ids
                reason = "stop" if stopped else "length" if ids else "aborted"
                del self._running[name]
            spans = (VersionSpan(self.version, 0, 1),) if ids else ()
            logprobs = np.full(len(ids), LOGPROB, np.float32)
            deltas.append(GenerationDelta(name, np.array(ids, np.int32), logprobs, spans, reason))
        return deltas

    def stage_weights(self, version: WeightVersion, tensors: Iterable[tuple[str, Any]]) -> None:
        assert sum(1 for _ in tensors) > 0
        self._next = version

    def close(self) -> None: ...


class Scripted(EngineProvider):
    name = "scripted"
    title = "scripted"
    roles = ("actor",)
    options = MappingProxyType({"actor": ScriptedOptions})

    def student(self, ctx: Any) -> StudentSource:
        from stillhouse.engines.torch.weights import EmbeddedWeights  # torch, in the worker only

        tokenizer = FileTokenizer(ctx.config.models.student)

        def start(wake: Any) -> Student:
            engine = ScriptedEngine(ctx.config.actor.section("scripted", ScriptedOptions))
            return Student(engine, EmbeddedWeights(engine), max_context=512)

        return StudentSource(tokenizer, tokenizer.fingerprint, tokenizer.stop_token_ids, start)


PROVIDER = Scripted()
