"""Sampled tokens per second, side by side: this project's engine against `model.generate` of transformers.

    OMP_NUM_THREADS=1 python -m bench.decoding.generate

Both sides get the same prompts, sample at temperature 1 without truncation, end at the same stop token and produce at
most the same number of tokens; a token after the end of its rollout is not counted. `generate` gets batches of `slots`
prompts padded on the left; the engine gets all requests at once and keeps `slots` of them running. Prompts are all
different, so nothing is gained from shared prefixes. Runs alternate, the first of each side is thrown away, and the
medians are printed. The engine also returns a log-prob per token, `generate` does not.

What a step has to do at least: read each weight once (of an embedding that is not the output head only the rows'
tokens), and 2 operations per weight and row. With few rows that is bound by memory. So "ceiling" is the speed at which
one thread sums an array of READ_BYTES, divided by the bytes of the weights: steps per second that no kernel exceeds.
"share" is what the engine reaches of it, prompts and sampling included.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from stillhouse.builtin import STUDENT_DIR, TRAIN_JSONL
from stillhouse.builtin.addition import read_problems
from stillhouse.builtin.tokenizer import prompt_token_ids
from stillhouse.engines.base import GenerationRequest
from stillhouse.engines.config import EngineConfig
from stillhouse.engines.torch.engine import TorchEngine
from stillhouse.models.loading import load_causal_lm
from stillhouse.models.tokenizer import load_tokenizer, stop_token_ids
from stillhouse.protocol.messages import Sampling

READ_BYTES = 256 << 20
READS = 5


class Steps(NamedTuple):
    """Decode steps per second of one run, and the ceiling measured right after it."""

    per_s: float
    ceiling_per_s: float


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    tokenizer = cast(PreTrainedTokenizerFast, load_tokenizer(args.model))
    stops = stop_token_ids(args.model, tokenizer)
    texts = [problem.prompt for problem in read_problems(TRAIN_JSONL)]
    texts = list(dict.fromkeys(texts))
    print(f"{args.model}: {args.repeats} alternating runs, {args.requests_per_slot} requests per slot, one thread\n")
    print(
        "| slots | requests | generate tok/s | engine tok/s | ratio (min..max of pairs) | tokens per rollout "
        "| engine steps/s | ceiling | share |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    clock_s = time.process_time if args.cpu_time else time.perf_counter
    for slots in args.slots:
        n_requests = args.requests_per_slot * slots * (4 if slots == 1 else 1)
        if n_requests > len(texts):
            raise SystemExit(f"{slots} slots need {n_requests} different prompts; {TRAIN_JSONL} has {len(texts)}")
        prompts = [prompt_token_ids(tokenizer, text) for text in texts[:n_requests]]
        engine = TorchEngine(
            load_causal_lm(args.model, device=args.device, dtype=args.dtype, attention="sdpa"),
            EngineConfig(
                max_concurrent=slots,
                max_context=args.max_context,
                device=args.device,
                dtype=args.dtype,
                fused=not args.generic,
            ),
        )
        plain = load_causal_lm(args.model, device=args.device, dtype=args.dtype, attention="sdpa")
        sides: tuple[Callable[[int], tuple[int, int]], ...] = (
            lambda seed, m=plain, p=prompts, n=slots: run_generate(m, p, n, stops, args.max_new_tokens, seed),
            lambda seed, e=engine, p=prompts: run_engine(e, p, stops, args.max_new_tokens, seed),
        )
        speeds: tuple[list[float], list[float]] = ([], [])
        steps: list[Steps] = []
        rollout_tokens = taken_s = 0.0
        for run in range(args.repeats + 1):
            before = engine.stats.decode_steps_total
            for side, taken in zip(sides, speeds, strict=True):
                started_s = clock_s()
                n_tokens, n_rollouts = side(run)
                taken_s = clock_s() - started_s
                taken.append(n_tokens / taken_s)
                rollout_tokens = n_tokens / n_rollouts
            per_s = (engine.stats.decode_steps_total - before) / taken_s  # the engine came last
            steps.append(Steps(per_s, read_bytes_per_s(clock_s) / step_bytes(plain)))
        _print_row(slots, n_requests, speeds[0][1:], speeds[1][1:], rollout_tokens, steps[1:])


def run_engine(
    engine: TorchEngine, prompts: Sequence[list[int]], stops: tuple[int, ...], max_new_tokens: int, seed: int
) -> tuple[int, int]:
    """(sampled tokens, rollouts)."""
    for index, prompt in enumerate(prompts):
        sampling = Sampling(max_new_tokens=max_new_tokens, seed=seed * 1_000_003 + index)
        request = GenerationRequest(str(index), np.asarray(prompt, np.int32), sampling, max_new_tokens, stops)
        engine.submit(request)
    n_tokens, n_left = 0, len(prompts)
    while n_left:
        for delta in engine.poll(1.0):
            n_tokens += len(delta.token_ids)
            n_left -= delta.finish_reason is not None
    return n_tokens, len(prompts)


def run_generate(
    model: Any, prompts: Sequence[list[int]], batch: int, stops: tuple[int, ...], max_new_tokens: int, seed: int
) -> tuple[int, int]:
    """(useful tokens, rollouts): tokens up to and including the first stop token of each row."""
    torch.manual_seed(seed)
    n_tokens = 0
    for start in range(0, len(prompts), batch):
        rows = prompts[start : start + batch]
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=model.device)
        lengths = torch.tensor([[len(row)] for row in rows], device=model.device)
        output = model.generate(
            input_ids=ids,
            attention_mask=(torch.arange(longest, device=model.device) >= longest - lengths).long(),
            max_new_tokens=max_new_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=list(stops),
            pad_token_id=stops[0],
        )
        ended = torch.isin(output[:, longest:], torch.tensor(stops, device=model.device)).int().cumsum(dim=1)
        n_tokens += int((ended == 0).sum()) + int((ended[:, -1] > 0).sum())
    return n_tokens, len(prompts)


def step_bytes(model: PreTrainedModel) -> int:
    """Bytes of the weights that a decode step reads: all but an embedding that is not also the output head."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    tied = embedding.weight is head.weight
    return sum(p.nbytes for p in model.parameters() if tied or p is not embedding.weight)


