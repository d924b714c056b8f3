"""The best share that any schedule could reach in bench/scale.py, by arithmetic.

The actors sample without a pause, g tokens/s. A step trains M tokens in T seconds. Its weights are sampled with p
seconds after its end, and a token can be in a batch d seconds after it was sampled. Lengths do not matter as long as
parts of responses may be trained, because a token's age is all that counts.

Bound 0: a batch is sampled after the step before it, so a cycle is at least M / g + T + p + d.

Bound 1: the batch of step k + 1 is formed w seconds after the end of step k. Tokens of version k that were sampled in
the d seconds before that, or later until version k + 1 arrives, are in no batch: they would be two steps old in the
next one. That is max(0, p + d - w) seconds of sampling per cycle T + w, and the rest must give M tokens:

    g (T + w - max(0, p + d - w)) = M      hence with g = M / T      w = (p + d) / 2,   share = T / (T + (p + d) / 2)

Waiting longer loses time of the learner, waiting less loses tokens. From bound 2 on such a token is in the next batch.
"""

from __future__ import annotations

from bench.scale_settings import Scenario


def best_share(scenario: Scenario, until_scored_s: float = 0.0) -> float:
    """Share of the slowest stage's own rate. `until_scored_s`: d. 0: an upper limit for every engine and teacher."""
    tokens, bounds = scenario.step_tokens, scenario.bounds
    write_s = tokens / min(bounds["actors"], bounds["teachers"])
    train_s = tokens / bounds["learner"]
    late_s = scenario.publish_s + until_scored_s
    if scenario.max_staleness == 0:
        cycle_s = write_s + train_s + late_s
    elif scenario.max_staleness == 1:
        cycle_s = train_s + waits_s(write_s, train_s, late_s)
    else:
        cycle_s = max(write_s, train_s)
    return tokens / cycle_s / scenario.bound_per_s


def waits_s(write_s: float, train_s: float, late_s: float) -> float:
    """w of bound 1: how long a learner waits per step for the tokens that it needs."""
    short_s = write_s - train_s
    if short_s >= late_s:
        return short_s  # the new weights are there before the batch is full: nothing is lost
    return max(0.0, (short_s + late_s) / 2)
