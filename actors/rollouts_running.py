"""The rollouts that an actor runs, and the transitions between their phases.

    ticket -> waiting --engine has min_version--> RESETTING --env.reset--> GENERATING <--> STEPPING
                                                                               |              |
                                                  gone <--finished, failed, cancelled---------+

No sockets: segments and failures go to `send`. The owner calls all methods from one thread; environment calls run on
the EnvRunner's threads and come back through `take_environment_outcomes`."""

from __future__ import annotations

import enum
import logging
import math
import queue
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np

from actors.agent import AgentEpisode, Ask
from actors.config import ActorConfig
from actors.env_runner import EnvRunner
from actors.env_thread import EnvironmentTimeout, Outcome
from actors.envs.base import EnvTask, Observation, TextTokenizer, TurnEnd
from actors.envs.episode import Continuation, Episode
from actors.envs.registry import LoadedEnvironment, load_environments
from actors.failures import Brake, Failure, of_environment
from actors.rollout import Rollout
from actors.trajectory.graph import GraphCounts, Origin
from actors.trajectory.rollout import BranchingRollout, NoRoom
from engines.base import GenerationDelta, GenerationEngine, GenerationRequest, Int32s
from protocol.messages import Message, RolloutFailed, Ticket
from protocol.printable import in_one_line

log = logging.getLogger(__name__)

MAX_NAMES: Final = 64
"""Most names of environment numbers with a total of their own; further names share the total `other`."""
MAX_NAME: Final = 64
"""Characters kept of such a name."""

Send = Callable[[Message, Sequence[np.ndarray[Any, Any]]], None]


class Phase(enum.Enum):
    """Phases of a rollout: each names what the rollout waits for."""

    RESETTING = "environment resets"
    GENERATING = "engine samples"
    STEPPING = "environment answers"
    AGENT = "agent runs; it asks the engine itself"


