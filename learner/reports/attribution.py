"""Which role limits the speed of a run, and what more of it would give. docs/metrics.md has the model in words.

Let the time of a step be 1, and let each role's share of it be the time in which it works. With a bound on staleness
above 0 the roles work at the same time, so one of them works all the time and the others wait for it. With k times as
many teachers, the teachers' share u becomes u / k, and a step takes the largest of

    1 - u + u / k         the rest of it stays as it is
    1 - w                 w: share in which the learner waits for tokens
    a                     the share of the actors
    (e + a + u / k + b) / (max_staleness + 1)
                          a rollout on its way around: environment e, the roles' work on its batch, b the learner's;
                          as many batches are on their way at once. It is scaled down if it says more than 1 for the
                          present, as segments are scored while others are still written

All but the first say what binds next. If no role works all the time and the last is about 1, the bound on staleness is
the limit (`staleness`): with a larger one a step takes the largest of the roles' shares and of that term.

If the processors of this machine are used up, roles that compute on them wait for one another, and none of them is the
limit: more of it would take its time from the others (`cpu`)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final, NamedTuple

from stillhouse.learner.reports.wait_clock import WaitReport
from stillhouse.learner.reports.work_window import Work, WorkWindow
from stillhouse.protocol.messages import Snapshot
from stillhouse.protocol.processors import share_used

WINDOW_S: Final = 60.0
"""What limits a run is judged over this much time, on the status and in the metrics."""

MIN_STEPS: Final = 3
"""Fewer say nothing."""
SATURATED: Final = 0.8
"""A role that works for this share of the time has no time left that more work would fill."""
LITTLE_WAIT: Final = 0.1
"""If the learner waits less than this, it is the limit itself."""
MOST_OF: Final = 0.5
FULL_CPU: Final = 0.9
OWN_SHARE: Final = 0.2
"""If the run's workers use less of the processors than this, they are not its limit."""
NOT_HERE: Final = 1.1
"""If workers use more than this many times the processors of this machine, some are on another one."""
SHOWN: Final = 0.1
"""A smaller share of other processes is not told."""
MOST_TIMES: Final = 3
"""At most this many times the present number is advised at once."""
ALMOST: Final = 1.02
"""Fewer workers are advised if a step takes at most this many times the shortest."""
WORTH: Final = 1.05
"""A smaller speedup is not worth a sentence."""
STAGES: Final = (
    *("learner", "teachers", "actors", "environments", "cpu", "staleness"),
    *("weights", "eval", "checkpoint", "unknown"),
)  # fmt: skip


OWN_CAUSES: Final = ("weights", "eval", "checkpoint")
"""Causes of waiting that are stages by themselves."""
CANNOT_TELL: Final = "cannot tell what binds"


class BoundVerdict(NamedTuple):
    """What limits the run."""

    stage: str
    """One of STAGES."""
    shares: dict[str, float]
    """Share of the learner's time by what it went to: its own work, or waiting for a stage. They sum to 1."""
    text: str
    """For the table of the status, and the summary."""
    more: int = 0
    """How many more of it are advised."""
    speedup: float | None = None
    """Predicted steps per second with them, over those now; None: cannot be predicted."""

    @property
    def short(self) -> str:
        """For a status in one line: without the reasons why nothing can be said."""
        return CANNOT_TELL if self.stage == "unknown" else self.text

    def gauges(self) -> dict[str, float]:
        """Figures by tag."""
        figures = {f"bound/{stage}": self.shares.get(stage, 0.0) for stage in STAGES}
        return figures if self.speedup is None else figures | {"bound/speedup": self.speedup}


class RunLimits:
    """What limits a run, for its learner. Owned by the learner's loop."""

    def __init__(self) -> None:
        self._lately, self._whole = WorkWindow(WINDOW_S), WorkWindow(math.inf)
        self._ended: Work | None = None

    def update(self, snapshot: Snapshot) -> dict[str, float]:
        """Figures of the last WINDOW_S, by tag. `snapshot`: the first of the learner's start, then those of batches."""
        cpu = share_used()
        for window in (self._lately, self._whole):
            window.update(snapshot, cpu)
        work, tokens = self._lately.work(), snapshot.ledger.tokens
        figures: dict[str, float] = {}
        if work is not None:
            figures = work.efficiency() | {f"flops/{role}": flops for role, flops in work.flops.items()}
            figures |= {f"gpu_hours/{role}": hours for role, hours in work.gpu_hours.items()}
        if tokens.accepted:
            figures["efficiency/goodput"] = tokens.trained / tokens.accepted
        verdict = attribute(work)
        return figures if verdict is None else figures | verdict.gauges()

    def end(self, snapshot: Snapshot) -> None:
        """With the first snapshot after the last step, where the figures of the whole run end; later ones count for
        nothing."""
        self._whole.update(snapshot, share_used())
        self._ended = self._ended or self._whole.work()

    def account(self, waits: WaitReport) -> dict[str, Any]:
        """What limited the run from the start of this learner to its last step, and its figures, for learner.json.
        `waits`: the learner's time, over the same."""
        newest = self._whole.work()
        if newest is None:
            return {"bound": "", "efficiency": {}, "flops": {}}
        work = replace(
            self._ended or newest,
            learner={"busy": waits.busy_fraction, **waits.wait_fraction},
        )
        verdict = attribute(work)
        return {"bound": verdict.text if verdict else "", "efficiency": work.efficiency(), "flops": work.flops}


