"""The buffer's peers: what each may still be sent, holds and has done; and the messages that are to be sent to them.

Credit is absolute: the peer says how much more it will take and how many messages' worth of work it had received when
it said so; what was sent after that is subtracted here. Messages to a peer arrive exactly once (`protocol.flow`), so
the two counts meet. When a peer was declared lost, what was on its way is gone, and its next credit starts them anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

from stillhouse.buffer.breaker import Breaker
from stillhouse.buffer.rollouts import RolloutState, ScoreJob
from stillhouse.buffer.tokens import Array
from stillhouse.protocol.messages import (
    GPU_S,
    ForgottenPeers,
    Message,
    PeerView,
    Role,
    ScoreCredit,
    TicketCredit,
    WeightVersion,
)

DRAINING: Final = "draining"
"""The one number of a heartbeat that decides anything here: a teacher that leaves gets no more work."""
KEPT: Final = (DRAINING, GPU_S)
"""Those that outlive this process."""


class Outgoing(NamedTuple):
    """A message to send to one peer, and its frames."""

    role: Role
    name: str
    message: Message
    arrays: tuple[Array, ...] = ()


class Outbox:
    """Collects the messages that one event causes."""

    def __init__(self) -> None:
        self._messages: list[Outgoing] = []
        self.learner: str | None = None
        """Name of the connected learner."""

    def send(self, role: Role, name: str | None, message: Message, arrays: tuple[Array, ...] = ()) -> None:
        """`name` None: no learner is connected; one that comes back is sent the same again, or asks for it."""
        if name is not None:
            self._messages.append(Outgoing(role, name, message, arrays))

    def take(self) -> list[Outgoing]:
        """Return the collected messages, and forget them."""
        messages, self._messages = self._messages, []
        return messages


@dataclass(slots=True, eq=False, repr=False)
class Lease:
    """A score job granted to one teacher."""

    lease_id: int
    job: ScoreJob
    teacher: TeacherPeer
    granted_s: float
    hedge: bool
    """True if the job was already out at another teacher."""
    known_tokens: int
    """Tokens of the item that its teacher was sent with the rollout's former item."""


class Peer:
    """A peer, known by role and name. A new incarnation replaces the record and takes over its totals."""

    def __init__(self, role: Role, name: str, incarnation: str, now_s: float, former: Peer | None = None) -> None:
        self.role: Role = role
        self.name = name
        self.incarnation = incarnation
        self.alive = True
        self.heard_s = now_s
        self.version: WeightVersion | None = None
        self.stats: dict[str, float] = {}
        self.former_gpu_s = former.gpu_s if former is not None else 0.0
        self.done_total = former.done_total if former is not None else 0
        self.tokens_total = former.tokens_total if former is not None else 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}, alive={self.alive}, held={self.held})"

    @property
    def held(self) -> int:
        return 0

    @property
    def gpu_s(self) -> float:
        """Seconds of GPUs, over all its processes."""
        return self.former_gpu_s + self.stats.get(GPU_S, 0.0)

    def view(self, now_s: float, held: int | None = None) -> PeerView:
        return PeerView(
            role=self.role,
            name=self.name,
            alive=self.alive,
            version=self.version,
            silent_s=max(0.0, now_s - self.heard_s),
            stats=self.stats | ({GPU_S: self.gpu_s} if self.gpu_s else {}),
            held=self.held if held is None else held,
            done_total=self.done_total,
            tokens_total=self.tokens_total,
            held_back=self.held_back(now_s),
        )

    def held_back(self, now_s: float) -> str:
        """Reason why a connected peer receives no work; empty if it does."""
        return ""


class ActorPeer(Peer):
    """An actor, which holds tickets. Its credit counts rollouts."""

    def __init__(self, name: str, incarnation: str, now_s: float, former: Peer | None = None) -> None:
        super().__init__("actor", name, incarnation, now_s, former)
        self.rollouts: dict[str, RolloutState] = {}
        """Rollouts that run at this actor, by id."""
        self.taken_back: list[str] = []
        """Rollouts taken from it while it was silent. They are cancelled if the same incarnation is heard again."""
        self._credit = TicketCredit(n=0, seq=-1, tickets_received_total=0)
        self._sent_total = 0
        self._counts_meet = True

    @property
    def held(self) -> int:
        return len(self.rollouts)

    @property
    def free(self) -> int:
        """Number of tickets that it may be sent now."""
        if not self._counts_meet:
            return 0
        return self._credit.n - (self._sent_total - self._credit.tickets_received_total)

    def give_credit(self, credit: TicketCredit) -> None:
        if credit.seq <= self._credit.seq:
            return
        self._credit = credit
        if not self._counts_meet or credit.tickets_received_total > self._sent_total:
            self._sent_total = credit.tickets_received_total
            self._counts_meet = True

    def lost(self) -> list[RolloutState]:
        """Take back all rollouts of an actor that was declared lost, and return them."""
        self._counts_meet = False
        rollouts = list(self.rollouts.values())
        self.rollouts.clear()
        self.taken_back += [rollout.rollout_id for rollout in rollouts]
        return rollouts

    def ticket_sent(self, rollout: RolloutState) -> None:
        self._sent_total += 1
        self.rollouts[rollout.rollout_id] = rollout


