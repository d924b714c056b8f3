"""The restart budget: counted per worker, within a window, with a growing wait."""

from __future__ import annotations

from stillhouse.launch.config.run import LaunchConfig
from stillhouse.launch.processes.slots import RestartBudget

CONFIG = LaunchConfig(max_restarts=7, restart_backoff_s=1.0)


def test_the_wait_doubles_up_to_its_bound_and_then_the_budget_is_spent() -> None:
    budget = RestartBudget(CONFIG)
    waits_s = [budget.died("actor-0", float(t)) for t in range(9)]
    assert waits_s == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, None, None]
    assert budget.totals == {"actor-0": 7}


def test_each_worker_has_its_own_budget() -> None:
    budget = RestartBudget(CONFIG)
    for _ in range(8):
        budget.died("actor-0", 0.0)
    assert budget.died("actor-1", 0.0) == 1.0


def test_old_restarts_are_forgotten() -> None:
    budget = RestartBudget(LaunchConfig(max_restarts=3, restart_backoff_s=1.0))
    for t in (0.0, 30.0, 60.0):
        budget.died("actor-0", t)
    assert budget.died("actor-0", 299.0) is None
    assert budget.died("actor-0", 345.0) == 2.0  # the restarts at 0 and 30 are forgotten
    assert budget.totals["actor-0"] == 4


def test_no_restarts_at_all() -> None:
    assert RestartBudget(LaunchConfig(max_restarts=0)).died("actor-0", 0.0) is None
