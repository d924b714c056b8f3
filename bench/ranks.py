"""One learner of 1, 2 and 4 ranks on the same batches: losses, time per step, and peak memory of each rank beside the
launcher's estimate (launch.checks.memory).

    OMP_NUM_THREADS=1 python bench/ranks.py examples/smollm2/model [--ranks 1,2,4] [--tokens 3072] [--steps 3]

Each rank is a process with one thread, on the CPU over gloo. Sequences of 256 tokens, 1,024 tokens in a pass. The first
step makes the optimizer's moments and is not timed. Memory is the resident memory at its peak during the other steps,
less that before the model was loaded; the estimate is without processes and what is sent, which are not here. Ranks
share the cores, so on a machine with fewer cores than ranks a step cannot become faster.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

import builtin
from bench.score_and_learn import train_item
from launch.checks.memory import learner_need, read_shape
from launch.config.run import RunConfig
from launch.config.tree import build
from learner.ranks.group import RankGroup, Ranks
from learner.step.make_trainer import make_trainer
from protocol.addresses import free_port

SEQUENCE = 256
PACK_TOKENS = 1024
LIMIT_S = 1800.0
VOCABULARY = 256
"""Ids that occur."""


def settings(ranks: int, dtype: str) -> dict[str, object]:
    return {"warmup_steps": 0, "pack_tokens": PACK_TOKENS, "ranks": ranks, "dtype": dtype, "device": "cpu"}


def resident() -> tuple[float, float]:
    """Resident memory now and at its peak, GiB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now, most = (int(lines[name].split()[0]) / 2**20 for name in ("VmRSS", "VmHWM"))
    return now, most


def train(given: argparse.Namespace) -> None:
    """What each rank runs. Prints one line of JSON."""
    torch.set_num_threads(1)
    size = int(os.environ["WORLD_SIZE"])
    before, _ = resident()
    ranks = RankGroup(device=torch.device("cpu"), timeout_s=LIMIT_S) if size > 1 else Ranks()
    if size > 1:
        ranks.lead = lambda *_: None  # type: ignore[method-assign,assignment]  # all run this same program
    config = build(RunConfig, {"learner": settings(size, given.dtype)}).learner
    trainer = make_trainer(given.model, config, steps=1000, vocab_tokens=VOCABULARY, seed=0, ranks=ranks)
    random = np.random.default_rng(0)
    tokens = [random.integers(0, VOCABULARY, SEQUENCE).astype(np.int32) for _ in range(given.tokens // SEQUENCE)]
    items = [train_item(i, ids_T, prompt_tokens=10, vocab=VOCABULARY) for i, ids_T in enumerate(tokens)]
    losses = [trainer.step(items).loss]
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    seconds: list[float] = []
    for _ in range(given.steps - 1):
        began_s = time.perf_counter()
        losses.append(trainer.step(items).loss)
        seconds.append(time.perf_counter() - began_s)
    print(json.dumps({"losses": losses, "seconds": seconds, "peak": resident()[1] - before}), flush=True)
    os._exit(0)


def run(given: argparse.Namespace, size: int) -> list[dict[str, object]]:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common = {**os.environ, "WORLD_SIZE": str(size), **address}
    command = [sys.executable, __file__, given.model, "--tokens", str(given.tokens), "--steps", str(given.steps)]
    command += ["--dtype", given.dtype, "--as-rank"]
    started = [
        subprocess.Popen(command, env={**common, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    try:
        return [json.loads(one.communicate(timeout=LIMIT_S)[0].splitlines()[-1]) for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()


def estimate(given: argparse.Namespace, size: int) -> float:
    models = {"student": given.model, "teacher": str(builtin.TEACHER_DIR)}
    shape = read_shape(Path(given.model))
    assert shape is not None, f"{given.model}: no weights that can be read"
    config = build(RunConfig, {"models": models, "learner": settings(size, given.dtype)})
    need = learner_need(config, shape, "gloo", device="cpu")
    return sum(gib for name, gib in {**need.sure, **need.likely}.items() if name not in ("staging", "process"))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0].replace("\n", " "))
    parser.add_argument("model", help="folder of the student")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--tokens", type=int, default=3072, help="of a batch")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_rank:
        train(given)
    print(f"{given.model}, {given.dtype}, {given.tokens:,} tokens per batch")
    print("| ranks | losses | seconds per step, median | peak memory per rank, GiB | estimate of the first |")
    print("|---|---|---|---|---|")
    for size in map(int, given.ranks.split(",")):
        found = run(given, size)
        losses = ", ".join(f"{loss:.6f}" for loss in found[0]["losses"])  # type: ignore[attr-defined]
        seconds = statistics.median(found[0]["seconds"])  # type: ignore[arg-type]
        peaks = ", ".join(f"{one['peak']:.2f}" for one in found)
        print(f"| {size} | {losses} | {seconds:.1f} | {peaks} | {estimate(given, size):.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