class TeacherPeer(Peer):
    """A teacher, which holds score leases. Its credit counts tokens that it has to compute: an item's context, without
    what it was sent with the rollout's former item."""

    def __init__(
        self, name: str, pool: str, incarnation: str, now_s: float, breaker: Breaker, former: Peer | None = None
    ) -> None:
        super().__init__("teacher", name, incarnation, now_s, former)
        self.pool = pool
        self.breaker = breaker
        self.leases: dict[int, Lease] = {}
        self._credit = ScoreCredit(tokens=0, seq=-1, items_received_total=0)
        self._sent_total = 0
        self._on_their_way: deque[tuple[int, int]] = deque()
        """(number of items sent before this one, its new tokens)"""
        self._tokens_on_their_way = 0
        self._counts_meet = True

    @property
    def held(self) -> int:
        return len(self.leases)

    def held_back(self, now_s: float) -> str:
        if not self.alive:
            return ""
        return self.breaker.reason(now_s) or ("leaving" if self.stats.get(DRAINING) else "")

    @property
    def free_tokens(self) -> int:
        if not self._counts_meet:
            return 0
        return self._credit.tokens - self._tokens_on_their_way

    def has_room(self, new_tokens: int) -> bool:
        """Return True if an item of so many new tokens may be leased to it. One longer than its credit is sent by
        itself."""
        return new_tokens <= self.free_tokens or (self.free_tokens > 0 and not self.leases)

    def give_credit(self, credit: ScoreCredit) -> None:
        if credit.seq <= self._credit.seq:
            return
        self._credit = credit
        if not self._counts_meet or credit.items_received_total > self._sent_total:
            self._sent_total = credit.items_received_total
            self._counts_meet = True
        while self._on_their_way and self._on_their_way[0][0] < credit.items_received_total:
            self._tokens_on_their_way -= self._on_their_way.popleft()[1]

    def lost(self) -> None:
        """Forget what was on its way to a teacher that was declared lost."""
        self._counts_meet = False
        self._on_their_way.clear()
        self._tokens_on_their_way = 0

    def item_sent(self, lease: Lease, new_tokens: int) -> None:
        self.leases[lease.lease_id] = lease
        self._on_their_way.append((self._sent_total, new_tokens))
        self._tokens_on_their_way += new_tokens
        self._sent_total += 1


class PeerTable:
    """All peers that are connected, and the last of those that were: a run of weeks has workers that come for an hour.

    A peer is entered when it says Hello and is gone when it is lost. It may come back under the same name."""

    remembered: ClassVar[int] = 256
    """Number of gone actors and teachers to remember. Of those that left earlier only sums are kept."""

    def __init__(self) -> None:
        self._peers: dict[tuple[Role, str], Peer] = {}
        self._gone: dict[tuple[Role, str], None] = {}
        """Keys of peers that are gone, in the order in which they left."""
        self.forgotten: dict[Role, ForgottenPeers] = {}

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    def find(self, role: Role, name: str) -> Peer | None:
        return self._peers.get((role, name))

    def enter(self, peer: Peer) -> None:
        """Add a connected peer, in place of any other of its name."""
        key = peer.role, peer.name
        self._peers[key] = peer
        self._gone.pop(key, None)

    def remove(self, peer: Peer) -> None:
        """Forget a peer completely."""
        del self._peers[peer.role, peer.name]

    def gone(self, peer: Peer) -> Peer | None:
        """Note that an actor or teacher is gone and holds nothing. Returns the peer that is forgotten in its place, if
        any. Not for learners: a restarted learner that knows the same batches must find its record."""
        self._gone[peer.role, peer.name] = None
        if len(self._gone) <= self.remembered:
            return None
        oldest = next(iter(self._gone))
        del self._gone[oldest]
        forgotten = self._peers.pop(oldest)
        sums = self.forgotten.get(forgotten.role, ForgottenPeers())
        self.forgotten[forgotten.role] = ForgottenPeers(
            sums.n + 1, sums.done_total + forgotten.done_total, sums.tokens_total + forgotten.tokens_total
        )
        return forgotten
