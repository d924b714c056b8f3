"""Weights for a vLLM server, whose workers (engines/vllm/worker) are members of the learner's group.

    join     stillhouse_join
    take     stillhouse_receive: all buckets in one call, which ends at its deadline
             from a file: stillhouse_reload
    leave    stillhouse_leave

Each is a call of the worker processes, POST /collective_rpc. No torch.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Final

import msgspec

from stillhouse.engines.base import Int32s
from stillhouse.engines.http.link import RequestRefused
from stillhouse.engines.http.stream import StreamError
from stillhouse.engines.http.verify import Ask, NotComparedError, ServerVerifier
from stillhouse.engines.http.weights import WeightsOverHTTP
from stillhouse.engines.vllm.engine import VLLMEngine
from stillhouse.engines.vllm.http import GENERATE
from stillhouse.engines.vllm.replies import decode_reply
from stillhouse.protocol.messages import WeightPlan
from stillhouse.weights.checks import Checksums
from stillhouse.weights.errors import Interrupted
from stillhouse.weights.manifest import WeightBucket, smallest_tensor_bucket

_RPC: Final = "/collective_rpc"
_SCRATCH: Final = "scratch"
_OF_NOTHING: Final = sha256().hexdigest()


class _Said(msgspec.Struct, frozen=True):
    error: str = ""


class _Reply(msgspec.Struct, frozen=True):
    """An answer per worker process."""

    results: list[_Said | None]


class _Checksums(msgspec.Struct, frozen=True):
    checksums: dict[str, str]


class VLLMVerifier(ServerVerifier):
    def _score(self, ids: Int32s, ask: Ask) -> list[float]:
        body: dict[str, Any] = {
            "token_ids": ids.tolist(),
            "sampling_params": {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0, "detokenize": False},
            "cache_salt": f"canary {secrets.token_hex(16)}",  # so that no cache of other weights is used
        }
        rows = decode_reply(ask(GENERATE, body)).prompt_logprobs or []
        if len(rows) != len(ids):
            raise StreamError(f"{len(rows)} rows of prompt log-probs for {len(ids)} tokens")
        found = [(row or {}).get(token) for token, row in zip(ids.tolist()[1:], rows[1:], strict=True)]
        if None in found:
            raise StreamError("prompt log-probs of other tokens than the prompt's")
        return [entry.logprob for entry in found if entry is not None]

    def _checksums(self, ask: Ask) -> Checksums:
        """vLLM's kernels on a CPU keep weights in a layout of their own, and its checksums are then those of empty
        tensors."""
        try:
            said = msgspec.json.decode(ask("/weight_checker", {"action": "checksum"}), type=_Checksums).checksums
        except (RequestRefused, msgspec.DecodeError) as error:
            raise NotComparedError(str(error)) from error
        if not said or _OF_NOTHING in said.values():
            raise NotComparedError("the server's checksums leave out tensors that its kernels hold")
        return [said]


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
