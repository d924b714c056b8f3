"""Who should be in the weight group, and when it is time to make it anew. No I/O, no clock: times are handed in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from weights.config import WeightsConfig


@dataclass(frozen=True, slots=True, order=True)
class Seat:
    """One process that may be a member: a name alone would mix up an actor with its restarted self."""

    name: str
    incarnation: str


class Roster:
    """wanted = connected - cooling, where a seat cools after it was left out, longer each time:

    delay of the n-th strike = min(rejoin_delay_s * 2 ** (n - 1), rejoin_delay_max_s)

    A strike is forgotten when the seat confirms a version, or is gone."""

    def __init__(self, config: WeightsConfig, expected_actors: int) -> None:
        """`expected_actors`: 0 = unknown, always wait out the window. More than these have joined from elsewhere, and
        such come in company: for them the window is waited out."""
        self._config = config
        self._expected = expected_actors
        self._connected: tuple[Seat, ...] = ()
        self._strikes: dict[Seat, int] = {}
        self._cool_until_s: dict[Seat, float] = {}
        self._window_end_s: float | None = None

    def __repr__(self) -> str:
        return f"Roster(connected={len(self._connected)}, cooling={len(self._cool_until_s)})"

    def connect(self, now_s: float, seats: Iterable[Seat]) -> None:
        """These are connected now, and no others. A change opens a window, unless one is open."""
        connected = tuple(seats)
        if set(connected) == set(self._connected):
            return
        self._connected = connected
        for seat in set(self._strikes) - set(connected):
            self._strikes.pop(seat)
            self._cool_until_s.pop(seat, None)
        if self._window_end_s is None:
            self._window_end_s = now_s + self._config.join_window_s

    def strike(self, now_s: float, seat: Seat) -> float:
        """Leave it out for a while; how long, in seconds."""
        self._strikes[seat] = strikes = self._strikes.get(seat, 0) + 1
        delay_s = min(self._config.rejoin_delay_s * 2.0 ** (strikes - 1), self._config.rejoin_delay_max_s)
        self._cool_until_s[seat] = now_s + delay_s
        return delay_s

    def confirm(self, seats: Iterable[Seat]) -> None:
        """These took part in a whole broadcast."""
        for seat in seats:
            self._strikes.pop(seat, None)
            self._cool_until_s.pop(seat, None)

    def wanted(self, now_s: float) -> tuple[Seat, ...]:
        """In the order of their names, so that ranks are stable."""
        return tuple(sorted(seat for seat in self._connected if self._cool_until_s.get(seat, now_s) <= now_s))

    def rebuild_in_s(self, now_s: float, seated: tuple[Seat, ...], *, urgent: bool) -> float | None:
        """When the group of `seated` should give way to one of `wanted`: 0 = now, None = it is as it should be.
        `urgent`: the group cannot be used as it is, so do not wait for the window."""
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
        """A group was made of `wanted`; what changed before is done with."""
        self._window_end_s = None

    def cooled_in_s(self, now_s: float) -> float | None:
        """When the next seat may come back; None = none is left out."""
        self._cool_until_s = {seat: until_s for seat, until_s in self._cool_until_s.items() if until_s > now_s}
        return min(self._cool_until_s.values(), default=now_s) - now_s if self._cool_until_s else None
