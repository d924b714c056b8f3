"""Imports SGLang once, then forks a real server for every request:  python zygote.py CONTROL_FD LOG_DIR OWNER_PID

Importing SGLang takes about ten seconds and 200 MB; forked servers share it copy-on-write. Runs in SGLang's own
environment with shim/ on PYTHONPATH. protocol.fork_server has the loop and its messages; to start a server, {"name",
"args"} are needed, and LOG_DIR/NAME.log gets its output.

Forking is safe because there is one thread and no CUDA context. A server (serve.py) dies with this process, and this
process is killed when the thread that started it dies, if OWNER_PID is not 0.
"""

# pyright: reportMissingImports=false
# SGLang is in an environment of its own, not in the one that is type-checked.

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from serve import become_server, own

PINNING = {"--enable-lora", "--enable-return-routed-experts"}
"""Arguments of servers that ask for pinned memory."""
LAST_GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL when everything ends; after SIGTERM, SGLang finishes running requests."""


def warm_up() -> None:
    """Import what a server imports, including the registry of all models."""
    import torch

    torch.set_num_threads(1)
    set_start_method = multiprocessing.set_start_method
    set_start_method("fork", force=True)

    def always_fork(method: str | None = None, force: bool = False) -> None:
        """SGLang asks for "spawn" because of CUDA. There is no CUDA here, and spawning would repeat all imports."""
        set_start_method("fork", force=True)

    multiprocessing.set_start_method = always_fork
    from sglang.srt.plugins import load_plugins

    load_plugins()
    import sglang.srt.entrypoints.http_server  # noqa: F401
    import sglang.srt.managers.detokenizer_manager  # noqa: F401
    import sglang.srt.managers.scheduler  # noqa: F401
    from sglang.srt.models.registry import ModelRegistry

    ModelRegistry.get_supported_archs()
    gc.collect()
    gc.freeze()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C in a terminal the owner decides, by closing the socket
    control_fd, log_dir, owner_pid = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    if owner_pid:
        own("children").die_with_parent(owner_pid)

    def become(message: dict[str, Any]) -> None:
        if PINNING & set(message["args"]):
            from sglang_torch_cpu.pinned import ignore_pinning

            ignore_pinning()
        become_server(log_dir / f"{message['name']}.log", os.getppid(), message["args"])

    with socket.socket(fileno=control_fd) as control:
        warm_up()
        own("fork_server").ForkServer(control, become, grace_s=LAST_GRACE_S).serve()


if __name__ == "__main__":
    main()
