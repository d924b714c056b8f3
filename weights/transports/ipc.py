"""Versions as memory that the members map, on the learner's GPU by CUDA IPC, or on a CPU as a shared segment.

    learner    the copy of the weights is shared memory | Round: its handles, checksums |            wait for answers
    member                                              | open, copy out, checksum of what is there, prove, Answer |

So a version costs the members one copy, and nothing goes through host memory or a socket. The learner keeps two copies,
which take turns: a member that is late may find newer bytes in place of those that it reads. Embedded engines therefore
compare checksums after they have copied, before they use anything; a server that is late stays paused until it gets the
next whole version. Whoever fails does not hold up the others. SGLang servers take it by a route that wants a pickle,
which is written beside the server (engines.sglang.tensor_payload); only handles go to the members.
"""

from __future__ import annotations

import torch
from msgspec.structs import replace
from torch import Tensor

from stillhouse.protocol.messages import WeightsRef
from stillhouse.weights.buckets import BucketLayout, Content, EqualBuckets, PackedLayout, checksum
from stillhouse.weights.control_messages import Round, SharedRun, WeightCheck
from stillhouse.weights.group_host import GroupHost, NotSent
from stillhouse.weights.manifest import WeightManifest
from stillhouse.weights.roster import GroupSeat
from stillhouse.weights.shared_memory import NoSharedMemory, export, is_shareable, shareable
from stillhouse.weights.staged_weights import Former, StagedVersion
from stillhouse.weights.transport import TransportSetup
from stillhouse.weights.transports.folder import NoGroup


class IpcTransport(GroupHost):
    """Members on this machine open the learner's copy of the weights."""

    backend = "ipc"
    independent = True

    def __init__(self, setup: TransportSetup) -> None:
        super().__init__(setup)
        self._run_B: Tensor | None = None
        """The version, where the copies are not one run of shared memory: those of a learner of several ranks."""

    def _meet_at(self) -> int:
        return 0

    def _open(self, seats: tuple[GroupSeat, ...]) -> NoGroup:
        return NoGroup()

    def _layout_of(self, manifest: WeightManifest) -> BucketLayout:
        kind = EqualBuckets if self._members.kind == "engines" else PackedLayout
        return kind(manifest, self._config.bucket_bytes)

    def _header(
        self,
        weights: StagedVersion,
        check: WeightCheck | None,
        timeout_s: float,
        file: WeightsRef | None,
        former: Former | None,
    ) -> tuple[BucketLayout, Round]:
        layout, header = super()._header(weights, check, timeout_s, file, former)
        try:
            return layout, replace(header, shared=self._shared(layout, weights.content))
        except NoSharedMemory as error:
            raise NotSent(str(error)) from error

    def _shared(self, layout: BucketLayout, content: Content) -> SharedRun:
        run_B = content.in_place(layout)
        if run_B is None or not is_shareable(run_B):
            if self._run_B is None or self._run_B.numel() != layout.total_bytes:
                self._run_B = shareable(layout.total_bytes, torch.device("cpu") if run_B is None else run_B.device)
            content.read(layout, 0, layout.total_bytes, self._run_B)
            run_B = self._run_B
        engines = self._members.kind == "engines"
        sums = [checksum(run_B[slice(*layout.bounds(i))]).item() for i in range(layout.n_buckets if engines else 0)]
        each = range(self._members.ranks_each)
        return SharedRun(tuple(tuple(export(run_B) for _ in each) for _ in self._seats), tuple(map(int, sums)))
