"""Weights for a vLLM server, whose workers (engines/vllm/worker) are members of the learner's group.

    join     stillhouse_join
    take     stillhouse_receive: all buckets in one call, which ends at its deadline
             from a file: stillhouse_reload
    leave    stillhouse_leave

Each is a call of the worker processes, POST /collective_rpc. No torch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from stillhouse.engines.http.link import RequestRefused
from stillhouse.engines.http.weights import WeightsOverHTTP
from stillhouse.engines.vllm.engine import VLLMEngine
from stillhouse.engines.vllm.verify import VLLMVerifier
from stillhouse.protocol.messages import WeightPlan
from stillhouse.weights.errors import Interrupted
from stillhouse.weights.manifest import WeightBucket, smallest_tensor_bucket

_RPC: Final = "/collective_rpc"
_SCRATCH: Final = "scratch"


class _Said(msgspec.Struct, frozen=True):
    error: str = ""


class _Reply(msgspec.Struct, frozen=True):
    """An answer per worker process."""

    results: list[_Said | None]


class VLLMWeights(WeightsOverHTTP[VLLMEngine]):
    """A WeightSink (weights.sink)."""

    _updates_name = False
    _no_ipc = "by ipc no vLLM server gets weights; expected weights.transport = auto, collective or wire"

    def __init__(self, engine: VLLMEngine, *, student: str) -> None:
        super().__init__(engine, VLLMVerifier(engine), student=student)
        self._confirms = False

    def _join_group(self, plan: WeightPlan, rank: int, deadline_s: float, interrupted: Interrupted) -> None:
        self._confirms = plan.backend == "nccl"
        self._call(
            "stillhouse_join",
            {
                "host": plan.host,
                "port": plan.port,
                "rank_offset": rank,
                "world_size": plan.world_size,
                "name": plan.group_name,
                "backend": plan.backend,
            },
            deadline_s,
            interrupted,
        )

    def _leave_group(self, name: str) -> None:
        self._read(self._post(_RPC, {"method": "stillhouse_leave", "kwargs": {"name": name}}))

    def _receive(
        self, buckets: Sequence[WeightBucket], label: dict[str, str], deadline_s: float, interrupted: Interrupted
    ) -> None:
        self._known = False
        said: list[list[Any]] = [[[spec.name, spec.dtype, spec.shape] for spec in one.tensors] for one in buckets]
        if self._confirms:  # an operation that was aborted looks finished; the next one then fails
            said.append([[_SCRATCH, spec.dtype, spec.shape] for spec in smallest_tensor_bucket(buckets).tensors])
        self._call("stillhouse_receive", {"name": self._group_name, "buckets": said}, deadline_s, interrupted)

    def _from_disk(self, folder: str, label: dict[str, str]) -> tuple[str, dict[str, Any]]:
        return _RPC, {"method": "stillhouse_reload", "kwargs": {"folder": folder}}

    def _read(self, reply: bytes) -> None:
        for said in msgspec.json.decode(reply, type=_Reply).results:
            if said is not None and said.error:
                raise RequestRefused(f"{self._server.url}: {said.error}")

    def _call(self, method: str, words: dict[str, Any], deadline_s: float, interrupted: Interrupted) -> None:
        """Call all workers, which end at the deadline."""
        words = words | {"timeout_s": max(deadline_s - time.monotonic(), 0.1)}
        self._read(self._ask(_RPC, {"method": method, "kwargs": words}, deadline_s, interrupted, ends_in_s=0.0))
