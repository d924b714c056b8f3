"""The learner's side of weight transport: a thread that sends each version to the actors' group and keeps it alive.

    training thread   publish: copies the weights and returns; wait_idle, busy, stats
    receiving thread  membership (in our learner the training thread makes this call, too)
    publisher thread  all else: collectives, `post_plan`, `published`; only it uses GroupHost and Roster

The thread does one job at a time, the first that is due:

    rebuild   the group broke, or the roster wants another one: post a plan, make the group. Members say which version
              they have.
    deliver   some member does not have the newest version yet: broadcast it to all. A newcomer gets
              it so, too.

A version counts as published, and is announced, when every member of the group has it or there are no members.
A member that does not keep up is left out (`weights.group_host` explains how it is found). Each such failure leads to a
rebuild without it, so that the others have the newest version again after one plan.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal, Self, TypeAlias

import msgspec
import torch

from stillhouse.protocol.keys import ServerKeys
from stillhouse.protocol.messages import Membership, WeightPlan, WeightVersion
from stillhouse.protocol.turns import POLL_S, Turn
from stillhouse.tracing import events
from stillhouse.weights.config import Place, WeightsConfig, bucket_size, sent_dtype, staged_in
from stillhouse.weights.group_operations import choose_backend
from stillhouse.weights.roster import EMBEDDED, GroupMembers, GroupSeat, Roster
from stillhouse.weights.server_checks import LearnerCanary, VersionChecks
from stillhouse.weights.snapshot import SnapshotKeeper
from stillhouse.weights.staged_weights import StagedVersion, StagedWeights, Staging, Weight, WeightStreams, streams_of
from stillhouse.weights.transport import DropReason, PublisherStats, RoundResult, TransportSetup, make_transport

log = logging.getLogger(__name__)

SNAPSHOTS_KEPT: Final = 2
"""Number of recent snapshots to keep in the run folder."""
RETRY_MAX_S: Final = 60.0
"""A group that fails for an unknown reason is tried again after 1, 2, 4 ... seconds, at most this."""

Job: TypeAlias = Literal["rebuild", "deliver", "stop"]


class PublisherFailed(RuntimeError):
    """The publisher's thread has ended, by an error (the cause) or by `close`. No more versions will be sent."""


class PublishTimeout(RuntimeError):
    """With `every_version`: the earlier versions could not be delivered in time."""


