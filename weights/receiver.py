"""The actor's side of weight transport: a thread that follows the learner's plans. No torch: the sink (weights.sink)
handles the weights, in the engine's own process or by way of a server.

    worker thread     handle_plan (returns at once), stats, raise_if_failed, close
    receiver thread   everything of the sink: joining, rounds, leaving

    waiting --plan--> Joined, Go, Ready --> in the group --Round--> receiving --Answer--> in the group
       ^                                         |                      |
       +----- Leave, a newer plan, a broken group+----------------------+

In the group the thread waits for the learner's next message on a socket, so it notices a newer plan or `close` at once;
inside a broadcast within 0.1 s. Whatever breaks, the next plan starts afresh and needs no former state.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Final

from stillhouse.protocol.keys import ClientKeys
from stillhouse.protocol.messages import WeightPlan, WeightVersion
from stillhouse.tracing import events
from stillhouse.weights.config import NO_GROUP
from stillhouse.weights.control import ControlMember, Waker, member_keys
from stillhouse.weights.control_messages import (
    Agreed,
    AnswerStatus,
    Go,
    Leave,
    MemberAnswer,
    MemberJoined,
    MemberReady,
    Round,
)
from stillhouse.weights.errors import (
    GroupBroken,
    GroupInterrupted,
    Interrupted,
    SnapshotRefused,
    WeightsDiffer,
    WeightsRefused,
)
from stillhouse.weights.sink import Receipt, WeightSink
from stillhouse.weights.wire import WireMember

log = logging.getLogger(__name__)

SETTLE_S: Final = 3.0
"""After a failure to join, wait this long for the operations under way to end; rank 0 gives up after half of it."""


class WeightReceiverFailed(RuntimeError):
    """The receiver's thread has ended with an error (the cause), so this actor gets no more weights."""


@dataclass(slots=True)
class _Figures:
    """Totals and newest values, under their names in the heartbeat's stats."""

    weights_received_total: float = 0.0
    weight_bytes_total: float = 0.0
    weight_receive_s: float = 0.0
    weight_stage_s: float = 0.0
    weight_groups_joined_total: float = 0.0
    weight_groups_broken_total: float = 0.0
    snapshots_refused_total: float = 0.0
    weight_reconnects_total: float = 0.0
    """Connections to the learner that took the place of a broken one."""


