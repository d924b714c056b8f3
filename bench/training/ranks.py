"""One learner of 1, 2 and 4 ranks on the same batches: losses, time per step, and peak memory of each rank beside the
launcher's estimate (launch.checks.memory).

    OMP_NUM_THREADS=1 python -m bench.training.ranks examples/smollm2/model [--ranks 1,2,4] [--tokens 3072] [--steps 3]

    OMP_NUM_THREADS=1 python -m bench.training.ranks long --sequence 32768 --tokens 32768 --recompute 1 --divide \\
        --steps 2

Each rank is a process with one thread, on the CPU over gloo. Sequences of 256 tokens, 1,024 tokens in a pass, or as
many as a longer sequence has. `--divide`: all ranks divide each sequence (learner.context_parallel). `long` is a Qwen3
of two layers with random weights and a context of 40,960 tokens, made for the occasion. The first
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
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.training.score_and_learn import train_item
from stillhouse import builtin
from stillhouse.launch.checks.memory import learner_need, read_shape
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.learner.ranks.group import ProcessGroup, Ranks
from stillhouse.learner.step.make_trainer import make_trainer
from stillhouse.protocol.addresses import free_port

SEQUENCE = 256
PACK_TOKENS = 1024
LIMIT_S = 1800.0
VOCABULARY = 256
"""Ids that occur."""


LONG: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 40960,
}


def settings(given: argparse.Namespace, ranks: int) -> dict[str, object]:
    pack_tokens = max(PACK_TOKENS, given.sequence)
    common: dict[str, object] = {"warmup_steps": 0, "device": "cpu", "dtype": given.dtype, "recompute": given.recompute}
    return common | {"pack_tokens": pack_tokens, "ranks": ranks, "context_parallel": ranks if given.divide else 1}


def make_long(folder: str) -> str:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**LONG)).save_pretrained(folder)
    return folder


def resident() -> tuple[float, float]:
    """Resident memory now and at its peak, GiB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    now, most = (int(lines[name].split()[0]) / 2**20 for name in ("VmRSS", "VmHWM"))
    return now, most


def train(given: argparse.Namespace) -> None:
    """What each rank runs. Prints one line of JSON."""
    torch.set_num_threads(1)
    size = int(os.environ["WORLD_SIZE"])
    before, _ = resident()
    context = size if given.divide else 1
    ranks = ProcessGroup(device=torch.device("cpu"), timeout_s=LIMIT_S, context=context) if size > 1 else Ranks()
    if size > 1:
        ranks.announce = lambda *_: None  # type: ignore[method-assign,assignment]  # all run this same program
    config = build(RunConfig, {"learner": settings(given, size)}).learner
    trainer = make_trainer(given.model, config, steps=1000, vocab_tokens=VOCABULARY, seed=0, ranks=ranks)
    random = np.random.default_rng(0)
    tokens = [
        random.integers(0, VOCABULARY, given.sequence).astype(np.int32) for _ in range(given.tokens // given.sequence)
    ]
    items = [train_item(i, ids_T, prompt_tokens=10, vocab=VOCABULARY) for i, ids_T in enumerate(tokens)]
    steps = [trainer.step(items)]
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak starts again
    seconds: list[float] = []
    for _ in range(given.steps - 1):
        began_s = time.perf_counter()
        steps.append(trainer.step(items))
        seconds.append(time.perf_counter() - began_s)
    said = {"losses": [one.loss for one in steps], "norms": [one.grad_norm for one in steps], "seconds": seconds}
    print(json.dumps(said | {"peak": resident()[1] - before}), flush=True)
    os._exit(0)


def run(given: argparse.Namespace, size: int) -> list[dict[str, object]]:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common = {**os.environ, "WORLD_SIZE": str(size), **address}
    command = [sys.executable, __file__, given.model, "--tokens", str(given.tokens), "--steps", str(given.steps)]
    command += ["--dtype", given.dtype, "--sequence", str(given.sequence), "--recompute", str(given.recompute)]
    command += ["--as-rank", *(["--divide"] if given.divide else [])]
    started = [
        subprocess.Popen(command, env={**common, "RANK": str(rank)}, stdout=subprocess.PIPE, encoding="utf-8")
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
    config = build(RunConfig, {"models": models, "learner": settings(given, size)})
    need = learner_need(config, shape, "gloo", device="cpu")
    return sum(gib for name, gib in {**need.sure, **need.likely}.items() if name not in ("staging", "process"))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0].replace("\n", " "))
    parser.add_argument("model", help="folder of the student, or long")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--tokens", type=int, default=3072, help="of a batch")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--sequence", type=int, default=SEQUENCE, help="tokens of a sequence")
    parser.add_argument("--recompute", type=float, default=0.0, help="learner.recompute")
    parser.add_argument("--divide", action="store_true", help="all ranks divide each sequence")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_rank:
        train(given)
    print(f"{given.model}, {given.dtype}, {given.tokens:,} tokens per batch in sequences of {given.sequence:,}")
    with tempfile.TemporaryDirectory() as folder:
        if given.model == "long":
            given.model = make_long(folder)
        table(given)
    return 0


def table(given: argparse.Namespace) -> None:
    print("| ranks | losses | norms of the gradient | seconds per step, median | peak per rank, GiB | estimate |")
    print("|---|---|---|---|---|---|")
    for size in map(int, given.ranks.split(",")):
        found = run(given, size)
        losses = ", ".join(f"{loss:.6f}" for loss in found[0]["losses"])  # type: ignore[attr-defined]
        norms = ", ".join(f"{norm:.6f}" for norm in found[0]["norms"])  # type: ignore[attr-defined]
        seconds = statistics.median(found[0]["seconds"])  # type: ignore[arg-type]
        peaks = ", ".join(f"{one['peak']:.2f}" for one in found)
        print(f"| {size} | {losses} | {norms} | {seconds:.1f} | {peaks} | {estimate(given, size):.2f} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
