"""What an optimizer step costs on a device and where its time goes, beside variants that might be worth building.

    python -m bench.training.learner_profile --device cuda --model FOLDER           a Qwen3 of 1.7 billion: 80 to 120 s
    python -m bench.training.learner_profile --device cpu --tokens 512 --square 256   the same here, in small

A step trains `--packs` packs of nearly `--tokens` tokens with bfloat16 products, in sequences of a quarter of
`--longest` to `--longest` tokens. Each row of the first table is warmed up by one step; then `--steps` are timed.

    share       operations of the step over seconds, over the rate of a large product of bfloat16 matrices on this
                device in this run. Operations: three forward passes (models.flops, after Kaplan et al. 2020), which is
                what PaLM's appendix B calls model FLOPs utilization (Chowdhery et al. 2022, arXiv 2204.02311): what
                recompute makes again is not counted
    waits       times that the host waited for the device in one step, by the profiler
    device      share of the time in which the device computed; the rest it waited for the host

Rows "attention": only that operation, forward and backward, on the same queries, keys and values of one pack and layer.
Rows "compiled": by torch.compile, the parts (norms and MLPs) for all packs at once, layers for each layout of a pack
anew (the time that this takes is not in the row). "-": not on this device, or not by this torch. A row that fails says
why.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig

from bench.training.device_step import told, wait
from bench.training.score_and_learn import train_item
from stillhouse.builtin import STUDENT_DIR
from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.step.train_step import Trainer
from stillhouse.models.flops import ForwardFlops, forward_flops
from stillhouse.models.layers import layers
from stillhouse.models.loading import load_causal_lm
from stillhouse.models.packed import packed_attention
from stillhouse.models.packed_layout import make_layout

PROMPT_TOKENS: Final = 16
PLAIN, AGAIN, ATTENTION, PARTS, WHOLE = "as-it-is", "recompute", "attention", "compiled-parts", "compiled-layers"
ROWS: Final = (PLAIN, AGAIN, ATTENTION, PARTS, WHOLE)
LOSS: Final = ("_ChunkedScores", "_OnePass")
"""Functions of models.logprobs: the output head is in them."""
GROUPS: Final = {
    "attention": r"flash|fmha|scaled_dot_product|attention|attn",
    "matrix products": r"gemm|nvjet|xmma|cutlass|cublas|gemv|aten::(add)?(mm|bmm)",
    "optimizer": r"multi_tensor|adam|foreach",
    "copies, casts": r"memcpy|memset|copy|cat|index|gather|aten::(clone|to)",
    "norms, elementwise": r"elementwise|reduce|norm|softmax|triton|aten::",
}
"""By the first pattern that a kernel's name has."""
WAITS: Final = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")


class Profile(NamedTuple):
    groups: Counter[str]
    """Microseconds of each group."""
    kernels: Counter[tuple[str, str]]
    """(group, kernel) -> microseconds."""
    waits: Counter[str]


