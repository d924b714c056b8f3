"""A real run of the built-in task with a fault every moment or two, and the verdict.

    python -m bench.faults.chaos --faults 300 --seed 0 [--roles actor,teacher] [--kinds kill,stop,cut] [--report FILE]
    python -m bench.faults.chaos --runs 10 --faults 30 --report FILE
    python -m bench.faults.chaos --hosts 3 --delay-ms 50 --loss 0.01 --faults 40 --no-reference

Kinds: kill (SIGKILL), stop (SIGSTOP for a while), hang (SIGSTOP, until the launcher kills it); cut and reset of a link,
blackhole, delay and throttle of a link for a while; in place of one message: duplicate, corrupt, truncate, garbage,
version, tear, noise (tests.sim.chaos.meddling); stranger (who does not belong to the run knocks at the buffer's door);
together (SIGKILL of several at once, at times the launcher among them); trap (SIGKILL before or after a named function,
tests.sim.chaos.traps); relaunch and interrupt (SIGKILL of the launcher, or Ctrl-C, and --resume). Only if asked for:
disk (the run folder is full for a while, with --disk-mib); version. What may kill its target strikes only the roles
that the launcher starts again, unless --roles says others. The same seed draws the same faults.

--hosts N: the workers are spread over N hosts (network namespaces, Linux, root), each with a `stillhouse join` that is
started again when it ends before the run, and with delay and loss on the links between them; --rank-hosts M: the first
M have a rank of the learner each. All kinds strike workers of all hosts; relaunch and interrupt also strike joins;
partition cuts a host off until shortly before or after a limit. One before and one after each limit come for sure.

Judged at the end: exit code 0, ledger balanced in all units, no token over the bound and none trained twice as seen on
the wire by the proxy, nothing found by the audit of the run's record (`stillhouse audit`), evaluation as that of a run
without faults within noise (--no-reference leaves it out), and no process, descriptor or mount left. Exit code 1 if
anything is wrong. --runs N makes N runs in sequence, without a reference. Each has its own
seed, staleness bound, release policy and group size.
"""

from __future__ import annotations

import argparse
import math
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from bench.faults.chaos_audit import audit_runs
from stillhouse.launch.workers.crew import ROLES
from tests.sim.chaos.campaign import reference, run_campaign
from tests.sim.chaos.faults import KINDS, UNUSUAL, Fault, Kind, partitions
from tests.sim.chaos.limits import HOME
from tests.sim.chaos.plan import Plan
from tests.sim.chaos.verdict import Struck, Verdict

STEPS_PER_FAULT = 4
STEPS_PER_FAULT_OF_HOSTS = 8
"""The others go on while a host is cut off."""
USUAL: Final[tuple[Kind, ...]] = tuple(kind for kind in KINDS if kind not in UNUSUAL)
HOSTS_END_S = 240.0
"""Over slow links a run needs longer to find together again."""
SIGMAS = 3.0
"""Accuracies may differ by this many standard errors of their difference, plus ACCURACY_SLACK."""
ACCURACY_SLACK = 0.03
KL_SLACK = 0.3
"""The reverse KL at the end may be larger than without faults by this share of what training took off."""


