"""Bytes and requests per scored token of growing rollouts: asking for the new tokens only, or from the start.

    python -m bench.sglang_scoring [--rollouts 16] [--grow 32] [--length 384]

    incremental   what SGLangScorer does: log-probs from where the rollout has grown
    from start    the same requests with start = 1, as a scorer does that knows no more than the sequence
    at the end    once per rollout, when it has its full length: the least there can be, and the latest

Rollouts have a prompt of 16 tokens and come back each time they have grown. The last two columns: tokens that the
server found in its prefix cache, and CPU seconds of the server, both per 1,000 scored tokens.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.sglang_rollouts import READY_S, CpuClock
from builtin import TEACHER_DIR
from engines.base import ScoreRequest
from engines.sglang.config import SGLangConfig
from engines.sglang.scorer import SGLangScorer
from models.description import vocabulary_size
from sglang_server.servers import Servers

N_PROMPT = 16
COUNTED = (
    "http_requests_total",
    "http_sent_bytes_total",
    "http_received_bytes_total",
    "prompt_tokens_cached_total",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--grow", type=int, default=32)
    parser.add_argument("--length", type=int, default=384)
    args = parser.parse_args()
    ends = range(N_PROMPT + args.grow, N_PROMPT + args.length + 1, args.grow)
    ways: dict[str, Callable[[int], tuple[int, range]]] = {
        "incremental": lambda end: (end - args.grow, ends),
        "from start": lambda _: (1, ends),
        "at the end": lambda _: (N_PROMPT, ends[-1:]),
    }
    print(f"{'':>12} {'requests':>9} {'sent B':>8} {'received B':>11} {'cached/1k':>10} {'CPU s/1k':>9}")
    # Health checks are requests, too: here there are none to speak of.
    config = SGLangConfig(health_every_s=3600.0)
    with tempfile.TemporaryDirectory() as folder, Servers(Path(folder)) as servers:
        server = servers.start("teacher", TEACHER_DIR)
        servers.wait_ready([server], READY_S)
        scorer = SGLangScorer(server.url, config, vocab_size=vocabulary_size(TEACHER_DIR))
        for seed, (name, way) in enumerate(ways.items()):
            show(name, scorer, CpuClock(server.pid), way, seed, args.rollouts, ends)
        scorer.close()


def show(
    name: str,
    scorer: SGLangScorer,
    clock: CpuClock,
    way: Callable[[int], tuple[int, range]],
    seed: int,
    n_rollouts: int,
    ends: range,
) -> None:
    """One row: sequences of its own, so that nothing of the former row is in the prefix cache."""
    ids = np.random.default_rng(seed).integers(0, 256, (n_rollouts, ends[-1])).astype(np.int32)
    before, cpu_s = scorer.stats, clock.read_s()
    for end in way(0)[1]:
        scorer.score([ScoreRequest(row[:end], way(end)[0]) for row in ids])
    used = {key: scorer.stats[key] - before[key] for key in COUNTED}
    n_scored = n_rollouts * (ends[-1] - N_PROMPT)
    requests, sent, received, cached = (used[key] / n_scored for key in COUNTED)
    cpu = 1000 * (clock.read_s() - cpu_s) / n_scored
    print(f"{name:>12} {requests:>9.3f} {sent:>8.1f} {received:>11.1f} {1000 * cached:>10.0f} {cpu:>9.3f}")


if __name__ == "__main__":
    main()
