"""Random conversations through the token graph, against a second account (tests/sim/conversations.py).

    python bench/token_graph.py --conversations 1000000

Each conversation has up to 40 events: turns, retries, forks, summaries, sub-agents, several choices, calls that run at
the same time, responses without log-probs or without a reader. A difference ends the program and names the seed.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from multiprocessing import get_context

from tests.sim.token_graph import run_conversations

CHUNK = 2_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=100_000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.conversations)
    started, total, done = time.monotonic(), Counter[str](), 0
    chunks = [seeds[i : i + CHUNK] for i in range(0, len(seeds), CHUNK)]
    with get_context("spawn").Pool(options.processes) as pool:
        for chunk, counts in zip(chunks, pool.imap(run_chunk, chunks), strict=True):
            total += counts
            done += len(chunk)
            print(f"\r{done:,} of {len(seeds):,} agree, {time.monotonic() - started:.0f} s", end="", flush=True)
    print()
    for name, n in sorted(total.items()):
        print(f"{name:>24} {n:>12,}")


def run_chunk(seeds: range) -> Counter[str]:
    total = Counter[str]()
    for graph in run_conversations(seeds):
        counts = graph.counts
        total["calls"] += counts.calls
        total["drift tokens"] += counts.drift_tokens
        total["sequences"] += len(graph.sequences())
        for origin, n in counts.by_origin.items():
            total[f"calls: {origin}"] += n
        for drop, n in counts.dropped_responses.items():
            total[f"dropped: {drop}"] += n
    return total


if __name__ == "__main__":
    main()