@dataclass(slots=True)
class Run:
    """One rollout under way."""

    rollout: Rollout | BranchingRollout
    episode: Episode | AgentEpisode
    step_timeout_s: float
    phase: Phase = Phase.RESETTING
    requests: dict[str, float] = field(default_factory=dict[str, float])
    """Requests that the engine works on, and when they were made (monotonic). An agent may have several."""
    since_s: float = 0.0
    """When the current call of the environment was made (monotonic)."""


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
        no other is ever run. Raises whatever an environment raises while it is imported."""
        self._engine = engine
        self._environments = environments
        self._tokenizer = tokenizer
        self._config = config
        self._known = load_environments(config.environments_of(task_env), tokenizer)
        """By the name that a ticket gives."""
        self._stop_token_ids = stop_token_ids
        self._max_context_tokens = max_context_tokens
        self._send = send
        self._waiting: deque[tuple[Ticket, Int32s]] = deque()
        self._runs: dict[str, Run] = {}
        self._by_request: dict[str, str] = {}
        self._brake = Brake(config.max_failures_in_a_row)
        self._asked: queue.SimpleQueue[Ask] = queue.SimpleQueue()
        """Requests of agents, from their threads."""
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
        """Start waiting tickets in order, as far as their weights have arrived. After a failure nothing starts for a
        while."""
        version = self._engine.version
        while self._waiting and self._waiting[0][0].min_version <= version and not self._brake.holds_s():
            if not self._environments.has_room:
                return  # environments are still closing; too many stuck ones raise TooManyStuck
            ticket, prompt_ids = self._waiting.popleft()
            known = self._known.get(ticket.env)
            if known is None:
                detail = f"the ticket names {in_one_line(ticket.env)!r}, expected one of {', '.join(self._known)}"
                self._fail(ticket.rollout_id, Failure("env_unknown", detail))
                continue
            try:
                self._start(ticket, prompt_ids, known)
            except ValueError as error:
                self._fail(ticket.rollout_id, Failure("engine_refused", in_one_line(str(error))))
            except (OSError, RuntimeError) as error:
                self._fail(ticket.rollout_id, of_environment(error))

    def ready_in_s(self) -> float:
        """Seconds until delayed tickets may start; infinite when none is delayed."""
        holds_s = self._brake.holds_s()
        return holds_s if self._waiting and holds_s else math.inf

    def _start(self, ticket: Ticket, prompt_ids: Int32s, known: LoadedEnvironment) -> None:
        """Raises ValueError for an unusable prompt or row, OSError or RuntimeError when the system gives no thread."""
        row = msgspec.json.decode(ticket.row, type=dict[str, Any]) if ticket.row else {}
        task = EnvTask(prompt_ids, ticket.ground_truth, ticket.tag, ticket.rollout_id, ticket.sampling.seed, row)
        options, timeout_s = row.get("env_options") or {}, known.config.step_timeout_s
        limits: dict[str, int] = {
            "segment_tokens": self._config.segment_tokens,
            "max_context_tokens": self._max_context_tokens,
        }
        max_turns = known.config.max_turns
        if known.agent is not None:
            episode = AgentEpisode(partial(known.agent, options), task, self._tokenizer, self._ask)
            rollout = BranchingRollout(ticket, prompt_ids, **limits, max_calls=max_turns, retries=False)
            run, call = Run(rollout, episode, timeout_s, Phase.AGENT), ("rollout", episode.run)
        else:
            episode = Episode(
                partial(known.make, options),
                task,
                self._tokenizer,
                model_stop_token_ids=self._stop_token_ids,
                max_turns=max_turns,
            )
            rollout = Rollout(ticket, prompt_ids, **limits)
            run, call = Run(rollout, episode, timeout_s, since_s=time.monotonic()), ("reset", episode.start)
        self._environments.open(ticket.rollout_id, episode.close, timeout_s)
        self._runs[ticket.rollout_id] = run
        self._environments.submit(ticket.rollout_id, *call, timeout_s)

    def _ask(self, ask: Ask) -> None:
        """Called on an agent's thread."""
        self._asked.put(ask)
        self._environments.wake()

    def take_asked(self) -> None:
        """Hand the requests of agents to the engine."""
        while not self._asked.empty():
            ask = self._asked.get()
            run = self._runs.get(ask.rollout_id)
            if run is None:
                continue  # ended or cancelled meanwhile
            assert isinstance(run.rollout, BranchingRollout) and isinstance(run.episode, AgentEpisode)
            if ask.prompt_ids is None:
                self._give_up_call(run, ask.number)
                continue
            stops = (*self._stop_token_ids, *ask.stop_token_ids)
            try:
                request = run.rollout.request(
                    ask.prompt_ids, ask.number, max_new_tokens=ask.max_new_tokens, stop_token_ids=stops
                )
                self._engine.submit(request)
            except NoRoom as full:
                run.episode.refuse(ask.number, str(full))
            except (ValueError, RuntimeError) as error:
                self._drop(ask.rollout_id, Failure("engine_refused", in_one_line(str(error))))
            else:
                self._submitted(ask.rollout_id, run, request)

    def _submitted(self, rollout_id: str, run: Run, request: GenerationRequest) -> None:
        run.requests[request.request_id] = time.monotonic()
        self._by_request[request.request_id] = rollout_id

    def take_deltas(self, deltas: Sequence[GenerationDelta]) -> None:
        """Append sampled tokens to their rollouts; a finished turn goes to its environment."""
        for delta in deltas:
            rollout_id = self._by_request.get(delta.request_id)
            if rollout_id is None:
                self.counts["deltas_of_cancelled_total"] += 1
                continue
            run = self._runs[rollout_id]
            response_ids = run.rollout.append_delta(delta)
            if delta.finish_reason is not None:
                del self._by_request[delta.request_id]
                self._book_time("generation_s_total", "generations_total", run.requests.pop(delta.request_id))
            match delta.finish_reason:
                case None:
                    self._send_segments(run)
                case "stop" | "length" if isinstance(run.episode, AgentEpisode):
                    assert response_ids is not None
                    self._send_segments(run)
                    number = int(delta.request_id.rpartition("/")[2])
                    run.episode.deliver(number, response_ids, delta.finish_reason)
                case "stop" | "length":
                    self._send_segments(run)
                    self._step(rollout_id, run, delta.finish_reason)
                case reason:
                    detail = in_one_line(delta.error or "no detail given")
                    self._drop(rollout_id, Failure("engine_error" if reason == "error" else "engine_aborted", detail))

    def take_environment_outcomes(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            run = self._runs.get(outcome.key)
            if run is None:
                continue  # cancelled meanwhile
            if run.phase is not Phase.AGENT:  # whose time is mostly that of the engine
                self._book_time("environment_s_total", "environment_calls_total", run.since_s)
            if outcome.error is not None:
                self.counts["environment_errors_total"] += 1
                late = isinstance(outcome.error, EnvironmentTimeout)
                failure = (
                    Failure("env_timeout", in_one_line(str(outcome.error))) if late else of_environment(outcome.error)
                )
                self._drop(outcome.key, failure)
            elif run.phase is Phase.RESETTING:
                self._begin(outcome.key, run, outcome.result)
            else:
                self._continue(outcome.key, run, outcome.result)

    def _begin(self, rollout_id: str, run: Run, observation: Observation) -> None:
        if observation.prompt_ids is not None:
            assert isinstance(run.rollout, Rollout)
            run.rollout.replace_prompt(observation.prompt_ids)
        self._append_and_generate(rollout_id, run, observation.token_ids)

    def _continue(self, rollout_id: str, run: Run, continuation: Continuation) -> None:
        for name, value in continuation.info.items():
            self.counts[self._info_key(name)] += float(value)
        if continuation.finish_reason is None:
            self._append_and_generate(rollout_id, run, continuation.token_ids)
            return
        try:
            run.rollout.finish(continuation.finish_reason, continuation.reward)
        except ValueError as error:  # an engine that answered without a token
            self._drop(rollout_id, Failure("engine_error", in_one_line(str(error))))
            return
        self._send_segments(run)
        if isinstance(run.rollout, BranchingRollout):
            self._count_calls(run.rollout.graph.counts)
        self.counts["rollouts_finished_total"] += 1
        self._brake.success()
        self._forget(rollout_id)

    def _count_calls(self, counts: GraphCounts) -> None:
        self.counts["agent_rollouts_total"] += 1
        self.counts["agent_calls_total"] += counts.calls
        self.counts["agent_roots_total"] += counts.by_origin[Origin.ROOT]
        self.counts["agent_forks_total"] += counts.by_origin[Origin.FORKS]
        self.counts["agent_drift_tokens_total"] += counts.drift_tokens
        self.counts["agent_dropped_responses_total"] += sum(counts.dropped_responses.values())

    def _book_time(self, seconds: str, calls: str, since_s: float) -> None:
        """Add the time of one answer, queueing included, to these two totals."""
        self.counts[seconds] += time.monotonic() - since_s
        self.counts[calls] += 1

    def _info_key(self, name: str) -> str:
        """The total for a number that an environment reports. Names are bounded because each is sent in every
        heartbeat."""
        key = f"env_{name[:MAX_NAME]}_total"
        if key not in self._info_keys:
            if len(self._info_keys) >= MAX_NAMES:
                return "env_other_total"
            self._info_keys.add(key)
        return key

    def _append_and_generate(self, rollout_id: str, run: Run, token_ids: Int32s) -> None:
        assert isinstance(run.rollout, Rollout) and isinstance(run.episode, Episode)
        run.rollout.append_environment(token_ids)
        try:
            request = run.rollout.next_request(run.episode.stop_token_ids)
            self._engine.submit(request)
        except (ValueError, RuntimeError) as error:
            self._drop(rollout_id, Failure("engine_refused", in_one_line(str(error))))
            return
        run.phase = Phase.GENERATING
        self._submitted(rollout_id, run, request)

    def _step(self, rollout_id: str, run: Run, turn_end: TurnEnd) -> None:
        run.phase, run.since_s = Phase.STEPPING, time.monotonic()
        rollout, episode = run.rollout, run.episode
        assert isinstance(rollout, Rollout) and isinstance(episode, Episode)
        step = partial(
            episode.advance,
            rollout.turn_ids,
            turn_end,
            budget_left=rollout.budget_left,
            context_left=rollout.context_left,
        )
        self._environments.submit(rollout_id, "step", step, run.step_timeout_s)

    def _give_up_call(self, run: Run, number: int) -> None:
        """The agent stopped waiting for a response."""
        assert isinstance(run.rollout, BranchingRollout)
        request_id = run.rollout.request_id(number)
        if run.requests.pop(request_id, None) is not None:
            del self._by_request[request_id]
            self._engine.abort(request_id)
            run.rollout.end(request_id, delivered=False)

    def _send_segments(self, run: Run) -> None:
        for segment in run.rollout.take_segments():
            self._send(segment.message, segment.arrays)
            self.counts["segments_total"] += 1

    def cancel(self, rollout_id: str, reason: str) -> None:
        """Stop a rollout that the buffer no longer wants. Unknown ids are ignored: the rollout may just have ended."""
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
        """Report a failure to the buffer. Raises TooManyFailures, after the report, when it was the last one
        allowed."""
        log.warning("rollout %s failed: %s", rollout_id, failure)
        self.counts["rollouts_failed_total"] += 1
        self._send(RolloutFailed(rollout_id, failure.reason, failure.error, failure.detail), ())
        self._brake.failure(str(failure))

    def _forget(self, rollout_id: str) -> None:
        run = self._runs.pop(rollout_id)
        for request_id in run.requests:
            del self._by_request[request_id]
            self._engine.abort(request_id)
        self._environments.finish(rollout_id)
