"""`cluster.py join RUN`: more actors and teachers for a run that goes on, from this machine or another.

Exit codes: 0 the run finished, now or before; 1 it broke off, or this end failed; 2 the command line or the machine
does not fit the run, or there is no such run now (nothing was started); 128 + n stopped by signal n (130: Ctrl-C), the
run goes on. Whatever starts this command may start it again: it joins as soon as the run is back (docs/cluster.md).
"""

from __future__ import annotations

import os
import platform
import re
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from launch.buffer_link import BufferLink
from launch.config.files import write_config
from launch.config.run import ALIASES
from launch.config.tree import Key
from launch.config.words import split_words
from launch.errors import ConfigError, LaunchError, interrupted, refuse
from launch.join.config import Joining, check_joining
from launch.join.joiner import Joiner
from launch.join.link import check_names, close_on_error, connect
from launch.join.status import JoinStatus, JoinSummary
from launch.join.target import RunIsFinished, Target, find_target
from launch.processes.local import local_processes
from launch.report.terminal import lasting_output
from launch.run import log_to, preload_modules
from launch.workers.launch_plan import LaunchPlan
from launch.workers.work_folder import WorkFolder
from protocol.atomic_file import write_atomic
from protocol.keys import KEYS

LONGEST_PREFIX: Final = 60
WAIT_REMOVED: Final = (
    "--wait-s: was removed. A join ends when its run breaks off (exit code 1). Let whatever starts it start it again, "
    "with the same --name-prefix: systemd, a requeued Slurm job or a shell loop; docs/cluster.md has the lines"
)
USAGE: Final = """\
usage: cluster.py join RUN [--actors N] [--teachers M] [--pool NAME] [--KEY VALUE ...]

More actors and teachers for a run that goes on. They leave with Ctrl-C, or when the run ends; what they were at goes to
others. docs/cluster.md has the whole of it.

  RUN                  folder of a run (or its name in runs/) on this machine or a shared file system; a folder that
                       `cluster.py export` wrote; or tcp://HOST:PORT, with --config and --keys
  --actors N           student processes; they need to be reached by the learner and by one another
  --teachers M         teacher processes
  --pool NAME          pool that the teachers serve (teacher.pool)
  --name-prefix NAME   the workers are called actor-NAME-0, ...; this machine's name and something random without it
  --keys FOLDER        keys of the run, where RUN is an address
  --config FILE        config.yaml of the run, where RUN is an address
  --dir DIR            for logs; joined/NAME in the run's folder without it
  --KEY VALUE          models.*, actor.*, teacher.*, launch.*: what is another here than in the run, as in
                       --student FOLDER, --actor.server.gpus 0,1; cluster.py --help explains all keys
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinLine:
    """What was asked for, as words."""

    run: str
    keys: Path | None
    config: Path | None
    dir: Path | None
    prefix: str
    overrides: tuple[tuple[Key, str], ...]


class Found(NamedTuple):
    """A run that can be joined. `link` is open."""

    target: Target
    joining: Joining
    link: BufferLink


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    with lasting_output():
        return _main(arguments)


def _main(arguments: Sequence[str]) -> int:
    began_s = time.monotonic()
    try:
        line = parse_join(arguments)
        if line is None:
            print(USAGE, end="")
            return 0
        target = find_target(line.run, keys=line.keys, config=line.config)
        joining = check_joining(target, line.overrides, line.prefix)
        link = connect(target, line.prefix)
        with close_on_error(link):
            check_names(link, joining, line.prefix)
        return join(line, Found(target, joining, link), began_s).exit_code
    except RunIsFinished as error:  # as if we had been there at the end; whoever starts us again need not
        print(f"stillhouse: {error}", file=sys.stderr)
        return 0
    except LaunchError as error:
        return refuse(error)
    except KeyboardInterrupt:
        return interrupted()


def parse_join(arguments: Sequence[str]) -> JoinLine | None:
    """None: help is wanted. Raises ConfigError."""
    if any(word.partition("=")[0] in ("--wait-s", "--wait_s") for word in arguments):
        raise ConfigError(WAIT_REMOVED)
    words = split_words(
        arguments,
        own=("keys", "config", "dir", "name_prefix"),
        switches=("help",),
        positional=1,
        aliases={**ALIASES, "pool": "teacher.pool"},
    )
    if "help" in words.switches:
        return None
    if not words.positional:
        raise ConfigError("which run? got no RUN; --help shows how to name one")
    own = words.own
    prefix = own.get("name_prefix", f"{_plain(platform.node())}-{secrets.token_hex(2)}")
    if not re.fullmatch(rf"[A-Za-z0-9._-]{{1,{LONGEST_PREFIX}}}", prefix):
        raise ConfigError(
            f"--name-prefix: got {prefix!r}, expected 1 to {LONGEST_PREFIX} letters, digits, dots, dashes, underscores"
        )
    return JoinLine(
        run=words.positional[0],
        keys=Path(own["keys"]).expanduser() if "keys" in own else None,
        config=Path(own["config"]).expanduser() if "config" in own else None,
        dir=Path(own["dir"]).expanduser() if "dir" in own else None,
        prefix=prefix,
        overrides=words.overrides,
    )


def join(line: JoinLine, found: Found, began_s: float) -> JoinSummary:
    """Join and stay until the end; closes the link. Raises LaunchError when the folder cannot be made."""
    target, joining, link = found
    config = joining.config
    with close_on_error(link):
        folder = _open_folder(_folder(line, target), target, joining, link.run_id)
    log_to(folder.logs / "launcher.log")
    status = JoinStatus(None if config.launch.status == "off" else config.launch.status_every_s, began_s)
    status.say(
        f"joining {target.name} at {target.address} with {config.actors} actors and {config.teachers} teachers, called "
        f"...-{line.prefix}-N; logs in {folder.logs}"
    )
    plan = LaunchPlan(
        config=config,
        began_s=began_s,
        preload=preload_modules(config, joining.model_types, learner=False, roles=joining.roles),
        servers=joining.servers,
        placement=joining.placement,
    )
    backend = local_processes(plan, folder)
    joiner = Joiner(plan, folder, status, backend, link, address=target.address, prefix=line.prefix)
    if joining.placement.text:
        status.say(joining.placement.text)
    summary = joiner.run(target.name)
    file = folder.path / "summary.json"
    write_atomic(file, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    for name, worker in summary.workers.items():
        print(f"{name}: {worker.tokens:,} tokens, {worker.done:,} {'rollouts' if name[0] == 'a' else 'items'} done")
    return summary


def _folder(line: JoinLine, target: Target) -> Path:
    return (line.dir or target.home / line.prefix).absolute()


def _open_folder(path: Path, target: Target, joining: Joining, run_id: str) -> WorkFolder:
    try:
        (path / "logs").mkdir(parents=True, exist_ok=True)
        _point_to_keys(path / KEYS, target.keys)
        write_config(joining.config, path / "config.yaml")
    except OSError as error:
        raise LaunchError(f"{path} cannot be written: {error}; name another folder by --dir") from error
    return WorkFolder(path, run_id)


def _point_to_keys(link: Path, keys: Path | None) -> None:
    """Workers look for keys in their launcher's folder. No copy is made of a secret."""
    if link.is_symlink():
        link.unlink()
    if link.exists():
        raise LaunchError(f"{link} is there already, and is no link to keys; name another folder by --dir")
    if keys is not None:
        link.symlink_to(os.fspath(keys), target_is_directory=True)


def _plain(host: str) -> str:
    """As much of a host's name as a worker's name may hold."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", host.partition(".")[0])[:40] or "host"
