"""Teachers that fail item after item are held back and tried again; items that everybody fails hold nobody back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stillhouse.buffer.breaker import Breaker
from stillhouse.protocol import messages as m
from tests.buffer.driver import PROMPT, Driver

Make = type[Driver]
SEQ = count(2)
N_ITEM = len(PROMPT) + 1
"""Context tokens of the first segment of a rollout here."""


@dataclass
class SlowBreaker:
    """Remembers everything and thinks it over each time: `against` from the whole history, the rest step by step."""

    failures: int
    first_s: float
    longest_s: float
    history: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    until_s: float | None = None
    n_failed_probes: int = 0
    probe: int | None = None

    def against(self) -> set[str]:
        items: set[str] = set()
        for what, item in self.history:
            if what == "scored":
                items = set()
            elif what == "failed":
                items |= {item}
            else:
                items -= {item}
        return items

    def back_off_s(self) -> float:
        return min(self.first_s * 2.0**self.n_failed_probes, self.longest_s)

    def happened(self, now_s: float, what: str, item: str, lease: int) -> None:
        self.history.append((what, item))
        enough = bool(self.failures) and len(self.against()) >= self.failures
        if what == "failed" and self.until_s is not None and self.probe == lease:
            self.n_failed_probes += 1
            self.probe = None
            self.until_s = now_s + self.back_off_s()
        elif what == "failed" and self.until_s is None and enough:
            self.until_s = now_s + self.back_off_s()
        elif what != "failed" and not enough:
            self.until_s, self.probe, self.n_failed_probes = None, None, 0

    def allows(self, now_s: float) -> bool:
        return self.until_s is None or (self.probe is None and now_s >= self.until_s)


@given(
    failures=st.integers(0, 3),
    longest=st.sampled_from((1.0, 4.0)),
    steps=st.lists(
        st.tuples(st.sampled_from(("scored", "failed", "failed", "failed", "pardon", "nothing", "sent")),
                  st.sampled_from("abcde"), st.sampled_from((0.0, 0.3, 1.0, 2.0, 4.0))),
        max_size=60,
    ),
)  # fmt: skip
def test_it_opens_probes_and_closes_as_the_slow_one_does(
    failures: int, longest: float, steps: list[tuple[str, str, float]]
) -> None:
    breaker = Breaker(failures=failures, backoff_s=1.0, backoff_max_s=longest)
    slow = SlowBreaker(failures, 1.0, longest)
    now_s, lease, out = 0.0, 0, list[int]()
    for what, item, waited_s in steps:
        now_s += waited_s
        assert breaker.allows(now_s) == slow.allows(now_s)
        assert breaker.is_open == (slow.until_s is not None) == bool(breaker.reason(now_s))
        if what == "sent":
            if not slow.allows(now_s):
                continue
            lease += 1
            out.append(lease)
            assert breaker.sent(lease) == (slow.until_s is not None)
            slow.probe = lease if slow.until_s is not None else None
        elif what == "pardon":
            known = item in slow.against()
            breaker.pardon(item)
            if known:
                slow.happened(now_s, "pardon", item, 0)
        elif not out:
            continue
        elif what == "scored":
            out.pop()
            breaker.succeeded()
            slow.happened(now_s, "scored", "", 0)
        elif what == "failed":
            was_open, ended = breaker.is_open, out.pop()
            opened = breaker.failed(now_s, ended, item)
            slow.happened(now_s, "failed", item, ended)
            assert opened == (not was_open and slow.until_s is not None)
        else:
            ended = out.pop()
            breaker.inconclusive(ended)
            slow.probe = None if slow.probe == ended else slow.probe
    assert breaker.allows(now_s + longest) or breaker.is_open


# --------------------------------------------------------------------------------------------------- in the buffer


def ready(make: Make, teachers: tuple[str, ...] = ("t", "u"), **settings: Any) -> Driver:
    """Rollouts 0.. to write to, and teachers that have no credit yet."""
    defaults: dict[str, Any] = {
        "batch": 50, "breaker_failures": 3, "breaker_backoff_s": 1.0, "lease_s": 60.0,
        "max_score_attempts": 20, "hedge_multiple": 0.0,
    }  # fmt: skip
    driver = make(peers=False, **(defaults | settings))
    driver.actor()
    driver.join("learner", "learner")
    for name in teachers:
        driver.teacher(name, tokens=0)
    driver.offer(*range(40))
    return driver


def credit(driver: Driver, name: str, tokens: int) -> None:
    """As much room as this, nothing on its way."""
    received = sum(len(o.message.items) for o in driver.sent if o.name == name and isinstance(o.message, m.ScoreWork))
    driver.send("teacher", name, m.ScoreCredit(tokens, next(SEQ), received))


def fails(driver: Driver, who: dict[str, Sequence[int]]) -> None:
    """Each teacher takes the items of these tasks, nobody else's, and fails them; then it has no more room."""
    for name, task_ids in who.items():
        for task_id in task_ids:
            driver.write(f"train-{task_id}-0-0", 1)
        credit(driver, name, len(task_ids) * N_ITEM)
    taken = {lease: held[0] for lease, held in driver.work.items()}
    assert sorted(taken.values()) == sorted(name for name, task_ids in who.items() for _ in task_ids)
    for name in who:
        credit(driver, name, 0)
    for lease in taken:
        driver.refuse_work(lease)


def held_back(driver: Driver) -> dict[str, str]:
    return {peer.name: peer.held_back for peer in driver.snapshot.peers if peer.held_back}


def test_after_failures_in_a_row_a_teacher_waits_then_gets_one_item(make: Make) -> None:
    driver = ready(make, ("t",))
    fails(driver, {"t": range(3)})
    assert held_back(driver) == {
        "t": "failed 3 items in a row, or took longer than buffer.lease_s; tried again in 1.0 s"
    }
    assert driver.state.held_back == {"t": "train-0-0-0/0, train-1-0-0/0, train-2-0-0/0"}
    credit(driver, "t", 1000)
    driver.wait(0.9)
    assert not driver.work
    driver.wait(0.2)
    assert len(driver.work) == 1, "one item, although there is room for all"
    assert "on trial" in held_back(driver)["t"]
    driver.score()
    assert not held_back(driver)
    assert driver.snapshot.queues["breakers_opened_total"] == 1
    assert driver.snapshot.queues["tokens_scored"] == 3, "all of them, now"


def test_a_pool_of_which_all_are_held_back_goes_on(make: Make) -> None:
    driver = ready(make, ("t", "u"))
    fails(driver, {"t": range(3), "u": range(10, 13)})
    assert set(held_back(driver)) == {"t", "u"}
    for name in ("t", "u"):
        credit(driver, name, 1000)
    driver.wait(1.1)
    assert {name for name, _, _ in driver.work.values()} == {"t", "u"} and len(driver.work) == 2
    driver.score()
    assert driver.snapshot.queues["tokens_scored"] == 6 and not held_back(driver)
