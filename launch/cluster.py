"""Start a run:   python launch/cluster.py --actors 32 --teachers 8

`stillhouse` is the same program; --help lists its commands (launch.config.help). This file only finds the package, and
an interpreter that has what it needs. launch.run does the rest.
"""

import importlib.util
import os
import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = {
    "join": "launch.join.command",
    "invite": "launch.join.invite",
    "audit": "tools.audit.run",
    "view": "tools.view.command",
    "render": "launch.render.command",
    "trace": "tools.trace.command",
    "try": "tools.try_environment",
    "doctor": "tools.doctor.command",
    "write": "tools.write.command",
    "replay": "replay.command",
    "export": "tools.export.command",
    "builtin": "builtin.command",
    "sglang-server": "sglang_server.command",
}
"""First word -> module with its `main`, in the package stillhouse; without such a word a run is started."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
NEEDED = ("msgspec", "numpy", "psutil", "rich", "torch", "transformers", "yaml", "zmq")


def use_repository() -> None:
    """For a script, Python puts its folder, launch/, first on the path; put the one with `stillhouse` there instead."""
    sys.path[:] = [str(ROOT / "src"), *(entry for entry in sys.path if Path(entry).resolve() != ROOT / "launch")]


def use_environment() -> None:
    """Switch to the repository's virtual environment if this interpreter lacks something, or say what to do."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    old = sys.version_info < (3, 11)
    if not missing and not old:
        return
    environment = ROOT / ".venv"
    python = environment / "bin" / "python"
    if python.exists() and Path(sys.prefix).resolve() != environment.resolve():
        os.execv(python, [str(python), str(Path(__file__).resolve()), *sys.argv[1:]])
    lacking = "is older than Python 3.11" if old else f"lacks {', '.join(missing)}"
    sys.exit(f"stillhouse: {sys.executable} {lacking}. Run `make venv` in {ROOT} once, then try again.")


def spare_loopback() -> None:
    """Let no program that this process starts, nor a library in it, ask a proxy of the environment (`http_proxy`) for
    what is on this machine: servers, agents and their endpoints."""
    former = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if former != "*" and any(name.lower().endswith("_proxy") for name in os.environ):
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(filter(None, (former, *LOOPBACK)))


def main() -> int:
    """Entry of the console script `stillhouse`, and of this script."""
    try:
        spare_loopback()
        from stillhouse.launch.terminal import sure_output  # imported late: use_environment comes first

        module = COMMANDS.get(sys.argv[1] if len(sys.argv) > 1 else "")
        words = sys.argv[2:] if module else sys.argv[1:] or ["--help"]
        with sure_output():
            return import_module(f"stillhouse.{module or 'launch.run'}").main(words)
    except KeyboardInterrupt:  # during imports; later the commands handle it
        print("stillhouse: stopped before anything was started", file=sys.stderr)
        return 130


if __name__ == "__main__":
    use_repository()
    use_environment()
    sys.exit(main())
