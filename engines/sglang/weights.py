"""Weights for an SGLang server: the server is the member of the learner's group, and this controls it over HTTP.

    join     POST /init_weights_update_group
    take     pause, begin, a POST per bucket (the server receives one broadcast in each), over NCCL: synchronise, one
             tensor again, synchronise; end, check, resume
             from a file: pause, POST /update_weights_from_disk, check, resume
             by ipc: pause, begin, for each bucket POST /update_weights_from_tensor, synchronise; end, check, resume
             by wire: written to a file in the system's folder for temporary ones, then as from a file
    prepare  the same, from the student's own folder
    leave    POST /destroy_weights_update_group

A bucket that has arrived is in the model. So between the first bucket and the end of a version the weights are unknown
(`version` is None), and the engine stays paused until a whole version has arrived, by broadcast or from disk. With a
check, the server gets the version's label only after passing; a server that fails it is lost.

A server stuck in a collective answers no update request and cannot be freed over HTTP, but it is freed when the peer it
waits for leaves or dies. It gets `control_timeout_s` for that, and three times more if it still answers health checks:
then probably another server hangs, which is declared lost and ended meanwhile. After that it is lost.

The prefix cache is flushed with the old weights, except in mode `in_place`, where requests keep using it. Requests are
never aborted from here. No torch.
"""

# Why it is so: docs/decisions/sglang-weights.md

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NoReturn

import msgspec

from stillhouse.engines.http.link import RequestRefused, ServerLost, ServerUnavailable
from stillhouse.engines.sglang.engine import SGLangEngine
from stillhouse.engines.sglang.requests import bucket_update, disk_update, tensor_update
from stillhouse.engines.sglang.tensor_payload import tensor_payload
from stillhouse.engines.sglang.verify import ServerVerifier
from stillhouse.protocol.atomic_file import not_a_link
from stillhouse.protocol.messages import WeightPlan, WeightsRef, WeightVersion
from stillhouse.weights.control_messages import Agreed, CudaHandle, Round, WeightCheck
from stillhouse.weights.deadlines import in_thread, wait_patiently
from stillhouse.weights.errors import GroupBroken, Interrupted, SnapshotRefused, WeightsDiffer, WeightsRefused
from stillhouse.weights.manifest import WeightBucket, smallest_tensor_bucket, whole_tensor_buckets
from stillhouse.weights.sink import Receipt, snapshot_file, whole_file
from stillhouse.weights.snapshot_format import FILE_NAME, snapshot_head
from stillhouse.weights.wire import WireMember

log = logging.getLogger(__name__)

_JOIN_SLACK_S: Final = 1.0
"""Rank 0's deadline should end a rendezvous first."""
_MORE_PATIENCE: Final = 3
_FORMER_GROUPS: Final = 8
_SLOWEST_DISK_BYTES_S: Final = 100e6
"""Assumed slowest rate at which a server reads a snapshot."""
_BROKEN_WORDS: Final = ("receive weights", "gloo", "nccl", "connection", "timed out", "timeout")
"""Words in a server's error for a bucket that did not arrive, as opposed to one that it cannot use."""
_CHECKER: Final = "/weights_checker"
_FROM_DISK: Final = "/update_weights_from_disk"
STUDENT: Final = WeightVersion(0, 0)
"""The weights that every run starts from."""


class _Reply(msgspec.Struct, frozen=True):
    success: bool = True
    message: str = ""


