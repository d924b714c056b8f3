"""Losses on a large vocabulary: peak memory and speed, in chunks against the plain version, side by side.

    OMP_NUM_THREADS=1 python bench/training/loss.py

Given are hidden states [T, H] and a head [V, H]; what is measured is the loss and the gradients of both. Plain is what
one writes first: logits [T, V], log_softmax, then gather or the divergence's formula, and `backward`. Both sides are
compared on few tokens first. Each run is a process of its own; its peak is the largest resident memory less what it
held before the loss (inputs, torch itself). CPU seconds, because the machine may be shared. Sides alternate.

    sampled     -sum w * A * s of sampled tokens, w and A from s as in the default objective (models.one_pass)
    two_pass    the same by models.logprobs.token_scores, which anything may follow: the head product once more
    top_k       reverse KL against 64 tokens and a tail, by the loss of a step (learner.step.step_loss), which works out
                the log-prob and entropy of every token beside it
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from stillhouse.learner.batch import Microbatch
from stillhouse.learner.objectives.config import ObjectiveConfig
from stillhouse.learner.objectives.distributions import log_tail
from stillhouse.learner.objectives.losses import TokenInputs
from stillhouse.learner.objectives.options import Distributions
from stillhouse.learner.payloads import TopRows
from stillhouse.learner.step.step_loss import make_step_loss
from stillhouse.models.logprobs import LmHead, token_scores
from stillhouse.models.one_pass import one_pass_loss
from tests.sim.sampled_tokens import SampledTokens

CAP, TOP_K = 2.0, 64
CHECKED_TOKENS = 48


@dataclass(frozen=True)
class Inputs:
    hidden_TH: Tensor
    weight_VH: Tensor
    targets_T: Tensor
    behaviour_T: Tensor
    teacher_T: Tensor
    top: TopRows


def make_inputs(tokens: int, hidden: int, vocab: int, seed: int = 0) -> Inputs:
    source = torch.Generator().manual_seed(seed)
    ids_TK = torch.stack([torch.randperm(vocab, generator=source)[:TOP_K] for _ in range(min(tokens, 64))])
    ids_TK = ids_TK.repeat(-(-tokens // len(ids_TK)), 1)[:tokens]
    top_TK = torch.log_softmax(torch.randn((tokens, TOP_K + 1), generator=source) * 2, dim=1)[:, :TOP_K]
    uniform = torch.log(torch.tensor(1.0 / vocab))
    return Inputs(
        hidden_TH=torch.randn((tokens, hidden), generator=source).requires_grad_(),
        weight_VH=(torch.randn((vocab, hidden), generator=source) * hidden**-0.5).requires_grad_(),
        targets_T=torch.randint(0, vocab, (tokens,), generator=source),
        behaviour_T=uniform + torch.randn(tokens, generator=source),
        teacher_T=uniform + torch.randn(tokens, generator=source),
        top=TopRows(ids_TK.numpy(), top_TK.numpy(), log_tail(top_TK).numpy(), np.full(tokens, TOP_K)),
    )


def _slope(x: Inputs, logprobs_C: Tensor, place: slice) -> Tensor:
    """d loss / d s of the default objective."""
    weights_C = torch.exp(logprobs_C - x.behaviour_T[place]).clamp(max=CAP)
    return weights_C * (logprobs_C - x.teacher_T[place]) / len(x.targets_T)


def plain_sampled(x: Inputs, chunk: int) -> Tensor:
    logprobs_T = torch.log_softmax(x.hidden_TH @ x.weight_VH.T, dim=1).gather(1, x.targets_T[:, None])[:, 0]
    return (_slope(x, logprobs_T.detach(), slice(None)) * logprobs_T).sum()


def sampled(x: Inputs, chunk: int) -> Tensor:
    def loss(logprobs_C: Tensor, place: slice) -> tuple[Tensor, Tensor]:
        slope_C = _slope(x, logprobs_C, place)
        return slope_C * logprobs_C, slope_C

    return one_pass_loss(LmHead(x.weight_VH), x.hidden_TH, SampledTokens(x.targets_T, loss), chunk_tokens=chunk)


def two_pass(x: Inputs, chunk: int) -> Tensor:
    logprobs_T = token_scores(LmHead(x.weight_VH), x.hidden_TH, x.targets_T, chunk_tokens=chunk).logprobs_T
    return (_slope(x, logprobs_T.detach(), slice(None)) * logprobs_T).sum()


def plain_top_k(x: Inputs, chunk: int) -> Tensor:
    p_TV = torch.log_softmax(x.hidden_TH @ x.weight_VH.T, dim=1)
    top_TK = p_TV.gather(1, torch.from_numpy(x.top.ids_RK))
    tail_T1 = torch.log1p(-top_TK.exp().sum(dim=1, keepdim=True))
    p_TB = torch.cat([top_TK, tail_T1], dim=1)
    q_TB = torch.cat([torch.from_numpy(x.top.logprobs_RK), torch.from_numpy(x.top.tail_R)[:, None]], dim=1)
    return (p_TB.exp() * (p_TB - q_TB)).sum() / len(x.targets_T)


def top_k(x: Inputs, chunk: int) -> Tensor:
    """The step's own path: `make_step_loss` with one teacher on every token, and no reward."""
    n, rows = len(x.targets_T), len(x.weight_VH)
    loss = make_step_loss(
        ObjectiveConfig(divergence=Distributions(name="reverse_kl")),
        max_new_tokens=1,
        chunk_tokens=chunk,
        vocab_tokens=rows,
        rows=rows,
        seed=0,
    )
    routed_MN, nothing = np.ones((1, n), np.bool_), np.zeros(0, np.int64)
    inputs = TokenInputs(
        behaviour_N=x.behaviour_T,
        teacher_MN=x.teacher_T[None],
        routed_MN=torch.from_numpy(routed_MN),
        teachers=("default",),
        coef_M=torch.ones(1),
        reward_advantage_N=torch.zeros(n),
        share_N=torch.ones(n),
        sequence_N=torch.zeros(n, dtype=torch.int64),
        n_sequences=1,
    )
    microbatch = Microbatch(
        ids_T=nothing,
        lengths=(),
        predictor_N=nothing,
        target_N=nothing,
        behaviour_N=np.zeros(0, np.float32),
        teacher_MN=np.zeros((1, n), np.float32),
        routed_MN=routed_MN,
        item_N=nothing,
        token_N=nothing,
        before_N=nothing,
        top=(x.top,),
    )
    return loss(LmHead(x.weight_VH), x.hidden_TH, x.targets_T, inputs, microbatch, n).loss


