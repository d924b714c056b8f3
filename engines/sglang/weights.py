"""Weights for an SGLang server, which is the member of the learner's group.

    join     POST /init_weights_update_group
    take     a POST per bucket (the server receives one broadcast in each), between begin and end; over NCCL:
             synchronise, one tensor again, synchronise
             by wire: POST /update_weights_from_disk
             by ipc: for each bucket POST /update_weights_from_tensor, synchronise
    leave    POST /destroy_weights_update_group

The prefix cache is flushed with the old weights, except in mode `in_place`, where requests keep using it. No torch.
"""

# Why it is so: docs/decisions/sglang-weights.md

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from stillhouse.engines.base import Int32s, ScoreRequest
from stillhouse.engines.http.link import RequestRefused, ServerUnavailable
from stillhouse.engines.http.verify import Ask, NotComparedError, ServerVerifier
from stillhouse.engines.http.weights import MORE_PATIENCE, WeightsOverHTTP
from stillhouse.engines.sglang.engine import SGLangEngine
from stillhouse.engines.sglang.features import SCORED
from stillhouse.engines.sglang.requests import bucket_update, disk_update, tensor_update
from stillhouse.engines.sglang.scorer import decode_scores
from stillhouse.engines.sglang.tensor_payload import tensor_payload
from stillhouse.protocol.messages import WeightPlan, WeightVersion
from stillhouse.weights.checks import Checksums, parse_checksums
from stillhouse.weights.control_messages import CudaHandle, WeightCheck
from stillhouse.weights.errors import Interrupted
from stillhouse.weights.manifest import WeightBucket, smallest_tensor_bucket
from stillhouse.weights.wire import WireMember

_CHECKER: Final = "/weights_checker"


class _Reply(msgspec.Struct, frozen=True):
    success: bool = True
    message: str = ""


class SGLangVerifier(ServerVerifier):
    def _score(self, ids: Int32s, ask: Ask) -> list[float]:
        body: dict[str, Any] = {
            "input_ids": ids.tolist(),
            "sampling_params": SCORED,
            "return_logprob": True,
            "logprob_start_len": 0,
            # A new key of the prefix cache, so that no entry of other weights is used.
            "extra_key": f"canary {secrets.token_hex(4)}",
        }
        reply = ask("/generate", body)
        return decode_scores(reply, ScoreRequest(ids, 1), vocab_size=self._engine.vocab_size).logprobs.tolist()

    def _checksums(self, ask: Ask) -> Checksums:
        try:
            said = parse_checksums(ask(_CHECKER, {"action": "checksum"}))
        except RequestRefused as error:
            raise NotComparedError(str(error)) from error
        if not said:
            raise NotComparedError(f"{_CHECKER} gave an unknown reply")
        return said


