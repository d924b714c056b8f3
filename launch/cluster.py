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
PACKAGES = (
    *("protocol", "models", "weights", "engines", "recording", "actors", "teachers", "buffer", "learner", "launch"),
    *("replay", "builtin", "sglang_server"),
)
WITH_CODE = ("builtin", "sglang_server")
"""Of PACKAGES those whose __init__.py is not empty."""
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


def expect_own_packages() -> None:
    """Our packages have plain names, which others use too: end with the name of the one that stands in for ours."""
    for name in PACKAGES:
        found = importlib.util.find_spec(name)
        places = list(found.submodule_search_locations or ()) if found is not None else []
        file = Path(found.origin).resolve() if found is not None and found.origin else None
        own = ROOT / name / "__init__.py"
        if file == own and (own.stat().st_size == 0 or name in WITH_CODE):
            continue
        got = file or ", ".join(places) or "nothing"
        from importlib.metadata import packages_distributions  # only now: it takes a while

        owners = [owner for owner in packages_distributions().get(name, []) if owner != "stillhouse"]
        foreign = f", of the distribution {', '.join(owners)}" if owners else ""
        sys.exit(
            f"stillhouse: `import {name}` finds {got}{foreign}, expected {own}. Another package of that name is in the "
            "way: uninstall it and install stillhouse again, or use a virtual environment of its own (and an empty "
            "PYTHONPATH)."
        )


def main() -> int:
    """The console script `stillhouse`, and what the script ends in."""
    try:
        expect_own_packages()
        return run_command()
    except KeyboardInterrupt:  # while modules are imported; later it is the commands'
        print("stillhouse: stopped before anything was started", file=sys.stderr)
        return 130


def run_command() -> int:
    """What the first word asks for."""
    command, arguments = (sys.argv[1:2] or [""])[0], sys.argv[2:]
    if command == "join":
        from launch.join.command import main as join_main

        return join_main(arguments)
    if command == "export":
        from launch.join.export import main as export_main

        return export_main(arguments)
    if command == "audit":
        from launch.audit.run import main as audit_main

        return audit_main(arguments)
    if command == "completion":
        from launch.completion import main as completion_main

        return completion_main(arguments)
    from launch.run import main as run_main

    return run_main(sys.argv[1:])


if __name__ == "__main__":
    use_repository()
    use_environment()
    sys.exit(main())
