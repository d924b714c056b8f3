"""Speed of the top-k decoder (protocol.topk_codec) beside the decoders of earlier commits, each on its own payloads of
the same distributions.

    OMP_NUM_THREADS=1 python bench/training/decode_top_k.py [--commits f01fea9^ 047210e] [--positions 32 256 2048 8192]
        [--shapes tail64 wide256] [--repeats 9] [--joined 32]

The decoders take turns; medians of CPU time per payload. f01fea9^ is the decoder before it was first made faster,
047210e the last before joined calls. Their payloads hold bits without gaps, ids in order of likelihood; each decoder's
result must be this tree's, but for the rounding of float32.

    "wide"    the same number of tokens at every position, V = 151,936 (18 bits)
    "tail"    V = 49,152, mass 0.999: up to as many tokens as the number says, at many positions fewer
    "rest"    V = 312 with 5 bits for each token of the rest: what teachers send for a small vocabulary

"joined": the same, decoded as the learner does with the payloads of one rollout, several together (--joined) per call.
Its first column is for one payload of them.

What a decoder has to do at least is to read the payload and write an id and a log-prob of 4 bytes each per token:
"copy" is a plain copy of as many bytes.
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
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from stillhouse.protocol.topk_codec import TopK, decode_joined, encode_top_k

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("bit_words", "topk_layout", "topk_codec")
"""Files of the codec, in the order of their imports. The oldest commits have only the last."""
LEAST_S = 0.002
"""A measurement makes as many calls as this takes."""
SHAPES = {
    **{f"tail{k}": (k, 49_152, (1.0, 8.0), {"mass": 0.999}) for k in (16, 64, 256)},
    **{f"wide{k}": (k, 151_936, (0.1, 0.2), {"mass": 1.0}) for k in (16, 64, 256)},
    "rest": (312, 312, (1.0, 8.0), {"rest_bits": 5}),
}
"""Name -> tokens, vocabulary, least and greatest standard deviation of the logits, options."""
DISTINCT_ROWS = 256
"""Longer payloads repeat them."""

Call = Callable[[], Any]


class Codec(NamedTuple):
    encode: Callable[..., bytes]
    decode: Callable[[list[bytes]], list[Any]]
    """All payloads, as it is done at that commit."""


def codec_at(commit: str) -> Codec:
    """The codec as it was at a commit, which decoded one payload after the other."""
    there: dict[str, ModuleType] = {}
    for number, name in enumerate(MODULES):
        show = ["git", "-C", str(ROOT), "show", f"{commit}:protocol/{name}.py"]
        said = subprocess.run(show, capture_output=True, encoding="utf-8", timeout=60)
        if said.returncode:
            if name == MODULES[-1]:
                raise SystemExit(f"{' '.join(show)}: {said.stderr.strip()}")
            continue
        source = said.stdout
        for earlier in there:
            source = source.replace(f"from protocol.{earlier} import", f"from {there[earlier].__name__} import")
        module = there[name] = ModuleType(f"codec_{abs(hash(commit))}_{number}")
        sys.modules[module.__name__] = module
        exec(compile(source, f"{commit}:protocol/{name}.py", "exec"), module.__dict__)
    codec: Any = there[MODULES[-1]]
    decode: Callable[[bytes], Any] = codec.decode_top_k

    def each(payloads: list[bytes]) -> list[Any]:
        return [decode(payload) for payload in payloads]

    return Codec(codec.encode_top_k, each)


def _joined(payloads: list[bytes]) -> list[TopK]:
    return [decode_joined(payloads)]


NOW = Codec(encode_top_k, _joined)


def rows(n: int, k: int, vocab: int, spread: tuple[float, float]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The k likeliest tokens of n distributions."""
    random, distinct = np.random.default_rng(0), min(n, DISTINCT_ROWS)
    ids_NK, logprobs_NK = np.empty((distinct, k), np.int64), np.empty((distinct, k), np.float32)
    for row in range(distinct):
        logits_V = random.normal(size=vocab) * random.uniform(*spread)
        ids_NK[row] = np.argsort(-logits_V)[:k]
        logprobs_NK[row] = logits_V[ids_NK[row]] - np.logaddexp.reduce(logits_V)
    repeats = -(-n // distinct)
    return np.tile(ids_NK, (repeats, 1))[:n], np.tile(logprobs_NK, (repeats, 1))[:n]


def cpu_us(call: Call) -> float:
    """CPU time of one call."""
    call()
    calls, start_s, spent_s = 0, time.process_time(), 0.0
    while spent_s < LEAST_S:
        call()
        calls, spent_s = calls + 1, time.process_time() - start_s
    return spent_s / calls * 1e6


def by_id(top: Any) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """(ids, log-probs), sorted by position and id."""
    order = np.lexsort((top.ids_S, np.repeat(np.arange(len(top.counts_T)), top.counts_T)))
    return top.ids_S[order], top.logprobs_S[order]


def same(one: TopK, other: Any) -> bool:
    (ids, logprobs), (other_ids, other_logprobs) = by_id(one), by_id(other)
    return (
        np.array_equal(one.counts_T, other.counts_T)
        and np.array_equal(ids, other_ids)
        and np.allclose(logprobs, other_logprobs, rtol=1e-6, atol=4e-6)
        and np.allclose(one.tail_T, other.tail_T, atol=1e-5)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commits", nargs="*", default=["f01fea9^", "047210e"], help="codecs to compare with")
    parser.add_argument("--positions", type=int, nargs="+", default=[32, 256, 2048, 8192])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--joined", type=int, default=32, help="payloads per call of the second kind of rows; 0: none")
    parser.add_argument("--joined-most", type=int, default=256, help="most positions of payloads that are joined")
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    codecs = {**{commit: codec_at(commit) for commit in arguments.commits}, "now": NOW}
    print("Microseconds per payload; in brackets: how many times as long as now.")
    print(f"{'shape':>8} {'positions':>9} {'tokens':>9} {'bytes':>9} {'before':>9} {'copy':>7}", end="")
    print(*(f"{name:>16}" for name in codecs))
    for name in arguments.shapes:
        k, vocab, spread, options = SHAPES[name]
        for n in arguments.positions:
            given = rows(n, k, vocab, spread)
            payloads = {at: codec.encode(*given, vocab_size=vocab, **options) for at, codec in codecs.items()}
            print_row(name, n, 1, payloads, codecs, arguments.repeats)
            if arguments.joined > 1 and n <= arguments.joined_most:
                print_row("joined", n, arguments.joined, payloads, codecs, arguments.repeats)


def print_row(
    name: str, n: int, joined: int, payloads: dict[str, bytes], codecs: dict[str, Codec], repeats: int
) -> None:
    (top,) = NOW.decode([payloads["now"]])
    for at, codec in codecs.items():
        if not same(top, codec.decode([payloads[at]])[0]):
            raise SystemExit(f"{name}, {n} positions: {at} decodes something else")
    copied = np.zeros(joined * (len(payloads["now"]) + 8 * len(top.ids_S)), np.uint8)
    times_us: dict[str, list[float]] = {at: [] for at in ("copy", *codecs)}
    for _ in range(repeats):
        times_us["copy"].append(cpu_us(copied.copy) / joined)
        for at, codec in codecs.items():
            given = [payloads[at]] * joined
            times_us[at].append(cpu_us(lambda codec=codec, given=given: codec.decode(given)) / joined)
    medians = {at: statistics.median(values) for at, values in times_us.items()}
    cells = [f"{medians[at]:.0f} ({medians[at] / medians['now']:.1f})" for at in codecs]
    sizes = f"{len(payloads['now']):>9} {len(payloads[next(iter(payloads))]):>9}"
    print(f"{name:>8} {n:>9} {len(top.ids_S):>9} {sizes} {medians['copy']:>7.1f}", end="")
    print(*(f"{cell:>16}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
