"""Checks one optimizer step on a device: that packing is exact there, how long the step takes, which attention runs,
and that its gradient equals the CPU's. For the first hour on a GPU (docs/gpu.md).

    python -m bench.training.device_step --device cuda:0 --model FOLDER --tokens 4096
    python -m bench.training.device_step --device cpu                           the same here, on the built-in student

One sequence of --tokens tokens, for each `learner.dtype`. The first step warms up, the second is timed. Memory: on a
GPU the peak that torch allocated, on a CPU the growth of the process. Gradients are taken before clipping and
compared with those of float32 on the CPU (`--no-reference` leaves that out, for models too large for it).

Exit code 1 if attention by plain matrix products (`_scaled_dot_product_attention_math`) runs on a GPU, where its scores
take T * T floats per head, or if a gradient differs in direction (cosine below 0.99).
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile

from bench.training.score_and_learn import train_item
from stillhouse.builtin import STUDENT_DIR
from stillhouse.learner.batch import TrainItem
from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.step.train_step import Trainer
from stillhouse.models.loading import load_causal_lm
from stillhouse.models.packed import context_window

PROMPT_TOKENS: Final = 10
MATH: Final = "aten::_scaled_dot_product_attention_math"
LEAST_COSINE: Final = 0.99
Dtype = Literal["float32", "bfloat16"]


class Measured(NamedTuple):
    step_s: float
    peak_bytes: int
    attention: tuple[str, ...]
    """Names of the attention operations that torch's profiler saw."""
    gradient_P: Tensor
    """Gradient of all parameters, float32, on the CPU."""


def main() -> int:
    args = _arguments()
    device = torch.device(args.device)
    model = load_causal_lm(args.model, device="cpu", dtype="float32", attention="packed")
    tokens, vocab = min(args.tokens, context_window(model.config)), model.config.get_text_config().vocab_size
    del model
    ids_T = np.random.default_rng(0).integers(0, vocab, tokens).astype(np.int32)
    item = train_item(0, ids_T, prompt_tokens=PROMPT_TOKENS, vocab=vocab)
    print(f"{args.model}: one sequence of {tokens} tokens, torch {torch.__version__}, {told(device)}\n")
    reference = None if args.no_reference else measure(args.model, torch.device("cpu"), "float32", item)
    print("| device, learner.dtype | second step, s | peak memory, MiB | attention | gradient norm | cosine |")
    print("|---|---|---|---|---|---|")
    wrong: list[str] = []
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    for dtype in dtypes:
        found = measure(args.model, device, dtype, item)
        cosine = None if reference is None else _cosine(found.gradient_P, reference.gradient_P)
        cells = [
            f"{device}, {dtype}",
            f"{found.step_s:.3f}",
            f"{found.peak_bytes / 2**20:,.0f}",
            ", ".join(found.attention),
            f"{float(found.gradient_P.norm()):.4g}",
            "" if cosine is None else f"{cosine:.5f}",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)
        if device.type == "cuda" and MATH in found.attention:
            wrong.append(f"{dtype}: {MATH} runs; expected a fused kernel")
        if cosine is not None and not cosine >= LEAST_COSINE:
            wrong.append(
                f"{dtype}: the gradient's cosine with the CPU's is {cosine:.5f}, expected {LEAST_COSINE} or more"
            )
    print("\n" + ("\n".join(wrong) or "in order"))
    return 1 if wrong else 0


def measure(model: str, device: torch.device, dtype: Dtype, item: TrainItem) -> Measured:
    """Load the model (which probes its packing there), and train the item twice."""
    student = load_causal_lm(model, device=device, dtype="float32", attention="packed", train=True)
    config = LearnerConfig(schedule="constant", warmup_steps=0, lr=1e-12, dtype=dtype)
    trainer = Trainer(student, config, total_steps=10**6)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    before = _memory(device)
    gradient_P, attention = _first_step(trainer, item)
    started_s = time.perf_counter()
    trainer.step([item])
    wait(device)
    step_s = time.perf_counter() - started_s
    peak = _memory(device) - (0 if device.type == "cuda" else before)
    return Measured(step_s, peak, attention, gradient_P)


def _first_step(trainer: Trainer, item: TrainItem) -> tuple[Tensor, tuple[str, ...]]:
    """Gradient of one step before clipping, and the attention operations that the step used."""
    gradients: list[Tensor] = []

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        groups = [group["params"] for group in optimizer.param_groups]
        gradients.extend(
            p.grad.detach().float().flatten().cpu() for group in groups for p in group if p.grad is not None
        )

    hook = register_optimizer_step_pre_hook(note)
    try:
        with profile(
            activities=[ProfilerActivity.CPU], acc_events=True
        ) as seen:  # where operations are chosen, on any device
            metrics = trainer.step([item])
    finally:
        hook.remove()
    clipped_P = torch.cat(gradients)
    names = {event.key for event in seen.key_averages() if "scaled_dot_product" in event.key}
    inner = tuple(sorted(name for name in names if name.startswith("aten::_") and "backward" not in name))
    return clipped_P * (metrics.grad_norm / max(float(clipped_P.norm()), 1e-30)), inner


def _cosine(a_P: Tensor, b_P: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a_P.double(), b_P.double(), dim=0))


def _memory(device: torch.device) -> int:
    """Bytes: the most allocated on a GPU; the most that this process ever had."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def told(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0].replace("\n", " "))
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    parser.add_argument(
        "--model", default=str(STUDENT_DIR), help="folder of a causal LM (default: the built-in student)"
    )
    parser.add_argument("--tokens", type=int, default=4096, help="at most; the model's context window bounds it")
    parser.add_argument("--no-reference", action="store_true", help="no comparison with the CPU")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
