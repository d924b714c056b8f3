"""The rollouts an actor has in hand, each in one of four phases, and the moves between them.

    ticket -> waiting --engine has min_version--> RESETTING --env.reset--> GENERATING <--> STEPPING
                                                                               |              |
                                                  gone <--finished, failed, cancelled---------+

No socket in here: segments and failures are handed to `send`. The owner calls the methods from one thread; environment
calls run on the EnvRunner's threads and come back through `take_environment_outcomes`."""

from __future__ import annotations

import enum
import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from actors.brake import Brake
from actors.config import ActorConfig
from actors.env_runner import EnvRunner
from actors.env_thread import EnvironmentTimeout, Outcome
from actors.envs.base import EnvTask, TextTokenizer, TurnEnd
from actors.envs.episode import Continuation, Episode
from actors.envs.registry import LoadedEnvironment, load_environments
from actors.failure import Failure, of_environment
from actors.rollout import Rollout
from engines.base import GenerationDelta, GenerationEngine, Int32s
from protocol.messages import Message, RolloutFailed, Ticket
from protocol.printable import in_one_line

log = logging.getLogger(__name__)

MAX_NAMES: Final = 64
"""Names of numbers of the environment that are summed up one by one; later ones go under `other`."""
MAX_NAME: Final = 64
"""Characters of such a name."""

Send = Callable[[Message, Sequence[np.ndarray[Any, Any]]], None]


class Phase(enum.Enum):
    """Who is at work on a rollout."""

    RESETTING = "environment resets"
    GENERATING = "engine samples"
    STEPPING = "environment answers"


@dataclass(slots=True)
class Run:
    """One rollout in hand."""

    rollout: Rollout
    episode: Episode
    step_timeout_s: float
    phase: Phase = Phase.RESETTING
    request_id: str = ""
    since_s: float = 0.0
    """When the engine or the environment was asked for what is awaited now (monotonic)."""