def read_bytes_per_s(clock_s: Callable[[], float]) -> float:
    """Speed at which this thread sums an array that is much larger than the caches; the best of READS."""
    array = torch.ones(READ_BYTES // 4)
    best = 0.0
    for _ in range(READS):
        started_s = clock_s()
        array.sum()
        best = max(best, array.nbytes / (clock_s() - started_s))
    return best


def _print_row(
    slots: int,
    n_requests: int,
    plain: list[float],
    ours: list[float],
    rollout_tokens: float,
    steps: list[Steps],
) -> None:
    pairs = [b / a for a, b in zip(plain, ours, strict=True)]
    middle = [statistics.median(values) for values in (plain, ours, pairs)]
    per_s, ceiling_per_s = (statistics.median(values) for values in zip(*steps, strict=True))
    share = statistics.median(step.per_s / step.ceiling_per_s for step in steps)
    print(
        f"| {slots} | {n_requests} | {middle[0]:,.0f} | {middle[1]:,.0f} | {middle[2]:.2f} "
        f"({min(pairs):.2f}..{max(pairs):.2f}) | {rollout_tokens:.1f} "
        f"| {per_s:,.1f} | {ceiling_per_s:,.1f} | {share:.2f} |",
        flush=True,
    )


def _arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=STUDENT_DIR, help="folder of a causal LM (default: the student)")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--requests-per-slot", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each side")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--max-context", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of both sides")
    parser.add_argument(
        "--cpu-time", action="store_true", help="count CPU seconds: fairer where others use the machine"
    )
    parser.add_argument("--generic", action="store_true", help="engine without its fused decoder")
    return parser.parse_args()


if __name__ == "__main__":
    main()
