"""One episode as it runs: its requests to the actor, the responses, its endpoints, and how it ended.

What an agent sees of it is `actors.agent.Context`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, TypeAlias

from stillhouse.actors.agent import Context, Endpoint, EpisodeOver, Generation
from stillhouse.actors.env_thread import CURRENT_CALL, EnvCall
from stillhouse.actors.envs.base import EnvTask, TextTokenizer, TurnEnd
from stillhouse.actors.envs.episode import EnvironmentFault, FinishReason
from stillhouse.engines.base import Float32s, Int32s

log = logging.getLogger(__name__)


class Session(Protocol):
    """The server's side of an Endpoint (`actors.endpoint`)."""

    @property
    def endpoint(self) -> Endpoint: ...

    def close(self) -> None:
        """End it, and every request under way. Called from any thread; again has no effect."""
        ...


class Ask(NamedTuple):
    """A request of an episode to its actor: the student is to continue these tokens."""

    rollout_id: str
    number: int
    """The episode's own count of its requests."""
    prompt_ids: Int32s
    """[n]"""
    max_new_tokens: int | None
    stop_token_ids: tuple[int, ...]
    retry: bool = False
    """With the prompt of an earlier request, the caller no longer wants the first response. False: it wants both."""
    choice_of: int | None = None
    """Number of the request of which this one is another choice, wanted beside it."""


class Response(NamedTuple):
    """What the student wrote in answer to a request."""

    token_ids: Int32s
    """[n]"""
    logprobs: Float32s
    """[n]"""
    finish_reason: TurnEnd
    budget_left: int
    """Tokens that the rollout may still sample."""


class GiveUp(NamedTuple):
    """The episode no longer waits for this request."""

    rollout_id: str
    number: int


class EpisodeEnd(NamedTuple):
    """How an episode ended."""

    finish_reason: FinishReason
    reward: float | None
    info: Mapping[str, float]
    turn_rewards: Mapping[int, float] = {}
    """The parts of `reward` by the number of the request that they were given for."""


Play: TypeAlias = Callable[[Context], Coroutine[Any, Any, FinishReason | None]]
"""A whole episode. Returns how it ended; None: as its last response did."""


def play_agent(make: Callable[[], Callable[..., Any]], task: EnvTask) -> Play:
    """The episode of an agent. `make` gives the coroutine function with its options."""

    async def play(ctx: Context) -> None:
        returned: object = await make()(ctx, task)
        if returned is not None:
            raise EnvironmentFault(f"the agent returned {returned!r:.60}, expected None: rewards go to ctx.reward")

    return play


