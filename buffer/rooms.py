"""The teachers of a pool by their free tokens: the one with most room is found at once, however many there are."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Final

from stillhouse.buffer.peers import TeacherPeer

MAX_OUTDATED: Final = 64
"""Entries of the heap that may be out of date in any case."""


class Rooms:
    """Its owner says when the free tokens of a teacher have changed, and when its first lease begins or its last one
    ends."""

    def __init__(self) -> None:
        self._teachers: dict[str, TeacherPeer] = {}
        self._numbers: dict[str, int] = {}
        """Numbers of the teachers in the order in which they joined: of two with as much room, the first is taken."""
        self._joined_total = 0
        self._by_room: list[tuple[int, int, str]] = []
        """A heap of (-free tokens, number, name). An entry that is out of date is removed when it comes up."""
        self._entered: dict[str, int] = {}
        """Free tokens of each teacher as entered last."""
        self._without_lease: dict[str, None] = {}
        """Names of the teachers that hold nothing."""

    def __repr__(self) -> str:
        return f"Rooms({self._entered}, without a lease: {list(self._without_lease)})"

    def enter(self, teacher: TeacherPeer) -> None:
        """Add a teacher, in place of any other of its name."""
        self.remove(teacher.name)
        self._teachers[teacher.name] = teacher
        self._numbers[teacher.name] = self._joined_total
        self._joined_total += 1
        self.changed(teacher)

    def remove(self, name: str) -> None:
        """Forget a teacher that is lost."""
        if self._teachers.pop(name, None) is not None:
            del self._numbers[name], self._entered[name]
            self._without_lease.pop(name, None)

    def changed(self, teacher: TeacherPeer) -> None:
        """Enter the free tokens of a teacher, and whether it holds a lease. Ignores one that is lost."""
        name, free_tokens = teacher.name, teacher.free_tokens
        if self._teachers.get(name) is not teacher:
            return
        if teacher.leases:
            self._without_lease.pop(name, None)
        else:
            self._without_lease[name] = None
        if self._entered.get(name) == free_tokens:
            return
        self._entered[name] = free_tokens
        heappush(self._by_room, (-free_tokens, self._numbers[name], name))
        if len(self._by_room) > 2 * len(self._teachers) + MAX_OUTDATED:
            self._by_room = [(-free, self._numbers[name], name) for name, free in self._entered.items()]
            heapify(self._by_room)

    @property
    def any_free(self) -> bool:
        """Return True if a teacher has free tokens."""
        teacher = self._roomiest()
        return teacher is not None and teacher.free_tokens > 0

    def choose(self, new_tokens: int, may_take: Callable[[TeacherPeer], bool]) -> TeacherPeer | None:
        """The teacher with most free tokens, of those for which `may_take` is true and that have room for an item of so
        many new tokens (`TeacherPeer.has_room`)."""
        passed_over: list[tuple[int, int, str]] = []
        chosen: TeacherPeer | None = None
        while chosen is None and (teacher := self._roomiest()) is not None and teacher.free_tokens >= new_tokens:
            if may_take(teacher):
                chosen = teacher
            else:
                passed_over.append(heappop(self._by_room))
        for entry in passed_over:
            heappush(self._by_room, entry)
        if chosen is not None:
            return chosen
        alone = [self._teachers[name] for name in self._without_lease]
        able = [teacher for teacher in alone if teacher.has_room(new_tokens) and may_take(teacher)]
        return max(able, key=lambda teacher: (teacher.free_tokens, -self._numbers[teacher.name]), default=None)

    def _roomiest(self) -> TeacherPeer | None:
        while self._by_room:
            minus_free, number, name = self._by_room[0]
            if self._numbers.get(name) == number and self._entered[name] == -minus_free:
                return self._teachers[name]
            heappop(self._by_room)
        return None
