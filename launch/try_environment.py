"""Runs a few episodes of an environment without a run, and prints them turn by turn:

    python launch/cluster.py try ENV --n 4 --model DIR          (any key of launch/cluster.py)

The embedded engine writes on the CPU, with the tasks, seeds, limits and machinery of an actor. No teacher scores.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from launch.checks import preflight
from launch.config.command_line import CommandLine, resolve_config, split_words
from launch.config.keys import find_key
from launch.config.run import RunConfig
from launch.errors import ConfigError, LaunchError, interrupted, refuse
from protocol.messages import Message, RolloutFailed, Segment, Ticket, WeightVersion

if TYPE_CHECKING:
    from actors.envs.base import TextTokenizer
    from actors.rollouts_running import RunningRollouts
    from engines.torch.engine import TorchEngine

USAGE: Final = """\
usage: cluster.py try [ENV] [--n N] [--model DIR] [--config FILE] [--KEY VALUE ...]

Runs N episodes (default 2) of the environment ENV (default: learner.tasks.env), with the first N tasks of the run that
this configuration describes, and prints every turn: who wrote it, how many tokens it has, which of them would be
trained. --model is the student (default: the built-in one). Exit code 1 if an episode failed.
"""
OWN_FLAGS: Final = ("config", "n", "model")
TIMEOUT_S: Final = 600.0
"""Longest time for all episodes together."""
WAIT_S: Final = 0.05
"""Longest single wait for environments while the engine is idle."""
Array = np.ndarray[Any, Any]


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    try:
        words = split_words(arguments, own=OWN_FLAGS, switches=("help",), positional=1)
        if "help" in words.switches:
            print(USAGE)
            return 0
        n = _number(words.own.get("n", "2"))
        fixed = {"actor.engine": "torch", "teacher.engine": "torch", "device": "cpu"}
        if words.positional:
            fixed["learner.tasks.env"] = words.positional[0]
        if "model" in words.own:
            fixed |= dict.fromkeys(("models.student", "models.teacher"), words.own["model"])
        overrides = [(key, text) for name, text in fixed.items() if (key := find_key(RunConfig, name)) is not None]
        file = Path(words.own["config"]) if "config" in words.own else None
        line = CommandLine(config=file, overrides=(*words.overrides, *overrides))
        return try_episodes(preflight.check(resolve_config(line)).config, n)
    except (LaunchError, TimeoutError) as error:
        return refuse(error)
    except KeyboardInterrupt:
        return interrupted()


def try_episodes(config: RunConfig, n: int) -> int:
    """Run and print `n` episodes; returns 1 if one failed. Raises TimeoutError after TIMEOUT_S."""
    # Imported here because they import torch, which usage and mistakes need not wait for.
    from actors.env_runner import EnvRunner
    from actors.envs.base import TextTokenizer
    from actors.rollouts_running import RunningRollouts
    from engines.torch.engine import TorchEngine
    from learner.prompts.tasks import TaskStream, load_prompts
    from models.loading import load_causal_lm
    from models.packed import context_window
    from models.tokenizer import load_tokenizer, stop_token_ids

    path, tasks = config.models.student, config.learner.tasks
    tokenizer = load_tokenizer(path)
    offers = TaskStream(tasks, tokenizer, load_prompts(tasks, config.environments), seed=config.seed).next(n)
    settings = config.actor.torch
    model = load_causal_lm(path, device="cpu", dtype=settings.dtype, attention="sdpa")
    max_context = min(settings.max_context, context_window(model.config))
    engine = TorchEngine(model, msgspec.structs.replace(settings, max_context=max_context))
    episodes = Episodes(TextTokenizer(tokenizer))
    environments = EnvRunner(2 * config.actor.max_concurrent_rollouts)
    try:
        rollouts = RunningRollouts(
            engine,
            environments,
            episodes.tokenizer,
            config.actor,
            task_env=tasks.env,
            stop_token_ids=stop_token_ids(path, tokenizer),
            max_context_tokens=max_context,
            send=episodes.take,
        )
        for offer in offers:
            ticket = _ticket(offer.task)
            episodes.tickets[ticket.rollout_id] = ticket
            rollouts.add(ticket, offer.prompt_ids)
        _finish(rollouts, engine, environments)
    finally:
        environments.close()
        engine.close()
    for line in episodes.lines():
        print(line)
    return 1 if episodes.failed else 0


def _finish(rollouts: RunningRollouts, engine: TorchEngine, environments: Any) -> None:
    began_s = time.monotonic()
    while len(rollouts):
        if time.monotonic() - began_s > TIMEOUT_S:
            raise TimeoutError(f"{len(rollouts)} episodes were not done after {TIMEOUT_S:g} s")
        rollouts.take_deltas(engine.poll(0.0))
        rollouts.take_asked()
        rollouts.take_environment_outcomes(environments.take(0.0 if rollouts.generating else WAIT_S))
        rollouts.start_ready()


class Episodes:
    """What an actor would have sent, by rollout, and how it reads."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self.tickets: dict[str, Ticket] = {}
        self.failed: dict[str, RolloutFailed] = {}
        self._segments: dict[str, list[tuple[Segment, Sequence[Array]]]] = {}

    def take(self, message: Message, arrays: Sequence[Array]) -> None:
        """Accept what an actor would send to the buffer."""
        match message:
            case Segment():
                self._segments.setdefault(message.rollout_id, []).append((message, arrays))
            case RolloutFailed():
                self.failed[message.rollout_id] = message
            case _:
                raise AssertionError(f"an actor sends no {type(message).__name__} for a rollout")

    def lines(self) -> Iterator[str]:
        """All episodes as text."""
        for number, ticket in enumerate(self.tickets.values(), 1):
            tag = f", tag {ticket.tag!r}" if ticket.tag else ""
            yield f"episode {number} of {len(self.tickets)}: environment {ticket.env}{tag}, seed {ticket.sampling.seed}"
            yield from self._turns(self._segments.get(ticket.rollout_id, []))
            yield self._end(ticket.rollout_id)
            yield ""

    def _turns(self, segments: Sequence[tuple[Segment, Sequence[Array]]]) -> Iterator[str]:
        """One line per run of tokens of one author; a branch begins with the token that it follows."""
        if not segments:
            return
        ids, _, mask = (np.concatenate([arrays[i] for _, arrays in segments]) for i in range(3))
        branches = {message.start: message.follows for message, _ in segments if message.follows is not None}
        changes = np.flatnonzero(np.diff(mask)) + 1
        edges = sorted({0, len(ids), *changes.tolist(), *branches})
        for start, end in pairwise(edges):
            if start in branches:
                yield f"  -- a branch behind token {branches[start]}"
            author = "student" if mask[start] else "context"
            yield f"  {author} {end - start:5} tokens  {self.tokenizer.shown(ids[start:end])!r}"

    def _end(self, rollout_id: str) -> str:
        failure = self.failed.get(rollout_id)
        if failure is not None:
            error = f" ({failure.error})" if failure.error else ""
            return f"  failed: {failure.reason}{error}: {failure.detail}"
        segments = self._segments[rollout_id]
        last = segments[-1][0]
        dropped = sum(one.end - one.start for one in last.dropped)
        n_student = sum(int(arrays[2].sum()) for _, arrays in segments)
        reward = "no reward" if last.reward is None else f"reward {last.reward:g}"
        left_out = f", {dropped} of them dropped" if dropped else ""
        return (
            f"  ended: {last.finish_reason}, {reward}, {last.n_turns} turns, {last.end - n_student} tokens of context, "
            f"{n_student} of the student{left_out}"
        )


def _ticket(task: Any) -> Ticket:
    from buffer.rollouts import ticket_seed

    sampling = msgspec.structs.replace(task.sampling, seed=ticket_seed(task.sampling.seed, 0, 0))
    return Ticket(
        rollout_id=f"try-{task.task_id}-0-0",
        task_id=task.task_id,
        sample_index=0,
        kind="train",
        sampling=sampling,
        env=task.env,
        tag=task.tag,
        ground_truth=task.ground_truth,
        min_version=WeightVersion(0, 0),
        row=task.row,
    )


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--n: got {text!r}, expected a whole number of at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
