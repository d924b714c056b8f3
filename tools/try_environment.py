"""Runs a few episodes of an environment without a run, and prints them turn by turn:

    stillhouse try ENV --n 4 --model DIR          (any key of a run)

The embedded engine writes on the CPU, with the tasks, seeds, limits and machinery of an actor. No teacher scores.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from stillhouse.launch.checks import preflight
from stillhouse.launch.checks.environment_servers import check_environment_servers
from stillhouse.launch.config.command_line import CommandLine, resolve_config, split_words
from stillhouse.launch.config.keys import find_key
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.errors import ConfigError, LaunchError, interrupted, refuse
from stillhouse.protocol.messages import RolloutFailed, Segment, Ticket, WeightVersion

if TYPE_CHECKING:
    from stillhouse.actors.envs.base import TextTokenizer
    from stillhouse.launch.local_actor import LocalActor

USAGE: Final = """\
usage: stillhouse try [ENV] [--n N] [--model DIR] [--config FILE] [--KEY VALUE ...]

Runs N episodes (default 2) of the environment ENV (default: learner.tasks.env), with the first N tasks of the run that
this configuration describes, and prints every turn: who wrote it, how many tokens it has, which of them would be
trained. --model is the student (default: the built-in one). Exit code 1 if an episode failed.
"""
OWN_FLAGS: Final = ("config", "n", "model")
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
        config = preflight.check(resolve_config(line)).config
        check_environment_servers(config)
        return try_episodes(config, n)
    except (LaunchError, TimeoutError) as error:
        return refuse(error)
    except KeyboardInterrupt:
        return interrupted()


def try_episodes(config: RunConfig, n: int) -> int:
    """Run and print `n` episodes; returns 1 if one failed. Raises TimeoutError after `learner.stall_timeout_s`."""
    # Imported here because they import torch, which usage and mistakes need not wait for.
    from stillhouse.launch.local_actor import LocalActor, local_ticket
    from stillhouse.learner.prompts.tasks import TaskStream, load_prompts
    from stillhouse.models.tokenizer import load_tokenizer

    tasks = config.learner.tasks
    tokenizer = load_tokenizer(config.models.student)
    offers = TaskStream(tasks, tokenizer, load_prompts(tasks, config.environments), seed=config.seed).next(n)
    tickets = [(local_ticket(offer.task, WeightVersion(0, 0)), offer.prompt_ids) for offer in offers]
    actor = LocalActor(config.models.student, config.actor.torch, config, tokenizer)
    try:
        actor.write(tickets)
    finally:
        actor.close()
    for line in lines(actor, [ticket for ticket, _ in tickets]):
        print(line)
    return 1 if actor.failed else 0


def lines(actor: LocalActor, tickets: Sequence[Ticket]) -> Iterator[str]:
    """All episodes as text."""
    for number, ticket in enumerate(tickets, 1):
        tag = f", tag {ticket.tag!r}" if ticket.tag else ""
        yield f"episode {number} of {len(tickets)}: environment {ticket.env}{tag}, seed {ticket.sampling.seed}"
        segments, failure = actor.segments.get(ticket.rollout_id, []), actor.failed.get(ticket.rollout_id)
        if segments:
            yield from _turns(actor.tokenizer, segments)
        yield _end(segments) if failure is None else _failed(failure)
        yield ""


def _turns(tokenizer: TextTokenizer, segments: Sequence[tuple[Segment, Sequence[Array]]]) -> Iterator[str]:
    """One line per run of tokens of one author; a branch begins with the token that it follows."""
    ids, _, mask = (np.concatenate([arrays[i] for _, arrays in segments]) for i in range(3))
    branches = {message.start: message.follows for message, _ in segments if message.follows is not None}
    changes = np.flatnonzero(np.diff(mask)) + 1
    rewards = {one.end: one.reward for one in segments[-1][0].turn_rewards}
    edges = sorted({0, len(ids), *changes.tolist(), *branches})
    for start, end in pairwise(edges):
        if start in branches:
            yield f"  -- a branch behind token {branches[start]}"
        author = "student" if mask[start] else "context"
        yield f"  {author} {end - start:5} tokens  {tokenizer.shown(ids[start:end])!r}"
        if end in rewards:
            yield f"  reward of this turn: {rewards[end]:g}"


def _failed(failure: RolloutFailed) -> str:
    error = f" ({failure.error})" if failure.error else ""
    return f"  failed: {failure.reason}{error}: {failure.detail}"


def _end(segments: Sequence[tuple[Segment, Sequence[Array]]]) -> str:
    last = segments[-1][0]
    dropped = sum(one.end - one.start for one in last.dropped)
    n_student = sum(int(arrays[2].sum()) for _, arrays in segments)
    reward = "no reward" if last.reward is None else f"reward {last.reward:g}"
    left_out = f", {dropped} of them dropped" if dropped else ""
    return (
        f"  ended: {last.finish_reason}, {reward}, {last.n_turns} turns, {last.end - n_student} tokens of context, "
        f"{n_student} of the student{left_out}"
    )


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--n: got {text!r}, expected a whole number of at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
