"""The segments of `bench/transfer/wire.py` through a `ray.util.queue.Queue`, with all of Ray's CPU time.

The driver puts, a task in another process takes. Ray's processes (raylet, GCS, the queue's actor, workers) count too:
without them there is no queue. "ray" has at most WINDOW puts, and as many gets, under way, each of one segment, and a
put counts when its answer has come. "ray by 64" uses the queue's own calls for several items.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import time
from collections import deque
from typing import Any, Final, TypeAlias

import numpy.typing as npt

from bench.role_cpu import own_cpu_s

Segment: TypeAlias = tuple[bytes, *tuple[npt.NDArray[Any], ...]]
"""Header and arrays."""

BATCH: Final = 64
"""Segments per call of "ray by 64"."""


def available() -> bool:
    return importlib.util.find_spec("ray") is not None


class RayQueue:
    """A Ray of its own, with one queue."""

    def __init__(self) -> None:
        self._ray: Any = importlib.import_module("ray")
        # num_cpus only bounds how many tasks Ray runs at a time.
        self._ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
        queue: Any = importlib.import_module("ray.util.queue")
        self._queue: Any = queue.Queue()
        self._take_each: Any = self._ray.remote(_take_each)
        self._take_batches: Any = self._ray.remote(_take_batches)

    def close(self) -> None:
        self._queue.shutdown(force=True)
        self._ray.shutdown()

    def drive(self, item: Segment, seconds: float, window: int, *, batches: bool) -> tuple[int, float, float]:
        """Segments that were put and taken, the seconds, and the CPU seconds of all processes."""
        take = self._take_batches if batches else self._take_each
        taker = take.remote(self._queue, window)
        cpu_s, began_s = own_cpu_s(), time.perf_counter()
        under_way: deque[Any] = deque()
        batch = [_copied(item) for _ in range(BATCH)]  # pickle writes one object only once, however often it is there
        n = 0
        while time.perf_counter() < began_s + seconds:
            if batches:
                under_way.append(self._queue.actor.put_nowait_batch.remote(batch))
            else:
                under_way.append(self._queue.actor.put.remote(item))
            n += BATCH if batches else 1
            if len(under_way) * (BATCH if batches else 1) >= window:
                self._ray.get(under_way.popleft())
        self._ray.get(list(under_way))
        self._queue.put_nowait_batch([None] * window)  # the taker's end
        taken = self._ray.get(taker, timeout=60.0)
        taken_s, taken_cpu_s = time.perf_counter() - began_s, own_cpu_s() - cpu_s
        if taken != n:
            raise RuntimeError(f"{n} segments were put and {taken} were taken")
        return n, taken_s, taken_cpu_s

    def round_trip_s(self, item: Segment, n: int) -> float:
        """Median of blocking puts, one at a time, until each is in the queue."""
        times_s: list[float] = []
        for _ in range(n):
            began_s = time.perf_counter()
            self._queue.put(item)
            times_s.append(time.perf_counter() - began_s)
        return statistics.median(times_s)


def measure(
    item: Segment, seconds: float, n_round_trips: int, window: int, *, batches: bool
) -> tuple[float, float, float]:
    """Segments per second, CPU seconds per segment, and seconds of a put."""
    queue = RayQueue()
    try:
        queue.drive(item, seconds / 4, window, batches=batches)  # warm up
        n, taken_s, cpu_s = queue.drive(item, seconds, window, batches=batches)
        return n / taken_s, cpu_s / n, queue.round_trip_s(item, n_round_trips)
    finally:
        queue.close()


def _copied(item: Segment) -> Segment:
    header, *arrays = item
    return bytes(bytearray(header)), *(array.copy() for array in arrays)


def _take_each(queue: Any, window: int) -> int:
    """Take single items, with several gets under way, until each of these has got a None."""
    ray: Any = importlib.import_module("ray")
    under_way: deque[Any] = deque(queue.actor.get.remote() for _ in range(window))
    n = 0
    while under_way:
        if ray.get(under_way.popleft()) is not None:
            n += 1
            under_way.append(queue.actor.get.remote())
    return n


def _take_batches(queue: Any, window: int) -> int:
    """Take items in batches, as many as are there, until `window` times None came."""
    n = n_ends = 0
    while n_ends < window:
        size = queue.qsize()
        if not size:
            time.sleep(0.0005)
            continue
        items = queue.get_nowait_batch(min(size, window))
        n_ends += sum(item is None for item in items)
        n += sum(item is not None for item in items)
    return n
