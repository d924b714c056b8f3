"""How the built-in task was made:

stillhouse builtin build                 its problems, teacher and student (a few CPU minutes)
stillhouse builtin build --hybrid FOLDER a student with recurrent layers (a CPU minute)
stillhouse builtin measure [FOLDER ...]  accuracy of models on its evaluation problems
stillhouse builtin specialists FOLDER    the files of a run with two specialist teachers
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final

COMMANDS: Final = ("build", "measure", "specialists")


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    if not arguments or arguments[0] not in COMMANDS:
        asked = arguments[:1] in (["--help"], ["-h"])
        print(__doc__.strip(), file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    import_module(f"stillhouse.builtin.{arguments[0]}").main(arguments[1:])
    return 0