class RunningRollouts:
    """Everything between a ticket and its last segment."""

    def __init__(
        self,
        engine: GenerationEngine,
        environments: EnvRunner,
        tokenizer: TextTokenizer,
        config: ActorConfig,
        *,
        task_env: str,
        stop_token_ids: tuple[int, ...],
        max_context_tokens: int,
        send: Send,
    ) -> None:
        """`task_env`: the environment that the configured tasks name. It and those of `config` are imported here, and
        no other is ever run. Raises what they raise."""
        self._engine = engine
        self._environments = environments
        self._tokenizer = tokenizer
        self._config = config
        self._known = load_environments(config.environments_of(task_env), tokenizer)
        """By the name that a ticket may give."""
        self._stop_token_ids = stop_token_ids
        self._max_context_tokens = max_context_tokens
        self._send = send
        self._waiting: deque[tuple[Ticket, Int32s]] = deque()
        self._runs: dict[str, Run] = {}
        self._by_request: dict[str, str] = {}
        self._brake = Brake(config.max_failures_in_a_row)
        self._info_keys: set[str] = set()
        self.counts: defaultdict[str, float] = defaultdict(float)
        """Running totals for the heartbeat: rollouts by how they ended, environment numbers, segments."""

    def __len__(self) -> int:
        return len(self._runs) + len(self._waiting)

    @property
    def waiting_for_weights(self) -> int:
        return len(self._waiting)

    @property
    def generating(self) -> int:
        return len(self._by_request)

    def add(self, ticket: Ticket, prompt_ids: Int32s) -> None:
        self._waiting.append((ticket, prompt_ids))

    def start_ready(self) -> None:
        """Start, in order, the tickets whose weights are here; after failures none for a while."""
        version = self._engine.version
        while self._waiting and self._waiting[0][0].min_version <= version and not self._brake.holds_s():
            if not self._environments.has_room:
                return  # threads of environments that take long to close; those that are stuck have an end of their own
            ticket, prompt_ids = self._waiting.popleft()
            known = self._known.get(ticket.env)
            if known is None:
                told = f"the ticket names {in_one_line(ticket.env)!r}, expected one of {', '.join(self._known)}"
                self._fail(ticket.rollout_id, Failure("env_unknown", told))
                continue
            try:
                self._start(ticket, prompt_ids, known)
            except ValueError as error:
                self._fail(ticket.rollout_id, Failure("engine_refused", in_one_line(str(error))))
            except (OSError, RuntimeError) as error:
                self._fail(ticket.rollout_id, of_environment(error))

    def ready_in_s(self) -> float:
        """When waiting tickets may be tried again; infinite when nothing is put off."""
        holds_s = self._brake.holds_s()
        return holds_s if self._waiting and holds_s else math.inf

    def _start(self, ticket: Ticket, prompt_ids: Int32s, known: LoadedEnvironment) -> None:
        """Raises ValueError for a prompt that is none, OSError or RuntimeError where no thread can be had."""
        rollout = Rollout(
            ticket,
            prompt_ids,
            segment_tokens=self._config.segment_tokens,
            max_context_tokens=self._max_context_tokens,
        )
        task = EnvTask(prompt_ids, ticket.ground_truth, ticket.tag, ticket.rollout_id, ticket.sampling.seed)
        episode = Episode(
            known.make,
            task,
            self._tokenizer,
            model_stop_token_ids=self._stop_token_ids,
            max_turns=known.config.max_turns,
        )
        timeout_s = known.config.step_timeout_s
        self._environments.open(ticket.rollout_id, episode.close, timeout_s)
        self._runs[ticket.rollout_id] = Run(rollout, episode, timeout_s, since_s=time.monotonic())
        self._environments.submit(ticket.rollout_id, "reset", episode.start, timeout_s)

    def take_deltas(self, deltas: Sequence[GenerationDelta]) -> None:
        """Book what the engine sampled; a finished turn goes to its environment."""
        for delta in deltas:
            rollout_id = self._by_request.get(delta.request_id)
            if rollout_id is None:
                self.counts["deltas_of_cancelled_total"] += 1
                continue
            run = self._runs[rollout_id]
            run.rollout.append_delta(delta)
            if delta.finish_reason is not None:
                self._book_time("generation_s_total", "generations_total", run)
            match delta.finish_reason:
                case None:
                    self._send_segments(run)
                case "stop" | "length":
                    del self._by_request[delta.request_id]
                    self._send_segments(run)
                    self._step(rollout_id, run, delta.finish_reason)
                case reason:
                    del self._by_request[delta.request_id]
                    told = in_one_line(delta.error or "no detail given")
                    self._drop(rollout_id, Failure("engine_error" if reason == "error" else "engine_aborted", told))

    def take_environment_outcomes(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            run = self._runs.get(outcome.key)
            if run is None:
                continue  # cancelled meanwhile
            self._book_time("environment_s_total", "environment_calls_total", run)
            if outcome.error is not None:
                self.counts["environment_errors_total"] += 1
                late = isinstance(outcome.error, EnvironmentTimeout)
                told = (
                    Failure("env_timeout", in_one_line(str(outcome.error))) if late else of_environment(outcome.error)
                )
                self._drop(outcome.key, told)
            elif run.phase is Phase.RESETTING:
                self._append_and_generate(outcome.key, run, outcome.result)
            else:
                self._continue(outcome.key, run, outcome.result)

    def _continue(self, rollout_id: str, run: Run, continuation: Continuation) -> None:
        for name, value in continuation.info.items():
            self.counts[self._info_key(name)] += float(value)
        if continuation.finish_reason is None:
            self._append_and_generate(rollout_id, run, continuation.token_ids)
            return
        run.rollout.finish(continuation.finish_reason, continuation.reward)
        self._send_segments(run)
        self.counts["rollouts_finished_total"] += 1
        self._brake.success()
        self._forget(rollout_id)

    def _book_time(self, seconds: str, calls: str, run: Run) -> None:
        """Add up how long an answer took, queueing included, under these two totals."""
        self.counts[seconds] += time.monotonic() - run.since_s
        self.counts[calls] += 1

    def _info_key(self, name: str) -> str:
        """Where a number of an environment's is summed up: names are bounded, or they would fill the heartbeats."""
        key = f"env_{name[:MAX_NAME]}_total"
        if key not in self._info_keys:
            if len(self._info_keys) >= MAX_NAMES:
                return "env_other_total"
            self._info_keys.add(key)
        return key

    def _append_and_generate(self, rollout_id: str, run: Run, token_ids: Int32s) -> None:
        run.rollout.append_environment(token_ids)
        try:
            request = run.rollout.next_request(run.episode.stop_token_ids)
            self._engine.submit(request)
        except (ValueError, RuntimeError) as error:
            self._drop(rollout_id, Failure("engine_refused", in_one_line(str(error))))
            return
        run.phase, run.request_id, run.since_s = Phase.GENERATING, request.request_id, time.monotonic()
        self._by_request[request.request_id] = rollout_id

    def _step(self, rollout_id: str, run: Run, turn_end: TurnEnd) -> None:
        run.phase, run.since_s = Phase.STEPPING, time.monotonic()
        rollout = run.rollout
        step = partial(
            run.episode.advance,
            rollout.turn_ids,
            turn_end,
            budget_left=rollout.budget_left,
            context_left=rollout.context_left,
        )
        self._environments.submit(rollout_id, "step", step, run.step_timeout_s)

    def _send_segments(self, run: Run) -> None:
        for segment in run.rollout.take_segments():
            self._send(segment.message, segment.arrays)
            self.counts["segments_total"] += 1

    def cancel(self, rollout_id: str, reason: str) -> None:
        """The buffer no longer wants it. Unknown ids are fine: it may just have ended."""
        if rollout_id in self._runs:
            log.info("rollout %s is cancelled: %s", rollout_id, reason)
            self._forget(rollout_id)
        else:
            self._waiting = deque(entry for entry in self._waiting if entry[0].rollout_id != rollout_id)
        self.counts["rollouts_cancelled_total"] += 1

    def _drop(self, rollout_id: str, failure: Failure) -> None:
        self._forget(rollout_id)
        self._fail(rollout_id, failure)

    def _fail(self, rollout_id: str, failure: Failure) -> None:
        """Say it; raises TooManyFailures for the one that is too many, of which the buffer has been told too."""
        log.warning("rollout %s failed: %s", rollout_id, failure)
        self.counts["rollouts_failed_total"] += 1
        self._send(RolloutFailed(rollout_id, failure.reason, failure.error, failure.detail), ())
        self._brake.failure(str(failure))

    def _forget(self, rollout_id: str) -> None:
        run = self._runs.pop(rollout_id)
        if self._by_request.pop(run.request_id, None) is not None:
            self._engine.abort(run.request_id)
        self._environments.finish(rollout_id)