def main() -> int:
    args = _arguments()
    device, model = torch.device(args.device), Path(args.model)
    flops = forward_flops(model)
    assert flops is not None, f"{model}: expected safetensors files"
    config: Any = AutoConfig.from_pretrained(model)
    lengths = _lengths(
        args.packs * args.tokens * 31 // 32, min(args.longest, args.tokens, config.max_position_embeddings)
    )
    peak = _peak(device, args.square)
    print(
        f"{model}: {sum(lengths)} tokens in {len(lengths)} sequences, packs of {args.tokens}, torch {torch.__version__}"
    )
    print(f"{told(device)}: {peak / 1e12:.3g} TFLOP/s in a product of {args.square} x {args.square} in bfloat16\n")
    print("| what | s | tokens/s | TFLOP/s | share | waits | device | peak GiB |\n|---|---|---|---|---|---|---|---|")
    row = partial(_row, device=device, peak=peak)
    found: dict[str, Profile] = {}
    failed = False
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` ends compilers that take too long
    try:
        for name in args.rows:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            if name == ATTENTION:
                pack = [n for n, end in zip(lengths, np.cumsum(lengths), strict=True) if end <= args.tokens]
                one = ForwardFlops(0.0, flops.per_pair / config.num_hidden_layers)
                for kind, attend in _attentions(config, pack, device).items():
                    try:
                        seconds = _timed(attend, 10 * args.steps, device)
                        row(f"attention, {kind}", seconds, sum(pack), _work(one, pack))
                    except (RuntimeError, TypeError, AssertionError) as error:
                        print(f"| attention, {kind} | - ({_first(error)}) |", flush=True)
                continue
            try:
                step = _step(args, lengths, name)
                seconds = _timed(step, args.steps, device)
                found[name], busy = _profiled(step, device)
                waits = str(sum(found[name].waits.values())) if device.type == "cuda" else "-"
                row(f"step, {name}", seconds, sum(lengths), _work(flops, lengths), waits=waits, busy=busy)
            except (RuntimeError, OSError) as error:
                failed |= name == PLAIN
                print(f"| step, {name} | failed: {_first(error)} |", flush=True)
            step = None  # the next row needs the memory
            if name in (PARTS, WHOLE):
                torch.compiler.reset()
            gc.collect()
    finally:
        for name, seen in found.items():
            _print_profile(name, seen, kernels=name == PLAIN)
    return int(failed)


def _work(flops: ForwardFlops, lengths: Sequence[int]) -> float:
    return sum(flops.training(length, frozen=False) for length in lengths)


def _lengths(tokens: int, longest: int) -> list[int]:
    """Lengths of sequences that make `tokens` tokens together."""
    random, lengths = np.random.default_rng(0), list[int]()
    while (left := tokens - sum(lengths)) > PROMPT_TOKENS:
        lengths.append(min(left, int(random.integers(max(longest // 4, PROMPT_TOKENS + 1), longest + 1))))
    return lengths


def _step(args: argparse.Namespace, lengths: list[int], row: str) -> Callable[[], object]:
    model = load_causal_lm(args.model, device=args.device, dtype="float32", attention="packed", train=True)
    vocab = model.config.get_text_config().vocab_size
    for layer in layers(model) if row in (PARTS, WHOLE) else ():
        if row == WHOLE:
            layer.compile()
        for name, part in layer.named_children() if row == PARTS else ():
            if "attn" not in name:
                part.compile(dynamic=True)
    config = LearnerConfig(lr=1e-12, dtype="bfloat16", recompute=float(row == AGAIN), pack_tokens=args.tokens)
    trainer, random = Trainer(model, config, total_steps=10**6), np.random.default_rng(1)
    drawn = [random.integers(0, vocab, length + 1).astype(np.int32) for length in lengths]
    items = [train_item(i, ids, prompt_tokens=PROMPT_TOKENS, vocab=vocab) for i, ids in enumerate(drawn)]
    return partial(trainer.step, items)


def _attentions(config: Any, lengths: list[int], device: torch.device) -> dict[str, Callable[[], None]]:
    """One layer's attention of a pack, by what packs use and by torch's kernel for sequences of different lengths."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    sizes = sorted(lengths, reverse=True)
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(sum(sizes), n, head, device=device, dtype=torch.bfloat16).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    )
    layout = make_layout(sizes, device, (), alone=False)
    ends = torch.tensor([0, *np.cumsum(sizes)], device=device, dtype=torch.int32)
    module, kept = torch.nn.Identity(), dict[str, Tensor]()

    def ours() -> Tensor:
        rows = [x.transpose(0, 1)[None] for x in (query, key, value)]
        return packed_attention(module, rows[0], rows[1], rows[2], None, packed_layout=layout)[0][0]

    def varlen() -> Tensor:
        if device.type != "cuda":
            raise RuntimeError("a kernel for GPUs")
        from torch.nn.attention.varlen import varlen_attn

        takes = inspect.signature(varlen_attn).parameters  # it had is_causal in torch 2.10, and checks heads since 2.12
        how: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in takes else {"is_causal": True}
        how |= {"enable_gqa": True} if "enable_gqa" in takes else {}
        out: Any = varlen_attn(query, key, value, ends, ends, sizes[0], sizes[0], **how)
        if "ours" in kept:
            torch.testing.assert_close(out, kept.pop("ours"), rtol=0.05, atol=0.05)
        return out

    def run(attend: Callable[[], Tensor]) -> None:
        out = attend()
        if attend is ours:
            kept["ours"] = out.detach()
        torch.autograd.grad(out, (query, key, value), torch.ones_like(out))

    return {PLAIN: partial(run, ours), "varlen_attn": partial(run, varlen)}


def _timed(act: Callable[[], object], times: int, device: torch.device) -> float:
    """Seconds of one, after one that is not counted."""
    act()
    wait(device)
    began_s = time.perf_counter()
    for _ in range(times):
        act()
    wait(device)
    return (time.perf_counter() - began_s) / times


def _peak(device: torch.device, size: int) -> float:
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / _timed(lambda: left @ right, 20, device)


def _profiled(step: Callable[[], object], device: torch.device) -> tuple[Profile, str]:
    """(what one step spends, share of its time in which the device computed). On a CPU operations stand for
    kernels."""
    gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    with profile(activities=activities, acc_events=True) as seen:
        began_s = time.perf_counter()
        step()
        wait(device)
        wall_s = time.perf_counter() - began_s
    found = Profile(Counter(), Counter(), Counter())
    for event in seen.events() or ():
        found.waits.update([event.name] if event.name in WAITS else [])
        above, one = "", event
        while (one := one.cpu_parent) is not None:
            above += f" {one.name}"
        spent = [(k.name, k.duration) for k in event.kernels] if gpu else [(event.name, event.self_cpu_time_total)]
        for name, us in spent:
            group = _group(name, f"{above} {event.name}")
            found.groups[group] += us
            found.kernels[group, name] += us
    return found, f"{sum(found.groups.values()) / 1e6 / wall_s:.0%}" if gpu else "-"


def _group(name: str, above: str) -> str:
    if any(one in above for one in LOSS):
        return "loss and output head"
    if "Optimizer.step" in above:
        return "optimizer"
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, name, re.IGNORECASE)), "other")


def _print_profile(name: str, seen: Profile, *, kernels: bool) -> None:
    total = max(sum(seen.groups.values()), 1)
    print(f"\n{name}: where {total / 1e3:.1f} ms of a step go\n\n| group | ms | share |\n|---|---|---|")
    for group, us in seen.groups.most_common():
        print(f"| {group} | {us / 1e3:.1f} | {us / total:.0%} |")
    if kernels:
        print("\n| kernel | group | ms | share |\n|---|---|---|---|")
        for (group, kernel), us in seen.kernels.most_common(10):
            print(f"| {kernel[:90]} | {group} | {us / 1e3:.1f} | {us / total:.0%} |")
    if seen.waits:
        print(f"waits of the host: {dict(seen.waits)}", flush=True)


def _row(
    what: str,
    seconds: float,
    tokens: int,
    work: float,
    *,
    device: torch.device,
    peak: float,
    waits: str = "",
    busy: str = "",
) -> None:
    rate = work / seconds
    gib = f"{torch.cuda.max_memory_allocated() / 2**30:.1f}" if device.type == "cuda" else "-"
    cells = (f"{seconds:.4g}", f"{tokens / seconds:,.0f}", f"{rate / 1e12:.3g}", f"{rate / peak:.1%}", waits, busy, gib)
    print(f"| {what} | {' | '.join(cells)} |", flush=True)


def _first(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0].replace("\n", " "))
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    parser.add_argument("--model", default=str(STUDENT_DIR), help="folder of a causal LM")
    parser.add_argument("--tokens", type=int, default=16384, help="of a pack")
    parser.add_argument("--longest", type=int, default=2048, help="tokens of the longest sequence")
    parser.add_argument("--packs", type=int, default=2, help="of a step")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a row")
    parser.add_argument("--square", type=int, default=8192, help="rows of the product that gives the peak")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
