"""`... -m stillhouse.launch.ray.joined PID RUN`: `stillhouse join RUN ...` that dies with its parent, process PID."""

from __future__ import annotations

import sys

from stillhouse.launch.join import command
from stillhouse.protocol.children import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    sys.exit(command.main(sys.argv[2:]))