class AgentEpisode:
    """Runs one episode, and carries its requests to the actor and the responses back. Requests may come from other
    event loops than the episode's own: an endpoint has one for all its sessions."""

    def __init__(
        self,
        play: Play,
        task: EnvTask,
        tokenizer: TextTokenizer,
        post: Callable[[Ask | GiveUp], None],
        *,
        budget_left: int,
        max_context_tokens: int,
        new_session: Callable[[AgentEpisode], Session] | None = None,
    ) -> None:
        """`post` hands a request to the actor's main thread. `budget_left`: tokens that may be sampled.
        `new_session` opens an endpoint for this episode."""
        self._play = play
        self._task = task
        self.tokenizer = tokenizer
        self._post = post
        self.budget_left = budget_left
        self.max_context_tokens = max_context_tokens
        self._new_session = new_session
        self._sessions: list[Session] = []
        self.reward: float | None = None
        self._out_of_range = False
        """One of its rewards was no finite number."""
        self.turn_rewards: dict[int, float] = {}
        self.newest = 0
        """Number of the newest response."""
        self.info: dict[str, float] = {}
        self._guard = threading.Lock()
        """For all that other threads change: reward, info, sessions and waiting requests."""
        self._waiting: dict[int, asyncio.Future[Response]] = {}
        self._numbers = itertools.count()
        self._last: TurnEnd | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._call: EnvCall | None = None
        self._over = False

    # --------------------------------------------------------------------------------------- on the episode's thread

    async def run(self) -> EpisodeEnd:
        """The whole episode. Raises EnvironmentFault for an agent that breaks a rule, EpisodeOver if not even one
        response had room, and whatever the agent raises."""
        self._loop, self._call = asyncio.get_running_loop(), CURRENT_CALL.get()
        try:
            finish_reason = await self._play(Context(self, self._task.prompt_ids))
        except EpisodeOver:
            if self._last is None:
                raise
            finish_reason = "length"
        finally:
            self.close_sessions()
        if self._last is None:
            raise EnvironmentFault("the agent ended without a response of the student, expected one `ctx.generate`")
        if self._out_of_range:
            return EpisodeEnd(finish_reason or self._last, None, self.info)
        return EpisodeEnd(finish_reason or self._last, self.reward, self.info, self.turn_rewards)

    def open_session(self) -> Session:
        """See `Context.endpoint`."""
        if self._new_session is None:
            raise RuntimeError("this actor has no endpoint")
        session = self._new_session(self)
        with self._guard:
            self._sessions.append(session)
            over = self._over
        if over:
            session.close()
        return session

    # --------------------------------------------------------------------------------------------- on any event loop

    async def ask(
        self,
        prompt_ids: Int32s,
        max_new_tokens: int | None,
        stop_token_ids: tuple[int, ...],
        *,
        retry: bool = False,
        choice_of: int | None = None,
        number: int | None = None,
    ) -> Generation:
        """See `Context.generate`, and Ask. `number`: from `new_number`."""
        number = self.new_number() if number is None else number
        future: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        with self._guard:
            self._waiting[number] = future
        self._keep_time()
        self._post(Ask(self._task.rollout_id, number, prompt_ids, max_new_tokens, stop_token_ids, retry, choice_of))
        try:
            response = await future
        except asyncio.CancelledError:
            self._post(GiveUp(self._task.rollout_id, number))
            raise
        finally:
            with self._guard:
                del self._waiting[number]
            self._keep_time()
        self._last, self.budget_left, self.newest = response.finish_reason, response.budget_left, number
        ids = response.token_ids
        return Generation(ids, self.tokenizer.decode(ids), response.finish_reason, response.logprobs)

    def new_number(self) -> int:
        """A number for a request that is about to be made."""
        return next(self._numbers)

    def add_reward(self, value: float, number: int | None = None) -> bool:
        """`number`: of the response that it is given for; None: the newest, or the first if there is none yet. Returns
        False, and adds nothing, when the episode has ended. After a reward that is not finite, or whose sum with the
        earlier ones is not, the episode is unscored, and counted."""
        try:
            reward = float(value)
        except OverflowError:  # a whole number beyond floats
            reward = math.inf
        with self._guard:
            if self._over:
                return False
            number = self.newest if number is None else number
            total = (self.reward or 0.0) + reward
            of_turn = self.turn_rewards.get(number, 0.0) + reward
            if not (math.isfinite(total) and math.isfinite(of_turn)):
                if not self._out_of_range:
                    log.warning("rollout %s: the reward %r is no finite number", self._task.rollout_id, value)
                    self.info["reward_out_of_range"] = 1.0
                self._out_of_range = True
            self.reward, self.turn_rewards[number] = total, of_turn
            return True

    def add_info(self, numbers: Mapping[str, float]) -> None:
        """Raises EnvironmentFault for a number that is not finite."""
        for name, value in numbers.items():
            if not math.isfinite(float(value)):
                raise EnvironmentFault(f"ctx.note({name}={value!r}): expected a finite number")
            with self._guard:
                self.info[name] = self.info.get(name, 0.0) + float(value)

    def _keep_time(self) -> None:
        """The agent's own time runs while it waits for no response."""
        assert self._loop is not None and self._call is not None
        if self._loop is asyncio.get_running_loop():
            self._time_here()
            return
        if self._waiting:
            self._call.wait()
        else:
            self._call.expect()
        with suppress(RuntimeError):  # the episode has ended, and so has its loop
            self._loop.call_soon_threadsafe(self._time_here)

    def _time_here(self) -> None:
        assert self._call is not None
        if self._waiting:
            self._call.pause()
        else:
            self._call.resume()

    # ---------------------------------------------------------------------------------------- on the actor's thread

    def deliver(self, number: int, response: Response) -> None:
        """Answer a request."""
        response.token_ids.flags.writeable = False
        response.logprobs.flags.writeable = False
        self._settle(number, lambda future: future.set_result(response))

    def refuse(self, number: int, reason: str) -> None:
        """Answer a request that there is no room for."""
        self._settle(number, lambda future: future.set_exception(EpisodeOver(reason)))

    def close_sessions(self) -> None:
        """End what others may still wait for."""
        with self._guard:
            self._over = True
            sessions = list(self._sessions)
        for session in sessions:
            session.close()

    def _settle(self, number: int, settle: Callable[[asyncio.Future[Response]], None]) -> None:
        assert self._call is not None
        with self._guard:
            future = self._waiting.get(number)
        if future is None:
            return
        self._call.expect()

        def here() -> None:
            if not future.done():
                settle(future)

        with suppress(RuntimeError):  # the episode has ended, and so has its loop
            future.get_loop().call_soon_threadsafe(here)
