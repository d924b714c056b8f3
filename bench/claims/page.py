"""Writes docs/results/claims.md between its markers, the plot and the numbers, from the arms that are done.

The numbers, docs/results/claims.jsonl, are the arms' own lines, one arm per line. Where the folder has no arms, the
page is written from them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.claims import judge
from bench.claims.arm import OF_PAIR, TEXTS_OF
from bench.claims.grid import REUSED, RULES, SEEDS, TIMES, grid
from bench.claims.judge import TOTAL, Lines, Mean, Results, Row

DOCS: Final = Path(__file__).resolve().parents[2] / "docs" / "results"
PAIR: Final = (*OF_PAIR.values(), *TEXTS_OF)
DROPPED: Final = "dropped/"
"""Arms of an earlier grid, whose numbers are kept."""
HEAD: Final = (
    "| | rate | seeds | sampled | greedy | GFLOPs: student writes | teacher | training | all |",
    "|---|---:|---:|---|---|---:|---:|---:|---:|",
)


def write_page(folder: Path, docs: Path = DOCS) -> None:
    arms, notes = read(folder, docs)
    kept = {name: arms.pop(name) for name in list(arms) if name.startswith(DROPPED)}
    rows = [json.dumps({"name": name, "lines": lines}) for name, lines in {**arms, **kept}.items()]
    rows.insert(0, json.dumps({"notes": notes}))
    (docs / "claims.jsonl").write_text("".join(row + "\n" for row in rows), encoding="utf-8")
    results = Results.of(list(arms.values()))
    page = docs / "claims.md"
    text = page.read_text(encoding="utf-8")
    for name, part in {"verdicts": overview(results, arms), "provenance": provenance(notes, arms)}.items():
        text = filled(text, name, part)
    for claim, part in tables(results).items():
        text = filled(text, f"claim {claim}", [f"Rule: {RULES[claim][1]}", "", *part])
    page.write_text(text, encoding="utf-8")
    plot(results, docs / "claims.png")
    print(f"written: {page}")


def read(folder: Path, docs: Path) -> tuple[dict[str, Lines], list[dict[str, Any]]]:
    """(arms by name, notes about machines): those of the grid, in its order, and those of an earlier one."""
    files = {path.stem: path for path in (folder / "arms").glob("*.jsonl")}
    names = [*PAIR, *(arm.name for arm in grid())]
    arms = {name: [json.loads(row) for row in _rows(files[name])] for name in names if name in files}
    if arms:
        arms |= {
            f"{DROPPED}{path.stem}": [json.loads(row) for row in _rows(path)]
            for path in sorted((folder / DROPPED).glob("*"))
        }
        return arms, [json.loads(row) for row in _rows(folder / "machines.jsonl")]
    rows = [json.loads(row) for row in _rows(docs / "claims.jsonl")]
    return {row["name"]: row["lines"] for row in rows[1:]}, rows[0]["notes"] if rows else []


def _rows(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def filled(text: str, name: str, part: Iterable[str]) -> str:
    """With the lines between the markers of `name` replaced. Raises ValueError for a page without them."""
    pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
    body = "\n".join(part)
    filled_text, n = pattern.subn(lambda found: f"{found[1]}\n{body}\n\n{found[2]}", text)
    if n != 1:
        raise ValueError(f"the page has {n} places 'begin {name}', expected 1")
    return filled_text


def overview(results: Results, arms: Mapping[str, Lines]) -> list[str]:
    lines = ["| claim | verdict | arms done |", "|---|---|---:|"]
    for claim, (title, _) in RULES.items():
        own = [arm.name for arm in grid() if arm.claim == claim]
        verdict = judge.VERDICTS[claim](results)
        done = sum(name in arms for name in own)
        if verdict == "not run" and done:
            verdict = "incomplete"
        note = "" if done == len(own) or verdict in ("not run", "incomplete") else " (so far)"
        lines.append(f"| {claim}. {title} | **{verdict}**{note} | {done} of {len(own)} |")
    return lines


def provenance(notes: Sequence[Mapping[str, Any]], arms: Mapping[str, Lines]) -> list[str]:
    cpu_s = sum(lines[-1]["cpu_s"] for lines in arms.values())
    eval_s = sum(lines[-1].get("eval_cpu_s", 0.0) for lines in arms.values())
    pair = {name: arms[name] for name in PAIR if name in arms}
    commits = list(dict.fromkeys(note["commit"] for note in notes))
    lines = [
        f"{len(arms)} of {len(grid()) + len(PAIR)} arms are done; they took {cpu_s / 60:.0f} CPU minutes "
        f"({eval_s / 60:.0f} of these for evaluations), that is {cpu_s / 120:.0f} minutes of two quiet cores.",
    ]
    if notes:
        loads = ", ".join(f"{note['load']:.0f}" for note in notes)
        lines.append(
            f"Commit {', '.join(commits)}; {notes[0]['at']} to {notes[-1]['at']} (starts of the command); "
            f"{notes[0]['cpu']}; load of the machine at each start: {loads}."
        )
    for name, own in pair.items():
        what = next(key for key in ("parameters", "texts") if key in own[0])
        right = f"right {own[-2]['sampled']:.2f} of the time, sampled"
        lines.append(f"{name}: {own[0][what]:,} {what}, {right}, {own[-1]['cpu_s']:.0f} CPU seconds.")
    return lines


def tables(results: Results) -> dict[str, list[str]]:
    more = {
        "1": race_table(results),
        "2": cheapest_table(results, "2", ("OPD, reverse KL", "OPD, forward KL")),
        "2b": beside_table(results, "2b", "2"),
        "2c": [*cheapest_table(results, "2c", judge.LONG_OPD), "", *beside_table(results, "2c", "2c")],
        "5": recovery_table(results),
    }
    found = {claim: [*table(results.rows(claim)), *(["", *more[claim]] if claim in more else [])] for claim in RULES}
    found |= {"3": table(judge.order_rows(results)), "6": share_table(results)}
    return {claim: lines if any(line for line in lines) else ["No arm is done."] for claim, lines in found.items()}


def table(rows: Mapping[str, Row]) -> list[str]:
    if not rows:
        return []
    return [*HEAD, *(_line(name, row) for name, row in rows.items())]


def _line(name: str, row: Row) -> str:
    parts = " | ".join(f"{row.flops(*which) / 1e9:,.0f}" for which in (*((one,) for one in TOTAL), TOTAL))
    return f"| {name} | {row.rate:g} | {len(row.arms)} | {row.end('sampled')} | {row.end('greedy')} | {parts} |"


def race_table(results: Results) -> list[str]:
    grpo = judge.race(results, "GRPO")
    if grpo is None:
        return []
    lines = [
        "| to 0.95 x R, by seed | steps | GRPO's steps / its | GRPO's tokens / its | GRPO's FLOPs / its |",
        "|---|---|---|---|---|",
    ]
    for name in results.rows("1"):
        own = judge.race(results, name)
        if own is None or len(own.steps) != len(grpo.steps):
            continue
        cells = [", ".join("never" if step is None else str(step) for step in own.steps)]
        for slow, fast in zip(grpo, own, strict=True):
            cells.append(
                "-" if name == "GRPO" else ", ".join(f"{one:.1f}" if one else "-" for one in judge.ratios(slow, fast))
            )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def cheapest_table(results: Results, claim: str, rows: Sequence[str]) -> list[str]:
    lines = [
        "| at the accuracy of | by | least SFT that has it | its FLOPs / the row's | without the teacher's writing |",
        "|---|---|---|---:|---:|",
    ]
    for name in rows:
        for kind in ("sampled", "greedy"):
            found = judge.cheapest_sft(results, name, kind, claim)
            if found is not None:
                least, more = (f"{found.times}x", "") if found.times else (f"none up to {max(TIMES)}x", "> ")
                lines.append(
                    f"| {name} | {kind} | {least} | {more}{found.ratio:.1f} | {more}{found.without_writing:.1f} |"
                )
    return lines if len(lines) > 2 else []


def beside_table(results: Results, claim: str, sft_claim: str) -> list[str]:
    lines = ["| | sampled | SFT's curve at its FLOPs | it is ... the curve |", "|---|---|---:|---|"]
    for name, row in results.rows(claim).items():
        if name.startswith("OPD") and (found := judge.beside_sft(results, row, sft_claim)):
            (difference, error, side), own = found, row.end("sampled")
            where = f"{own.value - difference:.2f} | {side} ({difference:+.2f}, error {error:.2f})"
            lines.append(f"| {name} | {own} | {where} |")
    return lines if len(lines) > 2 else []


def recovery_table(results: Results) -> list[str]:
    lines = [
        "| | skill | knowledge | knowledge, greedy | skill / before | knowledge / behind the documents |",
        "|---|---|---|---|---:|---:|",
    ]
    if told := results.row("5", "documents"):
        lines.append(f"| before | {told.start:.2f} | | | 1 | |")
    for name, row in results.rows("5").items():
        if found := judge.kept(results, name):
            ends = " | ".join(str(row.end(kind)) for kind in ("sampled", "facts", "facts_greedy"))
            lines.append(f"| {name} | {ends} | {found[0]:.2f} | {found[1]:.2f} |")
    return lines if len(lines) > 2 else []


def share_table(results: Results) -> list[str]:
    if not results.rows("6"):
        return []
    lines = [
        f"| sampled | {' | '.join(f'lambda {own:g}' for own in judge.SHARES)} |",
        f"|---|{'---|' * len(judge.SHARES)}",
    ]
    for beta in judge.BETAS:
        rows = [judge.share_row(results, beta, own) for own in judge.SHARES]
        lines.append(f"| {beta} | {' | '.join('' if row is None else str(row.end('sampled')) for row in rows)} |")
    return lines


def curve(row: Row, key: str = "sampled") -> tuple[list[int], list[Mean]]:
    """(steps, accuracy) of the evaluations that every seed has."""
    by_step: dict[int, list[float]] = {}
    for lines in row.arms.values():
        for line in lines[:-1]:
            by_step.setdefault(line["step"], []).append(line[key])
    steps = [step for step, values in by_step.items() if len(values) == len(row.arms)]
    return steps, [judge.mean(by_step[step]) for step in steps]


def plot(results: Results, place: Path) -> None:
    """Without matplotlib (extra `claims`) there is none."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed (make claims installs it)")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(15, 9), layout="constrained")
    for axis, draw in zip(axes.flat, (_dense, _cost, _order, _reuse, _recovery, _shares), strict=True):
        draw(axis, results)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    figure.suptitle(f"Mean and standard error over up to {len(SEEDS)} seeds, each method at the better of its rates")
    figure.savefig(place, dpi=90, metadata={"Software": None})
    pyplot.close(figure)


