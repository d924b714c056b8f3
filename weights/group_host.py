"""Rank 0 of the weight groups: makes one group after another, sends versions, and finds the members that do not keep
up.

A collective that hangs does not show which member hangs, and in gloo's tree the members behind a hung one look just as
silent. So every member answers on the control channel when it has a version. If an answer does not come (rank 0's part
fails, a member answers `broken` because a neighbour's connection closed, the buffer loses a member, or the deadline
passes), rank 0 asks all members to leave. They obey even inside the collective, and answer. Any member that stays
silent past the grace period is dropped. So a killed member costs the grace period, and a hung one the deadline as well.

Subclasses (weights/transports/) provide what carries the bytes, and their layout.

Only the publisher's thread uses it. Every wait checks `gone` (has the buffer lost a member?) and `closing`.
"""

from __future__ import annotations

import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar, Final, Literal, Protocol, TypeVar

from stillhouse.protocol.messages import WeightPlan
from stillhouse.weights.buckets import BucketLayout, Content
from stillhouse.weights.control import ControlHost
from stillhouse.weights.control_messages import (
    Agreed,
    FromMember,
    Go,
    Leave,
    MemberAnswer,
    MemberJoined,
    MemberReady,
    Round,
    WeightCheck,
)
from stillhouse.weights.deadlines import RoundLimits, kind_of
from stillhouse.weights.errors import GroupBroken, GroupInterrupted
from stillhouse.weights.group_operations import BackendName
from stillhouse.weights.manifest import WeightManifest
from stillhouse.weights.roster import GroupSeat
from stillhouse.weights.staged_weights import StagedVersion
from stillhouse.weights.transport import DropReason, RoundResult, TransportSetup

log = logging.getLogger(__name__)

WAIT_SLICE_S: Final = 0.05
_Message = TypeVar("_Message", MemberJoined, MemberReady, MemberAnswer)


class NotSent(Exception):
    """A version could not be sent, and no member is at fault."""


class Channel(Protocol):
    """Rank 0's end of what carries the bytes to the members of one plan. One thread."""

    def join(self, timeout_s: float) -> None:
        """Meet the members. Raises GroupBroken or GroupInterrupted."""

    def send(self, round_number: int, layout: BucketLayout, content: Content, timeout_s: float) -> None:
        """Returns when the bytes have left this process; members may not have them yet. Raises GroupBroken or
        GroupInterrupted."""
        ...

    def close(self) -> None:
        """Nothing is sent any more."""


