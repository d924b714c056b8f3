"""Start a run:  python launch/cluster.py --actors 32 --teachers 8       (--help lists every key)
More workers for it:  python launch/cluster.py join RUN --actors 8     from another machine: what `export` writes
Count it again:  python launch/cluster.py audit RUN                     of a run that was started with --record FILE

Thin on purpose: finds the packages, and an interpreter that has what they need; launch.run does the rest.
"""

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("msgspec", "numpy", "psutil", "rich", "torch", "transformers", "yaml", "zmq")


def use_repository() -> None:
    """As a script, Python puts launch/ first on the path, where our packages are not; put the repository there."""
    sys.path[:] = [str(ROOT), *(entry for entry in sys.path if Path(entry).resolve() not in (ROOT / "launch", ROOT))]


def use_environment() -> None:
    """Go on in the repository's virtual environment if this interpreter lacks what is needed, or say what to do."""
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


def main() -> int:
    """The console script `stillhouse`, and what the script ends in."""
    command, arguments = (sys.argv[1:2] or [""])[0], sys.argv[2:]
    if command == "join":
        from launch.join import main as join_main

        return join_main(arguments)
    if command == "export":
        from launch.export import main as export_main

        return export_main(arguments)
    if command == "audit":
        from launch.audit.command import main as audit_main

        return audit_main(arguments)
    from launch.run import main as run_main

    return run_main(sys.argv[1:])


if __name__ == "__main__":
    use_repository()
    use_environment()
    sys.exit(main())
