"""Weights for a server over HTTP, from the actor that uses it: the server is the member of the learner's group, and
this controls it.

    join     have the server join the group
    take     pause, have the server receive the buckets, check, resume
             by wire: written to a file in the system's folder for temporary ones, which the server loads
    prepare  the same, from the student's own folder
    leave    have the server leave the group

What has arrived is in the model. So between its first part and the end of a version the weights are unknown (`version`
is None), and the engine stays paused until a whole version has arrived, by broadcast or from disk. With a check, the
server gets the version's label only after passing; a server that fails it is lost.

A server stuck in a collective answers no update request and cannot be freed over HTTP, but it is freed when the peer it
waits for leaves or dies. It gets `control_timeout_s` for that, and three times more if it still answers health checks:
then probably another server hangs, which is declared lost and ended meanwhile. After that it is lost.

Requests are never aborted from here. No torch.
"""

# Why it is so: docs/decisions/sglang-weights.md

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Final, Generic, NoReturn, TypeVar

from stillhouse.engines.http.engine import StudentOnServer
from stillhouse.engines.http.link import RequestRefused, ServerLost, ServerUnavailable
from stillhouse.engines.http.verify import ServerVerifier
from stillhouse.protocol.atomic_file import not_a_link
from stillhouse.protocol.messages import WeightPlan, WeightsRef, WeightVersion
from stillhouse.weights.control_messages import Agreed, Round, WeightCheck
from stillhouse.weights.deadlines import in_thread, wait_patiently
from stillhouse.weights.errors import GroupBroken, Interrupted, SnapshotRefused, WeightsDiffer, WeightsRefused
from stillhouse.weights.manifest import WeightBucket, whole_tensor_buckets
from stillhouse.weights.sink import Receipt, check_snapshot, whole_file
from stillhouse.weights.snapshot_format import FILE_NAME, snapshot_head
from stillhouse.weights.wire import WireMember

log = logging.getLogger(__name__)

_JOIN_SLACK_S: Final = 1.0
"""Rank 0's deadline should end a rendezvous first."""
MORE_PATIENCE: Final = 3
_FORMER_GROUPS: Final = 8
_SLOWEST_DISK_BYTES_S: Final = 100e6
"""Assumed slowest rate at which a server reads a snapshot."""
_BROKEN_WORDS: Final = ("receive weights", "gloo", "nccl", "connection", "timed out", "timeout")
"""Words in a server's error for a bucket that did not arrive, as opposed to one that it cannot use."""
STUDENT: Final = WeightVersion(0, 0)
"""The weights that every run starts from."""


EngineT = TypeVar("EngineT", bound=StudentOnServer[Any, Any])