def _dense(axis: Any, results: Results) -> None:
    for name, row in results.rows("1").items():
        _points(axis, name, *curve(row), "-")
    axis.set(title="1. Dense against sparse", xlabel="steps of 64 rollouts", ylabel="sampled accuracy")


def _cost(axis: Any, results: Results) -> None:
    own = [results.row("2", "OPD, reverse KL"), *results.rows("2b").values()]
    rows = {
        "SFT": judge.sft_rows(results),
        "OPD, reverse KL": own,
        "OPD, forward KL": [results.row("2", "OPD, forward KL")],
        "2c: SFT": judge.sft_rows(results, "2c"),
        "2c: OPD, reverse KL": [results.row("2c", row) for row in judge.LONG_OPD],
    }
    for label, found in rows.items():
        _ends(axis, label, {row.flops(*TOTAL) / 1e9: row for row in found if row})
    axis.set(
        title="2. Against more off-policy text, 1x to 10x", xlabel="GFLOPs", xscale="log", ylabel="sampled accuracy"
    )


def _order(axis: Any, results: Results) -> None:
    small = {f"half the width: {name}": row for name, row in results.rows("3b").items()}
    ordered = {**judge.order_rows(results), **small}
    ends = [row.end("sampled") for row in ordered.values()]
    axis.barh(list(ordered), [one.value for one in ends], xerr=[one.error for one in ends], capsize=3)
    axis.set(title="3. Order", xlabel="sampled accuracy")
    axis.tick_params("y", labelsize=8)