def main() -> int:
    signal.signal(signal.SIGTERM, lambda _signum, _frame: sys.exit(143))  # so that whatever was started ends with us
    args = parse(sys.argv[1:])
    kinds = cast(tuple[Kind, ...], tuple(args.kinds.split(",")) if args.kinds else USUAL)
    if unknown := set(kinds) - set(KINDS):
        sys.exit(f"unknown kinds {sorted(unknown)}; there are {', '.join(KINDS)}")
    plan = Plan(
        faults=args.faults,
        seed=args.seed,
        kinds=kinds,
        roles=frozenset(args.roles.split(",")),
        actors=args.actors,
        teachers=args.teachers,
        steps=args.steps or max(60, (STEPS_PER_FAULT_OF_HOSTS if args.hosts > 1 else STEPS_PER_FAULT) * args.faults),
        max_staleness=args.max_staleness,
        hosts=args.hosts,
        rank_hosts=args.rank_hosts,
        delay_ms=args.delay_ms,
        loss=args.loss,
        surely=tuple(Fault("kill", f"{role}-0") for role in args.surely_kill.split(",") if role),
        gap_s=(args.gap[0], args.gap[1]),
        disk_mib=args.disk_mib,
        arguments=tuple(args.set),
    )
    if plan.hosts > 1:
        plan = msgspec.structs.replace(
            plan,
            kinds=plan.kinds if args.kinds else (*plan.kinds, "partition"),
            surely=(*plan.surely, *partitions((*plan.guests, HOME))),
            end_timeout_s=HOSTS_END_S,
        )
    folder = args.folder or Path(tempfile.mkdtemp(prefix="chaos-run-"))
    print(f"runs, logs and the proxy's records: {folder}", flush=True)
    if args.runs:
        return audit_runs(plan, args.runs, folder, args.report)
    verdict = run_campaign(plan, folder / "faulted", lambda line: print(line, flush=True))
    undisturbed = None if args.no_reference else reference(plan, folder / "reference")
    if undisturbed is not None and verdict.summary:
        verdict.complaints += differences(verdict.summary, undisturbed)
    text = report(plan, verdict, undisturbed, " ".join(["python", *sys.argv]))
    print(f"\n{text}")
    if args.report:
        args.report.write_text(text, encoding="utf-8")
    return 1 if verdict.complaints else 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=30, help="faults in each run")
    parser.add_argument("--runs", type=int, default=0, help="number of audited runs, each with different settings")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--roles", default=",".join(sorted(ROLES)), help="whose death the run must survive")
    parser.add_argument("--kinds", default="", help=f"default: {','.join(USUAL)}, and with --hosts partition")
    parser.add_argument(
        "--surely-kill", default="", metavar="ROLES", help="of each named role worker 0, whatever is drawn"
    )
    parser.add_argument("--actors", type=int, default=3)
    parser.add_argument("--teachers", type=int, default=2)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--rank-hosts", type=int, default=1, help="hosts with a rank of the learner")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="of each frame between hosts")
    parser.add_argument("--loss", type=float, default=0.0, help="share of the frames between hosts")
    parser.add_argument(
        "--steps",
        type=int,
        default=0,
        help=f"default: {STEPS_PER_FAULT} for each fault, {STEPS_PER_FAULT_OF_HOSTS} over hosts",
    )
    parser.add_argument("--max-staleness", type=int, default=2)
    parser.add_argument("--gap", type=float, nargs=2, default=[0.5, 2.5], help="seconds between faults, evenly drawn")
    parser.add_argument("--disk-mib", type=int, default=0, help="the run folder is a tmpfs of this size")
    parser.add_argument("--set", action="append", default=[], metavar="--KEY=VALUE", help="further keys of the run")
    parser.add_argument("--no-reference", action="store_true", help="no second run without faults")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--report", type=Path, help="write the report there, too")
    args = parser.parse_args(arguments)
    if args.hosts == 1 and (args.delay_ms or args.loss or args.rank_hosts > 1 or "partition" in args.kinds.split(",")):
        parser.error("--delay-ms, --loss, --rank-hosts and partitions need --hosts 2 or more")
    if args.rank_hosts > args.hosts:
        parser.error(f"--rank-hosts: got {args.rank_hosts}, expected at most --hosts ({args.hosts})")
    return args


def differences(faulted: dict[str, Any], undisturbed: dict[str, Any]) -> list[str]:
    """Differences of the last evaluations beyond noise. The seeds are the same, but the order of events differs."""
    found: list[str] = []
    if not faulted["eval"] or faulted["eval"][-1]["step"] != undisturbed["eval"][-1]["step"]:
        return ["the run has no evaluation at its end"]
    first, ours, other = undisturbed["eval"][0], faulted["eval"][-1], undisturbed["eval"][-1]
    p, q, n = ours["accuracy_sampled"], other["accuracy_sampled"], max(1, min(ours["n_sampled"], other["n_sampled"]))
    allowed = ACCURACY_SLACK + SIGMAS * math.sqrt((p * (1 - p) + q * (1 - q)) / n)
    if q - p > allowed:
        found.append(f"accuracy {p:.3f} with faults, {q:.3f} without; up to {allowed:.3f} would be noise")
    gained = first["reverse_kl"] - other["reverse_kl"]
    if ours["reverse_kl"] - other["reverse_kl"] > KL_SLACK * max(gained, 0.0):
        found.append(f"reverse KL {ours['reverse_kl']:.3f} with faults, {other['reverse_kl']:.3f} without")
    return found


def report(plan: Plan, verdict: Verdict, undisturbed: dict[str, Any] | None, command: str) -> str:
    """Markdown."""
    summary = verdict.summary
    lines = [
        f"# Chaos: {len(verdict.struck)} faults, seed {plan.seed}",
        "",
        f"    {command}",
        "",
        f"{time.strftime('%Y-%m-%d')}. {plan.actors} actors, {plan.teachers} teachers, {plan.steps} steps, max "
        f"staleness {plan.max_staleness}; deadly faults strike {', '.join(sorted(plan.roles))}. Faults went on for "
        f"{verdict.faults_s:.0f} s, {verdict.missed} more found nothing to hit.",
        "",
        f"**{'Everything held' if not verdict.complaints else 'WRONG'}**"
        + "".join(f"\n- {c}" for c in verdict.complaints),
        "",
        *fault_table(verdict.struck),
        "",
        "Recovery: from the end of the fault until its target did work again (a segment, a score, a trained batch).",
        "",
    ]
    if plan.hosts > 1:
        lines += host_lines(plan, verdict)
    if summary:
        lines += result_table(verdict, undisturbed)
    if verdict.troubles:
        lines += ["", f"Tracebacks in the logs: {', '.join(f'{k} {n}' for k, n in verdict.troubles.items())}."]
    return "\n".join(lines) + "\n"