class WeightsOverHTTP(Generic[EngineT]):
    """A WeightSink (weights.sink)."""

    def __init__(self, engine: EngineT, verify: ServerVerifier, *, student: str) -> None:
        """`student`: folder of the run's first weights, as the server sees it."""
        self._engine = engine
        self._server = engine.server
        self._student = student
        self._known = engine.weights_known
        self._paused = False
        self._joined_before = False
        self._group_name: str | None = None
        self._pending: Future[Any] | None = None
        self._pending_ends_in_s = 0.0
        self._verify = verify
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
        if plan.backend == "ipc" and self._no_ipc:
            raise ValueError(f"{self._server.url}: {self._no_ipc}")

    def join(self, plan: WeightPlan, index: int, timeout_s: float, interrupted: Interrupted) -> None:
        if not self._joined_before:
            self._joined_before = True
            self._leave_for_the_dead(plan.group_name)
        self._group_name = plan.group_name
        deadline_s = time.monotonic() + timeout_s + _JOIN_SLACK_S
        try:
            self._join_group(plan, 1 + index * plan.ranks_per_member, deadline_s, interrupted)
        except RequestRefused as error:
            raise GroupBroken(str(error)) from error
        except ServerUnavailable as error:
            raise WeightsRefused(str(error)) from error

    def take(self, header: Round, agreed: Agreed, interrupted: Interrupted, wire: WireMember | None = None) -> Receipt:
        if wire is not None and not header.shared:
            return self._take_by_wire(header, agreed, interrupted, wire)
        if self._group_name is None and wire is None:
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
        named_by_update = self._updates_name and (check is None or not self._engine.features.labels_settable)
        label = {"weight_version": self._engine.labels.of(header.version)} if named_by_update else {}
        began_s = time.monotonic()
        with self._faults():
            if path is not None:
                whole_file(path)
            self._pause(deadline_s, cut=check is not None and check.canary is not None)
            paused_s = time.monotonic()
            if path is not None:
                self._known = False
                self._load_folder(str(path.parent), label, deadline_s, interrupted)
            else:
                buckets = whole_tensor_buckets(agreed.manifest, agreed.bucket_bytes)
                if wire is not None:
                    if self._no_ipc:  # whatever the plan said
                        raise WeightsRefused(f"{self._server.url}: {self._no_ipc}")
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
        if self._wrong:
            self._server.declare_lost(self._wrong)
            raise ServerLost(f"{self._server.url}: {self._wrong}")
        try:
            self._abandon_update()
            if self._group_name is not None:
                self._leave_group(self._group_name)
            if self._paused and self._known:
                self._resume(self._engine.version)  # no part of the update arrived
        except (RequestRefused, ServerUnavailable, ValueError) as error:
            log.warning("leaving weight group %s: %s", self._group_name, error)
        self._group_name = None

    def _leave_for_the_dead(self, group_name: str) -> None:
        """Leave groups of this learner that a former actor of this server joined before it died: until then, servers
        that wait for this one in such a group stay stuck."""
        stem, _, epoch = group_name.rpartition("-")
        for former in range(max(1, int(epoch) - _FORMER_GROUPS), int(epoch)):
            try:
                self._leave_group(f"{stem}-{former}")
                log.info("%s: left weight group %d of a former actor", self._server.url, former)
            except RequestRefused:
                continue  # it is not in this one
            except ServerUnavailable as error:
                raise WeightsRefused(str(error)) from error

    # --------------------------------------------------------------------------------------- parts of a round

    def _load_student(self, n_bytes: int) -> None:
        limit_s = self._engine.config.pause_timeout_s
        try:
            self._pause(time.monotonic() + limit_s)
            label = {"weight_version": self._engine.labels.of(STUDENT)} if self._updates_name else {}
            path, body = self._from_disk(self._student, label)
            self._read(self._post(path, body, limit_s + n_bytes / _SLOWEST_DISK_BYTES_S))
            self._resume(STUDENT, name=not self._updates_name)
        except (RequestRefused, ServerUnavailable, ValueError) as error:
            raise SnapshotRefused(f"{self._student}: {error}") from error

    def _check(self, check: WeightCheck, version: WeightVersion, deadline_s: float, interrupted: Interrupted) -> None:
        def ask(path: str, body: dict[str, Any]) -> bytes:
            return self._ask(path, body, deadline_s, interrupted)

        def reload(ref: WeightsRef) -> None:
            checked = in_thread(lambda: check_snapshot(ref), name="weight-file", daemon=True)
            path = wait_patiently(checked, deadline_s, interrupted, f"{ref.path}: not read at the deadline")
            self._load_folder(str(path.parent), {}, deadline_s, interrupted)

        self._verify.check(check, version, ask, reload)

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

    # ---------------------------------------------------------------------------- what a kind of server decides

    _updates_name: ClassVar[bool]
    """An update can name the weights, by `label` (weight_version)."""

    _no_ipc: str
    """Why it gets no weights by memory that the learner shares; empty: it does."""

    def _join_group(self, plan: WeightPlan, rank: int, deadline_s: float, interrupted: Interrupted) -> None:
        """Have the server join as `rank` and the following."""
        raise NotImplementedError

    def _leave_group(self, name: str) -> None:
        """Raises RequestRefused when the server is not in this group."""
        raise NotImplementedError

    def _receive(
        self, buckets: Sequence[WeightBucket], label: dict[str, str], deadline_s: float, interrupted: Interrupted
    ) -> None:
        """Have the server receive all weights from the group. `_known` is False from the first part on."""
        raise NotImplementedError

    def _open(
        self,
        wire: WireMember,
        number: int,
        buckets: Sequence[WeightBucket],
        label: dict[str, str],
        deadline_s: float,
        interrupted: Interrupted,
    ) -> None:
        """Have the server copy the weights out of the learner's memory. `_known` as in `_receive`."""
        raise NotImplementedError

    def _from_disk(self, folder: str, label: dict[str, str]) -> tuple[str, dict[str, Any]]:
        """Route and body of a request to load a folder's weights."""
        raise NotImplementedError

    def _read(self, reply: bytes) -> None:
        """Raises RequestRefused for a reply that says that an update failed."""

    def _abandon_update(self) -> None:
        """Close what an update that broke off has left open."""

    # ------------------------------------------------------------------------------------------------- calls

    def _load_folder(self, folder: str, label: dict[str, str], deadline_s: float, interrupted: Interrupted) -> None:
        path, body = self._from_disk(folder, label)
        self._read(self._ask(path, body, deadline_s, interrupted))

    def _pause(self, deadline_s: float, *, cut: bool = False) -> None:
        self._paused = True
        limit_s = min(self._engine.config.control_timeout_s, max(deadline_s - time.monotonic(), 0.1))
        self._engine.pause(limit_s, cut=cut)

    def _resume(self, version: WeightVersion, *, name: bool = False) -> None:
        self._engine.resume(version, self._engine.config.control_timeout_s, name=name)
        self._paused, self._known = False, True

    def _post(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> bytes:
        limit_s = timeout_s or self._engine.config.control_timeout_s
        return self._server.run(self._server.post(path, body, timeout_s=limit_s), timeout_s=limit_s + 1.0)

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
        patience_s = left_s + self._pending_ends_in_s + (2 + MORE_PATIENCE) * self._engine.config.control_timeout_s
        self._pending = request = self._server.post_soon(path, body, timeout_s=patience_s)
        missed = f"{self._server.url}{path}: not done at the deadline"
        reply = wait_patiently(request, deadline_s, interrupted, missed)  # on an error `settle` waits for it
        self._pending = None
        return reply

    def _await_free(self) -> None:
        patience_s = self._engine.config.control_timeout_s
        if self.settle(patience_s) or (self._answers() and self.settle(MORE_PATIENCE * patience_s)):
            return
        if self._pending_ends_in_s > 0 and self._answers() and self.settle(self._pending_ends_in_s):
            return
        self._lose("stuck in a weight update that has ended for all others")

    def _lose(self, reason: str) -> NoReturn:
        self._server.declare_lost(reason)
        raise ServerLost(f"{self._server.url}: {reason}")

    def _answers(self) -> bool:
        try:
            self._server.run(self._server.answers(), timeout_s=self._engine.config.control_timeout_s)
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