class WeightReceiver:
    """Follows WeightPlans for one sink."""

    def __init__(
        self,
        sink: WeightSink,
        *,
        name: str,
        on_staged: Callable[[], None] = lambda: None,
        keys: ClientKeys | None = None,
        within: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`name`: this actor's name in plans. `on_staged` is called from the receiver's thread whenever there are new
        weights. `keys`: encrypt the control channel. `within`: the sink takes weights inside of it."""
        self._sink = sink
        self._within = within
        self._keys = keys
        self._on_staged = on_staged
        self._name = name
        self._figures = _Figures()
        # Shared between the threads, under this lock.
        self._changed = threading.Condition()
        self._plan: WeightPlan | None = None
        self._closing = False
        self._failure: BaseException | None = None
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name="weight-receiver", daemon=True)

    # -------------------------------------------------------------------------------------- any other thread

    def start(self) -> None:
        self._thread.start()

    def handle_plan(self, plan: WeightPlan) -> None:
        """Follow this plan from now on, and abandon the former one."""
        with self._changed:
            if self._closing:
                return
            self._plan = plan
            self._changed.notify_all()
            self._waker.wake()

    def raise_if_failed(self) -> None:
        """Raises WeightReceiverFailed when the thread has ended with an error."""
        if self._failure is not None:
            raise WeightReceiverFailed(f"{self._name}: {self._failure}") from self._failure

    @property
    def version(self) -> WeightVersion | None:
        """Newest weights of the sink; None: unknown."""
        return self._sink.version

    @property
    def stats(self) -> dict[str, float]:
        """For the heartbeat; totals end in `_total`."""
        return asdict(self._figures) | self._sink.stats

    def close(self, timeout_s: float = 5.0) -> None:
        """Leave the group and end the thread. Idempotent. If an engine or a file system takes longer than `timeout_s`,
        the thread is abandoned and ends with the process."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
            self._waker.wake()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.error("%s: the weight receiver did not end within %.1f s", self._name, timeout_s)
        else:
            self._waker.close()

    # --------------------------------------------------------------------------------------- receiver thread

    def _run(self) -> None:
        try:
            self._sink.prepare()
            while True:
                plan = self._next_plan()
                if plan is None:
                    return
                try:
                    self._follow(plan)
                except (GroupBroken, WeightsRefused) as error:
                    self._figures.weight_groups_broken_total += 1
                    log.warning("%s: weight group %d: %s", self._name, plan.group_epoch, error)
                except GroupInterrupted as interruption:
                    log.info("%s: weight group %d: left, %s", self._name, plan.group_epoch, interruption)
        except BaseException as error:
            log.exception("%s: the weight receiver failed", self._name)
            self._failure = error

    def _next_plan(self) -> WeightPlan | None:
        """Wait for a plan; None when closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._plan is not None)
            if self._closing:
                return None
            plan, self._plan = self._plan, None
            return plan

    def _interrupted(self) -> str | None:
        if self._closing:
            return "closing"
        return "a newer plan is here" if self._plan is not None else None

    def _follow(self, plan: WeightPlan) -> None:
        if self._name not in plan.members:
            raise ValueError(f"weight plan {plan.group_epoch} is for {plan.members}; this actor is {self._name}")
        self._sink.check(plan)
        index = plan.members.index(self._name)
        with ControlMember(plan.control, member_keys(plan, self._keys), self._count_reconnect) as control:
            control.send(MemberJoined(plan.group_epoch, index + 1, self.version))
            go = self._await_go(control, plan)
            if go is not None:
                self._take_part(control, plan, index, go.timeout_s)

    def _await_go(self, control: ControlMember, plan: WeightPlan) -> Go | None:
        """None when rank 0 gave up the group. Raises GroupInterrupted, and GroupBroken after the join timeout."""
        deadline_s = time.monotonic() + plan.join_timeout_s + 1.0  # rank 0's deadline is a little later than ours
        while True:
            message = self._recv(control, deadline_s)
            if isinstance(message, Go) and message.group_epoch == plan.group_epoch:
                return message
            if isinstance(message, Leave) and message.group_epoch == plan.group_epoch:
                return None
            if time.monotonic() > deadline_s:
                raise GroupBroken(f"rank 0 did not start the group within {plan.join_timeout_s:.1f} s")

    def _take_part(self, control: ControlMember, plan: WeightPlan, index: int, timeout_s: float) -> None:
        def interrupted() -> str | None:
            return self._interrupted() or ("asked to leave" if control.must_leave() else None)

        wire: WireMember | None = None
        try:
            try:
                if plan.backend not in NO_GROUP:
                    self._sink.join(plan, index, timeout_s, interrupted)
                else:
                    keys = member_keys(plan, self._keys)
                    wire = WireMember(
                        plan.control,
                        keys,
                        group_epoch=plan.group_epoch,
                        rank=index + 1,
                        on_reconnect=self._count_reconnect,
                    )
            except (GroupBroken, GroupInterrupted) as error:
                free = self._sink.settle(SETTLE_S)
                control.send(MemberReady(plan.group_epoch, index + 1, str(error), at_fault=not free))
                raise
            except WeightsRefused as error:
                control.send(MemberReady(plan.group_epoch, index + 1, str(error), at_fault=True))
                raise
            self._figures.weight_groups_joined_total += 1
            control.send(MemberReady(plan.group_epoch, index + 1))
            agreed: Agreed | None = None
            taken = 0
            while True:
                message = self._recv(control, None)
                if isinstance(message, Leave):
                    return
                if isinstance(message, Round) and message.number > taken:  # else it was said again
                    taken = message.number
                    agreed = message.agreed or agreed
                    self._take_round(control, index, message, agreed, interrupted, wire)
        finally:
            if wire is not None:
                wire.close()
            self._sink.leave()

    def _count_reconnect(self) -> None:
        self._figures.weight_reconnects_total += 1

    def _recv(self, control: ControlMember, deadline_s: float | None) -> Go | Round | Leave | None:
        """The next message; None at the deadline or when woken. Raises GroupInterrupted."""
        self._waker.clear()
        reason = self._interrupted()
        if reason is not None:
            raise GroupInterrupted(reason)
        left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        return control.recv(left_s, self._waker)

    def _need_not_take(self, header: Round, wire: WireMember | None) -> bool:
        """Whether this member has the version already, as all do but the newcomer for whom a group was made, and no
        other member waits for it in a broadcast. A check by loading a file needs all that comes before it."""
        by_loading = header.check is not None and header.check.weights is not None
        return wire is not None and not by_loading and self._sink.version == header.version

    def _take_round(
        self,
        control: ControlMember,
        index: int,
        header: Round,
        agreed: Agreed | None,
        interrupted: Interrupted,
        wire: WireMember | None,
    ) -> None:
        """Take a version and answer. Failures are answered too, so that rank 0 knows that this member is alive."""

        def answer(status: AnswerStatus, reason: str = "") -> None:
            control.send(MemberAnswer(header.group_epoch, index + 1, header.number, status, reason))

        try:
            if agreed is None or agreed.manifest.digest != header.manifest_digest:
                raise WeightsRefused(f"round {header.number} follows a manifest that was never agreed")
            if self._need_not_take(header, wire):
                taken = Receipt(n_bytes=0, receive_s=0.0, stage_s=0.0, staged=False)
            else:
                with events.span("weights", "receive", version=str(header.version)), self._within():
                    taken = self._sink.take(header, agreed, interrupted, wire)
        except (GroupBroken, GroupInterrupted) as error:
            free = self._sink.settle(header.grace_s / 2)
            answer("broken" if free else "stuck", str(error))
            raise
        except WeightsDiffer as error:
            answer("wrong_weights", str(error))
            raise
        except Exception as error:
            self._figures.snapshots_refused_total += isinstance(error.__cause__, SnapshotRefused)
            answer("refused", f"{type(error).__name__}: {error}")
            raise
        self._figures.weights_received_total += taken.n_bytes > 0
        self._figures.weight_bytes_total += taken.n_bytes
        self._figures.weight_receive_s = taken.receive_s
        if taken.staged:
            self._figures.weight_stage_s = taken.stage_s
            self._on_staged()
        answer("staged")
