"""Seconds per version by ipc, gloo and NCCL, side by side: one learner, one actor, on one GPU or on the CPU.

    python scripts/gpu/transports.py [--device cpu|cuda] [--ways ipc gloo nccl] [--megabytes 3400] [--versions 5]

Each way has a publisher here and an actor of its own in another process, whose engine copies the tensors as a real one
does (310 of them, in bfloat16, as a Qwen3 of 28 layers has). The actor hashes the last version, which must be what was
sent. The first version is not counted: it makes the group. NCCL runs on a GPU only, by sockets, for both are on one.

    seconds     from `publish` until the actor has confirmed the version; median, in brackets the largest
    stopped     of these, the seconds in which training would wait (the copies)
    GPU MiB     most that this process had on its GPU beyond the weights themselves
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import msgspec
import torch
from torch import Tensor
from xxhash import xxh3_64

from stillhouse.engines.torch.weights import EmbeddedWeights
from stillhouse.protocol.messages import Membership, WeightPlan, WeightVersion
from stillhouse.weights.config import NCCL_SOCKETS_ONLY, WeightsConfig
from stillhouse.weights.publisher import Publisher
from stillhouse.weights.receiver import WeightReceiver

WAYS: dict[str, dict[str, Any]] = {
    "ipc": {"transport": "ipc", "staging": "device"},
    "ipc, copies in host memory": {"transport": "ipc", "staging": "host"},
    "gloo": {"transport": "collective", "backend": "gloo"},
    "nccl": {"transport": "collective", "backend": "nccl"},
    "nccl, copies in host memory": {"transport": "collective", "backend": "nccl", "staging": "host"},
}
N_TENSORS = 310
LIMIT_S = 120.0


class Engine:
    """Takes weights as an engine does, and computes nothing."""

    def __init__(self, device: str) -> None:
        self.version = WeightVersion(0, 0)
        self.copies: dict[str, Tensor] = {}
        self._device = device

    def stage_weights(self, version: WeightVersion, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            if name not in self.copies:
                self.copies[name] = torch.empty_like(tensor, device=self._device)
            self.copies[name].copy_(tensor)
        self.version = version


def hashed(named: Iterable[tuple[str, Tensor]]) -> str:
    digest = xxh3_64()
    for name, tensor in sorted(named, key=lambda one: one[0]):
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def act(device: str) -> None:
    """The actor: a plan on each line; an empty line asks for the hash of what it has, the end of the input ends it."""
    engine = Engine(device)
    receiver = WeightReceiver(EmbeddedWeights(engine, device=device), name="actor-0")
    receiver.start()
    for line in sys.stdin:
        receiver.raise_if_failed()
        if line.strip():
            receiver.handle_plan(msgspec.json.decode(line, type=WeightPlan))
        else:
            print(hashed(engine.copies.items()), flush=True)
    receiver.close()


class Learner:
    def __init__(self, way: str, device: torch.device, folder: Path) -> None:
        environment = {**os.environ, "NCCL_HOSTID": "actor-0"}
        words = [sys.executable, __file__, "--actor", str(device)]
        self.actor = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8", env=environment
        )
        self._out = threading.Condition()
        self._newest = WeightVersion(0, 0)
        config = WeightsConfig(every_version=True, join_timeout_s=LIMIT_S, broadcast_timeout_s=LIMIT_S, **WAYS[way])
        self.publisher = Publisher(
            config,
            snapshot_dir=folder,
            post_plan=self._post,
            published=self._published,
            expected_actors=1,
            device=device,
        )
        self.publisher.membership(Membership(("actor-0",), ("a",)))

    def _say(self, line: str) -> None:
        assert self.actor.stdin is not None
        self.actor.stdin.write(f"{line}\n")
        self.actor.stdin.flush()

    def _post(self, plan: WeightPlan) -> None:
        self._say(msgspec.json.encode(plan).decode())

    def _published(self, version: WeightVersion, _seconds: float) -> None:
        with self._out:
            self._newest = version
            self._out.notify_all()

    def publish(self, step: int, named: list[tuple[str, Tensor]]) -> tuple[float, float]:
        """(seconds until it is confirmed, seconds of the copies)"""
        version, began_s = WeightVersion(0, step), time.monotonic()
        self.publisher.publish(version, named)
        with self._out:
            if not self._out.wait_for(lambda: self._newest == version, LIMIT_S):
                raise TimeoutError(f"version {version} is not out after {LIMIT_S:g} s: {self.publisher.stats}")
        return time.monotonic() - began_s, self.publisher.stats.copy_s

    def hash_of_actor(self) -> str:
        self._say("")
        assert self.actor.stdout is not None
        return self.actor.stdout.readline().strip()

    def close(self) -> None:
        self.publisher.close()
        self.actor.communicate(timeout=LIMIT_S)


def measure(way: str, device: torch.device, megabytes: float, versions: int) -> tuple[float, str]:
    """(median seconds, a row of the table)"""
    each = round(megabytes * 1e6 / 2 / N_TENSORS)
    named = [(f"layers.{i}", torch.randn(each, device=device).bfloat16()) for i in range(N_TENSORS)]
    n_bytes = sum(tensor.nbytes for _, tensor in named)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with tempfile.TemporaryDirectory() as folder:
        learner = Learner(way, device, Path(folder))
        try:
            took: list[tuple[float, float]] = []
            for step in range(1, versions + 2):
                for _, tensor in named:
                    tensor.add_(1)
                took.append(learner.publish(step, named))
            right = learner.hash_of_actor() == hashed(named)
        finally:
            learner.close()
    peak = (torch.cuda.max_memory_reserved(device) - n_bytes) / 2**20 if device.type == "cuda" else 0.0
    seconds, stopped = ([one[i] for one in took[1:]] for i in (0, 1))
    middle = statistics.median(seconds)
    cells = (f"{middle:.3f} ({max(seconds):.3f})", f"{statistics.median(stopped):.3f}", f"{n_bytes / 1e6:.0f}")
    gpu = f"{peak:.0f}" if peak else "-"
    verdict = "right" if right else "WRONG"
    return middle, f"| {way} | {' | '.join(cells)} | {n_bytes / 1e9 / middle:.2f} | {gpu} | {verdict} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ways", nargs="+", choices=WAYS)
    parser.add_argument("--megabytes", type=float, default=3400.0)
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--actor", metavar="DEVICE", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.actor:
        act(asked.actor)
        return 0
    device = torch.device(asked.device)
    if device.type == "cuda":
        os.environ.update({**NCCL_SOCKETS_ONLY, "NCCL_HOSTID": "learner"})
    ways = asked.ways or ([*WAYS] if device.type == "cuda" else ["ipc", "gloo"])
    print("| way | seconds (largest) | stopped | MB | GB/s | GPU MiB | actor has |\n|---|---|---|---|---|---|---|")
    middles: dict[str, float] = {}
    failed = False
    for way in ways:
        try:
            middles[way], row = measure(way, device, asked.megabytes, asked.versions)
        except (OSError, RuntimeError, ValueError) as error:
            row = f"| {way} | failed: {str(error).splitlines()[0][:200]} |"
        failed |= "failed" in row or "WRONG" in row
        print(row, flush=True)
    if "ipc" in middles:
        print(*(f"{way} / ipc: {middle / middles['ipc']:.2f}" for way, middle in middles.items() if way != "ipc"))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
