"""A few columns of RUN/metrics.jsonl, then each GPU process's peak (MEMORY: lines `pid, MiB`).

python scripts/gpu/table.py RUN [MEMORY]
"""

import json
import sys
from pathlib import Path

run, peak = Path(sys.argv[1]), {}
columns = {
    "step": "step",
    "loss": "train/loss",
    "ratio_mean": "train/ratio_mean",
    "ratio_max": "train/ratio_max",
    "step_s": "time/step_s",
    "train_s": "train/step_s",
    "data_s": "wait/data_s",
    "tokens": "train/tokens",
    "push_s": "weights/broadcast_s",
    "MB": "weights/broadcast_bytes",
    "copy_s": "weights/copy_s",
    "checks": "weights/check_requests_total",
    "rebuilds": "weights/rebuilds_total",
    "failed": "weights/failed_groups_total",
}
rows = (
    [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    if (run / "metrics.jsonl").exists()
    else []
)
rows = [r for r in rows if r.get("kind") == "step"]


def show(name, x):
    if x is None:
        return "-"
    return f"{x / 1e6:.1f}" if name == "MB" else f"{x:.4g}"


def ledger(s):  # accepted = trained + masked + dropped + still there
    unequal = [
        k
        for k, c in (s.get("ledger") or {}).items()
        if isinstance(c, dict)
        and "accepted" in c
        and c["accepted"]
        != c["trained"] + sum(c["masked"].values()) + sum(c["dropped"].values()) + c["waiting"] + c["in_flight"]
    ]
    return f"UNBALANCED {unequal}" if unequal else "balanced" if s.get("ledger") else "absent"


print(*(f"{name:>10}" for name in columns))
for r in rows if len(rows) <= 12 else [*rows[:4], *rows[-8:]]:
    print(*(f"{show(name, r.get(key)):>10}" for name, key in columns.items()))
if (run / "summary.json").exists():
    s = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    print(
        "run:",
        s.get("state"),
        "|",
        s.get("reason"),
        "| ledger",
        ledger(s),
        "| versions",
        s.get("versions_published"),
        "| wall",
        round(s.get("wall_s") or 0, 1),
        "s, ready after",
        round(s.get("ready_s") or 0, 1),
        "s",
    )
else:
    print(f"run: no {run}/summary.json")
for line in (
    Path(sys.argv[2]).read_text(encoding="utf-8").splitlines()
    if len(sys.argv) > 2 and Path(sys.argv[2]).exists()
    else []
):
    pid, _, mib = line.partition(",")
    if mib.strip().isdigit():
        peak[pid] = max(peak.get(pid, 0), int(mib))
if peak:
    print("GPU memory, peak MiB by pid:", peak)
