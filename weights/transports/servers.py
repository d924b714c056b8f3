"""Rank 0 of the update group of SGLang servers. The other ranks run SGLang's own code, which determines all of this.

    rendezvous   TCPStore at the plan's host:port, keys under GROUP, then GROUP/, then cpu/ (gloo) or cuda/ (nccl), as
                 torch's _new_process_group_helper nests them; gloo connects all with all at once, NCCL in its first
                 operation
    round        one broadcast per bucket of whole tensors (weights.manifest), without greeting or checksums; with NCCL
                 also the smallest tensor once more, which fails on a server whose part was aborted

A server waits in the rendezvous and in broadcasts with its own timeout of up to half an hour, which cannot be set. It
is freed when the connection it waits on breaks. So each group has a TCP store of its own, which ends with the group,
and `close` closes our end of all connections.
"""

from __future__ import annotations

import time
from typing import Final

import torch
from torch import Tensor

from stillhouse.weights.buckets import BucketLayout, Content, PackedLayout
from stillhouse.weights.errors import GroupBroken, Interrupted
from stillhouse.weights.group_operations import (
    WAIT_SLICE_S,
    BackendName,
    GroupOperations,
    Store,
    connect_store,
    host_store,
    prefixed,
)
from stillhouse.weights.manifest import WeightManifest, smallest_tensor_bucket
from stillhouse.weights.roster import GroupSeat
from stillhouse.weights.transport import Transport, TransportSetup
from stillhouse.weights.transports.collective import CollectiveTransport

LATE_S: Final = 1.5
"""Time between the request to a server to join and its arrival at the store."""

_DEVICE_PREFIX: Final[dict[BackendName, str]] = {"gloo": "cpu/", "nccl": "cuda/"}
"""Prefix of the first device that torch lists for a backend; the group serves all devices."""


class ServerGroup(GroupOperations):
    """Rank 0 of one group, for one thread: `join`, then `send`, then `close`."""

    def __init__(
        self,
        store: Store,
        *,
        group_name: str,
        world_size: int,
        backend: BackendName,
        device: torch.device | str,
        address: str,
        interrupted: Interrupted,
    ) -> None:
        """`store`: hosted here for this group only; the caller must not keep a reference."""
        super().__init__(
            rank=0, world_size=world_size, backend=backend, device=device, address=address, interrupted=interrupted
        )
        self._hosted: Store | None = store
        self._meeting = False
        self._group_name = group_name

    def join(self, timeout_s: float) -> None:
        """Meet the servers, which are asked to join over HTTP at the same time. Raises GroupBroken or
        GroupInterrupted."""
        if self._hosted is None:
            raise GroupBroken(f"{self!r} is closed")
        self._meeting = True
        # A separate connection, so that our end does not keep the store itself alive.
        connection = connect_store(self._hosted.host, self._hosted.port, timeout_s)
        store = prefixed(connection, self._group_name, f"{self._group_name}/", _DEVICE_PREFIX[self._backend])
        self._group = self._patiently(
            lambda: self._make_group(store, timeout_s, lazy=False), time.monotonic() + timeout_s + WAIT_SLICE_S
        )
        self._meeting = self._connects_late  # with gloo all ranks have met by now

    def send(self, round_number: int, layout: BucketLayout, content: Content, timeout_s: float) -> None:
        """Broadcast the tensors. Returns when the bytes have left this process. Raises GroupBroken or
        GroupInterrupted."""
        if not isinstance(layout, PackedLayout):
            raise TypeError(f"round {round_number}: got a {type(layout).__name__}; servers take whole tensors")
        buckets = layout.buckets
        if self._backend == "nccl":
            buckets = (*buckets, smallest_tensor_bucket(buckets))
        deadline_s = time.monotonic() + timeout_s
        self._send_buckets(layout, content, [(bucket.start, bucket.end) for bucket in buckets], deadline_s)
        self._finish_all(deadline_s)

    def _start(self, tensor: Tensor, deadline_s: float) -> None:
        super()._start(tensor, deadline_s)
        self._meeting = False

    def close(self) -> None:
        """Also ends the store, which frees servers that wait in the rendezvous. A server that has not reached it yet
        would retry for half an hour, so after a failed `join` the store stays for a moment."""
        if self._meeting:
            time.sleep(LATE_S)
        self._meeting = False
        self._hosted = None
        super().close()


class ServerTransport(CollectiveTransport):
    """Broadcasts to SGLang servers. The store at which they wait must end with its group."""

    def _meet_at(self) -> int:
        self._store = None  # frees its port for the next one
        self._store = host_store(self._config.host, self._config.store_port)
        return self._store.port

    def _open(self, seats: tuple[GroupSeat, ...]) -> ServerGroup:
        store, self._store = self._store, None  # the group must hold the only reference, to be able to end it
        if store is None:
            raise RuntimeError("a group is made from a plan that names its store")
        return ServerGroup(
            store,
            group_name=self._group_name,
            world_size=self._world_size(seats),
            backend=self._backend,
            device=self._device,
            address=self._config.host,
            interrupted=lambda: self._stop_reason(seats),
        )

    def _layout_of(self, manifest: WeightManifest) -> PackedLayout:
        return PackedLayout(manifest, self._config.bucket_bytes)


def collective(setup: TransportSetup) -> Transport:
    """`weights.transport = collective`: broadcasts to embedded engines, or to SGLang servers."""
    return (ServerTransport if setup.members.kind == "servers" else CollectiveTransport)(setup)
