"""Episodes per second of the adapters to other packages, without a model: a script plays, on one thread.

    OMP_NUM_THREADS=1 python bench/decoding/episodes.py

Each episode is driven as an actor drives it (`actors.envs.episode`), tokenising included: make the environment, reset,
one turn after the other, close. It ends by itself or after 20 turns. In CPU seconds, because the machine may be shared.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import numpy as np
from transformers import AutoTokenizer

from stillhouse.actors.envs.base import EnvTask, TextTokenizer
from stillhouse.actors.envs.episode import Episode
from stillhouse.actors.envs.registry import check_options, make_environment
from stillhouse.builtin import STUDENT_DIR

MAX_TURNS: Final = 20
CASES: Final[dict[str, tuple[str, dict[str, Any], tuple[str, ...]]]] = {
    "FrozenLake-v1": ("gymnasium", {"id": "FrozenLake-v1"}, ("down", "I go right.")),
    "Taxi-v4": ("gymnasium", {"id": "Taxi-v4"}, ("south", "I go east.")),
    "Taxi-v4, no picture": ("gymnasium", {"id": "Taxi-v4", "draw": False}, ("south", "I go east.")),
    "Blackjack-v1": ("gymnasium", {"id": "Blackjack-v1"}, ("hit", "stick")),
    "chain_sum": ("reasoning_gym", {"dataset": "chain_sum"}, ("<answer>12</answer>",)),
    "sudoku": ("reasoning_gym", {"dataset": "sudoku"}, ("<answer>1 2 3</answer>",)),
}
"""Shown name -> environment, its options, and what the student says in turn."""


async def play(
    tokenizer: TextTokenizer, name: str, options: Mapping[str, Any], says: tuple[str, ...], seed: int
) -> int:
    """One episode; returns its number of turns."""
    task = EnvTask(np.zeros(1, np.int32), None, "", f"train-{seed}-0-0", seed, {"prompt": "Play.", "seed": seed})
    make = partial(make_environment, name, tokenizer, options)
    episode = Episode(make, task, tokenizer, model_stop_token_ids=(), max_turns=MAX_TURNS)
    await episode.start()
    turns, ended = 0, False
    while not ended:
        said = tokenizer.encode(says[turns % len(says)])
        ended = (await episode.advance(said, "stop", budget_left=10**6, context_left=10**6)).finish_reason is not None
        turns += 1
    await episode.close()
    return turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=500)
    wanted = parser.parse_args().episodes
    tokenizer = TextTokenizer(AutoTokenizer.from_pretrained(STUDENT_DIR))
    print(f"{'':22}{'episodes/s':>12}{'turns/s':>12}{'turns per episode':>20}")
    for shown, (name, options, says) in CASES.items():
        check_options(name, options)  # imports the package
        began_s = time.process_time()
        turns = sum(asyncio.run(play(tokenizer, name, options, says, seed)) for seed in range(wanted))
        seconds = time.process_time() - began_s
        print(f"{shown:22}{wanted / seconds:12,.0f}{turns / seconds:12,.0f}{turns / wanted:20.1f}")


if __name__ == "__main__":
    main()
