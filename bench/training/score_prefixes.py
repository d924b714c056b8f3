"""Scoring a growing rollout segment by segment, with and without its prefix kept, side by side (built-in architecture).

    OMP_NUM_THREADS=1 python bench/training/score_prefixes.py
    OMP_NUM_THREADS=1 python bench/training/score_prefixes.py --tokens 1024 --segment 64 --rollouts 4

Both sides are `TorchScorer`: one with a prefix cache that holds all rollouts, one without. Each gets the same requests,
one call per segment with that segment of every rollout, and gives the same log-probs, which is checked first. Runs
alternate; the ratio is that of each pair. Weights are random: the time does not depend on them, and the built-in
teacher's own context is shorter.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedModel, Qwen3ForCausalLM

from stillhouse.builtin import TEACHER_DIR
from stillhouse.engines.base import ScoreRequest
from stillhouse.engines.torch.scorer import TorchScorer, make_prefix_cache
from stillhouse.models import packed

CACHE_MB = 4096


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    clock_s = time.process_time if args.cpu_time else time.perf_counter
    model = _teacher(args.tokens)
    calls = _calls(args.tokens, args.segment, args.rollouts, model.config.vocab_size)
    _check_equal(model, calls)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    computed: dict[bool, float] = {}
    for _ in range(args.repeats):
        for cached, took_s in seconds.items():
            scorer = _scorer(model, cached=cached)
            started_s = clock_s()
            for requests in calls:
                scorer.score(requests)
            took_s.append(clock_s() - started_s)
            computed[cached] = scorer.figures["computed_tokens_total"]
    ratios = [anew / kept for anew, kept in zip(seconds[False], seconds[True], strict=True)]
    tokens = args.tokens * args.rollouts
    print(
        f"{args.rollouts} rollouts of {args.tokens} tokens in segments of {args.segment} ({len(calls)} calls), "
        f"{args.repeats} alternating runs, one thread, {'CPU' if args.cpu_time else 'wall'} time\n"
    )
    print("| prefixes | tokens computed | tokens scored per s |")
    print("|---|---|---|")
    for cached, took_s in seconds.items():
        name = "kept" if cached else "anew"
        print(f"| {name} | {computed[cached]:,.0f} | {tokens / statistics.median(took_s):,.0f} |")
    print(f"\nkept is {statistics.median(ratios):.1f} times as fast ({min(ratios):.1f}..{max(ratios):.1f})")


def _teacher(context: int) -> PreTrainedModel:
    """The built-in teacher's shape, with room for `context` tokens."""
    config: Any = AutoConfig.from_pretrained(TEACHER_DIR)
    config.max_position_embeddings = context
    torch.manual_seed(0)
    model: PreTrainedModel = Qwen3ForCausalLM(config)
    model.set_attn_implementation(packed.IMPLEMENTATION)
    return model.eval()


def _scorer(model: PreTrainedModel, *, cached: bool) -> TorchScorer:
    cache = make_prefix_cache(model, CACHE_MB if cached else 0)
    if (cache is not None) != cached:
        raise RuntimeError("this model has no prefix cache; the reason is in the warning above")
    return TorchScorer(model, prefix_cache=cache)


def _calls(n_tokens: int, size: int, n_rollouts: int, vocab: int) -> list[list[ScoreRequest]]:
    rows = np.random.default_rng(0).integers(0, vocab, (n_rollouts, n_tokens)).astype(np.int32)
    ends = [*range(size, n_tokens, size), n_tokens]
    return [
        [ScoreRequest(row[:end], max(1, start), str(i), last=end == n_tokens) for i, row in enumerate(rows)]
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
    ]


def _check_equal(model: PreTrainedModel, calls: list[list[ScoreRequest]]) -> None:
    sides = [_scorer(model, cached=cached) for cached in (False, True)]
    for requests in calls:
        for anew, kept in zip(*(side.score(requests) for side in sides), strict=True):
            np.testing.assert_allclose(kept.logprobs, anew.logprobs, atol=1e-4)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a rollout")
    parser.add_argument("--segment", type=int, default=128, help="tokens of a segment")
    parser.add_argument("--rollouts", type=int, default=1, help="rollouts that grow side by side")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each side")
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU seconds: for a machine that is busy")
    return parser.parse_args()


if __name__ == "__main__":
    main()
