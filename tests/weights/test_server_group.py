"""Rank 0 of the servers' group, against processes whose ranks are made as SGLang's init_custom_process_group does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from stillhouse.weights.buckets import PackedLayout, WholeTensors, manifest_of
from stillhouse.weights.errors import GroupBroken, GroupInterrupted
from stillhouse.weights.group_operations import host_store
from stillhouse.weights.manifest import WeightBucket
from stillhouse.weights.transports.servers import ServerGroup
from tests.patience import PATIENCE_S
from tests.sim.weights.weight_actors import fork_server

HOST = "127.0.0.1"
NAME = "weights-test-1"
TIMEOUT_S = PATIENCE_S


def tensors() -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        ("half", torch.randn(7, 3, generator=generator).bfloat16()),
        ("large", torch.randn(1_200, generator=generator)),
        ("count", torch.tensor(7)),
    ]


def server_rank(port: int, rank: int, world_size: int, buckets: tuple[WeightBucket, ...], pipe: Connection) -> None:
    """What an SGLang scheduler does with /init_weights_update_group and one bucket after the other."""
    c10d: Any = distributed_c10d
    try:
        timeout = timedelta(seconds=60)
        pipe.send("coming")
        rendezvous = c10d.rendezvous(f"tcp://{HOST}:{port}", rank, world_size, timeout=timeout)
        store, rank, world_size = next(rendezvous)
        store = c10d.PrefixStore(NAME, store)
        group, _ = c10d._new_process_group_helper(
            world_size, rank, [], c10d.Backend("gloo"), store, group_name=NAME, timeout=timeout
        )
        c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
        for bucket in buckets:
            flat = torch.empty(bucket.end - bucket.start, dtype=torch.uint8)
            dist.broadcast(flat, src=0, group=group)
            at = 0
            for spec in bucket.tensors:
                tensor = flat[at : at + spec.n_bytes].view(getattr(torch, spec.dtype)).view(spec.shape)
                pipe.send((spec.name, str(tensor.dtype), tensor.tolist()))
                at += spec.n_bytes
        pipe.send("done")
    except Exception as error:
        pipe.send(f"failed: {error}"[:200])
    pipe.recv()


class ServerRanks:
    """Ranks 1 .. n, and our rank 0."""

    def __init__(self, n: int, *, absent: int = 0, interrupted: Callable[[], str | None] = lambda: None) -> None:
        named = tensors()
        self.layout = PackedLayout(manifest_of(named), 1_024)
        run_B = torch.zeros(self.layout.total_bytes, dtype=torch.uint8)
        self.views = self.layout.views(run_B)
        for (_, view), (_, tensor) in zip(self.views, named, strict=True):
            view.copy_(tensor)
        store = host_store(HOST)
        world_size = n + absent + 1
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for rank in range(1, n + 1):
            ours, theirs = fork_server().Pipe()
            args = (store.port, rank, world_size, self.layout.buckets, theirs)
            process = fork_server().Process(target=server_rank, args=args, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        for index in range(n):
            assert self.said(index) == "coming"
        self.group = ServerGroup(
            store,
            group_name=NAME,
            world_size=world_size,
            backend="gloo",
            device="cpu",
            address=HOST,
            interrupted=interrupted,
        )

    def said(self, index: int) -> Any:
        assert self.pipes[index].poll(TIMEOUT_S), "it says nothing"
        return self.pipes[index].recv()

    def __enter__(self) -> ServerRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.group.close()
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            process.join(TIMEOUT_S)
            pipe.close()


@pytest.mark.parametrize("connects_late", [False, True])
def test_ranks_made_by_torchs_own_helper_get_every_tensor(connects_late: bool) -> None:
    """`connects_late` is NCCL's way; over gloo it changes nothing but the thread."""
    with ServerRanks(2) as ranks:
        ranks.group.join(TIMEOUT_S)
        ranks.group._connects_late = connects_late  # pyright: ignore[reportPrivateUsage]
        ranks.group.send(1, ranks.layout, WholeTensors(ranks.views), TIMEOUT_S)
        expected = {name: (str(tensor.dtype), tensor.tolist()) for name, tensor in tensors()}
        for index in range(2):
            got = {name: (dtype, values) for name, dtype, values in (ranks.said(index) for _ in expected)}
            assert got == expected
            assert ranks.said(index) == "done"


def test_servers_that_wait_for_one_that_never_comes_are_free_as_soon_as_rank_0_gives_up() -> None:
    stop = threading.Event()
    with ServerRanks(1, absent=1, interrupted=lambda: "enough" if stop.is_set() else None) as ranks:
        threading.Timer(0.3, stop.set).start()
        with pytest.raises(GroupInterrupted, match="enough"):
            ranks.group.join(TIMEOUT_S)
        ranks.group.close()
        assert ranks.said(0).startswith("failed")


def test_meeting_ends_at_the_deadline() -> None:
    with ServerRanks(0, absent=1) as ranks, pytest.raises(GroupBroken):
        ranks.group.join(0.5)


def test_tensors_that_do_not_lie_in_one_run_are_gathered_into_it() -> None:
    with ServerRanks(1) as ranks:
        ranks.group.join(TIMEOUT_S)
        ranks.group.send(1, ranks.layout, WholeTensors(tensors()), TIMEOUT_S)
        expected = {name: (str(tensor.dtype), tensor.tolist()) for name, tensor in tensors()}
        assert {name: (dtype, values) for name, dtype, values in (ranks.said(0) for _ in expected)} == expected
        assert ranks.said(0) == "done"
