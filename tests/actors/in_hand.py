"""Rollouts in hand without an actor around them: an engine that says what it is told to, environments that break, and
the actor's loop without its socket."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
from torch import Tensor

from stillhouse.actors.config import ActorConfig
from stillhouse.actors.envs.base import Action, Environment, EnvTask, Observation, StepResult, TextTokenizer
from stillhouse.actors.episodes import EpisodeThreads
from stillhouse.actors.failures import Failure
from stillhouse.actors.rollouts_running import RunningRollouts
from stillhouse.engines.base import EngineStats, GenerationDelta, GenerationEngine, GenerationRequest, Int32s
from stillhouse.protocol.messages import Message, RolloutFailed, Sampling, Segment, Ticket, VersionSpan, WeightVersion
from tests.patience import Limit

STOP = 313
"""<|im_end|> of the built-in tokenizer."""
BREAKABLE = f"{__name__}:Breakable"
V0, V1, V2 = (WeightVersion(0, step) for step in range(3))

MessageT = TypeVar("MessageT")


def ids_of(*ids: int) -> Int32s:
    return np.array(ids, dtype=np.int32)


def ticket(number: int = 0, **fields: Any) -> Ticket:
    defaults: dict[str, Any] = {
        "rollout_id": f"train-{number}-0-0",
        "task_id": number,
        "sample_index": 0,
        "kind": "train",
        "sampling": Sampling(seed=number, max_new_tokens=40),
        "env": "single_turn",
        "tag": "",
        "ground_truth": "7",
        "min_version": V0,
    }
    return Ticket(**(defaults | fields))


class ScriptedEngine:
    """Says what `say` tells it to, at the next poll. `version` is the test's to set."""

    def __init__(self) -> None:
        self.version = V0
        self.requests: dict[str, GenerationRequest] = {}
        """Under way, by request id."""
        self.aborted: list[str] = []
        self.refuse: Exception | None = None
        """Raised by the next submit."""
        self.works_in_poll = True
        self._deltas: deque[GenerationDelta] = deque()

    @property
    def stats(self) -> EngineStats:
        return EngineStats(len(self.requests), 0, 0, 0, 0, 0.0, 0, self.version)

    def say(self, request_id: str, *ids: int, end: Any = None, error: str | None = None) -> None:
        spans = (VersionSpan(self.version, 0, len(ids)),) if ids else ()
        logprobs = np.full(len(ids), -0.5, np.float32)
        self._deltas.append(GenerationDelta(request_id, ids_of(*ids), logprobs, spans, end, error))

    def submit(self, request: GenerationRequest) -> None:
        if self.refuse is not None:
            error, self.refuse = self.refuse, None
            raise error
        assert request.request_id not in self.requests
        self.requests[request.request_id] = request

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.say(request_id, end="aborted")

    def poll(self, timeout_s: float) -> list[GenerationDelta]:
        deltas = [self._deltas.popleft() for _ in range(len(self._deltas))]  # `say` is called in another thread
        for delta in deltas:
            if delta.finish_reason is not None:
                self.requests.pop(delta.request_id, None)
        return deltas

    def stage_weights(self, version: WeightVersion, tensors: Iterable[tuple[str, Tensor]]) -> None:
        raise AssertionError("not in these tests")

    def close(self) -> None: ...


