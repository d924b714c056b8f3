"""Serve models on a CPU until Ctrl-C:

    stillhouse sglang-server [--port P] [--log-dir DIR] MODEL [MODEL ...] [-- SERVER ARGS]

The first server gets the port P, the next one P + 1, ... Prints name, url and pid of each
server when it is ready."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Final

from stillhouse.sglang_server.servers import Servers, SGLangServer

GLOO_ON_LOOPBACK: Final = {"GLOO_SOCKET_IFNAME": "lo"}
"""Weights come over the interface that the servers listen on. Without this, gloo would resolve the host name."""


def main(arguments: list[str]) -> int:
    own, extra = arguments, list[str]()
    if "--" in arguments:
        cut = arguments.index("--")
        own, extra = arguments[:cut], arguments[cut + 1 :]
    parser = argparse.ArgumentParser(
        prog="stillhouse sglang-server", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folder of a checkpoint; repeat it for more servers")
    parser.add_argument("--port", type=int, default=0, help="port of the first server; 0 = free ports")
    parser.add_argument("--log-dir", type=Path, default=None, help="server logs; default: a new temporary folder")
    options = parser.parse_args(own)
    log_dir: Path = options.log_dir or Path(tempfile.mkdtemp(prefix="sglang-cpu-"))
    signal.signal(signal.SIGTERM, _leave)
    with Servers(log_dir, environment=GLOO_ON_LOOPBACK if "GLOO_SOCKET_IFNAME" not in os.environ else None) as servers:
        print(f"warm after {servers.warm_s} s; logs in {log_dir}", flush=True)
        started: list[SGLangServer] = []
        for index, model in enumerate(options.models):
            port = options.port + index if options.port else 0
            started.append(servers.start(f"server-{index}", model, extra, port=port))
        servers.wait_ready(started, timeout_s=120.0)
        for server in started:
            print(f"{server.name}  {server.url}  pid {server.pid}", flush=True)
        try:
            signal.pause()
        except KeyboardInterrupt:
            print("stopping the servers", flush=True)
    return 0


def _leave(number: int, frame: FrameType | None) -> None:
    """Exit on SIGTERM, so that the context manager ends the servers."""
    sys.exit(0)