class GroupHost(ABC):
    """A transport (weights.transport) whose members answer on the control channel. It has at most one group at a time.
    Subclasses define where members meet, what carries the bytes, and their layout."""

    backend: ClassVar[BackendName | Literal["wire", "ipc"] | None] = None
    """The `backend` of its plans; None: that of the Setup."""
    independent: ClassVar[bool] = False
    """True if the other members can still get a version when one of them fails."""
    copy_each: ClassVar[bool] = False
    """True if the learner's link carries a copy of a version for each member."""

    def __init__(self, setup: TransportSetup) -> None:
        self._config = setup.config
        self.limits = RoundLimits(setup.config)
        self._members = setup.members
        self._backend: BackendName = setup.backend
        self._device = setup.device
        self._gone = setup.gone
        self._closing = setup.closing
        self._control = ControlHost(setup.config.host, setup.config.control_port, setup.control_keys)
        self._heard: list[FromMember] = []
        """Messages read inside a collective, kept for `_collect`."""
        self._token = secrets.token_hex(4)
        self._epoch = 0
        self._round = 0
        self._group: Channel | None = None
        self._seats: tuple[GroupSeat, ...] = ()
        self._layout: BucketLayout | None = None

    def _meet_at(self) -> int:
        """TCP port of the store at which the members of the next plan meet; 0: they need none."""
        return 0

    @abstractmethod
    def _open(self, seats: tuple[GroupSeat, ...]) -> Channel:
        """A channel to the members of the plan that named `_meet_at`."""

    @abstractmethod
    def _layout_of(self, manifest: WeightManifest) -> BucketLayout: ...

    def __repr__(self) -> str:
        return f"GroupHost(epoch={self._epoch}, members={len(self._seats)}, round={self._round})"

    @property
    def seats(self) -> tuple[GroupSeat, ...]:
        """Members of the present group; empty when there is none."""
        return self._seats

    @property
    def group_epoch(self) -> int:
        """Number of the newest group, or attempt at one."""
        return self._epoch

    @property
    def control_unreadable_total(self) -> int:
        return self._control.unreadable_total

    @property
    def control_refused_total(self) -> int:
        return sum(self._control.refused.values())

    def form(
        self,
        seats: tuple[GroupSeat, ...],
        newest: StagedVersion | None,
        post_plan: Callable[[WeightPlan], None],
    ) -> RoundResult:
        """Replace the group by one of `seats`. Takes at most the limit for joining, a join timeout and a grace
        period."""
        self.disband("another group follows")
        self._epoch += 1
        self.limits.copies = len(seats) if self.copy_each else 1
        self._control.begin(self._epoch, [seat.name for seat in seats])
        self._heard.clear()
        limit_s = self.limits.limit_s("join", 0 if newest is None else newest.n_bytes)
        post_plan(self._plan(seats, limit_s))
        began_s = time.monotonic()
        joined = self._collect(seats, MemberJoined, began_s + limit_s)
        self.limits.took("join", limit_s, time.monotonic() - began_s)
        result = self._unless_all(seats, joined, "no_join") or self._connect(seats)
        if result.error is not None:
            return result
        self._seats = seats
        self._layout = None
        self._round = 0
        held = [message.version for message in joined.values()]
        return RoundResult(behind=newest is not None and any(has is None or has < newest.version for has in held))

    def publish(self, weights: StagedVersion, check: WeightCheck | None = None) -> RoundResult:
        """Send a version to the group and wait until every member has staged it: at most its limit and a grace period.
        After an error the group is gone. `check`: how members prove that they have the version. Raises ValueError
        when names, dtypes or shapes of the tensors have changed."""
        if self._group is None:
            raise RuntimeError("there is no weight group to send through; form one first")
        kind = kind_of(check)
        timeout_s = self.limits.limit_s(kind, weights.n_bytes)
        try:
            layout, header = self._header(weights, check, timeout_s)
        except NotSent as unsent:
            return self._failed(str(unsent), {})
        began_s = time.monotonic()
        self._control.send(header)
        error: str | None = None
        try:
            self._group.send(self._round, layout, weights.content, timeout_s)
        except (GroupBroken, GroupInterrupted) as broken:
            error = str(broken)
        answers = self._collect(self._seats, MemberAnswer, began_s + timeout_s, error=error)
        self.limits.took(kind, timeout_s, time.monotonic() - began_s)
        has = tuple(self._seats[rank - 1] for rank, answer in answers.items() if answer.status == "staged")
        result = self._conclude(answers, error)
        return replace(result, has=has, n_bytes=weights.n_bytes, seconds=time.monotonic() - began_s)

    def disband(self, reason: str) -> None:
        """End the group. Its members wait for the next plan."""
        self._release(reason)
        self._seats = ()

    def close(self) -> None:
        self.disband("the learner is closing")
        self._control.close()

    # ------------------------------------------------------------------------------------------------ steps

    def _plan(self, seats: tuple[GroupSeat, ...], join_limit_s: float) -> WeightPlan:
        return WeightPlan(
            group_epoch=self._epoch,
            host=self._config.host,
            port=self._meet_at(),
            backend=self.backend or self._backend,
            members=tuple(seat.name for seat in seats),
            world_size=self._world_size(seats),
            join_timeout_s=join_limit_s,
            control=self._control.endpoint,
            control_keys=self._control.plan_keys,
            kind=self._members.kind,
            ranks_per_member=self._members.ranks_each,
            group_name=self._group_name,
        )

    @property
    def _group_name(self) -> str:
        return f"stillhouse-{self._token}-{self._epoch}"

    def _world_size(self, seats: tuple[GroupSeat, ...]) -> int:
        return 1 + len(seats) * self._members.ranks_each

    def _connect(self, seats: tuple[GroupSeat, ...]) -> RoundResult:
        timeout_s = self._config.join_timeout_s
        deadline_s = time.monotonic() + timeout_s
        self._group = self._open(seats)
        self._control.send(Go(self._epoch, timeout_s))
        error: str | None = None
        try:
            self._group.join(timeout_s)
        except (GroupBroken, GroupInterrupted) as broken:
            error = str(broken)
        ready = self._collect(seats, MemberReady, deadline_s, error=error)
        failed = self._unless_all(seats, ready, "no_ready")
        if failed is not None:
            return failed
        error = error or next((message.error for message in ready.values() if message.error is not None), None)
        if self._stands() and error is None:
            return RoundResult()
        lost: dict[GroupSeat, DropReason] = {
            seats[rank - 1]: "no_ready" for rank, message in ready.items() if message.at_fault
        }
        return self._failed(error or "not every member was ready in time", lost)

    def _header(
        self, weights: StagedVersion, check: WeightCheck | None, timeout_s: float
    ) -> tuple[BucketLayout, Round]:
        """Raises NotSent."""
        manifest = weights.manifest
        agreed: Agreed | None = None
        if self._layout is None:
            agreed = Agreed(manifest, self._config.bucket_bytes, self._members.adapter_config)
            self._layout = self._layout_of(manifest)
        elif self._layout.manifest != manifest:
            raise ValueError(
                "the tensors to publish differ from those of the former version: names, dtypes and shapes must stay "
                f"the same within a run (got {len(manifest.tensors)}, expected {len(self._layout.manifest.tensors)})"
            )
        self._round += 1
        header = Round(
            group_epoch=self._epoch,
            number=self._round,
            version=weights.version,
            manifest_digest=manifest.digest,
            agreed=agreed,
            timeout_s=timeout_s,
            grace_s=self._config.answer_grace_s,
            check=check,
        )
        return self._layout, header

    def _conclude(self, answers: dict[int, MemberAnswer], error: str | None) -> RoundResult:
        seats = self._seats
        gone = self._gone(seats)
        lost: dict[GroupSeat, DropReason] = {
            seat: "disconnected" if seat in gone else "no_answer"
            for rank, seat in enumerate(seats, start=1)
            if rank not in answers
        }
        for rank, answer in answers.items():
            if answer.status in ("refused", "stuck", "wrong_weights"):
                lost[seats[rank - 1]] = answer.status
            if answer.status != "staged":
                error = error or f"{seats[rank - 1].name}: {answer.reason}"
        if self._stands() and error is None and not lost:
            return RoundResult()
        return self._failed(error or "not every member confirmed the version in time", lost)

    def _collect(
        self, seats: tuple[GroupSeat, ...], kind: type[_Message], deadline_s: float, *, error: str | None = None
    ) -> dict[int, _Message]:
        """Messages of one kind by rank, until every live member has sent one, or the deadline. At the first sign of
        trouble (`error`: rank 0's own) the group is released, and its members get the grace period to answer."""
        messages: dict[int, _Message] = {}
        wait_s = 0.0
        while True:
            heard, self._heard = [*self._heard, *self._control.poll(wait_s)], []
            for message in heard:
                if isinstance(message, kind) and 0 < message.rank <= len(seats) and self._is_of_now(message):
                    messages[message.rank] = message
            owed = frozenset(seat for rank, seat in enumerate(seats, start=1) if rank not in messages)
            gone = self._gone(owed)
            if owed == gone or (gone and self._group is None) or self._closing():
                return messages
            left_s = deadline_s - time.monotonic()
            trouble = error is not None or gone or any(self._failure_of(message) for message in messages.values())
            if self._group is not None and (trouble or left_s <= 0):
                self._release(error or "the group does not answer")
                deadline_s = time.monotonic() + self._config.answer_grace_s
                left_s = self._config.answer_grace_s
            if left_s <= 0:
                return messages
            wait_s = min(WAIT_SLICE_S, left_s)

    def _stands(self) -> bool:
        """For type checkers, which do not know that `_collect` may have released the group."""
        return self._group is not None

    def _release(self, reason: str) -> None:
        """Ask the members to leave, and close our end, which frees members that are stuck behind it."""
        self._control.send(Leave(self._epoch, reason))
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _is_of_now(self, message: FromMember) -> bool:
        return not isinstance(message, MemberAnswer) or message.number == self._round

    def _failure_of(self, message: FromMember) -> str:
        """Why the others cannot continue either; empty if they can. An engine that refuses has passed on every byte; a
        server may refuse before that."""
        if self.independent:
            return ""
        match message:
            case MemberAnswer():
                engines = self._members.kind == "engines"
                harmless = ("staged", "refused") if engines else ("staged",)
                fatal = message.status not in harmless
                return (message.reason or message.status) if fatal else ""
            case MemberReady():
                return message.error or ""
            case MemberJoined():
                return ""

    def _stop_reason(self, seats: tuple[GroupSeat, ...]) -> str | None:
        """Called inside a collective: rank 0 must not wait for a member that has already reported a failure."""
        if self._closing():
            return "the learner is closing"
        self._heard += self._control.poll(0.0)
        for message in self._heard:
            if self._is_of_now(message) and (failure := self._failure_of(message)):
                return f"member {message.rank}: {failure}"
        gone = self._gone(seats)
        return f"{', '.join(seat.name for seat in sorted(gone))} left" if gone else None

    def _finished(self, seats: tuple[GroupSeat, ...]) -> set[int]:
        """Ranks that have answered in this round, or are gone."""
        self._heard += self._control.poll(0.0)
        answered = {m.rank for m in self._heard if isinstance(m, MemberAnswer) and self._is_of_now(m)}
        gone = self._gone(seats)
        return answered | {rank for rank, seat in enumerate(seats, start=1) if seat in gone}

    def _unless_all(
        self, seats: tuple[GroupSeat, ...], messages: Mapping[int, FromMember], reason: DropReason
    ) -> RoundResult | None:
        """The failure, if the message of a member is missing. If some member is known to be gone, the other silent ones
        were not waited for, and are not blamed."""
        if self._closing():
            return self._failed("the learner is closing", {})
        gone = self._gone(seats)
        if gone:
            return self._failed("a member left", dict.fromkeys(sorted(gone), "disconnected"))
        silent = [seat for rank, seat in enumerate(seats, start=1) if rank not in messages]
        return self._failed("not every member is there", dict.fromkeys(silent, reason)) if silent else None

    def _failed(self, error: str, lost: dict[GroupSeat, DropReason]) -> RoundResult:
        names = (
            ", ".join(f"{seat.name} ({reason})" for seat, reason in lost.items())
            or "no member, for the culprit is unknown"
        )
        log.warning("weight group %d: %s; left out: %s", self._epoch, error, names)
        self.disband(error)
        return RoundResult(error=error, lost=lost)
