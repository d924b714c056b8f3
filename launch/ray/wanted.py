"""hosts.json of a run on Ray: how many workers are wanted. `stillhouse scale` and the autoscaler change it."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import msgspec

from stillhouse.launch.errors import LaunchError
from stillhouse.launch.report.figures import plural
from stillhouse.protocol.atomic_file import not_a_link, write_atomic

HOSTS_FILE: Final = "hosts.json"
LOCK_FILE: Final = "hosts.lock"
"""Held while the numbers are changed. It cannot be the file itself, which is replaced."""
LOCK_S: Final = 10.0
"""The longest wait for whoever else changes them, which takes milliseconds."""
LONGEST_NUMBER: Final = 5
"""Digits of a number of workers: a longer one is a slip, and would be a list of as many hosts."""
Workers: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=10**LONGEST_NUMBER)]


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Workers on Ray's nodes. A role whose workers run beside the learner has 0."""

    actors: Workers = 0
    teachers: Workers = 0
    """0 in a run with `pools`."""
    pools: dict[str, Workers] = {}
    """Teachers of each pool, in a run with `pools`."""

    def __str__(self) -> str:
        numbers = {"actor": self.actors, "teacher": self.teachers}
        parts = [plural(n, role) for role, n in numbers.items() if n]
        parts += [f"{plural(n, 'teacher')} of {pool}" for pool, n in self.pools.items() if n]
        return " and ".join(parts) or "no workers"

    @property
    def teachers_by_pool(self) -> dict[str, int]:
        """As launch.topology.groups_of takes them."""
        return self.pools or {"": self.teachers}


def read_wanted(run_dir: Path) -> Wanted | None:
    """None without the file. Raises LaunchError when it is damaged."""
    file = run_dir / HOSTS_FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=Wanted)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise LaunchError(f"{file}: {error}; expected {{'actors': N, 'teachers': N}}") from error


def write_wanted(run_dir: Path, wanted: Wanted) -> None:
    """Replace the numbers, whatever they were."""
    with _alone(run_dir):
        _write(run_dir, wanted)


def change_wanted(run_dir: Path, change: Callable[[Wanted], Wanted]) -> Wanted:
    """Change the numbers that are there, while nobody else does. Returns those that are there then. Raises LaunchError
    when there are none or they are damaged, and OSError."""
    with _alone(run_dir):
        before = read_wanted(run_dir)
        if before is None:
            raise LaunchError(f"{run_dir / HOSTS_FILE} is not there; the launcher of a run on Ray writes it")
        after = change(before)
        if after != before:
            _write(run_dir, after)
    return after


def _write(run_dir: Path, wanted: Wanted) -> None:
    write_atomic(run_dir / HOSTS_FILE, msgspec.json.encode(wanted) + b"\n")


@contextmanager
def _alone(run_dir: Path) -> Generator[None]:
    """One process at a time; the lock ends with the process. Raises LaunchError after LOCK_S."""
    until_s = time.monotonic() + LOCK_S
    with open(run_dir / LOCK_FILE, "ab", opener=not_a_link) as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until_s:
                    raise LaunchError(
                        f"{run_dir / LOCK_FILE}: another process has held it for {LOCK_S:.0f} s, a stopped "
                        "`stillhouse scale` perhaps; end that one, or try again"
                    ) from None
                time.sleep(0.01)
        yield
