"""Where the time of one decode step of the embedded engine goes, beside what memory and arithmetic allow, with the
kernels in C (`engines.torch.kernels`) and without.

    OMP_NUM_THREADS=1 python bench/decoding/decode_step.py --model examples/smollm2/model --slots 8

All slots decode, nothing is prefilled. A step must read every weight once (an embedding that is not the output head:
only the rows' tokens) and the keys and values so far, and it makes 2 operations per weight and row. "share" is the time
that reading these bytes takes at the speed at which this thread sums a large array, divided by the time measured.
"share without it" is what the step would reach if the part took no time. CPU seconds of one thread, medians; the two
engines take turns.

The last table has the products alone for several numbers of rows: as the rows grow, they are bound by arithmetic.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.decoding.generate import products_s, read_bytes_per_s, step_bytes
from stillhouse.builtin import STUDENT_DIR
from stillhouse.engines.base import GenerationRequest
from stillhouse.engines.config import EngineConfig, UseKernels
from stillhouse.engines.torch import engine
from stillhouse.engines.torch.decoders import kernels_for
from stillhouse.engines.torch.engine import TorchEngine
from stillhouse.engines.torch.fused import RmsNorm
from stillhouse.engines.torch.kernels import Kernels
from stillhouse.engines.torch.kv_cache import SlotCache
from stillhouse.engines.torch.products import Product
from stillhouse.models.loading import load_causal_lm
from stillhouse.protocol.messages import Sampling

PROMPT_TOKENS = 18
FIRST_STEPS = 4
BOUND = "products with the weights"
"""The part that reads the weights: without it there would be no least time."""
ATTENTION = "attention over the cache, writes to it"
"""In C with the rotation of queries and keys."""
PARTS: Sequence[tuple[str, Any, str]] = (
    (BOUND, Product, "__call__"),
    (BOUND, Product, "added_to"),
    (ATTENTION, SlotCache, "attend"),
    (ATTENTION, SlotCache, "write"),
    (ATTENTION, Kernels, "attend"),
    ("norms", RmsNorm, "__call__"),
    ("activation", Kernels, "silu_gate"),
    ("sampling", engine, "sample"),
)
REST = "everything else (without kernels: rotary, activation)"


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    cached_tokens = PROMPT_TOKENS + FIRST_STEPS + args.steps // 2
    max_context = PROMPT_TOKENS + args.steps + FIRST_STEPS + 1
    engines: dict[UseKernels, TorchEngine] = {
        choice: TorchEngine(
            load_causal_lm(args.model, device="cpu", dtype="float32", attention="sdpa"),
            EngineConfig(max_concurrent=args.slots, max_context=max_context, kernels=choice, device="cpu"),
        )
        for choice in args.kernels
    }
    plain = load_causal_lm(args.model, device="cpu", dtype="float32", attention="sdpa")
    taken_s: defaultdict[UseKernels, list[float]] = defaultdict(list)
    speeds: list[float] = []
    for _ in range(args.turns):
        for choice, generator in engines.items():
            taken_s[choice] += steps_s(generator, args.slots, args.steps)
            speeds.append(read_bytes_per_s(time.process_time))
    bytes_per_s = statistics.median(speeds)
    config: Any = plain.config
    cached = 8 * cached_tokens * args.slots * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    least_s = (step_bytes(plain) + cached) / bytes_per_s
    operations = 2 * args.slots * step_bytes(plain) / 4
    print(
        f"{args.model}, {args.slots} rows: {step_bytes(plain) / 1e6:,.1f} MB of weights and {cached / 1e6:,.1f} MB of "
        f"keys and values at {bytes_per_s / 1e9:.1f} GB/s ({min(speeds) / 1e9:.1f} to {max(speeds) / 1e9:.1f}): "
        f"{1e3 * least_s:.2f} ms; {operations / 1e9:.2f} GFLOP"
    )
    for choice, generator in engines.items():
        step_s = statistics.median(taken_s[choice])
        print(f"\nkernels {choice}: a step takes {1e3 * step_s:.2f} ms, share {least_s / step_s:.2f}\n")
        print("| part | ms | of the step | share without it |\n|---|---|---|---|")
        for name, part_s in parts_s(generator, args.slots, args.steps, step_s).items():
            without = f"{least_s / (step_s - part_s):.2f}" if name != BOUND else "-"
            print(f"| {name} | {1e3 * part_s:.2f} | {part_s / step_s:.0%} | {without} |")
    print("\n| rows | kernels | products alone, ms | share | GFLOP/s |\n|---|---|---|---|---|")
    for rows in args.rows:
        for choice in args.kernels:
            product_s = products_s(plain, rows, time.process_time, kernels_for(plain, choice))
            share, speed = step_bytes(plain) / bytes_per_s / product_s, rows * step_bytes(plain) / 2e9 / product_s
            print(f"| {rows} | {choice} | {1e3 * product_s:.2f} | {share:.2f} | {speed:.0f} |", flush=True)


def steps_s(
    generator: TorchEngine, slots: int, steps: int, after_step: Callable[[], None] = lambda: None
) -> list[float]:
    """Seconds of each decode step. Fills the engine, and empties it afterwards."""
    random = np.random.default_rng(0)
    for index in range(slots):
        ids = random.integers(0, 250, PROMPT_TOKENS).astype(np.int32)
        n_new = steps + FIRST_STEPS
        generator.submit(GenerationRequest(str(index), ids, Sampling(max_new_tokens=n_new, seed=index), n_new, ()))
    taken_s: list[float] = []
    for _ in range(steps + FIRST_STEPS):
        started_s = time.process_time()
        generator.poll(0.0)
        taken_s.append(time.process_time() - started_s)
        after_step()
    return taken_s[FIRST_STEPS:]


def parts_s(generator: TorchEngine, slots: int, steps: int, step_s: float) -> dict[str, float]:
    """Seconds of a step that each part takes, and what is left. The clock's own calls are in what is left, and left out
    by taking the step's time from a run without them."""
    now: defaultdict[str, float] = defaultdict(float)
    found: defaultdict[str, list[float]] = defaultdict(list)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started_s = time.process_time()
            result = function(*args, **kwargs)
            now[name] += time.process_time() - started_s
            return result

        return call

    def keep() -> None:
        for name, part_s in now.items():
            found[name].append(part_s)
        now.clear()

    originals = [(owner, attribute, getattr(owner, attribute)) for _, owner, attribute in PARTS]
    for (name, owner, attribute), (_, _, function) in zip(PARTS, originals, strict=True):
        setattr(owner, attribute, timed(name, function))
    try:
        steps_s(generator, slots, steps, keep)
    finally:
        for owner, attribute, function in originals:
            setattr(owner, attribute, function)
    parts = {name: statistics.median(values[FIRST_STEPS:]) for name, values in found.items()}
    return parts | {REST: max(0.0, step_s - sum(parts.values()))}


def _arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=STUDENT_DIR, help="folder of a causal LM (default: the student)")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40, help="decode steps to measure, per turn")
    parser.add_argument("--turns", type=int, default=2, help="measurements of each engine")
    parser.add_argument("--kernels", nargs="+", choices=("on", "off"), default=["off", "on"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="of the products alone")
    return parser.parse_args()


if __name__ == "__main__":
    main()