def fault_table(struck: Sequence[Struck]) -> list[str]:
    roles = sorted({one.fault.role for one in struck})
    by_kind: defaultdict[str, list[Struck]] = defaultdict(list)
    for one in struck:
        by_kind[one.fault.kind].append(one)
    lines = [
        f"| fault | {' | '.join(roles)} | recovery s: median | worst | not seen again |",
        "|---|" + "---:|" * (len(roles) + 3),
    ]
    for kind, ones in sorted(by_kind.items()):
        counts = [sum(one.fault.role == role for one in ones) for role in roles]
        times = [one.recovery_s for one in ones if one.recovery_s is not None]
        middle, worst = (f"{statistics.median(times):.1f}", f"{max(times):.1f}") if times else ("-", "-")
        cells = [kind, *map(str, counts), middle, worst, str(len(ones) - len(times))]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def host_lines(plan: Plan, verdict: Verdict) -> list[str]:
    exits = Counter[int]()
    for codes in verdict.join_exits.values():
        exits.update(codes)
    ends = ", ".join(f"{code} ({n} times)" for code, n in sorted(exits.items()))
    left_out = ", ".join(f"{reason} ({n} times)" for reason, n in verdict.left_out.items()) or "nobody"
    ranks = f", {plan.rank_hosts} of them with a rank of the learner each" if plan.rank_hosts > 1 else ""
    lines = [
        f"{plan.hosts} hosts{ranks}; {plan.delay_ms:g} ms each way, a quarter more or less, and {plan.loss:.0%} of all "
        f"frames lost. The buffer counted a peer as lost for its silence {verdict.silent} times. Left out of the "
        f"weight group for missing a deadline: {left_out}. Exit codes of the joins, which were started again but for "
        f"0: {ends}.",
        "",
        "| partition that healed before or after a limit | host | for s | recovery s |",
        "|---|---|---:|---:|",
    ]
    for one in verdict.struck:
        if one.fault.kind == "partition":
            recovery = "-" if one.recovery_s is None else f"{one.recovery_s:.1f}"
            fault = one.fault
            lines.append(f"| {fault.side} {fault.point} | {fault.target} | {fault.seconds:.1f} | {recovery} |")
    return [*lines, ""]


def result_table(verdict: Verdict, undisturbed: dict[str, Any] | None) -> list[str]:
    rows = {"with faults": verdict.summary} | ({"without": undisturbed} if undisturbed is not None else {})
    lines = [
        "| run | wall s | tokens accepted | trained | masked | dropped | staleness max | restarts | accuracy "
        "| reverse KL |",
        "|---|" + "---:|" * 9,
    ]
    for name, summary in rows.items():
        tokens = summary["tokens"]
        first, last = (summary["eval"][0], summary["eval"][-1]) if summary["eval"] else ({}, {})
        ends = [f"{first.get(key) or 0:.3f} -> {last.get(key) or 0:.3f}" for key in ("accuracy_sampled", "reverse_kl")]
        restarts = sum(worker["restarts"] for worker in summary["workers"].values())
        cells = [f"{summary['wall_s']:.0f}", f"{tokens['accepted']:,}", f"{tokens['trained']:,}",
                 f"{sum(tokens['masked'].values()):,}", f"{sum(tokens['dropped'].values()):,}",
                 f"{summary['staleness']['max']} of {summary['staleness']['bound']}", str(restarts), *ends]  # fmt: skip
        lines.append(f"| {name} | {' | '.join(cells)} |")
    launches = 1 + sum(one.fault.restarts_run for one in verdict.struck)
    if launches > 1:
        lines += [
            "",
            f"Wall time and restarts of the run with faults are those of the last of {launches} launches; all of them "
            f"took {verdict.wall_s:.0f} s. The tokens are the ledger's, which goes on over them.",
        ]
    found, refused = verdict.audit, verdict.summary["ledger"]["rejected"] or "nothing"
    lines += [
        "",
        f"Seen on the wire: {found.batches} batches with {found.tokens:,} tokens trained, each once; the stalest "
        f"{found.staleness_max} steps old. Refused at the buffer's door: {refused}.",
    ]
    return lines


if __name__ == "__main__":
    sys.exit(main())