class ServerWeights(WeightsOverHTTP[SGLangEngine]):
    """A WeightSink (weights.sink)."""

    _updates_name = True

    def __init__(self, engine: SGLangEngine, *, student: str, ours: bool) -> None:
        """`ours`: the launcher started the server."""
        super().__init__(engine, SGLangVerifier(engine), student=student)
        self._no_ipc = "" if ours else "by ipc only servers that the launcher started get weights: they read a pickle"
        self._session_open = False
        self._answers_when_queued = False

    def _join_group(self, plan: WeightPlan, rank: int, deadline_s: float, interrupted: Interrupted) -> None:
        self._answers_when_queued = plan.backend == "nccl"
        body = {
            "master_address": plan.host,
            "master_port": plan.port,
            "rank_offset": rank,
            "world_size": plan.world_size,
            "group_name": plan.group_name,
            "backend": plan.backend,
        }
        self._call("/init_weights_update_group", body, deadline_s, interrupted)

    def _leave_group(self, name: str) -> None:
        """Raises RequestRefused when the server is not in the group. With NCCL the server waits for pending operations,
        for ever if a peer is dead, and its scheduler does nothing else meanwhile: then ServerLost."""
        limit_s = MORE_PATIENCE * self._engine.config.control_timeout_s
        try:
            self._post("/destroy_weights_update_group", {"group_name": name}, limit_s)
        except ServerUnavailable as error:
            if not isinstance(error.__cause__, TimeoutError):
                raise
            self._lose(f"did not leave weight group {name} within {limit_s:g} s")

    def _receive(
        self, buckets: Sequence[WeightBucket], label: dict[str, str], deadline_s: float, interrupted: Interrupted
    ) -> None:
        self._open_session()
        self._known = False
        for index, bucket in enumerate(buckets):
            last = index == len(buckets) - 1
            body = self._update(bucket, label if last else {}, last=last)
            self._call("/update_weights_from_distributed", body, deadline_s, interrupted)
        if self._answers_when_queued:
            self._confirm(buckets, deadline_s, interrupted)
        self._close_session()
        if self._answers_when_queued:
            self._synchronise(deadline_s, interrupted)

    def _open(
        self,
        wire: WireMember,
        number: int,
        buckets: Sequence[WeightBucket],
        label: dict[str, str],
        deadline_s: float,
        interrupted: Interrupted,
    ) -> None:
        self._open_session()
        self._known = False
        shared = wire.shared(number, len(buckets), deadline_s, interrupted)
        for index, (bucket, one) in enumerate(zip(buckets, shared, strict=True)):
            last = index == len(buckets) - 1
            payloads = [tensor_payload(handle, bucket) for handle in one.handles]
            body = tensor_update(payloads, flush=last and self._flushes) | (label if last else {})
            self._ask("/update_weights_from_tensor", body, deadline_s, interrupted)
            if any(isinstance(handle, CudaHandle) for handle in one.handles):
                self._synchronise(deadline_s, interrupted)  # it answers when the copies are queued
        self._close_session()

    def _from_disk(self, folder: str, label: dict[str, str]) -> tuple[str, dict[str, Any]]:
        return "/update_weights_from_disk", disk_update(folder, flush=self._flushes) | label

    def _abandon_update(self) -> None:
        session_open, self._session_open = self._session_open, False
        if session_open:
            self._post("/end_weight_update", {})

    def _update(self, bucket: WeightBucket, label: dict[str, str], *, last: bool) -> dict[str, Any]:
        return bucket_update(bucket, str(self._group_name), flush=last and self._flushes) | label

    def _check(self, check: WeightCheck, version: WeightVersion, deadline_s: float, interrupted: Interrupted) -> None:
        if check.canary is not None:
            self._engine.take_again()  # its forward pass writes into the KV cache
        super()._check(check, version, deadline_s, interrupted)

    def _synchronise(self, deadline_s: float, interrupted: Interrupted) -> None:
        """Over NCCL a server answers as soon as a bucket is queued. A checksum request makes it synchronise its device
        first (sglang.srt.utils.weight_checker, _compute_checksum)."""
        try:
            self._ask(_CHECKER, {"action": "checksum", "skip_tensor_list": [""]}, deadline_s, interrupted)
        except RequestRefused as error:
            self._verify.skip(str(error))

    def _confirm(self, buckets: Sequence[WeightBucket], deadline_s: float, interrupted: Interrupted) -> None:
        """An operation that the server's watchdog aborted looks finished, even to the server. So after the last one it
        is sent the smallest tensor again, which it refuses on an aborted communicator."""
        self._synchronise(deadline_s, interrupted)
        body = self._update(smallest_tensor_bucket(buckets), {}, last=False)
        self._call("/update_weights_from_distributed", body, deadline_s, interrupted)

    @property
    def _flushes(self) -> bool:
        return self._engine.config.update_mode != "in_place"

    def _open_session(self) -> None:
        if not self._engine.features.update_sessions:
            return
        self._session_open = True
        try:
            self._post("/begin_weight_update", {})
        except RequestRefused:  # a former actor died with a session open
            self._post("/end_weight_update", {})
            self._post("/begin_weight_update", {})

    def _close_session(self) -> None:
        if self._session_open:
            self._post("/end_weight_update", {})
            self._session_open = False

    def _call(self, path: str, body: dict[str, Any], deadline_s: float, interrupted: Interrupted) -> None:
        """Send a request during which the server may get stuck for good."""
        text = self._ask(path, body, deadline_s, interrupted, ends_in_s=0.0)
        reply = msgspec.json.decode(text, type=_Reply)
        if not reply.success:
            raise RequestRefused(f"{self._server.url}{path}: {reply.message}")
