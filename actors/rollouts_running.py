"""The rollouts that an actor runs, and what happens to each between its ticket and its end.

    ticket -> waiting --engine has min_version--> episode runs <--asks, responses--> engine samples
                                                       |
                                    gone <--finished, failed, cancelled

No sockets: segments and failures go to `send`. The owner calls all methods from one thread. Episodes run elsewhere
(`actors.episodes`); `take_news` takes what they ask of the engine, and how they ended."""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from stillhouse.actors.config import ActorConfig, EnvConfig
from stillhouse.actors.episodes import EpisodeEnded, EpisodeStart, EpisodeThreads
from stillhouse.actors.failures import Brake, Failure, of_environment
from stillhouse.actors.running_episode import Ask, EpisodeEnd, GiveUp, Response
from stillhouse.actors.trajectory.graph import GraphCounts, Origin
from stillhouse.actors.trajectory.rollout import CutSegment, NoRoom, Rollout
from stillhouse.engines.base import GenerationDelta, GenerationEngine, Int32s
from stillhouse.models.flops import ForwardFlops
from stillhouse.protocol.messages import Message, RolloutFailed, Ticket, is_training
from stillhouse.protocol.printable import in_one_line
from stillhouse.tracing import events

log = logging.getLogger(__name__)

MAX_NAMES: Final = 64
"""Most names of environment numbers with a total of their own; further names share the total `other`."""
MAX_NAME: Final = 64
"""Characters kept of such a name."""

Send = Callable[[Message, Sequence[np.ndarray[Any, Any]]], None]


@dataclass(slots=True)
class Run:
    """One rollout under way."""

    rollout: Rollout
    is_agent: bool
    """False: an environment of one conversation."""
    since_s: float
    """When the episode's own code last began to run (monotonic)."""
    requests: dict[str, float] = field(default_factory=dict[str, float])
    """Requests that the engine works on, and when they were made (monotonic)."""