def _reuse(axis: Any, results: Results) -> None:
    fresh = {"OPD": ("2", "OPD, reverse KL"), "SFT": ("2", "SFT, 1x"), "GRPO": ("1", "GRPO")}
    for word, key in fresh.items():
        few = {str(n): results.row("4", f"{word}, {n}") for n in REUSED}
        _ends(axis, word, few | {"new": results.row(*key)})
    axis.set(title="4. Data reuse", xlabel="different prompts", ylabel="sampled accuracy")


def _recovery(axis: Any, results: Results) -> None:
    for n, (name, row) in enumerate(results.rows("5").items()):
        for key, style in (("sampled", "-"), ("facts", ":")):
            label = f"{name}: {'skill' if key == 'sampled' else 'knowledge'}"
            _points(axis, label, *curve(row, key), style, color=f"C{n}")
    axis.set(title="5. Recovery", xlabel="steps of 32", ylabel="sampled accuracy")


def _shares(axis: Any, results: Results) -> None:
    for beta in judge.BETAS:
        _ends(axis, beta, {own: judge.share_row(results, beta, own) for own in judge.SHARES})
    axis.set(title="6. Lambda and beta", xlabel="share of own text (lambda)", ylabel="sampled accuracy")


def _ends(axis: Any, name: str, rows: Mapping[Any, Row | None]) -> None:
    done = {at: row.end("sampled") for at, row in rows.items() if row}
    _points(axis, name, list(done), list(done.values()), "-o")


def _points(axis: Any, name: str, at: Sequence[Any], values: Sequence[Mean], style: str, **options: Any) -> None:
    if values:
        errors = [one.error for one in values]
        axis.errorbar(at, [one.value for one in values], errors, fmt=style, label=name, capsize=2, **options)
