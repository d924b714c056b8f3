"""Speed of the top-k decoder (protocol.topk_codec) beside the decoders of earlier commits, on the same payloads.

    OMP_NUM_THREADS=1 python bench/decode_top_k.py [--commits f01fea9^ 047210e] [--repeats 15]

The decoders take turns; medians of CPU time per call. f01fea9^ is the decoder before it was first made faster. Each
result must equal this tree's, bit for bit.

What a decoder has to do at least: read the payload, and write an id and a log-prob of 4 bytes each per token. "copy"
is a plain copy of as many bytes. NumPy cannot come near to it, because each operation is a pass of its own over all
tokens:
take a word's bits out of the bytes around it, separate id and code, look the code up, add up each position's
probabilities, scale and round the log-probs, and sort the ids to find one that is listed twice. That is about ten
passes of 0.1 to 1 ns per token, and some 60 calls of 0.5 to 2 us, whatever the size of the payload.

    tail      V = 49,152, at most 256 tokens per position, mass 0.999: what teachers send for a large vocabulary
    wide      V = 151,936, 256 tokens at every position
    rest      V = 312 with 5 bits for each token of the rest: what teachers send for a small one
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.topk_codec import TopK, decode_top_k, encode_top_k

Decoder = Callable[[bytes], TopK]
ROOT = Path(__file__).resolve().parents[1]
MODULES = ("bit_words", "topk_codec")
"""Files of the decoder, in the order of their imports. The oldest commits have only the second."""
CALLS = 8
"""Calls per measurement."""


def decoder_at(commit: str) -> Decoder:
    """The decoder as it was at a commit."""
    there: dict[str, ModuleType] = {}
    for number, name in enumerate(MODULES):
        show = ["git", "-C", str(ROOT), "show", f"{commit}:protocol/{name}.py"]
        said = subprocess.run(show, capture_output=True, text=True, timeout=60)
        if said.returncode:
            if name == MODULES[-1]:
                raise SystemExit(f"{' '.join(show)}: {said.stderr.strip()}")
            continue
        source = said.stdout
        for earlier in there:
            source = source.replace(f"from protocol.{earlier} import", f"from {there[earlier].__name__} import")
        module = there[name] = ModuleType(f"decoder_{abs(hash(commit))}_{number}")
        sys.modules[module.__name__] = module
        exec(compile(source, f"{commit}:protocol/{name}.py", "exec"), module.__dict__)
    return there[MODULES[-1]].decode_top_k


def rows(
    n: int, k: int, vocab: int, spread: tuple[float, float]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """The k likeliest tokens of n distributions; `spread`: least and greatest standard deviation of the logits."""
    random = np.random.default_rng(0)
    ids_NK, logprobs_NK = np.empty((n, k), np.int64), np.empty((n, k), np.float32)
    for row in range(n):
        logits_V = random.normal(size=vocab) * random.uniform(*spread)
        ids_NK[row] = np.argsort(-logits_V)[:k]
        logprobs_NK[row] = logits_V[ids_NK[row]] - np.logaddexp.reduce(logits_V)
    return ids_NK, logprobs_NK


def payloads(n: int) -> dict[str, bytes]:
    return {
        "tail": encode_top_k(*rows(n, 256, 49_152, (1.0, 8.0)), vocab_size=49_152),
        "wide": encode_top_k(*rows(n, 256, 151_936, (0.1, 0.2)), vocab_size=151_936, mass=1.0),
        "rest": encode_top_k(*rows(n, 312, 312, (1.0, 8.0)), vocab_size=312, rest_bits=5),
    }


def cpu_us(call: Callable[[], Any]) -> float:
    call()
    start_s = time.process_time()
    for _ in range(CALLS):
        call()
    return (time.process_time() - start_s) / CALLS * 1e6


def same(one: TopK, other: Any) -> bool:
    fields = ("counts_T", "ids_S", "logprobs_S", "tail_T")
    return all(getattr(one, field).tobytes() == getattr(other, field).tobytes() for field in fields)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commits", nargs="*", default=["f01fea9^", "047210e"], help="decoders to compare with")
    parser.add_argument("--positions", type=int, nargs="+", default=[40, 256])
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    decoders = {**{commit: decoder_at(commit) for commit in arguments.commits}, "now": decode_top_k}
    print("Microseconds per payload; in brackets: how many times as long as now.")
    print(f"{'form':>5} {'positions':>9} {'tokens':>7} {'copy':>6}", *(f"{name:>16}" for name in decoders))
    for n in arguments.positions:
        for form, payload in payloads(n).items():
            print_row(form, payload, n, decoders, arguments.repeats)


def print_row(form: str, payload: bytes, n: int, decoders: dict[str, Decoder], repeats: int) -> None:
    top = decode_top_k(payload)
    for name, decode in decoders.items():
        if not same(top, decode(payload)):
            raise SystemExit(f"{form}, {n} positions: {name} decodes something else")
    least = np.zeros(len(payload) + 8 * len(top.ids_S), np.uint8)
    times_us: dict[str, list[float]] = {name: [] for name in ("copy", *decoders)}
    for _ in range(repeats):
        times_us["copy"].append(cpu_us(least.copy))
        for name, decode in decoders.items():
            times_us[name].append(cpu_us(lambda decode=decode: decode(payload)))
    medians = {name: statistics.median(values) for name, values in times_us.items()}
    cells = [f"{medians[name]:.0f} ({medians[name] / medians['now']:.1f})" for name in decoders]
    print(
        f"{form:>5} {n:>9} {len(top.ids_S):>7} {medians['copy']:>6.1f}", *(f"{cell:>16}" for cell in cells), flush=True
    )


if __name__ == "__main__":
    main()
