"""Turns this process into a vLLM server:  python serve.py     reads {"args", "key", "environment", "log", "parent_pid"}
as a line on stdin

Uses only the standard library, vLLM and files of ours that need no more, because it runs in vLLM's own interpreter.
Arguments come on stdin: any user of the machine can read a command line.

vLLM asks for its key on a few routes only (/v1, /inference): whoever reaches the port may change its weights, or call
any method of its workers. Here it asks for the key on every route.
"""

# pyright: reportMissingImports=false
# vLLM is in an environment of its own, not in the one that is type-checked.

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

WORKER = Path(__file__).resolve().with_name("worker")
"""Folder with the part of ours that vLLM's worker processes load (stillhouse_weights.py)."""


def own(name: str) -> Any:
    """The module stillhouse.NAME, which needs the standard library alone. The package's folder is on the path for that
    moment only."""
    home = Path(__file__).resolve().parents[2]
    sources = str(home / "src" if (home / "src" / "stillhouse").is_dir() else home.parent)
    sys.path.insert(0, sources)
    try:
        return importlib.import_module(f"stillhouse.{name}")
    finally:
        sys.path.remove(sources)


def become_server(request: dict[str, Any]) -> None:
    """Serve until SIGTERM."""
    process = own("sglang_server.serve")
    own("protocol.children").die_with_parent(request["parent_pid"])
    process.write_to(Path(request["log"]))
    process.hide(request["key"])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(WORKER), os.environ.get("PYTHONPATH", ""))))
    sys.path.append(str(WORKER))
    os.environ |= {"VLLM_API_KEY": request["key"], "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    os.environ |= {name: value for name, value in request["environment"].items() if name not in os.environ}
    process.keep_stores_here()
    guard_all_routes()
    from vllm.entrypoints.cli.main import main as run_command

    sys.argv = ["vllm", "serve", *request["args"]]
    run_command()


def guard_all_routes() -> None:
    """Raises RuntimeError for a vLLM that guards its routes in another way."""
    from vllm.entrypoints.serve.middleware import authenticate

    if not isinstance(getattr(authenticate, "GUARDED_PREFIX", None), tuple):
        raise RuntimeError(
            "this vLLM has no GUARDED_PREFIX (vllm.entrypoints.serve.middleware.authenticate), by which its weights "
            "are kept behind the key; expected a version such as 0.32"
        )
    authenticate.GUARDED_PREFIX = ("/",)


def main() -> None:
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [entry for entry in sys.path if entry != here]  # our file names must not shadow other modules
    become_server(json.loads(sys.stdin.readline()))


if __name__ == "__mp_main__":
    own("protocol.children").die_with_parent(os.getppid())  # vLLM's engine and workers would stay, with their memory
    process = own("sglang_server.serve")  # as in the process that spawned this one
    process.hide(os.environ["VLLM_API_KEY"])
    process.keep_stores_here()
if __name__ == "__main__":
    main()
