"""Answers and lines of log at a bounded rate, and what that costs to remember."""

from __future__ import annotations

from stillhouse.protocol.handshake import REMEMBERED_PEERS, Doorkeeper
from stillhouse.protocol.messages import Hello
from stillhouse.protocol.ratelimit import OncePerInterval


class Seconds:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_each_key_is_due_once_per_interval() -> None:
    clock = Seconds()
    answers = OncePerInterval(1.0, at_most=100, clock=clock)
    assert [answers.due(b"a"), answers.due(b"a"), answers.due(b"b")] == [True, False, True]
    clock.now_s = 0.99
    assert not answers.due(b"a")
    clock.now_s = 1.0
    assert [answers.due(b"a"), answers.due(b"a")] == [True, False]


def test_keys_that_are_over_are_forgotten_however_many_came() -> None:
    clock = Seconds()
    answers = OncePerInterval(1.0, at_most=100, clock=clock)
    for n in range(1000):
        clock.now_s = n / 10
        assert answers.due(b"connection-%d" % n)
    assert len(answers) == 10


def test_no_more_keys_are_remembered_than_allowed_and_the_oldest_goes_first() -> None:
    answers = OncePerInterval(1.0, at_most=100, clock=Seconds())
    assert all(answers.due(b"%d" % n) for n in range(101))
    assert len(answers) == 100
    assert [answers.due(b"1"), answers.due(b"0")] == [False, True]


def test_who_makes_up_names_does_not_fill_the_doorkeepers_memory() -> None:
    door = Doorkeeper(run_id="run-1", vocab_fingerprint=None)
    for n in range(REMEMBERED_PEERS + 10):
        door.admitted(Hello("actor", "known", f"i{n}", "run-1", "ab" * 32))
        door.admitted(Hello("actor", f"made-up-{n}", "first", "run-1", "ab" * 32))
    remembered = door.incarnations()
    assert len(remembered) == REMEMBERED_PEERS
    assert max(len(incarnations) for _, incarnations in remembered) == 16
    back = door.objection(Hello("actor", "known", f"i{REMEMBERED_PEERS + 8}", "run-1", "ab" * 32))
    assert back is not None and back.code == "duplicate_name", "who was replaced last is remembered"
