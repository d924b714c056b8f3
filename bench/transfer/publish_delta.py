"""Whether it is faster to send only the weights that changed: seconds from the learner's `publish` until an actor
process has the version, whole and as changes, side by side, over loopback that is limited to a given rate.

    python bench/transfer/publish_delta.py --mbit 0 1000 10000 --megabytes 10 100 400 --changed 0.01 [--repeats 5]

Runs in a network namespace of its own (`unshare -Urn`), whose loopback has a token bucket (`tc ... tbf`); a rate of 0
is no limit. Both directions share the rate. Needs unshare, ip and tc, and a kernel that allows it to this user.

Weights are bfloat16, in 310 tensors as in bench/transfer/publish.py; before each version the given share of them, at
random places, is given another value. The two ways take turns, each with a publisher and an actor of its own. Medians,
without the first turn. CPU seconds are those of the learner's process during the version.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

import torch

from bench.transfer.publish import TIMEOUT_S, Named, large_tensors
from stillhouse.protocol.messages import WeightVersion
from stillhouse.weights.config import DeltaUse, WeightsConfig
from stillhouse.weights.publisher import Publisher
from tests.sim.weights.weight_actors import ActorFleet

INSIDE: Final = "--inside"
BURST_BYTES: Final = 1 << 20
WAYS: Final[tuple[DeltaUse, ...]] = ("off", "on")


def main() -> int:
    args = _arguments()
    if not args.inside:
        command = [_tool("unshare"), "-Urn", sys.executable, *sys.argv, INSIDE]
        root = str(Path(__file__).resolve().parents[2])
        return subprocess.run(command, env=os.environ | {"PYTHONPATH": root}, check=False).returncode
    torch.set_num_threads(1)
    subprocess.run([_tool("ip"), "link", "set", "lo", "up"], check=True)
    print("| Mb/s | MB | changed | whole, s | changes, s | whole / changes | MB sent | CPU s, whole | changes |")
    print("|---|---|---|---|---|---|---|---|---|")
    for mbit in args.mbit:
        limit(mbit)
        for megabytes in args.megabytes:
            for share in args.changed:
                print_row(mbit, large_tensors(megabytes), share, args.repeats)
    return 0


def limit(mbit: int) -> None:
    """Set the rate of loopback in this namespace."""
    tc = _tool("tc")
    subprocess.run([tc, "qdisc", "del", "dev", "lo", "root"], check=False, capture_output=True)
    if mbit:
        burst = str(max(BURST_BYTES, mbit * 1000))  # a bucket is refilled at most once per tick
        rate = ["rate", f"{mbit}mbit", "burst", burst, "latency", "200ms"]
        subprocess.run([tc, "qdisc", "add", "dev", "lo", "root", "tbf", *rate], check=True)


class Side(NamedTuple):
    """A publisher and its actor."""

    fleet: ActorFleet
    publisher: Publisher


class Took(NamedTuple):
    staged_s: float
    cpu_s: float
    n_bytes: int


def print_row(mbit: int, named: Named, share: float, repeats: int) -> None:
    took = measure(named, share, repeats)
    whole, changes = (took[way][1:] for way in WAYS)
    a, b = (statistics.median(one.staged_s for one in each) for each in (whole, changes))
    cpu_a, cpu_b = (statistics.median(one.cpu_s for one in each) for each in (whole, changes))
    megabytes = sum(tensor.nbytes for _, tensor in named) / 1e6
    print(
        f"| {mbit or 'no limit'} | {megabytes:.0f} | {share:.1%} | {a:.3f} | {b:.3f} | {a / b:.2f} | "
        f"{changes[-1].n_bytes / 1e6:.2f} | {cpu_a:.3f} | {cpu_b:.3f} |",
        flush=True,
    )


def measure(named: Named, share: float, repeats: int) -> dict[DeltaUse, list[Took]]:
    took: dict[DeltaUse, list[Took]] = {way: [] for way in WAYS}
    with ExitStack() as stack:
        sides = {way: start(stack, way) for way in WAYS}
        for way in WAYS:  # the first of a group is whole
            send(sides[way], 1, named)
        for step in range(2, repeats + 3):
            change(named, share, step)
            for way in WAYS if step % 2 else WAYS[::-1]:
                took[way].append(send(sides[way], step, named))
        deltas = sides["on"].publisher.stats.deltas_total
        if deltas != repeats + 1:
            raise RuntimeError(f"{deltas} versions went as changes, expected {repeats + 1}")
    return took


def start(stack: ExitStack, way: DeltaUse) -> Side:
    fleet = stack.enter_context(ActorFleet(digests=False))
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    config = WeightsConfig(join_timeout_s=60.0, broadcast_timeout_s=TIMEOUT_S, delta=way)
    publisher = stack.enter_context(
        Publisher(config, snapshot_dir=folder, post_plan=fleet.post_plan, published=lambda version, seconds: None)
    )
    fleet.start([f"actor-{way}"])
    publisher.membership(fleet.membership())
    publisher.wait_idle(TIMEOUT_S)
    return Side(fleet, publisher)


def send(side: Side, step: int, named: Named) -> Took:
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    side.publisher.publish(WeightVersion(0, step), named)
    staged = side.fleet.wait_for(WeightVersion(0, step), TIMEOUT_S)
    side.publisher.wait_idle(TIMEOUT_S)
    staged_s = max(one.at_s for one in staged.values()) - began_s
    return Took(staged_s, time.process_time() - began_cpu_s, side.publisher.stats.broadcast_bytes)


def change(named: Named, share: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _, tensor in named:
        at = torch.randint(0, tensor.numel(), (round(share * tensor.numel()),), generator=generator)
        tensor.view(torch.int16)[at] ^= 1


def _tool(name: str) -> str:
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if found is None:
        raise SystemExit(f"{name} is not installed; expected unshare, ip and tc (packages util-linux and iproute2)")
    return found


def _arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, nargs="+", default=[0, 1000, 10000], help="rates; 0: no limit")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[10.0, 100.0, 400.0])
    parser.add_argument("--changed", type=float, nargs="+", default=[0.01], help="shares of the weights")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(words)


if __name__ == "__main__":
    raise SystemExit(main())
