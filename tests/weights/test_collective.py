"""Weight groups over gloo: ranks are threads here, and processes where one has to die."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import stillhouse.weights.transports.collective
from stillhouse.weights.buckets import EqualBuckets, WholeTensors, manifest_of
from stillhouse.weights.errors import GroupBroken, GroupInterrupted, WeightsRefused
from stillhouse.weights.group_operations import Store, connect_store, host_store
from stillhouse.weights.transports.collective import WeightGroup
from tests.patience import PATIENCE_S
from tests.sim.weights.weight_actors import Fault, doomed_rank, fork_server

Named = list[tuple[str, Tensor]]
HOST = "127.0.0.1"
TIMEOUT_S = PATIENCE_S


def mixed_tensors(seed: int) -> Named:
    """Four dtypes; "large" is larger than four buckets of 1 KB."""
    generator = torch.Generator().manual_seed(seed)
    return [
        ("large", torch.randn(1_200, generator=generator)),
        ("half", torch.randn(7, 3, generator=generator).bfloat16()),
        ("transposed", torch.randn(5, 90, generator=generator).t()),
        ("flags", torch.rand(33, generator=generator) > 0.5),
        ("count", torch.tensor(seed)),
    ]


class Ranks:
    """All ranks of a group, each in a thread of its own."""

    def __init__(self, world_size: int) -> None:
        self.store = host_store(HOST)
        self.pool = ThreadPoolExecutor(world_size)
        stores = [self.store] + [connect_store(HOST, self.store.port, TIMEOUT_S) for _ in range(1, world_size)]
        self.groups = [self.group(store, rank, world_size) for rank, store in enumerate(stores)]

    def group(self, store: Store, rank: int, world_size: int) -> WeightGroup:
        return WeightGroup(store, group_epoch=1, rank=rank, world_size=world_size)

    def all(self, act: Callable[[WeightGroup], Any]) -> list[Future[Any]]:
        return [self.pool.submit(act, group) for group in self.groups]

    def join(self) -> None:
        for future in self.all(lambda group: group.join(TIMEOUT_S)):
            future.result()

    def broadcast(self, number: int, layout: EqualBuckets, named: Named) -> list[Future[Any]]:
        """Of the members, what they received."""
        sent = self.pool.submit(self.groups[0].send, number, layout, WholeTensors(named), TIMEOUT_S)
        received = [self.pool.submit(group.receive, number, layout, TIMEOUT_S) for group in self.groups[1:]]
        sent.result()
        return received

    def close(self) -> None:
        for group in self.groups:
            group.close()
        self.pool.shutdown()


@pytest.fixture
def four_ranks() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("bucket_bytes", [1_024, 1 << 20])
def test_all_members_get_equal_tensors_round_after_round(four_ranks: Ranks, bucket_bytes: int) -> None:
    four_ranks.join()
    layout = EqualBuckets(manifest_of(mixed_tensors(0)), bucket_bytes)
    for number in range(1, 4):
        named = mixed_tensors(number)
        for future in four_ranks.broadcast(number, layout, named):
            for (name, got), (sent_name, sent) in zip(future.result(), named, strict=True):
                assert name == sent_name and got.dtype == sent.dtype and torch.equal(got, sent), name


def test_tensors_that_lie_in_one_run_are_sent_as_they_lie(four_ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    four_ranks.join()
    layout = EqualBuckets(manifest_of(mixed_tensors(0)), 1_024)
    named = layout.views(torch.zeros(layout.total_bytes, dtype=torch.uint8))
    for (_, view), (_, tensor) in zip(named, mixed_tensors(1), strict=True):
        view.copy_(tensor)

    def gather(self: EqualBuckets, index: int, sources: list[Tensor], out_b: Tensor) -> None:
        raise AssertionError("there was nothing to gather")

    monkeypatch.setattr(EqualBuckets, "gather", gather)
    for future in four_ranks.broadcast(1, layout, named):
        for (name, got), (_, sent) in zip(future.result(), mixed_tensors(1), strict=True):
            assert torch.equal(got, sent), name


def test_the_next_bucket_is_gathered_while_the_one_before_is_on_its_way(
    four_ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    four_ranks.join()
    layout = EqualBuckets(manifest_of(mixed_tensors(0)), 1_024)
    steps: list[str] = []
    start, finish, gather = WeightGroup._start, WeightGroup._finish_oldest, EqualBuckets.gather  # pyright: ignore

    def log_start(group: WeightGroup, tensor: Tensor, deadline_s: float) -> None:
        start(group, tensor, deadline_s)
        if group is four_ranks.groups[0]:
            steps.append("start")

    def log_finish(group: WeightGroup, deadline_s: float) -> None:
        finish(group, deadline_s)
        if group is four_ranks.groups[0]:
            steps.append("finish")

    def log_gather(self: EqualBuckets, start: int, end: int, sources: list[Tensor], out_b: Tensor) -> None:
        steps.append("gather")
        gather(self, start, end, sources, out_b)

    monkeypatch.setattr(WeightGroup, "_start", log_start)
    monkeypatch.setattr(WeightGroup, "_finish_oldest", log_finish)
    monkeypatch.setattr(EqualBuckets, "gather", log_gather)
    for future in four_ranks.broadcast(1, layout, mixed_tensors(1)):
        future.result()
    assert steps[:6] == ["gather", "start", "gather", "start", "finish", "gather"]
    assert steps.count("gather") == layout.n_buckets > 4


def test_a_bucket_other_than_the_one_sent_is_refused(four_ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    four_ranks.join()
    layout = EqualBuckets(manifest_of(mixed_tensors(0)), 1_024)
    receive_started = threading.local()
    honest = stillhouse.weights.transports.collective.checksum

    def receive(group: WeightGroup) -> list[tuple[str, Tensor]]:
        receive_started.here = True
        return group.receive(1, layout, TIMEOUT_S)

    def lie(bucket_b: Tensor) -> Tensor:
        return honest(bucket_b) + (0 if hasattr(receive_started, "here") else 1)

    monkeypatch.setattr(stillhouse.weights.transports.collective, "checksum", lie)
    sent = four_ranks.pool.submit(four_ranks.groups[0].send, 1, layout, WholeTensors(mixed_tensors(1)), TIMEOUT_S)
    received = [four_ranks.pool.submit(receive, group) for group in four_ranks.groups[1:]]
    sent.result()
    for future in received:
        with pytest.raises(WeightsRefused, match=r"checksum differs in buckets \[0, 1"):
            future.result()


def test_ranks_that_are_not_in_the_same_round_notice(four_ranks: Ranks) -> None:
    four_ranks.join()
    layout = EqualBuckets(manifest_of(mixed_tensors(0)), 1_024)
    sent = four_ranks.pool.submit(four_ranks.groups[0].send, 2, layout, WholeTensors(mixed_tensors(1)), TIMEOUT_S)
    received = [four_ranks.pool.submit(group.receive, 1, layout, TIMEOUT_S) for group in four_ranks.groups[1:]]
    sent.result()
    for future in received:
        with pytest.raises(WeightsRefused, match="rank 0 sends round 2, expected 1"):
            future.result()


def test_joining_ends_at_the_deadline_when_a_member_never_comes() -> None:
    store = host_store(HOST)
    group = WeightGroup(store, group_epoch=1, rank=0, world_size=2)
    with pytest.raises(GroupBroken):
        group.join(0.5)
    group.close()


def test_a_broadcast_ends_at_the_deadline_when_a_member_never_takes_part(four_ranks: Ranks) -> None:
    four_ranks.join()
    named: Named = [("large", torch.zeros(16 << 20))]  # more than the sockets hold
    layout = EqualBuckets(manifest_of(named), 64 << 20)
    with pytest.raises(GroupBroken):
        four_ranks.groups[0].send(1, layout, WholeTensors(named), 1.0)


def test_waiting_ends_when_the_owner_says_so() -> None:
    stop = threading.Event()
    store = host_store(HOST)
    group = WeightGroup(
        store, group_epoch=1, rank=0, world_size=2, interrupted=lambda: "enough" if stop.is_set() else None
    )
    threading.Timer(0.2, stop.set).start()
    with pytest.raises(GroupInterrupted, match="enough"):
        group.join(3.0)
    group.close()


def test_a_member_killed_inside_a_broadcast_breaks_it_for_the_others_long_before_the_deadline() -> None:
    """Rank 1 of 3 is a process that kills itself in its third wait; the others would wait for two minutes."""
    store = host_store(HOST)
    named: Named = [("large", torch.zeros(4 << 20))]
    layout = EqualBuckets(manifest_of(named), 1 << 20)
    args = (HOST, store.port, 1, 3, layout, Fault(signal.SIGKILL, at_operation=3))
    victim = fork_server().Process(target=doomed_rank, args=args, daemon=True)
    victim.start()
    survivors = [
        WeightGroup(store, group_epoch=1, rank=0, world_size=3),
        WeightGroup(connect_store(HOST, store.port, TIMEOUT_S), group_epoch=1, rank=2, world_size=3),
    ]
    with ThreadPoolExecutor(2) as pool:
        for joined in [pool.submit(group.join, TIMEOUT_S) for group in survivors]:
            joined.result()
        sent = pool.submit(survivors[0].send, 1, layout, WholeTensors(named), 120.0)
        received = pool.submit(survivors[1].receive, 1, layout, 120.0)
        with pytest.raises(GroupBroken):
            sent.result()
        survivors[0].close()
        with pytest.raises(GroupBroken):
            received.result()
        survivors[1].close()
    victim.join()
    assert victim.exitcode == -signal.SIGKILL
    victim.close()


def test_the_store_listens_on_its_host_only_and_says_which_port() -> None:
    store = host_store(HOST)
    assert store.port > 0
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", store.port), timeout=2.0)
    with socket.create_connection((HOST, store.port), timeout=2.0):
        pass


def test_a_store_that_is_gone_is_reported_at_once() -> None:
    with socket.create_server((HOST, 0)) as server:
        port: int = server.getsockname()[1]
    with pytest.raises(GroupBroken, match="no TCP store"):
        connect_store(HOST, port, 60.0)
