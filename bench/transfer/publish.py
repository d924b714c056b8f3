"""Seconds from the learner's `publish` until the last of N actor processes has the weights: three ways, side by side.

    python -m bench.transfer.publish [--actors 1 8 32] [--megabytes 0.8 256] [--repeats 5]

    publisher    this project's: staging copy, buckets, checksums, staged into the engine; "confirmed" also counts every
                 member's answer and the announcement. With --transport wire: encrypted, from one port
    per tensor   what many trainers do: an own gloo group with a full mesh, one blocking broadcast per tensor, into
                 memory that is allocated and touched beforehand; no checks, no answers
    flat         the same with one broadcast of all bytes: the least that a collective can cost

Where members share few cores, seconds measure mostly who is scheduled. So CPU seconds of all processes per GB and
member are printed too. Those of the publisher contain the copy for staging, the checksums and the answers.

What it must cost: each of N actors receives B bytes, and all but the leaves of the tree send them on. On one machine
that is 2 N B bytes copied by the kernel on shared cores, at best as fast as memory; ours reads N B more for the
checksums, and copies B once for the staging.

All on this machine over loopback, so that N actors share its cores. 0.8 MB are the built-in student's own tensors,
any other size is made of 310 tensors (a 28-layer Qwen3 has as many). The first turn of each way is thrown away, medians
are shown. The engine only records, so that nothing but the transport is measured.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo

from bench.role_cpu import own_cpu_s
from stillhouse.builtin import STUDENT_DIR
from stillhouse.protocol.messages import WeightVersion
from stillhouse.weights.buckets import byte_views, manifest_of, torch_dtype
from stillhouse.weights.config import WeightsConfig
from stillhouse.weights.group_operations import connect_store, host_store
from stillhouse.weights.manifest import WeightManifest
from stillhouse.weights.publisher import Publisher
from tests.sim.weights.weight_actors import ActorFleet, fork_server

HOST = "127.0.0.1"
TIMEOUT_S = 300.0
LARGE_TENSORS = 310

Named = list[tuple[str, Tensor]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.8, 256.0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--transport", choices=["collective", "wire"], default="collective", help="of the publisher")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'actors':>6} {'MB':>6} {'tensors':>7} | {'publisher s':>11} {'confirmed s':>11} "
          f"{'per tensor s':>12} {'flat s':>7} | "
          f"{'per tensor/ours':>15} {'flat/ours':>9}")  # fmt: skip
    for megabytes in args.megabytes:
        for actors in args.actors:
            named = student_tensors() if megabytes == 0.8 else large_tensors(megabytes)
            needed, free = actors * sum(t.nbytes for _, t in named), psutil.virtual_memory().available
            if needed > 0.6 * free:
                print(f"{actors:>6} {megabytes:>6.1f}: left out, needs {needed >> 20} MiB of {free >> 20} MiB free")
                continue
            print_row(actors, named, measure(actors, named, args.repeats, args.transport))


def student_tensors() -> Named:
    from stillhouse.models.loading import load_causal_lm

    model = load_causal_lm(STUDENT_DIR, device="cpu", dtype="float32", attention="sdpa")
    return [(name, parameter.detach().clone()) for name, parameter in model.named_parameters()]


def large_tensors(megabytes: float) -> Named:
    elements = round(megabytes * 1e6 / 2 / LARGE_TENSORS)
    return [(f"layers.{index}.weight", torch.randn(elements).bfloat16()) for index in range(LARGE_TENSORS)]


@dataclass(slots=True)
class Timings:
    """Seconds per repeat, and CPU seconds of all processes per GB and member, by way."""

    publisher: list[float] = field(default_factory=list[float])
    confirmed: list[float] = field(default_factory=list[float])
    per_tensor: list[float] = field(default_factory=list[float])
    flat: list[float] = field(default_factory=list[float])
    cpu: dict[str, list[float]] = field(default_factory=dict[str, list[float]])


class CpuMeter:
    """CPU seconds per GB and member of one way's turns."""

    def __init__(self, timings: Timings, way: str, actors: int, named: Named) -> None:
        self._readings = timings.cpu.setdefault(way, [])
        self._gb = actors * sum(tensor.nbytes for _, tensor in named) / 1e9
        self._began_s = 0.0

    def __enter__(self) -> None:
        self._began_s = own_cpu_s()

    def __exit__(self, *_: object) -> None:
        self._readings.append((own_cpu_s() - self._began_s) / self._gb)


