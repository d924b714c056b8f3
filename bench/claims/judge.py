"""From the arms' files to figures and verdicts, by the rules of bench.claims.grid."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np

from bench.claims.grid import TIMES

Lines: TypeAlias = list[dict[str, Any]]
Kind: TypeAlias = Literal["sampled", "greedy", "facts", "facts_greedy"]
Verdict: TypeAlias = Literal["held", "partly", "not held", "not tested", "not run"]
TARGET: Final = 0.95
LEARNT: Final = 0.1
"""What R must be above S for claim 1 to be tested; in claim 2c, what SFT must learn."""
LONG_OPD: Final = ("OPD, reverse KL, 1x", "OPD, reverse KL, 5x")


class Mean(NamedTuple):
    value: float
    error: float
    """Standard error over seeds; 0 for one seed."""
    seeds: int

    def __str__(self) -> str:
        return f"{self.value:.2f} ± {self.error:.2f}"


def mean(values: Sequence[float]) -> Mean:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return Mean(statistics.mean(values), error, len(values))


@dataclass
class Row:
    """A row of a claim, at its better rate. Lists are by seed."""

    rate: float
    arms: dict[int, Lines]

    @property
    def ends(self) -> list[dict[str, Any]]:
        return [lines[-2] for lines in self.arms.values()]

    def end(self, kind: Kind) -> Mean:
        return mean([line[kind] for line in self.ends])

    @property
    def start(self) -> float:
        return statistics.mean(lines[0]["sampled"] for lines in self.arms.values())

    def flops(self, *parts: str) -> float:
        """Mean over seeds, at the end."""
        return statistics.mean(sum(line["flops"][part] for part in parts) for line in self.ends)


TOTAL: Final = ("actor", "teacher", "learner")


@dataclass
class Results:
    """All arms that are done, by claim and row, then rate, then seed."""

    arms: dict[tuple[str, str], dict[float, dict[int, Lines]]] = field(default_factory=dict)

    @classmethod
    def of(cls, files: Sequence[Lines]) -> Results:
        found = cls()
        for lines in files:
            if arm := lines[-1].get("arm"):
                rates = found.arms.setdefault((arm["claim"], arm["row"]), {})
                rates.setdefault(arm["phases"][-1]["lr"], {})[arm["seed"]] = lines
        return found

    def row(self, claim: str, row: str) -> Row | None:
        """At the rate with the best mean sampled accuracy (claim 5: with that of the facts), of those with most seeds.
        None: no arm is done."""
        rates = self.arms.get((claim, row), {})
        if not rates:
            return None
        return max(
            (Row(rate, dict(sorted(seeds.items()))) for rate, seeds in rates.items()),
            key=lambda one: (len(one.arms), sum(end["sampled"] + end.get("facts", 0.0) for end in one.ends)),
        )

    def rows(self, claim: str) -> dict[str, Row]:
        return {row: one for c, row in self.arms if c == claim and (one := self.row(c, row)) is not None}


def reached(lines: Lines, target: float) -> dict[str, Any] | None:
    """The first evaluation after the start at or above the target."""
    return next((line for line in lines[1:-1] if line["sampled"] >= target), None)


class Race(NamedTuple):
    """Claim 1, one method: what each seed needed to reach the target; None where it did not."""

    steps: list[float | None]
    tokens: list[float | None]
    flops: list[float | None]


def target_of(results: Results, seed: int) -> float | None:
    """R is the better of the seed's two GRPO arms, as the arms that distil it chose it."""
    rates = results.arms.get(("1", "GRPO"), {})
    ends = [seeds[seed][-2]["sampled"] for seeds in rates.values() if seed in seeds]
    return TARGET * max(ends) if ends else None


def race(results: Results, row: str) -> Race | None:
    found = results.row("1", row)
    if found is None:
        return None
    needed: list[tuple[float | None, float | None, float | None]] = []
    for seed, lines in found.arms.items():
        arms = lines
        if row == "GRPO":  # that of R, whichever rate it has
            arms = max((s[seed] for s in results.arms["1", row].values() if seed in s), key=lambda a: a[-2]["sampled"])
        target = target_of(results, seed)
        line = None if target is None else reached(arms, target)
        if line is None:
            needed.append((None, None, None))
        else:
            needed.append((line["step"], line["tokens"].get("student", 0), sum(line["flops"].values())))
    return Race(*map(list, zip(*needed, strict=True)))