class RunningRollouts:
    """Everything between a ticket and its last segment."""

    def __init__(
        self,
        engine: GenerationEngine,
        episodes: EpisodeThreads,
        config: ActorConfig,
        *,
        environments: Mapping[str, EnvConfig],
        stop_token_ids: tuple[int, ...],
        max_context_tokens: int,
        send: Send,
        forward: ForwardFlops | None = None,
    ) -> None:
        """`environments`: those that a ticket may name, which `episodes` runs. `forward`: what tokens cost the student;
        None: not known."""
        self._engine = engine
        self._episodes = episodes
        self._config = config
        self._known = environments
        self._stop_token_ids = stop_token_ids
        self._max_context_tokens = max_context_tokens
        self._send = send
        self._forward = forward
        self._waiting: deque[tuple[Ticket, Int32s]] = deque()
        self._runs: dict[str, Run] = {}
        self._by_request: dict[str, str] = {}
        self._brake = Brake(config.max_failures_in_a_row)
        self._slots, self._lanes = events.Lanes(), events.Lanes()
        """Tracks of the trace, for requests and for rollouts that go on side by side."""
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

    @property
    def wants_engine(self) -> bool:
        """Whether the engine has something to do, or a rollout could begin."""
        begins = self._waiting and self._waiting[0][0].min_version <= self._engine.version and not self._brake.holds_s()
        return bool(self._by_request or begins)

    def add(self, ticket: Ticket, prompt_ids: Int32s) -> None:
        self._waiting.append((ticket, prompt_ids))

    def start_ready(self) -> None:
        """Start waiting tickets in order, as far as their weights have arrived. After a failure nothing starts for a
        while."""
        version = self._engine.version
        while self._waiting and self._waiting[0][0].min_version <= version and not self._brake.holds_s():
            if not self._episodes.has_room:
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

    def _start(self, ticket: Ticket, prompt_ids: Int32s, known: EnvConfig) -> None:
        """Raises ValueError for an unusable prompt or row, OSError or RuntimeError when the system gives no thread."""
        max_turns = min(known.max_turns, ticket.sampling.max_turns or known.max_turns)
        rollout = Rollout(
            ticket,
            prompt_ids,
            segment_tokens=self._config.segment_tokens,
            max_context_tokens=self._max_context_tokens,
            max_calls=max_turns,
        )
        self._episodes.start(
            EpisodeStart(
                ticket.rollout_id,
                ticket.env,
                prompt_ids,
                ticket.ground_truth,
                ticket.tag,
                ticket.sampling.seed,
                ticket.row,
                rollout.budget_left,
                max_turns,
            )
        )
        self._runs[ticket.rollout_id] = Run(rollout, ticket.env in self._episodes.agents, time.monotonic())
        self._lanes.take(ticket.rollout_id)

    def take_news(self) -> None:
        """Hand the requests of episodes to the engine, and finish the rollouts whose episodes ended."""
        for news in self._episodes.take():
            run = self._runs.get(news.rollout_id)
            if run is None:
                continue  # ended or cancelled meanwhile
            match news:
                case Ask():
                    self._generate(run, news)
                case GiveUp():
                    self._give_up_call(run, news.number)
                case EpisodeEnded():
                    self._ended(run, news)

    def _generate(self, run: Run, ask: Ask) -> None:
        stops = tuple(sorted({*self._stop_token_ids, *ask.stop_token_ids}))
        try:
            request = run.rollout.request(
                ask.prompt_ids,
                ask.number,
                max_new_tokens=ask.max_new_tokens,
                stop_token_ids=stops,
                retry=ask.retry,
                choice_of=ask.choice_of,
            )
            self._engine.submit(request)
        except NoRoom as full:
            self._episodes.refuse(ask.rollout_id, ask.number, str(full))
            return
        except (ValueError, RuntimeError) as error:
            self._drop(ask.rollout_id, Failure("engine_refused", in_one_line(str(error))))
            return
        if not run.requests:
            self._book_time("environment_s_total", "environment_calls_total", run.since_s)
        run.requests[request.request_id] = time.monotonic()
        self._slots.take(request.request_id)
        self._by_request[request.request_id] = ask.rollout_id

    def take_deltas(self, deltas: Sequence[GenerationDelta]) -> None:
        """Append sampled tokens to their rollouts; a finished turn goes to its environment."""
        for delta in deltas:
            rollout_id = self._by_request.get(delta.request_id)
            if rollout_id is None:
                self.counts["deltas_of_cancelled_total"] += 1
                continue
            run = self._runs[rollout_id]
            response = run.rollout.append_delta(delta)
            if delta.finish_reason is not None:
                self._slots.done(delta.request_id, "slot", "turn", rollout=rollout_id, end=delta.finish_reason)
                del self._by_request[delta.request_id]
                self._book_time("generation_s_total", "generations_total", run.requests.pop(delta.request_id))
            match delta.finish_reason:
                case None:
                    self._send_segments(run)
                case "stop" | "length":
                    assert response is not None
                    self._send_segments(run)
                    run.since_s = time.monotonic()
                    number = int(delta.request_id.rpartition("/")[2])
                    said = Response(*response, delta.finish_reason, run.rollout.budget_left)
                    self._episodes.deliver(rollout_id, number, said)
                case reason:
                    detail = in_one_line(delta.error or "no detail given")
                    self._drop(rollout_id, Failure("engine_error" if reason == "error" else "engine_aborted", detail))

    def _ended(self, run: Run, ended: EpisodeEnded) -> None:
        if not run.requests:
            self._book_time("environment_s_total", "environment_calls_total", run.since_s)
        if isinstance(ended.end, Failure):
            self.counts["environment_errors_total"] += 1
            self._drop(ended.rollout_id, ended.end)
        else:
            self._finish(ended.rollout_id, run, ended.end)

    def _finish(self, rollout_id: str, run: Run, end: EpisodeEnd) -> None:
        for name, value in end.info.items():
            self.counts[self._info_key(name)] += value
        try:
            run.rollout.finish(end.finish_reason, end.reward, end.turn_rewards)
        except ValueError as error:  # an engine that answered without a token
            self._drop(rollout_id, Failure("engine_error", in_one_line(str(error))))
            return
        self._send_segments(run)
        if run.is_agent:
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

    def _give_up_call(self, run: Run, number: int) -> None:
        request_id = run.rollout.request_id(number)
        if run.requests.pop(request_id, None) is not None:
            del self._by_request[request_id]
            self._slots.done(request_id, "slot", "turn", rollout=run.rollout.ticket.rollout_id, end="given up")
            self._engine.abort(request_id)
            run.rollout.end(request_id, delivered=False)
            run.since_s = time.monotonic()

    def send_early(self) -> None:
        """Send what is sampled of train rollouts, without waiting for whole segments."""
        for run in self._runs.values():
            if run.rollout.ticket.kind == "train":
                self._send_all(run.rollout.take_early())

    def _send_segments(self, run: Run) -> None:
        self._send_all(run.rollout.take_segments())

    def _send_all(self, segments: Sequence[CutSegment]) -> None:
        for segment in segments:
            began_ns = events.now_ns()
            self._send(segment.message, segment.arrays)
            self.counts["segments_total"] += 1
            if self._forward is not None and is_training(segment.message.rollout_id):
                n = segment.message.end - segment.message.start
                self.counts["flops_total"] += self._forward.of(segment.n_before, segment.n_before + n)
            if events.tracing():
                said = segment.message
                place = {"rollout": said.rollout_id, "start": said.start, "end": said.end}
                events.done("segments", "send", began_ns, **place, tokens=int(segment.arrays[2].sum()))

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
            self._slots.done(request_id, "slot", "turn", rollout=rollout_id, end="dropped")
            self._engine.abort(request_id)
        self._lanes.done(rollout_id, "rollout", "rollout", rollout=rollout_id)
        self._episodes.finish(rollout_id)
