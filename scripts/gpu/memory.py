"""The planner's GiB beside what each role of a run takes: one table, when its launcher has ended, or at SIGTERM.

python scripts/gpu/memory.py RUN [SECONDS between two looks]      before or while the run runs

On a GPU what nvidia-smi counts for a process, right within 10 %. Without one resident memory (PSS) beside the plan for
the host, which is not judged: a host's plan is what may be used at most. A worker's log says its pid; its server is the
process that listens at the URL in RUN/servers, with its children.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from stillhouse.launch.checks.server_preflight import check_servers
from stillhouse.launch.config.files import read_config
from stillhouse.launch.machine.machine import find_machine

WITHIN = 0.1
STARTS = re.compile(r": (\S+) (?:\(\w+\)|of \d+) starts, pid (\d+)$", re.MULTILINE)
NEED = re.compile(r"(\S+?)(?: to (\S+?), each)? ([\d.]+) \(([^)]*)\)")
"""An entry of the planner's line: launch.checks.memory.Need, or several that are alike."""


def workers(run: Path) -> dict[int, str]:
    """Pid -> worker, of all processes that the run's workers have had."""
    said = [
        log.read_text(encoding="utf-8", errors="replace")
        for log in (run / "logs").glob("*.log")
        if "server-" not in log.name
    ]
    return {int(pid): who for text in said for who, pid in STARTS.findall(text)}


def url_of(run: Path, worker: str) -> str:
    """URL of the worker's server; empty: none so far."""
    with suppress(OSError, ValueError):
        return json.loads((run / "servers" / f"{worker}.json").read_text(encoding="utf-8"))["url"]
    return ""


def listener(url: str) -> psutil.Process | None:
    """The process that listens there."""
    port = int(url.rpartition(":")[2] or 0)
    for one in psutil.net_connections("tcp"):
        if one.status == psutil.CONN_LISTEN and one.laddr[1:] == (port,) and one.pid:
            with suppress(psutil.Error):  # it ended meanwhile
                return psutil.Process(one.pid)
    return None


def servers(run: Path, known: dict[str, int]) -> dict[int, str]:
    """Pid -> server, with its children. `known`: URL -> the leader's pid."""
    found: dict[int, str] = {}
    for file in (run / "servers").glob("*.json"):
        if (url := url_of(run, file.stem)) and url not in known and (leader := listener(url)) is not None:
            known[url] = leader.pid
        with suppress(psutil.Error):
            leader = psutil.Process(known.get(url, -1))
            found |= {one.pid: f"server-{file.stem}" for one in (leader, *leader.children(recursive=True))}
    return found


def taken(pids: set[int]) -> dict[int, float]:
    """Pid -> GiB: of all processes on GPUs, or of these without one."""
    if smi := shutil.which("nvidia-smi"):
        query = [smi, "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
        rows = [
            line.split(",") for line in subprocess.run(query, capture_output=True, encoding="utf-8").stdout.splitlines()
        ]
        return {int(row[0]): float(row[1]) / 1024 for row in rows if len(row) == 2 and row[1].strip().isdigit()}
    found: dict[int, float] = {}
    for pid in pids:
        with suppress(psutil.Error):
            found[pid] = psutil.Process(pid).memory_full_info().pss / 2**30
    return found


def planned(run: Path) -> dict[str, tuple[float, str]]:
    """Role -> GiB, and its parts: by the run's own configuration."""
    machine = find_machine()
    gib = psutil.virtual_memory().total / 2**30
    found = check_servers(read_config(run / "config.yaml"), machine if machine.gpus else machine._replace(host_gib=gib))
    needs: dict[str, tuple[float, str]] = {}
    for line in found.memory:
        if line.startswith("GPU") or not machine.gpus:
            for first, last, total, parts in NEED.findall(line):
                stem, n = first.rpartition("-")[0], int(first.rpartition("-")[2]) if last else 0
                alike = range(n, int(last.rpartition("-")[2]) + 1) if last and last.startswith(stem) else ()
                names = [f"{stem}-{i}" for i in alike] or [name for name in (first, last) if name]
                needs |= {"learner-0" if who == "learner" else who: (float(total), parts) for who in names}
    for text in found.mistakes:
        print(f"the plan: {text}")
    return needs


def rows(plan: dict[str, tuple[float, str]], looks: list[dict[int, float]], who: dict[int, str]) -> Iterator[str]:
    peaks: dict[str, float] = {}
    for look in looks:
        now: dict[str, float] = {}
        for pid, gib in look.items():
            role = who.get(pid) or f"pid {pid}"
            now[role] = now.get(role, 0.0) + gib
        for role, gib in (*now.items(), ("all", sum(now.values()))):
            peaks[role] = max(peaks.get(role, 0.0), gib)
    for role in sorted({*plan, *peaks, "all"}, key=lambda role: (role == "all", role)):
        gib, parts = plan.get(role, (sum(total for total, _ in plan.values()) if role == "all" else 0.0, "-"))
        seen = peaks.get(role, 0.0)
        ratio = seen / gib if gib and seen else 0.0
        verdict = "-" if not ratio or ON_HOST or role == "all" else "ok" if abs(ratio - 1) <= WITHIN else "OFF"
        cells = (role, parts, *(f"{x:.2f}" if x else "-" for x in (gib, seen, ratio)), verdict)
        yield f"| {' | '.join(cells)} |"


ON_HOST = shutil.which("nvidia-smi") is None


def main() -> None:
    run, every_s = Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 2.0 if ON_HOST else 0.5
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, _frame: ended.append(signum))
    plan: dict[str, tuple[float, str]] = {}
    looks: list[dict[int, float]] = []
    who: dict[int, str] = {}
    known: dict[str, int] = {}
    launcher = 0
    while not ended and not (launcher and not psutil.pid_exists(launcher)):
        if not launcher and (run / "run.json").exists() and (run / "config.yaml").exists():
            launcher = json.loads((run / "run.json").read_text(encoding="utf-8"))["launcher_pid"]
            plan = planned(run)
        who |= workers(run) | servers(run, known)
        looks.append(taken({*who}))
        time.sleep(every_s)
    where = "without a GPU: resident memory beside the plan for the host" if ON_HOST else "nvidia-smi's peak"
    print(f"memory in GiB, {where}; {len(looks)} looks")
    print("| role | part of plan | planned | seen | ratio | verdict |\n|---|---|---|---|---|---|")
    print(*rows(plan, looks, who), sep="\n")
    if not ON_HOST and not any(pid in who for look in looks for pid in look):
        print("nvidia-smi names no process of the run: its pids are those of another namespace")


if __name__ == "__main__":
    main()