class Breakable(Environment):
    """Answers each turn with one token until the turn with id 9 in it; breaks or hangs where it is told to."""

    closed: ClassVar[deque[str]] = deque()
    """Rollouts whose environment was closed; cleared by the `in_hand` fixture."""
    ERRORS: ClassVar[dict[str, Exception]] = {
        "KeyError": KeyError("tool"),
        "OSError": OSError("no such tool"),
        "RuntimeError": RuntimeError("broke"),
        "AttributeError": AttributeError("None has no attribute x"),
    }

    let_go: ClassVar[threading.Event] = threading.Event()
    """Ends all blocking; the test's to set."""

    def __init__(
        self, tokenizer: TextTokenizer, *, at: str = "", error: str = "", hang: bool = False, block: bool = False
    ) -> None:
        self._at, self._error, self._hang, self._block = at, error, hang, block
        self._rollout_id = ""
        if at == "new":
            raise self.ERRORS[error]

    async def _maybe_break(self, where: str) -> None:
        if self._at == where:
            if self._block:
                self.let_go.wait()
                return
            if self._hang:
                await asyncio.Event().wait()
            raise self.ERRORS[self._error]

    async def reset(self, task: EnvTask) -> Observation:
        """The row's `prompt_ids` and `reply_ids`, if it has them."""
        self._rollout_id = task.rollout_id
        await self._maybe_break("reset")
        own, reply = task.row.get("prompt_ids"), task.row.get("reply_ids", ())
        return Observation(ids_of(*reply), None if own is None else ids_of(*own))

    async def step(self, action: Action) -> StepResult:
        await self._maybe_break("step")
        if 9 in action.token_ids or action.last:
            return StepResult(done=True, reward=1.0)
        return StepResult(token_ids=ids_of(8), info={"turns": 1.0})

    async def close(self) -> None:
        Breakable.closed.append(self._rollout_id)
        await self._maybe_break("close")


class InHand:
    """Running rollouts, turned by hand."""

    def __init__(
        self,
        engine: GenerationEngine,
        tokenizer: TextTokenizer,
        config: ActorConfig,
        task_env: str = "single_turn",
        max_threads: int = 128,
        max_context_tokens: int = 200,
    ) -> None:
        self.engine = engine
        environments = config.environments_of(task_env)
        self.episodes = EpisodeThreads(
            environments,
            tokenizer,
            max_threads=max_threads,
            stop_token_ids=(STOP,),
            max_context_tokens=max_context_tokens,
        )
        self.environments = self.episodes.runner
        self.sent: list[tuple[Message, tuple[np.ndarray[Any, Any], ...]]] = []
        self.rollouts = RunningRollouts(
            engine,
            self.episodes,
            config,
            environments=environments,
            stop_token_ids=(STOP,),
            max_context_tokens=max_context_tokens,
            send=lambda message, arrays: self.sent.append((message, tuple(arrays))),
        )

    def turn(self) -> None:
        """What the actor does between two looks at its socket."""
        time.sleep(0.001)
        self.rollouts.take_news()
        self.rollouts.take_deltas(self.engine.poll(0.0))
        self.rollouts.start_ready()

    def until(self, met: Callable[[], bool]) -> None:
        limit = Limit()
        while not met():
            assert not limit.passed, f"it never came to that; sent: {[m for m, _ in self.sent]}"
            self.turn()

    def until_gone(self) -> None:
        """Nothing in hand, and every environment is closed."""
        self.until(lambda: not len(self.rollouts) and not self.environments.pending and not self.environments.threads)

    def messages(self, kind: type[MessageT]) -> list[MessageT]:
        return [message for message, _ in self.sent if isinstance(message, kind)]

    @property
    def failures(self) -> dict[str, str]:
        """Rollout id -> reason, class of the exception and detail; each is said once."""
        failed = self.messages(RolloutFailed)
        assert len({message.rollout_id for message in failed}) == len(failed)
        return {each.rollout_id: str(Failure(each.reason, each.detail, each.error)) for each in failed}

    def whole(self, rollout_id: str) -> tuple[list[Segment], Int32s, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Segments of a finished rollout, which must lie end to end; ids, log-probs and mask of all of it."""
        parts = [(m, arrays) for m, arrays in self.sent if isinstance(m, Segment) and m.rollout_id == rollout_id]
        segments: Sequence[Segment] = [message for message, _ in parts]
        assert [s.index for s in segments] == list(range(len(parts))) and segments[-1].final
        assert [s.start for s in segments] == [0, *(s.end for s in segments[:-1])]
        assert not any(s.final for s in segments[:-1])
        ids, logprobs, mask = (np.concatenate([arrays[i] for _, arrays in parts]) for i in range(3))
        assert len(ids) == len(logprobs) == len(mask) == segments[-1].end
        return list(segments), ids, logprobs, mask
