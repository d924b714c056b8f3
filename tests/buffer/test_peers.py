"""Workers that come and go for weeks leave nothing behind but sums, and what follows from them stays true."""

from __future__ import annotations

import math

import pytest

from stillhouse.buffer.peers import PeerTable
from stillhouse.learner.reports.work_window import WorkWindow
from stillhouse.protocol import messages as m
from tests.buffer.driver import Driver

Make = type[Driver]


@pytest.fixture(autouse=True)
def few_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeerTable, "remembered", 3)


def with_one_task(make: Make) -> Driver:
    """Whoever comes is given it; nobody is there yet but the learner."""
    driver = make(staleness=0, batch=1, max_attempts=100, peers=False)
    driver.join("learner", "learner")
    driver.offer(0)
    return driver


def names(driver: Driver) -> list[str]:
    return [peer.name for peer in driver.snapshot.peers]


def test_of_actors_that_left_long_ago_their_sum_is_kept(make: Make) -> None:
    driver = with_one_task(make)
    for n in range(8):
        driver.actor(f"a{n}")
        driver.write(f"train-0-0-{n}", 2)
        driver.lose("actor", f"a{n}")
        assert driver.snapshot.tokens_total("actor") == 2 * (n + 1)
    assert names(driver) == ["learner", "a5", "a6", "a7"]
    assert driver.snapshot.forgotten == {"actor": m.ForgottenPeers(n=5, done_total=0, tokens_total=10)}


def test_who_comes_back_goes_on_counting_and_is_the_last_to_be_forgotten(make: Make) -> None:
    driver = with_one_task(make)
    driver.actor("a")
    driver.write("train-0-0-0", 2)
    driver.lose("actor", "a")
    for name in ("b", "c"):
        driver.actor(name)
        driver.lose("actor", name)
    driver.join("actor", "a", incarnation="2")
    driver.lose("actor", "a")
    driver.actor("d")
    driver.lose("actor", "d")
    assert names(driver) == ["learner", "a", "c", "d"]
    assert {peer.name: peer.tokens_total for peer in driver.snapshot.peers} == {"learner": 0, "a": 2, "c": 0, "d": 0}


def test_gpu_hours_are_those_of_all_processes_and_of_workers_that_left(make: Make) -> None:
    """Also for a learner that starts later. A worker on the CPU reports none."""
    driver = make()
    one, later = WorkWindow(math.inf), WorkWindow(60.0)

    def beat(role: m.Role, name: str, **stats: float) -> None:
        driver.send(role, name, m.Heartbeat(None, stats))
        driver.wait(1.0)
        one.update(driver.snapshot)

    for name, seconds in (("learner", 3600.0), ("learner", 7200.0)):
        beat("learner", name, gpu_s_total=seconds)
    for incarnation in ("2", "3"):
        beat("actor", "a", gpu_s_total=1800.0)
        driver.lose("actor", "a")
        driver.join("actor", "a", incarnation=incarnation)
    for name in "bcdef":
        driver.join("actor", name)
        beat("actor", name, gpu_s_total=360.0)
        driver.lose("actor", name)
    beat("actor", "a", gpu_s_total=900.0)
    beat("teacher", "t", busy_s_total=9.0)
    later.update(driver.snapshot)
    beat("teacher", "t", busy_s_total=9.0)
    later.update(driver.snapshot)
    works = [window.work() for window in (one, later)]
    hours = [work.gpu_hours for work in works if work is not None]
    assert hours == [pytest.approx({"learner": 2.0, "actor": 1.75}), pytest.approx({"learner": 2.0, "actor": 1.55})]
    assert names(driver) == ["a", "t", "learner", "d", "e", "f"]


def test_one_that_was_forgotten_may_come_back(make: Make) -> None:
    driver = with_one_task(make)
    driver.actor("a")
    driver.write("train-0-0-0", 2)
    driver.lose("actor", "a")
    for n in range(3):
        driver.join("actor", f"b{n}")
        driver.lose("actor", f"b{n}")
    assert "a" not in names(driver)
    driver.actor("a")  # the same process: it was only cut off
    ack = driver.write("train-0-0-0", 2)
    assert ack is not None and ack.status != "accepted", "its rollout was taken from it"
    driver.write("train-0-0-1", 3, final=True)
    assert driver.snapshot.tokens_total("actor") == 5
    assert driver.holder["train-0-0-1"] == "a"


def test_what_a_forgotten_teacher_failed_may_fail_at_others(make: Make) -> None:
    driver = make(max_score_attempts=10, breaker_failures=1, peers=False)
    driver.join("learner", "learner")
    driver.actor()
    driver.offer(0)
    driver.write("train-0-0-0", 2, final=True)
    for n in range(5):
        driver.teacher(f"t{n}")
        driver.refuse_work(next(lease for lease, (name, _, _) in driver.work.items() if name == f"t{n}"))
        driver.lose("teacher", f"t{n}")
        driver.work.clear()  # what it was given again went with it
    assert driver.snapshot.forgotten["teacher"].n == 2
    driver.teacher("t5")
    driver.score()
    assert driver.snapshot.queues["tokens_scored"] == 2


def test_the_learner_is_never_forgotten(make: Make) -> None:
    """A reconnect of the same process must find its batch."""
    driver = make(staleness=0, batch=1)
    driver.offer(0)
    driver.roll(0)
    batch = driver.batch_for(0)
    driver.lose("learner", "learner")
    for n in range(10):
        driver.join("teacher", f"t{n}")
        driver.lose("teacher", f"t{n}")
    driver.join("learner", "learner")
    driver.trained(batch)
    assert driver.ledger.tokens.trained == 2