class ServerWeights:
    """A WeightSink (weights.sink)."""

    def __init__(self, engine: SGLangEngine, *, student: str, ours: bool) -> None:
        """`student`: folder of the run's first weights, as the server sees it. `ours`: the launcher started it."""
        self._ours = ours
        self._engine = engine
        self._server = engine.server
        self._student = student
        self._known = engine.weights_known
        self._paused = False
        self._session_open = False
        self._joined_before = False
        self._group_name: str | None = None
        self._answers_when_queued = False
        self._pending: Future[Any] | None = None
        self._pending_ends_in_s = 0.0
        self._verify = ServerVerifier(engine)
        self._file = ExitStack()
        """Holds the copy of the file that the server loaded last."""
        self._wrong = ""
        """The reason why its weights are not those that were sent."""

    @property
    def version(self) -> WeightVersion | None:
        return self._engine.version if self._known else None

    @property
    def stats(self) -> dict[str, float]:
        return {**self._verify.stats, "weights_unknown": float(not self._known)}

    def prepare(self) -> None:
        """Reset a server with weights of another run, or of an unfinished update, to the student. Raises
        SnapshotRefused when it cannot read the student, or must not: a server that loads a malformed file ends."""
        if not self._known:
            log.info("%s: its weights are not this run's; loading %s", self._server.url, self._student)
            files = sorted(Path(self._student).glob("*.safetensors"))  # none where only the server can see the folder
            for file in files:
                whole_file(file)
            self._load_student(sum(file.stat().st_size for file in files))

    def check(self, plan: WeightPlan) -> None:
        if plan.kind != "servers":
            raise ValueError(f"weight plan {plan.group_epoch} is for {plan.kind}; this actor's engine is a server")
        if plan.backend == "ipc" and not self._ours:
            raise ValueError(self._not_ours)

    def join(self, plan: WeightPlan, index: int, timeout_s: float, interrupted: Interrupted) -> None:
        if not self._joined_before:
            self._joined_before = True
            self._leave_for_the_dead(plan.group_name)
        self._group_name = plan.group_name
        self._answers_when_queued = plan.backend == "nccl"
        body = {
            "master_address": plan.host,
            "master_port": plan.port,
            "rank_offset": 1 + index * plan.ranks_per_member,
            "world_size": plan.world_size,
            "group_name": plan.group_name,
            "backend": plan.backend,
        }
        deadline_s = time.monotonic() + timeout_s + _JOIN_SLACK_S
        try:
            self._call("/init_weights_update_group", body, deadline_s, interrupted)
        except RequestRefused as error:
            raise GroupBroken(str(error)) from error
        except ServerUnavailable as error:
            raise WeightsRefused(str(error)) from error

    def take(self, header: Round, agreed: Agreed, interrupted: Interrupted, wire: WireMember | None = None) -> Receipt:
        if wire is not None and not header.shared:
            return self._take_by_wire(header, agreed, interrupted, wire)
        if self._group_name is None and header.weights is None and wire is None:
            raise GroupBroken("no group was joined")
        return self._take(header, agreed, interrupted, wire=wire)

    def _take_by_wire(self, header: Round, agreed: Agreed, interrupted: Interrupted, wire: WireMember) -> Receipt:
        """The server must see the temporary files of this process (TMPDIR), as one on the same machine does."""
        began_s = time.monotonic()
        with TemporaryDirectory(prefix="stillhouse-weights-") as folder:
            path = Path(folder) / FILE_NAME
            try:
                fetch_file(path, header, agreed, interrupted, wire)
            except OSError as error:
                raise WeightsRefused(f"{path}: {error}") from error
            fetched_s = time.monotonic() - began_s
            taken = self._take(header, agreed, interrupted, path)
        return replace(taken, receive_s=taken.receive_s + fetched_s)

    def _take(
        self,
        header: Round,
        agreed: Agreed,
        interrupted: Interrupted,
        path: Path | None = None,
        wire: WireMember | None = None,
    ) -> Receipt:
        deadline_s = time.monotonic() + header.timeout_s
        check = header.check
        named_by_update = check is None or not self._engine.features.labels_settable
        label = {"weight_version": self._engine.labels.of(header.version)} if named_by_update else {}
        began_s = time.monotonic()
        with self._faults():
            if header.weights is not None:
                path = self._checked(header.weights, deadline_s, interrupted)
            elif path is not None:
                whole_file(path)
            self._pause(deadline_s, cut=check is not None and check.canary is not None)
            paused_s = time.monotonic()
            if path is not None:
                self._known = False
                self._ask(_FROM_DISK, self._from_disk(str(path.parent), label), deadline_s, interrupted)
            else:
                buckets = whole_tensor_buckets(agreed.manifest, agreed.bucket_bytes)
                if wire is not None:
                    self._open(wire, header.number, buckets, label, deadline_s, interrupted)
                else:
                    self._receive(buckets, label, deadline_s, interrupted)
            received_s = time.monotonic()
            if check is not None:
                self._check(check, header.version, deadline_s, interrupted)
            self._resume(header.version, name=not named_by_update)
        whole_s, receive_s = time.monotonic() - began_s, received_s - paused_s
        n_bytes = sum(spec.n_bytes for spec in agreed.manifest.tensors)
        return Receipt(n_bytes=n_bytes, receive_s=receive_s, stage_s=whole_s - receive_s)

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
        """Have the server copy the weights out of the learner's memory. Raises WeightsRefused where `check` refuses the
        plan, whatever the plan said."""
        if not self._ours:
            raise WeightsRefused(self._not_ours)
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

    def settle(self, timeout_s: float) -> bool:
        if self._pending is None:
            return True
        wait_for([self._pending], timeout_s)
        if not self._pending.done():
            return False
        self._pending = None
        return True

    def leave(self) -> None:
        """Leave the group. Raises ServerLost when the server stays stuck, cannot leave, or has wrong weights."""
        self._await_free()
        self._file.close()
        if self._wrong:
            self._server.declare_lost(self._wrong)
            raise ServerLost(f"{self._server.url}: {self._wrong}")
        try:
            self._close_session()
            if self._group_name is not None:
                self._destroy(self._group_name)
            if self._paused and self._known:
                self._resume(self._engine.version)  # no part of the update arrived
        except (RequestRefused, ServerUnavailable, ValueError) as error:
            log.warning("leaving weight group %s: %s", self._group_name, error)
        self._session_open = False
        self._group_name = None

    def _leave_for_the_dead(self, group_name: str) -> None:
        """Leave groups of this learner that a former actor of this server joined before it died: until then, servers
        that wait for this one in such a group stay stuck."""
        stem, _, epoch = group_name.rpartition("-")
        for former in range(max(1, int(epoch) - _FORMER_GROUPS), int(epoch)):
            try:
                self._destroy(f"{stem}-{former}")
                log.info("%s: left weight group %d of a former actor", self._server.url, former)
            except RequestRefused:
                continue  # it is not in this one
            except ServerUnavailable as error:
                raise WeightsRefused(str(error)) from error

    def _destroy(self, group_name: str) -> None:
        """Raises RequestRefused when the server is not in the group. With NCCL the server waits for pending operations,
        for ever if a peer is dead, and its scheduler does nothing else meanwhile: then ServerLost."""
        limit_s = _MORE_PATIENCE * self._engine.config.control_timeout_s
        try:
            self._post("/destroy_weights_update_group", {"group_name": group_name}, limit_s)
        except ServerUnavailable as error:
            if not isinstance(error.__cause__, TimeoutError):
                raise
            self._lose(f"did not leave weight group {group_name} within {limit_s:g} s")

    # --------------------------------------------------------------------------------------- parts of a round

    def _update(self, bucket: WeightBucket, label: dict[str, str], *, last: bool) -> dict[str, Any]:
        return bucket_update(bucket, str(self._group_name), flush=last and self._flushes) | label

    def _load_student(self, n_bytes: int) -> None:
        limit_s = self._engine.config.pause_timeout_s
        try:
            self._pause(time.monotonic() + limit_s)
            body = self._from_disk(self._student, {"weight_version": self._engine.labels.of(STUDENT)})
            self._post(_FROM_DISK, body, limit_s + n_bytes / _SLOWEST_DISK_BYTES_S)
            self._resume(STUDENT)
        except (RequestRefused, ServerUnavailable, ValueError) as error:
            raise SnapshotRefused(f"{self._student}: {error}") from error

    def _from_disk(self, folder: str, label: dict[str, str]) -> dict[str, Any]:
        return disk_update(folder, flush=self._flushes) | label

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

    def _check(self, check: WeightCheck, version: WeightVersion, deadline_s: float, interrupted: Interrupted) -> None:
        def ask(path: str, body: dict[str, Any]) -> bytes:
            return self._ask(path, body, deadline_s, interrupted)

        def reload(ref: WeightsRef) -> None:
            path = self._checked(ref, deadline_s, interrupted)
            ask(_FROM_DISK, self._from_disk(str(path.parent), {}))

        self._verify.check(check, version, ask, reload)

    def _checked(self, ref: WeightsRef, deadline_s: float, interrupted: Interrupted) -> Path:
        """The path of a file after verifying it. A copy of one from the run's store is kept until the next one comes.
        Raises SnapshotRefused, GroupBroken and GroupInterrupted."""
        file = ExitStack()
        checked = in_thread(lambda: file.enter_context(snapshot_file(ref)), name="weight-file", daemon=True)
        path = wait_patiently(checked, deadline_s, interrupted, f"{ref.path}: not read at the deadline")
        self._file.close()
        self._file = file
        return path

    @property
    def _not_ours(self) -> str:
        return f"{self._server.url}: by ipc only servers that the launcher started get weights: they read a pickle"

    @property
    def _flushes(self) -> bool:
        return self._engine.config.update_mode != "in_place"

    @contextmanager
    def _faults(self) -> Generator[None]:
        """Convert a server's failure into the error for its cause: the group, the weights, or this server."""
        try:
            yield
        except WeightsDiffer as error:
            self._wrong = str(error)
            raise
        except RequestRefused as error:
            if any(word in str(error).lower() for word in _BROKEN_WORDS):
                raise GroupBroken(str(error)) from error
            raise WeightsRefused(str(error)) from error
        except (ServerUnavailable, SnapshotRefused, ValueError) as error:
            raise WeightsRefused(f"{type(error).__name__}: {error}") from error

    # ------------------------------------------------------------------------------------------------- calls

    def _pause(self, deadline_s: float, *, cut: bool = False) -> None:
        self._paused = True
        limit_s = min(self._engine.config.control_timeout_s, max(deadline_s - time.monotonic(), 0.1))
        self._engine.pause(limit_s, cut=cut)

    def _resume(self, version: WeightVersion, *, name: bool = False) -> None:
        self._engine.resume(version, self._engine.config.control_timeout_s, name=name)
        self._paused, self._known = False, True

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

    def _post(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> bytes:
        limit_s = timeout_s or self._engine.config.control_timeout_s
        return self._server.run(self._server.post(path, body, timeout_s=limit_s), timeout_s=limit_s + 1.0)

    def _call(self, path: str, body: dict[str, Any], deadline_s: float, interrupted: Interrupted) -> None:
        """Send a request during which the server may get stuck for good."""
        text = self._ask(path, body, deadline_s, interrupted, ends_in_s=0.0)
        reply = msgspec.json.decode(text, type=_Reply)
        if not reply.success:
            raise RequestRefused(f"{self._server.url}{path}: {reply.message}")

    def _ask(
        self,
        path: str,
        body: dict[str, Any],
        deadline_s: float,
        interrupted: Interrupted,
        *,
        ends_in_s: float | None = None,
    ) -> bytes:
        """The reply. `ends_in_s`: how much longer than the deadline a healthy server may take; by default the time left
        until the deadline. Raises GroupInterrupted, and GroupBroken past the deadline."""
        left_s = max(deadline_s - time.monotonic(), 0.1)
        self._pending_ends_in_s = left_s if ends_in_s is None else ends_in_s
        patience_s = left_s + self._pending_ends_in_s + (2 + _MORE_PATIENCE) * self._engine.config.control_timeout_s
        self._pending = request = self._server.post_soon(path, body, timeout_s=patience_s)
        missed = f"{self._server.url}{path}: not done at the deadline"
        reply = wait_patiently(request, deadline_s, interrupted, missed)  # on an error `settle` waits for it
        self._pending = None
        return reply

    def _await_free(self) -> None:
        patience_s = self._engine.config.control_timeout_s
        if self.settle(patience_s) or (self._answers() and self.settle(_MORE_PATIENCE * patience_s)):
            return
        if self._pending_ends_in_s > 0 and self._answers() and self.settle(self._pending_ends_in_s):
            return
        self._lose("stuck in a weight update that has ended for all others")

    def _lose(self, reason: str) -> NoReturn:
        self._server.declare_lost(reason)
        raise ServerLost(f"{self._server.url}: {reason}")

    def _answers(self) -> bool:
        try:
            self._server.run(self._server.model_info(), timeout_s=self._engine.config.control_timeout_s)
        except (ServerUnavailable, RequestRefused, ValueError):
            return False
        return True


def fetch_file(path: Path, header: Round, agreed: Agreed, interrupted: Interrupted, wire: WireMember) -> None:
    """Write the version of this round into a file, as a snapshot has it. Raises OSError, GroupBroken and
    GroupInterrupted."""
    deadline_s = time.monotonic() + header.timeout_s
    head = snapshot_head(agreed.manifest, header.version)
    with open(path, "wb", opener=not_a_link) as file:
        file.write(head)

        def take(at: int, piece: bytes | memoryview) -> None:
            file.seek(len(head) + at)
            file.write(piece)

        wire.fetch(header.number, sum(spec.n_bytes for spec in agreed.manifest.tensors), take, deadline_s, interrupted)
