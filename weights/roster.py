"""The members of the weight group: what they are, which should be in it, and when to make a new group. No I/O, no
torch, no clock: times are passed in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from stillhouse.weights.config import SentDtype, WeightsConfig
from stillhouse.weights.manifest import Pieces, TensorPiece, WeightManifest

if TYPE_CHECKING:
    from stillhouse.weights.buckets import BucketLayout

CheckBy: TypeAlias = Literal["reload", "canary", "off"]
"""The proof by which a server shows that it has the weights that were sent. reload: by its checksums after loading the
snapshot file, and by a canary; canary: by the canary alone, where the file is what was sent; off: not at all."""
LONGEST_DELAY: Final = 60.0
"""Upper bound of the delay before a seat that was left out may come back, in units of rejoin_delay_s."""


@dataclass(frozen=True, slots=True)
class GroupMembers:
    """The kind of a run's members, which is the same for all. The engine's provider supplies it (engines.provider)."""

    kind: Literal["engines", "servers", "adapters"] = "engines"
    """Engines in the actors' processes, or one server per actor. adapters: such servers, which keep the weights of the
    student that the run started from and load its adapters."""
    ranks_each: int = 1
    """Above 1: the tensor-parallel ranks of a server."""
    check_by: CheckBy = "off"
    dtype: SentDtype = "keep"
    """The dtype of their weights; keep: not known."""
    pieces: Pieces = field(default_factory=dict[str, tuple[TensorPiece, ...]])
    """Which weights they know as several tensors, or by another name; empty for engines (weights.checkpoint_names)."""
    adapter_config: bytes = b""
    """For adapters: what members are sent first (weights.control_messages.Agreed)."""

    def staging(self, manifest: WeightManifest, bucket_bytes: int) -> BucketLayout:
        """A layout for copies of the weights in which buckets can be sent in place. For engines the cuts between
        buckets are made later, so only the places of the tensors matter."""
        from stillhouse.weights.buckets import ALIGN_BYTES, EqualBuckets, PackedLayout  # here, because it imports torch

        if self.kind != "engines":
            return PackedLayout(manifest, bucket_bytes)
        return EqualBuckets(manifest, ALIGN_BYTES)


EMBEDDED = GroupMembers()


@dataclass(frozen=True, slots=True, order=True)
class GroupSeat:
    """One process that may be a member. The incarnation tells a restarted actor from its former process."""

    name: str
    incarnation: str


class Roster:
    """Decides who is wanted: all connected seats, except those that cool down after they were left out.

    cool-down after the n-th strike = rejoin_delay_s * min(2 ** (n - 1), LONGEST_DELAY)

    Strikes are forgotten when the seat confirms a version, or disconnects."""

    def __init__(self, config: WeightsConfig, expected_actors: int) -> None:
        """`expected_actors`: 0 = unknown; the join window is always waited out. It is also waited out for more actors
        than expected: those joined from elsewhere, and such actors come in groups."""
        self._config = config
        self._expected = expected_actors
        self._connected: tuple[GroupSeat, ...] = ()
        self._strikes: dict[GroupSeat, int] = {}
        self._cool_until_s: dict[GroupSeat, float] = {}
        self._window_end_s: float | None = None

    def __repr__(self) -> str:
        return f"Roster(connected={len(self._connected)}, cooling={len(self._cool_until_s)})"

    def connect(self, now_s: float, seats: Iterable[GroupSeat]) -> None:
        """Set the seats that are connected now. A change opens the join window, unless it is open."""
        connected = tuple(seats)
        if set(connected) == set(self._connected):
            return
        self._connected = connected
        for seat in set(self._strikes) - set(connected):
            self._strikes.pop(seat)
            self._cool_until_s.pop(seat, None)
        if self._window_end_s is None:
            self._window_end_s = now_s + self._config.join_window_s

    def strike(self, now_s: float, seat: GroupSeat) -> float:
        """Leave the seat out for a while. Returns for how many seconds."""
        self._strikes[seat] = strikes = self._strikes.get(seat, 0) + 1
        delay_s = self._config.rejoin_delay_s * min(2.0 ** (strikes - 1), LONGEST_DELAY)
        self._cool_until_s[seat] = now_s + delay_s
        return delay_s

    def confirm(self, seats: Iterable[GroupSeat]) -> None:
        """Record that these seats took part in a complete broadcast."""
        for seat in seats:
            self._strikes.pop(seat, None)
            self._cool_until_s.pop(seat, None)

    def wanted(self, now_s: float) -> tuple[GroupSeat, ...]:
        """The wanted seats, sorted by name, so that ranks are stable."""
        return tuple(sorted(seat for seat in self._connected if self._cool_until_s.get(seat, now_s) <= now_s))

    def rebuild_in_s(self, now_s: float, seated: tuple[GroupSeat, ...], *, urgent: bool) -> float | None:
        """Seconds until the group of `seated` should be replaced; 0 = now, None = it is as wanted. `urgent`: the
        present group cannot be used, so do not wait for the window."""
        wanted = self.wanted(now_s)
        if set(wanted) == set(seated):
            self._window_end_s = None
            return None
        if urgent or (self._expected and len(wanted) == self._expected):
            return 0.0
        if self._window_end_s is None:  # a seat has cooled down
            self._window_end_s = now_s + self._config.join_window_s
        return max(0.0, self._window_end_s - now_s)

    def rebuilt(self) -> None:
        """Record that a group was made of `wanted`; close the window."""
        self._window_end_s = None

    def cooled_in_s(self, now_s: float) -> float | None:
        """Seconds until the next seat may come back; None = none is left out."""
        self._cool_until_s = {seat: until_s for seat, until_s in self._cool_until_s.items() if until_s > now_s}
        return min(self._cool_until_s.values(), default=now_s) - now_s if self._cool_until_s else None