def print_row(actors: int, named: Named, timings: Timings) -> None:
    ours, confirmed, plain, flat = (
        statistics.median(values[1:] or [math.nan])
        for values in (timings.publisher, timings.confirmed, timings.per_tensor, timings.flat)
    )
    megabytes = sum(tensor.nbytes for _, tensor in named) / 1e6
    print(f"{actors:>6} {megabytes:>6.1f} {len(named):>7} | {ours:>11.4f} {confirmed:>11.4f} "
          f"{plain:>12.4f} {flat:>7.4f} | "
          f"{plain / ours:>15.2f} {flat / ours:>9.2f}", flush=True)  # fmt: skip
    cpu = {way: statistics.median(readings[1:]) for way, readings in timings.cpu.items()}
    figures = ", ".join(f"{way} {cpu_s:.3f}" for way, cpu_s in cpu.items())
    print(
        f"{'':>6} CPU s per GB and member: {figures}; flat / publisher {cpu['flat'] / cpu['publisher']:.2f}", flush=True
    )


def measure(actors: int, named: Named, repeats: int, transport: str) -> Timings:
    """One way after the other: together they would need three times the memory."""
    timings = Timings()
    with tempfile.TemporaryDirectory() as folder:
        measure_publisher(actors, named, repeats, Path(folder) / "publisher", timings, transport)
    with PerTensorFleet(actors, named) as plain:
        timings.per_tensor = plain.broadcasts(repeats + 1, CpuMeter(timings, "per tensor", actors, named))
    run_B = torch.cat(byte_views(named))
    with PerTensorFleet(actors, [("flat", run_B)]) as whole:
        timings.flat = whole.broadcasts(repeats + 1, CpuMeter(timings, "flat", actors, named))
    return timings


def measure_publisher(actors: int, named: Named, repeats: int, folder: Path, timings: Timings, transport: str) -> None:
    announced = threading.Event()

    def published(version: WeightVersion, broadcast_s: float) -> None:
        announced.set()

    # Whole versions: the tensors do not change from step to step, so differences would be empty.
    config = WeightsConfig(transport=transport, join_timeout_s=60.0, broadcast_timeout_s=TIMEOUT_S)
    meter = CpuMeter(timings, "publisher", actors, named)
    with (
        ActorFleet(digests=False) as fleet,
        Publisher(
            config, snapshot_dir=folder, post_plan=fleet.post_plan, published=published, expected_actors=actors
        ) as publisher,
    ):
        fleet.start(f"actor-{index}" for index in range(actors))
        for name in fleet.actors:
            fleet.report(name, TIMEOUT_S)  # it has started: on a busy machine that can take longer than joining may
        publisher.membership(fleet.membership())
        publisher.wait_idle(TIMEOUT_S)
        for step in range(1, repeats + 2):
            announced.clear()
            with meter:
                began_s = time.monotonic()
                publisher.publish(WeightVersion(0, step), named)
                announced.wait(TIMEOUT_S)
                timings.confirmed.append(time.monotonic() - began_s)
                staged = fleet.wait_for(WeightVersion(0, step), TIMEOUT_S)
            timings.publisher.append(max(s.at_s for s in staged.values()) - began_s)


class PerTensorFleet:
    """Processes that take one broadcast per tensor, from a default gloo group; one tensor of all bytes is "flat"."""

    def __init__(self, actors: int, named: Named) -> None:
        self._named = named
        self._store = host_store(HOST)
        self._members: list[tuple[BaseProcess, Connection]] = []
        context = fork_server()
        for rank in range(1, actors + 1):
            ours, theirs = context.Pipe()
            args = (theirs, self._store.port, rank, actors + 1, manifest_of(named))
            process = context.Process(target=per_tensor_member, args=args, daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))
        self._group = ProcessGroupGloo(self._store, 0, actors + 1, timedelta(seconds=TIMEOUT_S))

    def __enter__(self) -> PerTensorFleet:
        return self

    def __exit__(self, *_: object) -> None:
        for process, connection in self._members:
            connection.close()
            process.join(TIMEOUT_S)

    def broadcasts(self, n: int, meter: CpuMeter) -> list[float]:
        return [self._broadcast(meter) for _ in range(n)]

    def _broadcast(self, meter: CpuMeter) -> float:
        for _, connection in self._members:
            connection.send(None)
        for _, connection in self._members:
            connection.recv()  # memory is there
        with meter:
            began_s = time.monotonic()
            for _, tensor in self._named:
                self._group.broadcast(tensor, 0).wait()  # pyright: ignore
            ended_s: list[float] = [connection.recv() for _, connection in self._members]
        return max(ended_s) - began_s


def per_tensor_member(connection: Connection, port: int, rank: int, world_size: int, manifest: WeightManifest) -> None:
    torch.set_num_threads(1)
    store = connect_store(HOST, port, TIMEOUT_S)
    group = ProcessGroupGloo(store, rank, world_size, timedelta(seconds=TIMEOUT_S))
    while True:
        try:
            connection.recv()
        except EOFError:
            return
        tensors = [torch.zeros(spec.shape, dtype=torch_dtype(spec)) for spec in manifest.tensors]
        for tensor in tensors:
            tensor.fill_(1)
        connection.send(None)
        for tensor in tensors:
            group.broadcast(tensor, 0).wait()  # pyright: ignore
        connection.send(time.monotonic())
        tensors.clear()


if __name__ == "__main__":
    main()
