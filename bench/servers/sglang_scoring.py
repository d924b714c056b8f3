"""Bytes and requests per scored token of growing rollouts: asking for the new tokens only, or from the start.

    python -m bench.servers.sglang_scoring [--rollouts 16] [--grow 32] [--length 384] [--teacher FOLDER]

    incremental   what SGLangScorer does: log-probs from where the rollout has grown
    from start    the same requests with start = 1, as a scorer does that knows no more than the sequence
    at the end    once per rollout, when it has its full length: the least there can be, and the latest

Rollouts have a prompt of 16 tokens and come back each time they have grown. The last two columns: tokens that the
server found in its prefix cache, and CPU seconds of the server, both per 1,000 scored tokens.

A second table has one request per rollout of that length, for each thing that a teacher can be asked for: log-probs of
the tokens; also of the 64 likeliest at each position; also of 64 given ones; last hidden states. It adds the CPU
seconds of this process, which reads the answers.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from bench.servers.sglang_rollouts import READY_S, CpuClock
from stillhouse.builtin import TEACHER_DIR
from stillhouse.engines.base import ScoreRequest
from stillhouse.engines.sglang.config import SGLangConfig
from stillhouse.engines.sglang.scorer import SGLangScorer
from stillhouse.models.description import vocabulary_size
from stillhouse.sglang_server.servers import Servers

N_PROMPT = 16
K = 64
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
    parser.add_argument("--teacher", type=Path, default=TEACHER_DIR)
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
        server = servers.start("teacher", args.teacher, ["--enable-return-hidden-states"])
        servers.wait_ready([server], READY_S)
        scorer = SGLangScorer(server.url, config, vocab_size=vocabulary_size(args.teacher))
        for seed, (name, way) in enumerate(ways.items()):
            show(name, scorer, CpuClock(server.pid), way, seed, args.rollouts, ends)
        show_payloads(scorer, CpuClock(server.pid), args.rollouts, args.length)
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


def show_payloads(scorer: SGLangScorer, clock: CpuClock, n_rollouts: int, length: int) -> None:
    """One row per payload, each on sequences of its own."""
    rng = np.random.default_rng(99)

    def requests(*, given: bool = False) -> list[ScoreRequest]:
        rows = rng.integers(0, 256, (n_rollouts, N_PROMPT + length)).astype(np.int32)
        sets = [rng.integers(0, scorer.vocab_size, (length, K)).astype(np.int32) if given else None for _ in rows]
        return [ScoreRequest(row, N_PROMPT, top_ids=ids) for row, ids in zip(rows, sets, strict=True)]

    ways: dict[str, Callable[[], object]] = {
        "log-probs": lambda: scorer.score(requests()),
        f"likeliest {K}": lambda: scorer.score(requests(), top_k=K),
        f"given {K}": lambda: scorer.score(requests(given=True)),
        "hidden states": lambda: [ask_hidden_states(scorer, request) for request in requests()],
    }
    print(f"\n{'':>13} {'received B':>11} {'server CPU s/1k':>16} {'own CPU s/1k':>13}")
    for name, way in ways.items():
        received, server_s, own_s = scorer.stats["http_received_bytes_total"], clock.read_s(), time.process_time()
        way()
        n_scored = n_rollouts * length
        received = scorer.stats["http_received_bytes_total"] - received
        server_s, own_s = clock.read_s() - server_s, time.process_time() - own_s
        print(f"{name:>13} {received / n_scored:>11.1f} {1000 * server_s / n_scored:>16.3f} ", end="")
        print(f"{1000 * own_s / n_scored:>13.3f}", flush=True)


def ask_hidden_states(scorer: SGLangScorer, request: ScoreRequest) -> object:
    """States of the whole sequence, but of what the server finds in its prefix cache: those it does not send."""
    body = {
        "input_ids": request.token_ids.tolist(),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_hidden_states": True,
    }
    reply = msgspec.json.decode(scorer.server.run(scorer.server.post("/generate", body), timeout_s=READY_S))
    states = np.array(reply["meta_info"]["hidden_states"][0], np.float32)
    if states.ndim != 2 or states.shape[0] < len(request.token_ids) - request.start:
        raise SystemExit(f"got hidden states of shape {states.shape} for {len(request.token_ids)} tokens")
    return states


if __name__ == "__main__":
    main()
