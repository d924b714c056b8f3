"""Weight groups under faults as NCCL has them, without a GPU, and the verdict.

    python -m bench.faults.group_faults [--faults 300] [--seed 0] [--kinds engines,servers]

A process group for CPUs fails, delays, hangs and aborts as torch's NCCL group does (tests/sim/weights/nccl_like.py); a
real publisher sends version after version through it to three embedded members, and to three servers. After each fault
every member that lives must have the newest version, bit for bit, within a bound; the publisher's thread must not fail;
what is counted as dropped must be what was said; nothing may be left behind. Exit code 1 if anything is found. The same
seed draws the same faults.
"""

from __future__ import annotations

import argparse
import sys
from typing import cast

from tests.sim.weights.group_campaign import Kind, run_campaign


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=300, help="of all kinds of members together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="engines,servers")
    args = parser.parse_args()
    kinds = cast(tuple[Kind, ...], tuple(args.kinds.split(",")))
    good = True
    for kind in kinds:
        verdict = run_campaign(kind, -(-args.faults // len(kinds)), args.seed)
        print(verdict, flush=True)
        good = good and not verdict.findings
    print("survived" if good else "NOT survived")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