class Publisher:
    """Starts its thread at once; must be closed."""

    def __init__(
        self,
        config: WeightsConfig,
        *,
        snapshot_dir: Path,
        post_plan: Callable[[WeightPlan], None],
        published: Callable[[WeightVersion, float], None],
        expected_actors: int = 0,
        device: torch.device | str = "cpu",
        members: GroupMembers = EMBEDDED,
        canary: LearnerCanary | None = None,
        control_keys: ServerKeys | None = None,
        streams: WeightStreams | None = None,
        staging: Staging = StagedWeights,
        turn: Turn | None = None,
    ) -> None:
        """`published(version, seconds of its broadcast or 0)` and `post_plan` are called from the publisher's thread.
        `snapshot_dir`: for the files that a proof of servers needs. `expected_actors`: when this many
        are connected the group is made without delay (0 = unknown). `device`: where the weights are. `members`: what
        the actors' engines are. `canary`: a further proof for servers, besides their checksums. `control_keys`: encrypt
        the control channel. `streams`: None = those of `device`. `staging`: makes the copies. `turn`: of this
        process on a device that others share; versions are sent in it. Raises ValueError for a backend that this
        machine does not have."""
        device = torch.device(device)
        backend = choose_backend(config.backend, device) if config.makes_groups else "gloo"
        config = msgspec.structs.replace(config, bucket_bytes=bucket_size(config.bucket_bytes, device.type))
        self._config, self._members, self._canary = config, members, canary
        self._post_plan, self._published, self._staging, self._turn = post_plan, published, staging, turn
        self._place: Place = staged_in(config, device.type, backend)
        self._streams = streams_of(device) if streams is None else streams
        self._snapshots = SnapshotKeeper(snapshot_dir, keep=SNAPSHOTS_KEPT)
        self._transport = make_transport(
            TransportSetup(
                config,
                backend=backend,
                device=device if backend == "nccl" or config.way == "ipc" else "cpu",
                gone=self._gone,
                closing=lambda: self._closing,
                members=members,
                control_keys=control_keys,
            )
        )
        self._roster = Roster(config, expected_actors)
        self._checks = VersionChecks(members, config, canary, self._snapshots)
        # Shared between the threads, under this lock.
        self._changed = threading.Condition()  # its lock is reentrant
        self._stats = PublisherStats()
        self._pending: StagedVersion | None = None
        self._spare: list[StagedVersion] = []
        self._connected: frozenset[GroupSeat] | None = None
        self._connected_news = self._rebuild_due = self._closing = False
        self._working = True
        self._failure: BaseException | None = None
        # The publisher thread's own.
        self._newest: StagedVersion | None = None
        self._owed = self._broken = False
        self._retry_s = self._not_before_s = 0.0
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -------------------------------------------------------------------------------------- any other thread

    def publish(self, version: WeightVersion, named: Iterable[tuple[str, Weight]]) -> None:
        """Copy the weights and return; the publisher's thread sends them. A version that still waits is replaced and
        counted as skipped; with `every_version` this waits for it instead. Call it from one thread only. Raises
        PublisherFailed, and PublishTimeout with `every_version`."""
        with self._changed:
            self._raise_if_failed()
            wait_s = self._transport.limits.publish_wait_s(0 if self._pending is None else self._pending.n_bytes)
            if self._config.every_version and not self._changed.wait_for(
                lambda: self._pending is None or self._over(), wait_s
            ):
                raise PublishTimeout(
                    f"version {version}: the one before is not out after {wait_s:.0f} s; "
                    f"{self._transport!r}, {self._roster!r}; see the actors' logs"
                )
            self._raise_if_failed()
            if self._closing:
                raise PublisherFailed(f"version {version} came after close")
            staged, self._pending = self._pending, None
            if staged is not None:
                self._stats.skipped_versions_total += 1
            elif self._spare:
                staged = self._spare.pop()
            else:
                staged = self._staging(
                    self._members,
                    dtype=sent_dtype(self._config.dtype, self._members.dtype),
                    bucket_bytes=self._config.bucket_bytes,
                    place=self._place,
                    streams=self._streams,
                )
        began_s, began_ns = time.monotonic(), events.now_ns()
        staged.canary = self._canary.score() if self._canary is not None else None
        staged.fill(version, named)  # last, because `wait` waits for the work queued up to here
        events.done("learner", "copy weights", began_ns, version=str(version))
        with self._changed:
            self._stats.copy_s = time.monotonic() - began_s
            self._pending = staged
            self._changed.notify_all()

    def membership(self, membership: Membership) -> None:
        """Set the actors that are connected to the buffer now. Raises PublisherFailed."""
        seats = frozenset(map(GroupSeat, membership.actors, membership.incarnations))
        with self._changed:
            self._raise_if_failed()
            self._connected = seats
            self._connected_news = True
            self._changed.notify_all()

    @property
    def busy(self) -> bool:
        """Some member lacks the newest version, or the group is being made (or about to be)."""
        with self._changed:
            return self._working or self._pending is not None or self._connected_news or self._rebuild_due or self._owed

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until not busy; False after `timeout_s`. Raises PublisherFailed."""
        with self._changed:
            idle = self._changed.wait_for(lambda: not self.busy or self._over(), timeout_s)
            self._raise_if_failed()
            return idle

    @property
    def stats(self) -> PublisherStats:
        """A copy of the figures."""
        with self._changed:
            return replace(
                self._stats,
                members=len(self._transport.seats),
                group_epoch=self._transport.group_epoch,
                snapshots_total=self._snapshots.written_total,
                snapshot_s=self._snapshots.write_s,
                snapshot_failures_total=self._snapshots.failures_total,
                dropped_total=self._stats.dropped_total.copy(),
                control_unreadable_total=self._transport.control_unreadable_total,
                control_refused_total=self._transport.control_refused_total,
            )

    def close(self, timeout_s: float = 10.0) -> None:
        """Ask the members to leave and end the thread. Unsent versions are dropped; where that matters, call
        `wait_idle` before. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.error("the publisher's thread did not end within %.1f s; it ends with the process", timeout_s)

    def _over(self) -> bool:
        return self._closing or self._failure is not None

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise PublisherFailed(f"the publisher ended: {self._failure}") from self._failure

    # -------------------------------------------------------------------------------------- publisher thread

    def _run(self) -> None:
        try:
            with self._streams.own():
                while (job := self._next_job()) != "stop":
                    if job == "rebuild":
                        self._rebuild()
                    elif self._turn is None:
                        self._deliver()
                    elif self._turn.try_take():
                        try:
                            self._deliver()
                        finally:
                            self._turn.give_back()
                    else:
                        time.sleep(POLL_S)  # the training thread sees to it that this ends
        except BaseException as error:
            log.exception("the publisher failed")
            with self._changed:
                self._failure = error
        finally:
            self._transport.close()
            with self._changed:
                self._working = False
                self._changed.notify_all()

    def _next_job(self) -> Job:
        """Wait until something is due."""
        with self._changed:
            while True:
                if self._closing:
                    return "stop"
                now_s = time.monotonic()
                self._take_news(now_s)
                rebuild_in_s = self._rebuild_in_s(now_s)
                self._rebuild_due = rebuild_in_s is not None
                self._working = True
                if rebuild_in_s == 0.0:
                    return "rebuild"
                seats = self._transport.seats
                if self._owed and (seats or not self._roster.wanted(now_s)):
                    return "deliver"
                self._working = False
                self._changed.notify_all()
                waits_s = [wait_s for wait_s in (rebuild_in_s, self._roster.cooled_in_s(now_s)) if wait_s is not None]
                self._changed.wait(min(waits_s) + 0.001 if waits_s else None)

    def _take_news(self, now_s: float) -> None:
        if self._connected_news and self._connected is not None:
            self._connected_news = False
            self._roster.connect(now_s, self._connected)
        # With every_version a new version waits until the former one is published.
        if self._pending is not None and not (self._config.every_version and self._owed):
            if self._newest is not None:
                published = self._stats.published  # owed again if a newcomer lacks it
                self._stats.skipped_versions_total += self._owed and self._newest.version != published
                self._spare.append(self._newest)
            self._newest, self._pending = self._pending, None
            self._owed = True
            self._changed.notify_all()

    def _rebuild_in_s(self, now_s: float) -> float | None:
        """Do not wait for more changes once the group cannot be used, or has lost a member while weights are to be
        sent."""
        seated = self._transport.seats
        lost_one = self._owed and bool(set(seated) - set(self._roster.wanted(now_s)))
        rebuild_in_s = self._roster.rebuild_in_s(now_s, seated, urgent=self._broken or lost_one)
        if rebuild_in_s is None:
            self._broken = False
            return None
        return max(rebuild_in_s, self._not_before_s - now_s, 0.0)

    def _rebuild(self) -> None:
        seats = self._roster.wanted(time.monotonic())
        left = set(self._transport.seats) - set(self._connected or ())
        self._count_dropped(Counter({"disconnected": len(left)} if left else {}))
        self._roster.rebuilt()
        self._broken = False
        if not seats:
            self._transport.disband("no members are left")
            return
        self._stats.rebuilds_total += 1
        newest = self._newest
        began_s = time.monotonic()
        with events.span("publication", "make the group", members=len(seats)):
            result = self._transport.form(seats, newest, self._post_plan)
        self._learn_from(result)
        if result.behind:
            self._owed = True
        elif result.error is None and newest is not None and self._owed:
            self._out(newest.version, time.monotonic() - began_s)

    def _deliver(self) -> None:
        newest = self._newest
        if newest is None:
            raise RuntimeError("there is nothing to deliver")
        if not self._transport.seats:
            self._out(newest.version, 0.0)
            return
        newest.wait()
        plan = self._transport.group_epoch
        check = self._checks.of(plan, newest)
        with events.span("publication", "broadcast", version=str(newest.version)) as figures:
            result = self._transport.publish(newest, check)
            figures |= {"bytes": result.n_bytes, "members": len(self._transport.seats), "ok": result.error is None}
        self._learn_from(result)
        if result.error is None:
            self._checks.passed(plan, check)
            self._roster.confirm(result.has)
            self._stats.check_requests_total += check is not None
            self._stats.broadcasts_total += 1
            self._stats.broadcast_s = result.seconds
            self._stats.broadcast_s_total += result.seconds
            self._stats.broadcast_bytes = result.n_bytes
            self._out(newest.version, result.seconds)

    def _learn_from(self, result: RoundResult) -> None:
        """After a failure, leave out the members that caused it; if they are not known, wait longer each time."""
        now_s = time.monotonic()
        if result.error is None:
            self._retry_s, self._not_before_s = 0.0, 0.0
            return
        self._broken = True
        self._stats.failed_groups_total += 1
        self._count_dropped(Counter(result.lost.values()))
        for seat, reason in result.lost.items():
            if reason != "disconnected":
                delay_s = self._roster.strike(now_s, seat)
                log.warning("%s is left out of the weight group for %.0f s: %s", seat.name, delay_s, reason)
        if not result.lost and not self._closing:
            self._retry_s = min(max(1.0, self._retry_s * 2), RETRY_MAX_S)
            self._not_before_s = now_s + self._retry_s

    def _count_dropped(self, by_reason: Counter[DropReason]) -> None:
        with self._changed:
            self._stats.dropped_total.update(by_reason)

    def _out(self, version: WeightVersion, broadcast_s: float) -> None:
        """Record and announce that every member has this version."""
        with self._changed:
            self._owed = False
        if self._stats.published is None or version > self._stats.published:
            self._stats.published = version
            self._published(version, broadcast_s)

    def _gone(self, seats: Iterable[GroupSeat]) -> frozenset[GroupSeat]:
        """Which of these seats the buffer has lost. The transport calls this during its waits."""
        with self._changed:
            connected = self._connected
        return frozenset(seats) - connected if connected is not None else frozenset()
