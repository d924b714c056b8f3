"""A few columns of RUN/metrics.jsonl, and how the run ended.

python scripts/gpu/table.py RUN
"""

import json
import sys
from pathlib import Path

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


def main(run):
    file = run / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    rows = [r for r in rows if r.get("kind") == "step"]
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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
