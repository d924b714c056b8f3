"""An actor in this process, without a run around it: the embedded engine on the CPU, and the machinery of an actor.

Nothing crosses a wire, and nothing is tried a second time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.actors.envs.base import TextTokenizer
from stillhouse.actors.episodes import EpisodeThreads
from stillhouse.actors.rollouts_running import RunningRollouts
from stillhouse.buffer.rollouts import ticket_seed
from stillhouse.engines.base import Int32s
from stillhouse.engines.config import EngineConfig
from stillhouse.engines.torch.engine import TorchEngine
from stillhouse.launch.config.run import RunConfig
from stillhouse.models.description import resolve_dtype
from stillhouse.models.loading import load_causal_lm, resolve_device
from stillhouse.models.packed import context_window
from stillhouse.models.tokenizer import stop_token_ids
from stillhouse.protocol.messages import Message, RolloutFailed, Segment, Task, Ticket, WeightVersion

EPISODES_WAIT_S: Final = 0.05
"""Longest single wait for the episodes while the engine is idle."""
Array = np.ndarray[Any, Any]


class LocalActor:
    """Writes rollouts with one model. Used from one thread; `close` when done."""

    def __init__(
        self, path: str | Path, settings: EngineConfig, config: RunConfig, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """`path`: the model's folder. `config`: environments and limits."""
        dtype = resolve_dtype(settings.dtype, resolve_device(settings.device))
        model = load_causal_lm(path, device="cpu", dtype=dtype, attention="sdpa")
        settings = msgspec.structs.replace(
            settings, max_context=min(settings.max_context, context_window(model.config))
        )
        self.engine = TorchEngine(model, settings)
        self.tokenizer = TextTokenizer(tokenizer)
        self.segments: dict[str, list[tuple[Segment, Sequence[Array]]]] = {}
        """What was written, by rollout id; of failed rollouts, what came before."""
        self.failed: dict[str, RolloutFailed] = {}
        self._timeout_s = config.learner.stall_timeout_s
        self._news = threading.Event()
        """Set when an episode asked for something or ended."""
        environments, stops = config.environments, stop_token_ids(path, tokenizer)
        self._episodes = EpisodeThreads(
            environments,
            self.tokenizer,
            max_threads=2 * config.actor.max_concurrent_rollouts,
            stop_token_ids=stops,
            max_context_tokens=settings.max_context,
            wake=self._news.set,
        )
        self._rollouts = RunningRollouts(
            self.engine,
            self._episodes,
            config.actor,
            environments=environments,
            stop_token_ids=stops,
            max_context_tokens=settings.max_context,
            send=self._take,
        )

    def write(self, tickets: Iterable[tuple[Ticket, Int32s]], check: Callable[[], None] = lambda: None) -> None:
        """Run these tickets, each with its prompt, until every rollout has ended; `segments` and `failed` then hold
        them alone. `check` is called between two steps of the engine and may raise. Raises TimeoutError after
        `learner.stall_timeout_s`."""
        self.segments.clear()
        self.failed.clear()
        for ticket, prompt_ids in tickets:
            self._rollouts.add(ticket, prompt_ids)
        began_s = time.monotonic()
        while len(self._rollouts):
            check()
            if time.monotonic() - began_s > self._timeout_s:
                raise TimeoutError(
                    f"{len(self._rollouts)} rollouts not done after {self._timeout_s:.0f} s (learner.stall_timeout_s)"
                )
            self._news.clear()
            self._rollouts.take_deltas(self.engine.poll(0.0))
            self._rollouts.take_news()
            self._rollouts.start_ready()
            if not self._rollouts.generating:
                self._news.wait(EPISODES_WAIT_S)

    def close(self) -> None:
        self._episodes.close()
        self.engine.close()

    def _take(self, message: Message, arrays: Sequence[Array]) -> None:
        """Accept what an actor would send to the buffer."""
        match message:
            case Segment():
                self.segments.setdefault(message.rollout_id, []).append((message, arrays))
            case RolloutFailed():
                self.failed[message.rollout_id] = message
            case _:
                raise AssertionError(f"an actor sends no {type(message).__name__} for a rollout")


def local_ticket(task: Task, version: WeightVersion, sample_index: int = 0) -> Ticket:
    """The first ticket that the buffer would issue for a sample of the task, with the same seed."""
    return Ticket(
        rollout_id=f"{task.kind}-{task.task_id}-{sample_index}-0",
        task_id=task.task_id,
        sample_index=sample_index,
        kind=task.kind,
        sampling=msgspec.structs.replace(task.sampling, seed=ticket_seed(task.sampling.seed, sample_index, 0)),
        env=task.env,
        tag=task.tag,
        ground_truth=task.ground_truth,
        min_version=version,
        row=task.row,
    )
