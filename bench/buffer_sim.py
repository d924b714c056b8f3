"""Millions of events through the buffer's core among simulated peers (tests/sim/buffer/sim.py), and how fast.

python -m bench.buffer_sim --events 10000000 --seed 0 --jobs 2
"""

from __future__ import annotations

import argparse
import os
import time

from tests.sim.buffer.sim import run


def cpu_s() -> float:
    """CPU time of this process and its ended children, seconds."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--check-every", type=int, default=10, help="events between two audits of all records")
    options = parser.parse_args()
    began_s, began_cpu_s = time.perf_counter(), cpu_s()
    totals = run(options.events, options.seed, options.check_every, options.jobs, progress_s=10.0)
    seconds, spent_s = time.perf_counter() - began_s, cpu_s() - began_cpu_s
    for name, n in sorted(totals.items()):
        print(f"{name:40} {n:>12,}")
    print(f"{'events/s':40} {totals['events'] / seconds:>12,.0f}   in {seconds:.1f} s")
    print(f"{'events/CPU s':40} {totals['events'] / spent_s:>12,.0f}   in {spent_s:.1f} CPU s")
    print(f"ledger and model compared after each event, records audited every {options.check_every} events")


if __name__ == "__main__":
    main()
