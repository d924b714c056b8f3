"""Start a run:   python launch/cluster.py --actors 32 --teachers 8       (--help explains the keys)
Add workers:   python launch/cluster.py join RUN --actors 8            (on another machine, with what `export` writes)
Audit a run:   python launch/cluster.py audit RUN                      (one that was started with --record FILE)
See its rollouts: python launch/cluster.py view RUN                    (one that was started with --record FILE)
Make a job for Slurm, Kubernetes or SkyPilot: python launch/cluster.py render slurm --config FILE
Change a run on Ray: python launch/cluster.py scale RUN --actors 16    (one that was started with --backend ray)
Write its trace: python launch/cluster.py trace RUN                    (one that was started with --trace FILE)
Try an environment, without a run:   python launch/cluster.py try ENV --n 4
Examine a run before its start:   python launch/cluster.py doctor         (the keys of the run)

Only finds the packages, and an interpreter that has what they need. launch.run does the rest.
"""

import importlib.util
import os
import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    *("protocol", "models", "weights", "engines", "recording", "actors", "teachers", "buffer", "learner", "launch"),
    *("replay", "builtin", "sglang_server", "tracing"),
)
WITH_CODE = ("builtin", "launch", "sglang_server")
"""Those of PACKAGES whose __init__.py is not empty."""
COMMANDS = {
    "join": "launch.join.command",
    "export": "launch.join.export",
    "audit": "launch.audit.run",
    "view": "launch.view.command",
    "render": "launch.render.command",
    "trace": "launch.trace.command",
    "scale": "launch.ray.scale",
    "try": "launch.try_environment",
    "doctor": "launch.doctor.command",
    "completion": "launch.completion",
}
"""First word -> module with its `main`; without such a word a run is started."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
NEEDED = ("msgspec", "numpy", "psutil", "rich", "torch", "transformers", "yaml", "zmq")


def use_repository() -> None:
    """For a script, Python puts its folder, launch/, first on the path; put the repository there instead."""
    sys.path[:] = [str(ROOT), *(entry for entry in sys.path if Path(entry).resolve() not in (ROOT / "launch", ROOT))]


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


def expect_own_packages() -> None:
    """Our packages have common names. Exit with an error if another package of the same name would be imported."""
    for name in PACKAGES:
        found = importlib.util.find_spec(name)
        places = list(found.submodule_search_locations or ()) if found is not None else []
        file = Path(found.origin).resolve() if found is not None and found.origin else None
        own = ROOT / name / "__init__.py"
        if file == own and (own.stat().st_size == 0 or name in WITH_CODE):
            continue
        got = file or ", ".join(places) or "nothing"
        from importlib.metadata import packages_distributions  # imported late: it is slow

        owners = [owner for owner in packages_distributions().get(name, []) if owner != "stillhouse"]
        foreign = f", of the distribution {', '.join(owners)}" if owners else ""
        sys.exit(
            f"stillhouse: `import {name}` finds {got}{foreign}, expected {own}. Another package of that name is in the "
            "way: uninstall it and install stillhouse again, or use a separate virtual environment (and an empty "
            "PYTHONPATH)."
        )


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
        expect_own_packages()
        from launch.terminal import sure_output  # now that `launch` is known to be ours

        module = COMMANDS.get(sys.argv[1] if len(sys.argv) > 1 else "")
        words = sys.argv[2:] if module else sys.argv[1:] or ["--help"]
        with sure_output():
            return import_module(module or "launch.run").main(words)
    except KeyboardInterrupt:  # during imports; later the commands handle it
        print("stillhouse: stopped before anything was started", file=sys.stderr)
        return 130


if __name__ == "__main__":
    use_repository()
    use_environment()
    sys.exit(main())
