"""How a sandbox is kept apart from its host: by bubblewrap, or not at all.

bubblewrap (https://github.com/containers/bubblewrap) starts a program in namespaces of its own: it sees a file system
made for it, no network, and no process but its own."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast, get_args

Isolation: TypeAlias = Literal["bubblewrap", "none"]
HERE: Final = Path(__file__).parent
INSIDE: Final = "/run/sandbox"
"""The folder of the supervisor, inside."""
SHM_MB: Final = 16
"""Size of /dev/shm inside."""
_OPEN_PROC: Final = frozenset(
    ("cpuinfo", "filesystems", "loadavg", "meminfo", "stat", "swaps", "sys", "uptime", "version", "vmstat")
)
"""What stays of /proc but the processes: the machine's size and load."""


class Limits(NamedTuple):
    """What a sandbox may use."""

    time_limit_s: float = 5.0
    """Seconds of computing per call, all its processes together."""
    memory_mb: int = 512
    """Memory of all processes of a call together."""
    disk_mb: int = 64
    """Size of /work, and again of /tmp. Both are in memory."""
    max_processes: int = 32
    """Processes and threads of a call together."""


class Start(NamedTuple):
    """How to start a supervisor (`actors.sandbox.supervise`)."""

    argv: tuple[str, ...]
    env: dict[str, str]
    folder: str | None
    """Its working folder on the host; None: it has a file system of its own."""


def checked_isolation(isolation: object) -> Isolation:
    """Raises ValueError for one that does not exist."""
    if isolation not in get_args(Isolation):
        raise ValueError(f"isolation: got {isolation!r}, expected one of {', '.join(get_args(Isolation))}")
    return cast(Isolation, isolation)


def checked_limits(**given: Any) -> Limits:
    """Raises ValueError for a limit that is not a number above 0."""
    for name, value in given.items():
        whole = name != "time_limit_s"
        kinds = int if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < 2**31:
            raise ValueError(f"{name}: got {value!r}, expected a {'whole ' * whole}number above 0")
    return Limits(**given)


def checked_python(python: str) -> str:
    """The path of the interpreter inside: the given one, or this one without its packages. Raises ValueError."""
    path = python or f"{sys.base_prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    if not (Path(path).is_absolute() and os.access(path, os.X_OK)):
        raise ValueError(f"python: there is no program {path!r}, expected the absolute path of an interpreter")
    return path


@functools.cache
def prefixes(python: str) -> tuple[str, ...]:
    """The folders that an interpreter needs outside /usr: its virtual environment's, and that of its installation."""
    asked = "import sys; print(sys.prefix, sys.base_prefix, sep=chr(10))"
    found = subprocess.run([python, "-I", "-c", asked], capture_output=True, encoding="utf-8", timeout=60, check=True)
    folders = {os.path.realpath(line) for line in found.stdout.splitlines()} | set(found.stdout.splitlines())
    for folder in folders:
        if Path.home().resolve().is_relative_to(folder) and not folder.startswith("/usr"):
            raise ValueError(f"python: {python!r} is installed in {folder!r}; all of that folder would be visible")
    return tuple(sorted(folder for folder in folders if not folder.startswith("/usr/") and folder != "/usr"))


def start_of(
    isolation: Isolation, limits: Limits, python: str, folder: str | None, link: tuple[int, ...] = ()
) -> Start:
    """`python`: from `checked_python`. `folder`: for a sandbox that is not isolated. `link`: file descriptors that the
    Python of its one call gets, as 3 and 4."""
    alone = isolation == "bubblewrap"
    programs = INSIDE if alone else str(HERE)
    config = {
        "memory_mb": limits.memory_mb,
        "disk_mb": limits.disk_mb,
        "max_processes": limits.max_processes,
        "folders": ["/work", "/tmp", "/dev/shm"] if alone else [],
        "alone": alone,
        "remove": folder,
        "link": link,
    }
    home = "/work" if folder is None else folder
    inside = {
        "PATH": f"{Path(python).parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": home,
        "TMPDIR": "/tmp" if alone else home,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    supervisor = (python, "-I", f"{programs}/supervise.py", json.dumps(config))
    if not alone:
        return Start(supervisor, inside, folder)
    # bubblewrap's own environment is visible inside, as /proc/1/environ: it gets none.
    return Start((*_bubblewrap(limits, python, inside), "--", *supervisor), {}, None)


def _bubblewrap(limits: Limits, python: str, inside: dict[str, str]) -> list[str]:
    program = shutil.which("bwrap")
    if program is None:
        raise ValueError(
            "isolation: there is no bwrap here. Install bubblewrap (apt install bubblewrap, dnf install bubblewrap) or "
            "set isolation = 'none' where something else protects the host, such as a container (SECURITY.md)"
        )
    argv = [program, "--unshare-all", "--unshare-user", *_without_user_namespaces(program)]
    argv += [
        "--die-with-parent",
        "--as-pid-1",
        "--new-session",
        "--uid",
        "1000",
        "--gid",
        "1000",
        "--hostname",
        "sandbox",
    ]
    argv += ["--clearenv", *(word for name, value in inside.items() for word in ("--setenv", name, value))]
    argv += ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/", name)
        if path.is_symlink():
            argv += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            argv += ["--ro-bind", str(path), str(path)]
    for path in ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"):
        argv += ["--ro-bind-try", path, path]
    for prefix in prefixes(python):
        argv += ["--ro-bind", prefix, prefix]
    argv += ["--ro-bind", str(HERE / "supervise.py"), f"{INSIDE}/supervise.py"]
    argv += ["--proc", "/proc", *_closed_proc(), *_devices(), "--size", str(SHM_MB << 20), "--tmpfs", "/dev/shm"]
    for folder in ("/work", "/tmp"):
        argv += ["--size", str(limits.disk_mb << 20), "--tmpfs", folder]
    return [*argv, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/work"]


def _closed_proc() -> list[str]:
    """What of /proc belongs to the whole machine. For an actor that runs as root, the user inside owns these files, and
    the kernel asks for no more than that: bubblewrap itself does not close /proc/sys then."""
    argv = ["--ro-bind", "/proc/sys", "/proc/sys"]
    for path in sorted(Path("/proc").iterdir()):
        if path.name.isdigit() or path.is_symlink() or path.name in _OPEN_PROC:
            continue
        if path.is_dir():
            argv += ["--tmpfs", str(path), "--remount-ro", str(path)]
        else:
            argv += ["--ro-bind", "/dev/null", str(path)]
    return argv


def _devices() -> list[str]:
    """/dev, without /dev/zero: the memory of a shared mapping of it is charged to nobody."""
    argv = ["--tmpfs", "/dev"]
    for name in ("null", "full", "random", "urandom"):
        argv += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        argv += ["--symlink", f"/proc/self/fd{target}", f"/dev/{name}"]
    return argv


@functools.cache
def _without_user_namespaces(program: str) -> tuple[str, ...]:
    """Programs inside make no user namespaces of their own, where this version of bubblewrap can see to that (0.8)."""
    known = subprocess.run([program, "--help"], capture_output=True, encoding="utf-8", timeout=60, check=False).stdout
    return ("--disable-userns",) if "--disable-userns" in known else ()