def attribute(work: Work | None) -> BoundVerdict | None:
    """None: too little has happened to say anything."""
    if work is None or work.steps < MIN_STEPS or not work.learner:
        return None
    shares = {stage: work.learner[stage] for stage in OWN_CAUSES}
    shares["learner"] = work.learner["busy"]
    waits = work.learner["data"] + work.learner["scoring"]
    stage = _waited_for(work)
    if waits >= LITTLE_WAIT and _processors_bind(stage, work):
        stage = "cpu"
    shares[stage] = shares.get(stage, 0.0) + waits
    own = {name: share for name, share in shares.items() if name in OWN_CAUSES}
    largest = max(own, key=lambda name: own[name])
    if own[largest] > max(waits, shares["learner"]):
        return BoundVerdict(largest, shares, f"{_named(largest)} {own[largest]:.0%}: {_WHAT_HELPS[largest]}")
    # Rollouts wait for newer weights where the learner that makes these is slow.
    if waits < LITTLE_WAIT or (stage in ("unknown", "staleness", "weights") and shares["learner"] >= SATURATED):
        return _learner_bound(work, shares)
    if stage in ("teachers", "actors"):
        return _more_of(stage, work, waits, shares)
    if stage == "staleness":
        return _staleness_bound(work, waits, shares)
    if stage == "cpu":
        return BoundVerdict(stage, shares, _used_processors(work))
    return BoundVerdict(stage, shares, _without_number(stage, work, waits))


def _waited_for(work: Work) -> str:
    """The stage that the learner waits for when it has no batch."""
    teachers, actors = work.teachers_busy or 0.0, work.actors_busy or 0.0
    if work.teachers and not work.scored_tokens and work.always_unscored:
        teachers = 1.0  # a batch that takes longer than the window: nothing is reported until it is done
    batch = work.trained_tokens / work.steps
    piled_up = work.unscored_tokens > MOST_OF * batch
    if teachers >= SATURATED and (actors < SATURATED or piled_up):
        return "teachers"
    if actors >= SATURATED:
        return "actors"
    if work.busiest_teacher >= SATURATED and piled_up:
        return "teachers"
    if work.awaiting_weights >= MOST_OF:
        return "weights"
    if work.in_environment >= MOST_OF:
        return "environments"
    return "staleness" if _around(work) >= SATURATED * (work.max_staleness + 1) else "unknown"


def _processors_bind(stage: str, work: Work) -> bool:
    """Whether what seems to be the limit only waits its turn: the processors of this machine are used up, also by the
    run, and the role does compute. A role that sleeps, or waits for a GPU, is busy without a processor."""
    if work.cpu is None or work.cpu < FULL_CPU or not OWN_SHARE <= sum(_processors_used(work).values()) <= NOT_HERE:
        return False
    if stage not in ("teachers", "actors"):
        return stage in ("unknown", "staleness", "environments")
    n = work.teachers if stage == "teachers" else work.actors
    busy_s = _roles(work)[stage] * n * work.seconds
    fair_share = min(1.0, work.processors / (work.teachers + work.actors + 1))
    return work.cpu_s[stage[:-1]] > MOST_OF * fair_share * busy_s > 0


def _processors_used(work: Work) -> dict[str, float]:
    used = {role: used_s / (work.seconds * work.processors) for role, used_s in work.cpu_s.items()}
    return dict(sorted(used.items(), key=lambda one: -one[1]))


def _used_processors(work: Work) -> str:
    used, names = _processors_used(work), {"actor": "actors", "teacher": "teachers"}
    parts = [f"{names.get(role, role)} {share:.0%}" for role, share in used.items() if share]
    others = (work.cpu or 0.0) - sum(used.values())
    parts += [f"other processes {others:.0%}"] if others >= SHOWN else []
    n = f"{work.processors:g}"
    return (
        f"cpu-bound: {n} of {n} cores are {work.cpu:.0%} busy ({', '.join(parts)}): more cores, or less to compute (a "
        "smaller model, shorter rollouts), would help"
    )


