"""Sampled tokens per second of one actor whose episodes wait for tools, against the same actor without waiting.

    OMP_NUM_THREADS=1 python bench/decoding/open_episodes.py
    OMP_NUM_THREADS=1 python bench/decoding/open_episodes.py --processes 2

256 episodes are open at once, on the embedded engine with the built-in student. Each turn has a fixed number of tokens;
after it the tool takes a second, which it awaits or in which it blocks its thread. Without waiting, the tool answers at
once, and the engine's slots are always full. With waiting they are full as long as 256 episodes suffice for that: of
10,000 tokens/s in turns of 96 about 104 episodes wait at a time, and 64 run; in turns of 48 it would be 208 and 64,
more than there are. The mean number of running requests is printed. Both run in turn, in one process, and the ratio is
that of each pair.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import threading
import time
from typing import Any, Final

import numpy as np
import torch

from stillhouse.actors.agent import Context
from stillhouse.actors.config import ActorConfig, EnvConfig
from stillhouse.actors.envs.base import EnvTask, TextTokenizer
from stillhouse.actors.episode_pool import EpisodePool
from stillhouse.actors.episode_wire import Setup
from stillhouse.actors.episodes import Episodes, EpisodeThreads
from stillhouse.actors.rollouts_running import RunningRollouts
from stillhouse.builtin import STUDENT_DIR
from stillhouse.engines.config import EngineConfig
from stillhouse.engines.torch.engine import TorchEngine
from stillhouse.models.loading import load_causal_lm
from stillhouse.models.tokenizer import load_tokenizer
from stillhouse.protocol.messages import Message, RolloutFailed, Sampling, Ticket, WeightVersion

TURNS: Final = 4
CONTEXT: Final = 1024
KINDS: Final = ("awaits", "blocks")


async def works(ctx: Context, task: EnvTask, *, seconds: float, blocks: bool, turn_tokens: int) -> None:
    """Turns of `turn_tokens` tokens, and a tool that takes `seconds` after each."""
    for _ in range(TURNS):
        await ctx.generate(max_new_tokens=turn_tokens)
        if blocks:
            time.sleep(seconds)
        elif seconds:
            await asyncio.sleep(seconds)
        ctx.observe(np.array([5, 6, 7], np.int32))


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._model = load_causal_lm(str(STUDENT_DIR), device="cpu", dtype="float32", attention="sdpa")
        self._tokenizer = TextTokenizer(load_tokenizer(str(STUDENT_DIR)))
        self._failed: list[RolloutFailed] = []
        self._news = threading.Event()

    def tokens_per_s(self, seconds: float, *, blocks: bool) -> tuple[float, float]:
        """Tokens per second, and the mean number of requests in the engine's slots."""
        args, stop = self._args, ()
        options: dict[str, Any] = {"seconds": seconds, "blocks": blocks, "turn_tokens": args.turn_tokens}
        environments = {"works": EnvConfig(name="bench.decoding.open_episodes:works", options=options, max_turns=TURNS)}
        engine = TorchEngine(self._model, EngineConfig(max_concurrent=args.slots, max_context=CONTEXT))
        limits: dict[str, Any] = {"max_threads": 2 * args.open, "stop_token_ids": stop, "max_context_tokens": CONTEXT}
        episodes: Episodes = (
            EpisodePool(
                args.processes,
                Setup(environments, str(STUDENT_DIR), 2 * args.open, stop, CONTEXT, 60.0),
                self._news.set,
            )
            if args.processes
            else EpisodeThreads(environments, self._tokenizer, **limits, wake=self._news.set)
        )
        config = ActorConfig(max_concurrent_rollouts=args.open, environments=environments)
        rollouts = RunningRollouts(
            engine,
            episodes,
            config,
            environments=environments,
            stop_token_ids=stop,
            max_context_tokens=CONTEXT,
            send=self._take,
        )
        try:
            return self._measure(engine, rollouts)
        finally:
            episodes.close()
            engine.close()

    def _measure(self, engine: TorchEngine, rollouts: RunningRollouts) -> tuple[float, float]:
        args, number = self._args, 0
        began_s = time.monotonic()
        n_before, steps_before, measured_s = 0, 0, 0.0
        while True:
            while len(rollouts) < args.open:
                rollouts.add(_ticket(number, TURNS * args.turn_tokens), np.arange(1, 20, dtype=np.int32))
                number += 1
            self._news.clear()
            rollouts.take_news()
            rollouts.take_deltas(engine.poll(0.0))
            rollouts.start_ready()
            if not rollouts.generating:
                self._news.wait(0.01)
            if self._failed:
                raise SystemExit(f"a rollout failed: {self._failed[0]}")
            now_s, stats = time.monotonic(), engine.stats
            if not measured_s and now_s - began_s > args.warm_up:
                n_before, steps_before, measured_s = stats.sampled_tokens_total, stats.decode_steps_total, now_s
            elif measured_s and now_s - measured_s > args.seconds:
                n = stats.sampled_tokens_total - n_before
                steps = max(1, stats.decode_steps_total - steps_before)
                return n / (now_s - measured_s), n / steps

    def _take(self, message: Message, arrays: object) -> None:
        if isinstance(message, RolloutFailed):
            self._failed.append(message)


def _ticket(number: int, n_tokens: int) -> Ticket:
    return Ticket(
        rollout_id=f"train-{number}-0-0",
        task_id=number,
        sample_index=0,
        kind="train",
        sampling=Sampling(max_new_tokens=n_tokens, seed=number),
        env="works",
        tag="",
        ground_truth=None,
        min_version=WeightVersion(0, 0),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--open", type=int, default=256, help="episodes at once")
    parser.add_argument("--slots", type=int, default=64, help="requests that the engine works on at once")
    parser.add_argument("--tool", type=float, default=1.0, help="seconds that the tool takes")
    parser.add_argument("--turn-tokens", type=int, default=96)
    parser.add_argument("--warm-up", type=float, default=4.0, help="seconds before each measurement")
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of each measurement")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--processes", type=int, default=0, help="processes for the episodes; 0: threads of the actor")
    args = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(args)
    where = f"{args.processes} processes" if args.processes else "threads"
    print(f"{args.open} open episodes in {where}, {args.slots} slots, tools of {args.tool:g} s, {args.pairs} pairs\n")
    print("| tool | without waiting, tok/s | with, tok/s | running | ratio (min..max of pairs) |")
    print("|---|---|---|---|---|")
    for kind in KINDS:
        pairs: list[tuple[float, float, float]] = []
        for i in range(args.pairs):
            order = (0.0, args.tool) if i % 2 == 0 else (args.tool, 0.0)  # whoever runs second finds a warmer machine
            measured = {seconds: bench.tokens_per_s(seconds, blocks=kind == "blocks") for seconds in order}
            pairs.append((measured[0.0][0], *measured[args.tool]))
        ratios = [with_ / without for without, with_, _ in pairs]
        medians = [statistics.median(column) for column in zip(*pairs, strict=True)]
        print(
            f"| {kind} | {medians[0]:,.0f} | {medians[1]:,.0f} | {medians[2]:.0f} | "
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f}..{max(ratios):.3f}) |"
        )


if __name__ == "__main__":
    main()
