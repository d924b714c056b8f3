"""The teacher with most room, found in order and by looking at all of them."""

from __future__ import annotations

from random import Random

import pytest

from stillhouse.buffer.breaker import Breaker
from stillhouse.buffer.peers import TeacherPeer
from stillhouse.buffer.rooms import MAX_OUTDATED, Rooms
from stillhouse.protocol.messages import ScoreCredit


class Pool:
    """Teachers whose credit and leases change at random, in the order in which they joined."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.rooms = Rooms()
        self.teachers: list[TeacherPeer] = []
        self.sent: dict[str, int] = {}
        self.seq = 0

    def join(self, name: str) -> None:
        self.leave(name)
        teacher = TeacherPeer(name, "default", "1", 0.0, Breaker(failures=3, backoff_s=1.0, backoff_max_s=60.0))
        self.teachers.append(teacher)
        self.sent[name] = 0
        self.rooms.enter(teacher)

    def leave(self, name: str) -> None:
        self.teachers = [teacher for teacher in self.teachers if teacher.name != name]
        self.rooms.remove(name)

    def give_credit(self, teacher: TeacherPeer, tokens: int) -> None:
        self.seq += 1
        teacher.give_credit(ScoreCredit(tokens, self.seq, self.sent[teacher.name]))
        self.rooms.changed(teacher)

    def send(self, teacher: TeacherPeer, tokens: int) -> None:
        class Sent:
            lease_id = self.seq = self.seq + 1

        teacher.item_sent(Sent(), tokens)  # type: ignore[arg-type]
        self.sent[teacher.name] += 1
        self.rooms.changed(teacher)

    def answer(self, teacher: TeacherPeer) -> None:
        if teacher.leases:
            teacher.leases.popitem()
            self.rooms.changed(teacher)

    def obvious(self, new_tokens: int, excluded: set[str]) -> TeacherPeer | None:
        """Look at all: the first with most free tokens, of those that have room."""
        able = [one for one in self.teachers if one.has_room(new_tokens) and one.name not in excluded]
        return max(able, key=lambda one: one.free_tokens, default=None)


@pytest.mark.parametrize("seed", range(8))
def test_the_choice_is_the_one_that_a_look_at_every_teacher_gives(seed: int) -> None:
    pool = Pool(seed)
    rng, found = pool.rng, 0
    for _ in range(4000):
        name = f"teacher-{rng.randrange(6)}"
        event = rng.random()
        if event < 0.03:
            pool.join(name)
        elif event < 0.04:
            pool.leave(name)
        elif pool.teachers:
            teacher = rng.choice(pool.teachers)
            if event < 0.25:
                pool.give_credit(teacher, rng.choice([0, 1, 5, 5, 9, 20]))
            elif event < 0.45:
                pool.answer(teacher)
            else:
                tokens = rng.choice([1, 4, 5, 8, 30])
                excluded = {one.name for one in pool.teachers if rng.random() < 0.2}
                chosen = pool.rooms.choose(tokens, lambda one, excluded=excluded: one.name not in excluded)
                assert chosen is pool.obvious(tokens, excluded)
                if chosen is not None:
                    found += 1
                    pool.send(chosen, tokens)
        assert pool.rooms.any_free == any(one.free_tokens > 0 for one in pool.teachers)
    assert found > 300


def test_a_choice_looks_at_one_teacher_and_not_at_all_of_them() -> None:
    pool, looks = Pool(0), list[str]()
    for number in range(500):
        pool.join(f"teacher-{number}")
        pool.give_credit(pool.teachers[-1], 600 + number)

    def may_take(teacher: TeacherPeer) -> bool:
        looks.append(teacher.name)
        return True

    for _ in range(500):
        chosen = pool.rooms.choose(600, may_take)
        assert chosen is not None
        pool.send(chosen, 600)
    assert len(looks) == 500 and len(set(looks)) == 500, "each in turn, as it has most room"
    assert pool.rooms.choose(600, may_take) is None and len(looks) == 500, "none has room: none is looked at"


def test_what_is_out_of_date_does_not_pile_up() -> None:
    pool = Pool(0)
    pool.join("teacher-0")
    pool.join("teacher-1")
    pool.give_credit(pool.teachers[1], 1_000_000)  # stays on top
    for number in range(10_000):
        pool.give_credit(pool.teachers[0], number % 977)
    assert len(pool.rooms._by_room) <= 2 * 2 + MAX_OUTDATED + 1  # pyright: ignore[reportPrivateUsage]