def ratios(slow: Sequence[float | None], fast: Sequence[float | None]) -> list[float]:
    """By seed; 0 where the fast one did not get there."""
    return [0.0 if b is None or a is None else a / b for a, b in zip(slow, fast, strict=True)]


def dense(results: Results) -> Verdict:
    grpo, opd = race(results, "GRPO"), race(results, "OPD, reverse KL")
    row = results.row("1", "GRPO")
    if grpo is None or opd is None or row is None or len(grpo.steps) != len(opd.steps):
        return "not run"
    best = statistics.mean((target_of(results, seed) or 0.0) / TARGET for seed in row.arms)
    if best < row.start + LEARNT:
        return "not tested"
    if None in opd.steps:
        return "not held"
    return _graded(statistics.median(ratios(grpo.steps, opd.steps)), 7.0, 2.0)


def _graded(value: float, held: float, partly: float) -> Verdict:
    return "held" if value >= held else "partly" if value >= partly else "not held"


class Cheapest(NamedTuple):
    """Claim 2: the least SFT with the accuracy of an on-policy row."""

    times: int | None
    """None: none has it."""
    ratio: float
    """Its FLOPs by those of the on-policy row; of the longest one if none has it."""
    without_writing: float
    """The same with the teacher's writing of SFT's text left out."""


def cheapest_sft(results: Results, row: str, kind: Kind, claim: str = "2") -> Cheapest | None:
    own = results.row(claim, row)
    sft = dict[int, Row](zip(TIMES, sft_rows(results, claim), strict=False))
    if own is None or len(sft) < len(TIMES):
        return None
    enough = [n for n, one in sft.items() if one.end(kind).value >= own.end(kind).value]
    used = sft[min(enough, default=max(TIMES))]
    cost = own.flops(*TOTAL)
    return Cheapest(min(enough, default=None), used.flops(*TOTAL) / cost, used.flops("learner") / cost)


def off_policy(results: Results) -> Verdict:
    found = cheapest_sft(results, "OPD, reverse KL", "sampled")
    if found is None:
        return "not run"
    return "held" if found.times is None else _graded(found.ratio, 9.0, 1.5)


def sft_rows(results: Results, claim: str = "2") -> list[Row]:
    """1x to 10x; fewer while some have not been run."""
    return [one for n in TIMES if (one := results.row(claim, f"SFT, {n}x")) is not None]


def beside_sft(results: Results, row: Row, claim: str = "2") -> tuple[float, float, str] | None:
    """Claims 2b and 2c: (how far the row is above SFT's curve at its FLOPs, the error, in a word). Below is
    negative."""
    sft = sft_rows(results, claim)
    if len(sft) < len(TIMES):
        return None
    ends, costs = [one.end("sampled") for one in sft], [math.log(one.flops(*TOTAL)) for one in sft]
    at, own = math.log(row.flops(*TOTAL)), row.end("sampled")
    after = next((n for n, cost in enumerate(costs) if cost >= at), len(sft) - 1)
    curve = float(np.interp(at, costs, [one.value for one in ends]))
    difference, error = own.value - curve, math.hypot(own.error, ends[after].error)
    return difference, error, "on" if abs(difference) <= error else "above" if difference > 0 else "below"


def longer(results: Results) -> Verdict:
    rows = results.rows("2b")
    found = [one for row in rows.values() if (one := beside_sft(results, row)) is not None]
    if len(found) < len(TIMES) - 1:
        return "not run"
    sides = {side for _, _, side in found}
    return "held" if sides == {"above"} else "partly" if "above" in sides and "below" not in sides else "not held"


def long_answers(results: Results) -> Verdict:
    rows = [results.row("2c", row) for row in LONG_OPD]
    found = [one for row in rows if row and (one := beside_sft(results, row, "2c")) is not None]
    least = cheapest_sft(results, LONG_OPD[0], "sampled", "2c")
    if least is None or len(found) < len(LONG_OPD):
        return "not run"
    most = sft_rows(results, "2c")[-1]
    if most.end("sampled").value < most.start + LEARNT:
        return "not tested"
    sides = {side for _, _, side in found}
    if "above" not in sides or "below" in sides:
        return "not held"
    return "held" if sides == {"above"} and (least.times is None or least.ratio >= 9.0) else "partly"


