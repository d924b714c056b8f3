"""Evaluation: outside pacing, first in line, delivered until the learner has it."""

from __future__ import annotations

import numpy as np

from stillhouse.protocol import messages as m
from tests.buffer.driver import Driver, v

Make = type[Driver]


def ask(driver: Driver, *have: str) -> m.EvalResult | None:
    driver.take(m.EvalResult)
    driver.send("learner", "learner", m.EvalWanted("e", have))
    return next(iter(driver.take(m.EvalResult)), None)


def test_evaluation_tickets_go_first_beyond_pacing_with_the_version_of_their_offer(make: Make) -> None:
    driver = make(peers=False, staleness=0, batch=1)
    driver.join("learner", "learner")
    driver.offer(0, 1)
    driver.send("learner", "learner", m.VersionPublished(v(3)))
    driver.offer(7, 8, kind="eval", eval_id="e", group=2)
    driver.actor(n=100)
    assert list(driver.tickets) == ["eval-7-0-0", "eval-7-1-0", "eval-8-0-0", "eval-8-1-0", "train-0-0-0"]
    assert driver.tickets["eval-7-0-0"].min_version == v(3)


def test_results_come_as_they_are_finished_and_again_when_the_learner_was_lost_before_it_had_them(make: Make) -> None:
    driver = make()
    driver.offer(7, 8, kind="eval", eval_id="e")
    assert ask(driver) == m.EvalResult("e", (), 0, 2)
    driver.write("eval-7-0-0", 2, final=True)
    assert driver.take(m.EvalResult) == []
    driver.score()
    (result,) = driver.take(m.EvalResult)
    assert [item.rollout_id for item in result.items] == ["eval-7-0-0"] and result.outstanding == 1
    assert ask(driver) == m.EvalResult("e", (), 0, 1), "it is on its way"
    driver.lose("learner", "learner")
    driver.join("learner", "learner")
    again = ask(driver)
    assert again is not None and [item.rollout_id for item in again.items] == ["eval-7-0-0"]
    assert ask(driver, "eval-7-0-0") == m.EvalResult("e", (), 0, 1)
    assert driver.ledger.eval_tokens.trained == 2, "counted once"
    assert driver.ledger.tokens.accepted == 0, "and not as training"


def test_any_number_of_evaluations_come_again_when_the_learner_was_lost_before_it_had_them(make: Make) -> None:
    driver = make()
    names = {f"set-{number}": f"eval-{number}-0-0" for number in range(12)}
    for name, rollout_id in names.items():
        driver.offer(int(name.removeprefix("set-")), kind="eval", eval_id=name)
        driver.write(rollout_id, 2, final=True)
        driver.score()
    for _ in range(2):
        for name in names:
            driver.send("learner", "learner", m.EvalWanted(name, ()))
        assert [item.rollout_id for one in driver.take(m.EvalResult) for item in one.items] == [*names.values()]
        driver.lose("learner", "learner")
        driver.join("learner", "learner")
    for name, rollout_id in names.items():
        driver.send("learner", "learner", m.EvalWanted(name, (rollout_id,)))
    assert driver.take(m.EvalResult) == [m.EvalResult(name, (), 0, 0) for name in names], "all is confirmed"
    assert driver.ledger.eval_tokens.trained == 2 * len(names)


def test_what_was_finished_before_it_was_asked_for_waits(make: Make) -> None:
    driver = make()
    driver.offer(7, kind="eval", eval_id="e")
    driver.write("eval-7-0-0", 2, context=1, final=True)
    driver.score()
    assert driver.ledger.eval_tokens.waiting == 2
    driver.send("learner", "learner", m.EvalWanted("e", ()))
    frames = next(o.arrays for o in driver.sent if isinstance(o.message, m.EvalResult))
    assert list(frames[2]) == [0, 0, 1, 1, 0], "the train mask is the loss mask"
    np.testing.assert_array_equal(frames[3], [[0, 0, -1, -1, 0]])
    assert driver.ledger.eval_tokens.trained == 2


def test_a_question_before_the_offer_is_answered_by_what_follows(make: Make) -> None:
    driver = make()
    assert ask(driver) is None
    driver.offer(7, kind="eval", eval_id="e", teachers=())
    driver.write("eval-7-0-0", 2, final=True)
    assert len(driver.take(m.EvalResult)) == 1


def test_rollouts_given_up_are_reported(make: Make) -> None:
    driver = make(max_attempts=2, max_score_attempts=1)
    driver.offer(7, 8, kind="eval", eval_id="e")
    ask(driver)
    driver.send("actor", "a", m.RolloutFailed("eval-7-0-0", "engine_error"))
    assert driver.take(m.EvalResult) == []
    driver.send("actor", "a", m.RolloutFailed("eval-7-0-1", "engine_error"))
    assert driver.take(m.EvalResult) == [m.EvalResult("e", (), 1, 1)]
    driver.write("eval-8-0-0", 3)
    driver.refuse_work(next(iter(driver.work)))
    assert driver.take(m.EvalResult) == [m.EvalResult("e", (), 2, 0)]
    assert driver.take(m.CancelRollout) == [m.CancelRollout("eval-8-0-0", "unscorable")]
    assert driver.ledger.eval_tokens.dropped == {"unscorable": 3}


def test_a_new_learner_starts_its_evaluations_anew(make: Make) -> None:
    driver = make()
    driver.offer(7, 8, kind="eval", eval_id="e")
    driver.write("eval-7-0-0", 2, final=True)
    driver.score()
    assert ask(driver) is not None
    driver.write("eval-8-0-0", 1)
    driver.restart_learner(0, epoch=1)
    assert driver.take(m.CancelRollout) == [m.CancelRollout("eval-8-0-0", "learner_lost")]
    assert driver.ledger.eval_tokens.dropped == {"learner_lost": 1}
    driver.offer(7, 8, kind="eval", eval_id="e")
    assert {"eval-7-0-1000", "eval-8-0-1000"} <= set(driver.tickets)
    assert ask(driver) == m.EvalResult("e", (), 0, 2)