def _more_of(stage: str, work: Work, waits: float, shares: dict[str, float]) -> BoundVerdict:
    """Teachers or actors bind: how many more, and what they would give."""
    n = work.teachers if stage == "teachers" else work.actors
    bound = f"{_named(stage)} {waits:.0%}"
    if n < 1 or _roles(work)[stage] < SATURATED:
        uneven = "some teachers are busy all the time and others are not; give their pool more"
        return BoundVerdict(stage, shares, f"{bound}: {uneven if n else 'none is connected'}")
    takes = {more: _step_takes(work, stage, (n + more) / n, waits) for more in range(1, (MOST_TIMES - 1) * n + 1)}
    least = min(took for took, _ in takes.values())
    more = next(more for more, (took, _) in takes.items() if took <= least * ALMOST)
    took, binds = takes[more]
    speedup = 1 / took
    if speedup < WORTH:
        return BoundVerdict(
            stage, shares, f"{bound}: more {stage} alone give nothing, {binds} would bind at once", 0, 1.0
        )
    what = f"{_number(more)} more {stage[:-1] if more == 1 else stage}"
    text = f"{bound}: {what} would give about {speedup:.1f} times{_caveat(work)}"
    return BoundVerdict(stage, shares, text, more, speedup)


def _roles(work: Work) -> dict[str, float]:
    return {"teachers": work.teachers_busy or 0.0, "actors": work.actors_busy or 0.0, "learner": work.learner["busy"]}


def _step_takes(work: Work, stage: str, times: float, waits: float) -> tuple[float, str]:
    """The time of a step with `times` as much of a stage, if it is 1 now, and what binds then."""
    roles, batches = _roles(work), work.max_staleness + 1
    faster = roles | {stage: roles[stage] / times}
    around = _around(work)
    around_then = around - roles[stage] + faster[stage]
    limits = {
        f"the {stage}": 1 - roles[stage] + faster[stage],
        **{f"the {role}": share for role, share in roles.items() if role != stage},
        "max_staleness": around_then / max(batches, around),
    }
    if stage != "learner":
        limits["the learner"] = 1 - waits
    binds = max(limits, key=lambda name: limits[name])
    return limits[binds], binds


def _around(work: Work) -> float:
    """Steps in which a batch comes around, if its environment and the roles work on it one after the other."""
    return work.environment_s * work.steps / work.seconds + sum(_roles(work).values())


def _staleness_bound(work: Work, waits: float, shares: dict[str, float]) -> BoundVerdict:
    """The batches that may be on their way at once are all on their way: how many more, and what they would give."""
    batches = work.max_staleness + 1
    around = min(_around(work), batches)
    takes = {
        more: max(around / (batches + more), 1 - waits, *_roles(work).values())
        for more in range(1, (MOST_TIMES - 1) * batches + 1)
    }
    more = next(more for more, took in takes.items() if took <= min(takes.values()) * ALMOST)
    speedup = 1 / takes[more]
    under_way = f"{batches} {'batch is' if batches == 1 else 'batches are'}"
    text = (
        f"staleness-bound {waits:.0%}: no more than {under_way} under way at once; max_staleness = "
        f"{work.max_staleness + more} would give about {speedup:.1f} times{_caveat(work)}, with older tokens"
    )
    return BoundVerdict("staleness", shares, text, more, speedup)


def _learner_bound(work: Work, shares: dict[str, float]) -> BoundVerdict:
    took, binds = _step_takes(work, "learner", 2.0, 0.0)
    text, speedup = f"learner-bound {shares['learner']:.0%}: ", 1 / took
    if speedup < WORTH:
        return BoundVerdict(
            "learner", shares, f"{text}a faster one alone gives nothing, {binds} would bind at once", 0, 1.0
        )
    text += f"a learner twice as fast would give about {speedup:.1f} times{_caveat(work)}"
    return BoundVerdict("learner", shares, text, 0, speedup)


def _without_number(stage: str, work: Work, waits: float) -> str:
    if stage != "unknown":
        return f"{_named(stage)} {waits:.0%}: {_WHAT_HELPS[stage]}"
    busy = f"actors work {work.actors_busy or 0:.0%}, teachers {work.teachers_busy or 0:.0%}"
    return (
        f"{CANNOT_TELL}: the learner waits {waits:.0%}, {busy} of the time, so none is the limit; "
        "they may take turns, and a larger max_staleness lets them overlap"
    )


def _caveat(work: Work) -> str:
    """On one machine the roles share the processors."""
    if work.cpu is None or work.cpu < FULL_CPU:
        return ""
    return f" on other processors (the CPU here is {work.cpu:.0%} busy, so more processes here may give nothing)"


def _named(stage: str) -> str:
    return {"teachers": "teacher-bound", "actors": "actor-bound", "environments": "environment-bound"}.get(
        stage, f"{stage}-bound"
    )


def _number(n: int) -> str:
    words = ("no", "one", "two", "three", "four", "five", "six")
    return words[n] if n < len(words) else str(n)


_WHAT_HELPS: Final = {
    "environments": "rollouts wait for their environments; a larger actor.max_concurrent_rollouts or a faster "
    "environment helps",
    "weights": "weights are being sent; see weights/ in the metrics",
    "eval": "the learner waits for evaluations",
    "checkpoint": "the learner waits for checkpoints to be copied or written",
}