def order(results: Results) -> Verdict:
    rows = order_rows(results)
    if "SFT, then OPD" not in rows or len(rows) < 5:
        return "not run"
    ranked = sorted(rows, key=lambda row: -rows[row].end("sampled").value)
    if ranked[0] != "SFT, then OPD":
        return "partly" if ranked[:2] == ["OPD, reverse KL", "SFT, then OPD"] else "not held"
    first, second = (rows[row].end("sampled") for row in ranked[:2])
    return "held" if first.value - second.value > math.hypot(first.error, second.error) else "partly"


def order_rows(results: Results) -> dict[str, Row]:
    shared = {"SFT": ("2", "SFT, 1x"), "OPD, reverse KL": ("2", "OPD, reverse KL")}
    found = {name: one for name, key in shared.items() if (one := results.row(*key)) is not None}
    return found | results.rows("3")


def gap(rows: dict[str, Row]) -> tuple[float, float] | None:
    """(SFT + OPD minus SFT, its error)."""
    if "SFT" not in rows or "SFT, then OPD" not in rows:
        return None
    a, b = rows["SFT"].end("sampled"), rows["SFT, then OPD"].end("sampled")
    return b.value - a.value, math.hypot(a.error, b.error)


def smaller(results: Results) -> Verdict:
    large, small = gap(order_rows(results)), gap(results.rows("3b"))
    if large is None or small is None:
        return "not run"
    if small[0] <= max(0.0, large[0]):
        return "not held"
    clear = small[0] > small[1] and small[0] - large[0] > math.hypot(small[1], large[1])
    return "held" if clear else "partly"


def gain(row: Row | None) -> float | None:
    return None if row is None else row.end("sampled").value - row.start


def reuse(results: Results) -> Verdict:
    def share(word: str, prompts: int, fresh: tuple[str, str]) -> float | None:
        some, whole = gain(results.row("4", f"{word}, {prompts}")), gain(results.row(*fresh))
        return None if some is None or not whole else some / whole

    def so(prompts: int) -> bool | None:
        opd, rl = share("OPD", prompts, ("2", "OPD, reverse KL")), share("GRPO", prompts, ("1", "GRPO"))
        return None if opd is None or rl is None else opd >= 0.8 and rl < 0.5

    one, few = so(1), so(16)
    if one is None or few is None:
        return "not run"
    return "held" if one else "partly" if few else "not held"


def kept(results: Results, row: str) -> tuple[float, float] | None:
    """Claim 5: (skill by that before the documents, knowledge by that behind them), at the row's end."""
    told, own = results.row("5", "documents"), results.row("5", row)
    if told is None or own is None or len(told.arms) != len(own.arms):
        return None
    return own.end("sampled").value / told.start, own.end("facts").value / told.end("facts").value


def recovery(results: Results) -> Verdict:
    told, opd, sft = results.row("5", "documents"), kept(results, "OPD, reverse KL"), kept(results, "SFT")
    if told is None or opd is None or sft is None:
        return "not run"
    if told.end("sampled").value > 0.5 * told.start or told.end("facts").value < 0.5:
        return "not tested"
    if min(opd) < 0.9:
        return "not held"
    return "held" if min(sft) < 0.9 else "partly"


BETAS: Final = ("forward KL", "JSD", "reverse KL")
SHARES: Final = (0.0, 0.25, 0.5, 1.0)


def share_row(results: Results, beta: str, own: float) -> Row | None:
    if beta != "JSD" and own == 0.0:
        return results.row("3", f"off-policy KD, {beta}")
    if beta != "JSD" and own == 1.0:
        return results.row("2", f"OPD, {beta}")
    return results.row("6", f"{beta}, {own:g}")


def shares(results: Results) -> Verdict:
    better: list[bool] = []
    for beta in BETAS:
        none, whole = share_row(results, beta, 0.0), share_row(results, beta, 1.0)
        if none is None or whole is None:
            return "not run"
        a, b = none.end("sampled"), whole.end("sampled")
        better.append(b.value - a.value > math.hypot(a.error, b.error))
    return "held" if all(better) else "partly" if any(better) else "not held"


VERDICTS: Final[dict[str, Callable[[Results], Verdict]]] = {
    **{"1": dense, "2": off_policy, "2b": longer, "2c": long_answers},
    **{"3": order, "3b": smaller, "4": reuse, "5": recovery, "6": shares},
}
