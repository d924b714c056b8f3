"""`make claims`: makes what is missing of the grid (bench.claims.grid), and the page from what is there.

    .venv/bin/python -m bench.claims [--folder runs/claims] [--jobs 2] [--only 1,2] [--page]

Arms are made by processes of one thread each. Stopped at any time, it goes on where it was: only arms under way are
lost.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.claims.jobs import ROOT, fill
from bench.claims.page import write_page


def main() -> int:
    args = parse()
    failed = [] if args.page else fill(args.folder, args.jobs, set(args.only.split(",")) if args.only else None)
    write_page(args.folder)
    return 1 if failed else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.claims", description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "claims")
    parser.add_argument("--jobs", type=int, default=2, help="arms at a time, of one thread each")
    parser.add_argument("--only", default="", help="claims, separated by commas; default: all")
    parser.add_argument("--page", action="store_true", help="make no arm; write the page from those that are done")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
