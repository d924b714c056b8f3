"""A run that ends in order when the process that started it is gone:

    python -m stillhouse.tools.kept_run FD [flags of a run]

FD is the reading end of a pipe. When its writing end is closed, by intent or because the other process was killed, this
launcher gets SIGTERM: the learner finishes its step and writes a checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
import threading


def stop_at_end_of(lifeline_fd: int) -> None:
    """Start a thread that sends this process SIGTERM at the end of the pipe."""

    def wait_for_the_end() -> None:
        while os.read(lifeline_fd, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait_for_the_end, name="lifeline", daemon=True).start()


def main() -> int:
    """Entry of the process."""
    stop_at_end_of(int(sys.argv[1]))
    from stillhouse.launch.run import main as run

    return run(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
