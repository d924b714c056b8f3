"""A command as a process that ends with its parent, such as a stage's: its GPU memory is free when it ends.

python -m stillhouse.launch.stages.child PARENT_PID WORD...
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from stillhouse.launch.processes.local import python_path
from stillhouse.launch.terminal import StopRequests
from stillhouse.protocol.children import die_with_parent

LOOK_S: Final = 0.2
"""Time between two looks for signals."""


def run_child(words: Sequence[str], stop: StopRequests) -> int:
    """Run `stillhouse WORD...` to its end, and pass on the signals that come meanwhile. Returns the exit code; 128 + n
    if signal n ended it. The child has a session of its own, so that Ctrl-C in the terminal reaches it once."""
    command = [sys.executable, "-P", "-m", "stillhouse.launch.stages.child", str(os.getpid()), *words]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        passed_on = 0
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(LOOK_S)
                return 128 - code if code < 0 else code
            for _ in range(stop.count - passed_on):
                if stop.first is not None:
                    process.send_signal(stop.first)
            passed_on = stop.count


def main() -> int:
    die_with_parent(int(sys.argv.pop(1)))  # before anything heavy is imported
    from stillhouse.launch import cluster

    return cluster.main()


if __name__ == "__main__":
    sys.exit(main())
