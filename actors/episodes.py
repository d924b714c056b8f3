"""The episodes of an actor, seen from its main loop: started, answered, taken from, finished.

An episode is the part of a rollout that is not the student: an environment or an agent. Each has a thread of the
actor's process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from stillhouse.actors.agent import EpisodeOver
from stillhouse.actors.config import EnvConfig
from stillhouse.actors.env_runner import EnvRunner
from stillhouse.actors.env_thread import EnvironmentTimeout
from stillhouse.actors.envs.base import EnvTask, TextTokenizer
from stillhouse.actors.envs.episode import Episode
from stillhouse.actors.envs.registry import load_environments
from stillhouse.actors.failures import Failure, of_environment
from stillhouse.actors.running_episode import AgentEpisode, Ask, EpisodeEnd, GiveUp, Response, Session, play_agent
from stillhouse.engines.base import Int32s
from stillhouse.protocol.printable import in_one_line

if TYPE_CHECKING:
    from stillhouse.actors.endpoint.server import EndpointServer


class EpisodeStart(NamedTuple):
    """What an episode begins with."""

    rollout_id: str
    env: str
    """Name of an environment of the configuration."""
    prompt_ids: Int32s
    """[n]"""
    ground_truth: str | None
    tag: str
    seed: int
    row: bytes
    """The prompt's row as JSON; empty: none."""
    budget_left: int
    """Tokens that the student may write."""
    max_turns: int
    """Turns that it may take."""


class EpisodeEnded(NamedTuple):
    """An episode is over."""

    rollout_id: str
    end: EpisodeEnd | Failure


EpisodeEvent: TypeAlias = Ask | GiveUp | EpisodeEnded


class EpisodeThreads:
    """Each episode on its own thread of this process. The owner calls all methods from one thread."""

    def __init__(
        self,
        configs: Mapping[str, EnvConfig],
        tokenizer: TextTokenizer,
        *,
        max_threads: int,
        stop_token_ids: tuple[int, ...],
        max_context_tokens: int,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`configs`: the environments by name; they are imported here, and no other is ever run. `stop_token_ids`: the
        model's. `wake` is called from another thread whenever there is something to take. Raises whatever an
        environment raises while it is imported."""
        self._known = load_environments(configs)
        self._tokenizer = tokenizer
        self._stop_token_ids = stop_token_ids
        self._max_context_tokens = max_context_tokens
        self._wake = wake
        self.runner = EnvRunner(max_threads, wake)
        self.runner.allow_files()
        self._episodes: dict[str, AgentEpisode] = {}
        self._endpoint: EndpointServer | None = None
        self._guard = threading.Lock()
        self._asked: queue.SimpleQueue[Ask | GiveUp] = queue.SimpleQueue()
        """From the episodes' threads."""

    @property
    def agents(self) -> frozenset[str]:
        """Names of the environments that are agents."""
        return frozenset(name for name, known in self._known.items() if known.agent is not None)

    @property
    def has_room(self) -> bool:
        """True when another episode may be started."""
        return self.runner.has_room

    @property
    def gauges(self) -> dict[str, float]:
        """For the heartbeat."""
        return {
            "environment_threads": float(self.runner.threads),
            "environment_threads_stuck": float(self.runner.stuck),
            **self.runner.counts,
        }

    def start(self, episode: EpisodeStart) -> None:
        """Raises OSError or RuntimeError when the system gives no more threads."""
        known = self._known[episode.env]
        row = msgspec.json.decode(episode.row, type=dict[str, Any]) if episode.row else {}
        task = EnvTask(episode.prompt_ids, episode.ground_truth, episode.tag, episode.rollout_id, episode.seed, row)
        tokenizer = self._tokenizer.with_template_kwargs(row.get("chat_template_kwargs"))
        options, timeout_s = row.get("env_options") or {}, known.config.step_timeout_s
        if known.agent is not None:
            play, close = play_agent(partial(known.agent, options), task), _nothing_to_close
        else:
            environment = Episode(
                partial(known.make, tokenizer, options),
                task,
                tokenizer,
                model_stop_token_ids=self._stop_token_ids,
                max_turns=episode.max_turns,
            )
            play, close = environment.play, environment.close
        running = AgentEpisode(
            play,
            task,
            tokenizer,
            self._ask,
            budget_left=episode.budget_left,
            max_context_tokens=self._max_context_tokens,
            new_session=self._new_session,
        )
        self.runner.open(episode.rollout_id, close, timeout_s)
        self._episodes[episode.rollout_id] = running
        self.runner.submit(episode.rollout_id, "rollout", running.run, timeout_s)

    def deliver(self, rollout_id: str, number: int, response: Response) -> None:
        """Answer request `number` of an episode."""
        self._episodes[rollout_id].deliver(number, response)

    def refuse(self, rollout_id: str, number: int, reason: str) -> None:
        """Answer a request that there is no room for."""
        self._episodes[rollout_id].refuse(number, reason)

    def finish(self, rollout_id: str) -> None:
        """Stop what still runs of an episode, and close it. Every started episode is finished once, ended or not."""
        self._episodes.pop(rollout_id).close_sessions()
        self.runner.finish(rollout_id)

    def take(self) -> list[EpisodeEvent]:
        """What episodes asked for, and which ended, in that order; those that are finished may be among them. Raises
        TooManyStuck."""
        news: list[EpisodeEvent] = []
        while not self._asked.empty():
            news.append(self._asked.get())
        ended = self.runner.take()
        return news + [EpisodeEnded(key, result if error is None else _failure(error)) for key, result, error in ended]

    def close(self) -> None:
        for episode in self._episodes.values():
            episode.close_sessions()
        self.runner.close()
        if self._endpoint is not None:
            self._endpoint.close()

    def _new_session(self, episode: AgentEpisode) -> Session:
        """Called on an episode's thread."""
        # Most episodes need no HTTP server, whose library takes a while to import.
        from stillhouse.actors.endpoint.server import EndpointServer

        with self._guard:
            if self._endpoint is None:
                self._endpoint = EndpointServer()
            return self._endpoint.new_session(episode)

    def _ask(self, ask: Ask | GiveUp) -> None:
        self._asked.put(ask)
        self._wake()


async def _nothing_to_close() -> None:
    """An agent closes what it opened itself (`async with`, `finally`)."""


def _failure(error: Exception) -> Failure:
    match error:
        case EnvironmentTimeout():
            return Failure("env_timeout", in_one_line(str(error)))
        case EpisodeOver():  # not even a first response had room
            return Failure("engine_refused", in_one_line(str(error)))
        case _:
            return of_environment(error)