PAIRS: dict[str, tuple[Callable[[Inputs, int], Tensor], Callable[[Inputs, int], Tensor]]] = {
    "sampled": (plain_sampled, sampled),
    "two_pass": (plain_sampled, two_pass),
    "top_k": (plain_top_k, top_k),
}


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    if args.one:
        name, side = args.one.split(",")
        print(json.dumps(measure(PAIRS[name][int(side)], args)))
        return
    print(
        f"T = {args.tokens}, V = {args.vocab}, H = {args.hidden}, chunks of {args.chunk}, float32, one thread, "
        f"{args.repeats} alternating runs of each side\n"
    )
    print("| loss | plain: peak MiB, CPU s | chunked: peak MiB, CPU s | peak ratio | speed ratio (min..max) |")
    print("|---|---|---|---|---|")
    for name in args.losses.split(","):
        check_equal(name)
        pairs = [(_in_process(name, 0, args), _in_process(name, 1, args)) for _ in range(args.repeats)]
        (plain_mib, plain_s), (ours_mib, ours_s) = (
            (max(run["peak_mib"] for run in side), statistics.median(run["cpu_s"] for run in side))
            for side in zip(*pairs, strict=True)
        )
        ratios = [plain["cpu_s"] / ours["cpu_s"] for plain, ours in pairs]
        print(
            f"| {name} | {plain_mib:,.0f}, {plain_s:.1f} | {ours_mib:,.0f}, {ours_s:.1f} | "
            f"{ours_mib / plain_mib:.3f} | "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f}) |",
            flush=True,
        )


def measure(side: Callable[[Inputs, int], Tensor], args: argparse.Namespace) -> dict[str, float]:
    """Peak MiB and CPU seconds of one loss with its gradients, in this process."""
    inputs = make_inputs(args.tokens, args.hidden, args.vocab)
    side(make_inputs(4, 8, 300), 2).backward()  # what torch loads on first use
    before_mib = psutil.Process().memory_info().rss / 2**20
    started_s = time.process_time()
    side(inputs, args.chunk).backward()
    cpu_s = time.process_time() - started_s
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return {"peak_mib": peak_mib - before_mib, "cpu_s": cpu_s}


def check_equal(name: str) -> None:
    """Both sides compute the same."""
    results: list[tuple[Tensor, ...]] = []
    for side in PAIRS[name]:
        x = make_inputs(CHECKED_TOKENS, 32, 3000)
        loss = side(x, 7)
        loss.backward()
        assert x.hidden_TH.grad is not None and x.weight_VH.grad is not None
        results.append((loss.detach(), x.hidden_TH.grad, x.weight_VH.grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=1e-6)


def _in_process(name: str, side: int, args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", f"{name},{side}"]
    for key in ("tokens", "vocab", "hidden", "chunk"):
        command += [f"--{key}", str(getattr(args, key))]
    return json.loads(subprocess.run(command, capture_output=True, check=True, encoding="utf-8", timeout=900).stdout)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096, help="T")
    parser.add_argument("--vocab", type=int, default=151_936, help="V")
    parser.add_argument("--hidden", type=int, default=1024, help="H")
    parser.add_argument("--chunk", type=int, default=256, help="positions of a chunk")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side")
    parser.add_argument("--losses", default=",".join(PAIRS), help="which")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
