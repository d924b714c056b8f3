"""`stillhouse join RUN`: adds actors, teachers and ranks of the learner to a running run, from this machine or another.

Exit codes (docs/hosts.md): 0 the run finished, now or before; 1 the run broke off, or this side failed; 2 the command
line or this machine does not fit the run; 75 the run cannot be joined now (stopped, starting, out of reach, or names
still taken); 128 + n stopped by signal n (130: Ctrl-C) while the run continues. Nothing was started on 2 and 75.
"""

from __future__ import annotations

import os
import platform
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from stillhouse.launch.buffer_link import BufferLink
from stillhouse.launch.config.command_line import split_words
from stillhouse.launch.config.files import write_config
from stillhouse.launch.config.keys import Key
from stillhouse.launch.config.run import ALIASES
from stillhouse.launch.errors import ConfigError, LaunchError, interrupted, refuse
from stillhouse.launch.join.config import Joining, check_joining, refuse_foreign
from stillhouse.launch.join.joiner import Joiner, JoinStatus, JoinSummary
from stillhouse.launch.join.target import Target, TryAgain, close_on_error, connect, find_target
from stillhouse.launch.processes.local import LocalProcesses
from stillhouse.launch.processes.slots import worker_name
from stillhouse.launch.terminal import lasting_output
from stillhouse.launch.workers.launch_plan import LaunchPlan, MakeBackend, preload_modules
from stillhouse.launch.workers.roles import ENTRIES, JOINED_RANKS_ENTRY
from stillhouse.launch.workers.start_role import WorkFolder
from stillhouse.protocol.atomic_file import write_atomic
from stillhouse.protocol.keys import KEYS

LONGEST_PREFIX: Final = 60
USAGE: Final = """\
usage: stillhouse join RUN [--actors N] [--teachers M] [--pool NAME] [--learner-ranks K] [--KEY VALUE ...]

Adds actors and teachers to a running run. They leave on Ctrl-C or when the run ends; unfinished work goes to other
workers. docs/hosts.md has the details.

  RUN                  folder of a run (or its name in runs/) on this machine or a shared file system, or a folder
                       written by `stillhouse invite`
  --actors N           student processes; the learner and the other actors must be able to reach them
  --teachers M         teacher processes
  --pool NAME          pool that the teachers serve (teacher.pool)
  --learner-ranks K    this host's share of the learner's ranks, in a run with learner.hosts above 1. RUN must be its
                       folder, which all hosts see under one path
  --name-prefix NAME   the workers are called actor-NAME-0, ...; default: the host name and a random part
  --dir DIR            folder for logs; default: joined/NAME in the run's folder
  --KEY VALUE          models.*, actor.*, teacher.*, launch.*: what differs here from the run, such as
                       --student FOLDER or --actor.server.gpus 0,1; stillhouse --help explains all keys
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinLine:
    """The parsed command line."""

    run: str
    dir: Path | None
    prefix: str
    ranks: int
    """Ranks of the learner that this host runs; 0: none."""
    overrides: tuple[tuple[Key, str], ...]


@lasting_output()
def main(arguments: Sequence[str], make_backend: MakeBackend = LocalProcesses) -> int:
    """Run the command; returns the exit code."""
    began_s = time.monotonic()
    try:
        line = parse_join(arguments)
        if line is None:
            print(USAGE, end="")
            return 0
        target = find_target(line.run)
        check_folder(line)
        joining = check_joining(target, line.overrides, line.prefix, ranks=line.ranks)
        link = connect(target, line.prefix)
        with close_on_error(link):
            _check_names(link, joining, line.prefix)
            return _join(line, target, joining, link, began_s, make_backend).exit_code
    except LaunchError as error:  # RunIsFinished gives 0, as if we had been there at the end
        return refuse(error)
    except KeyboardInterrupt:
        return interrupted()


def check_folder(line: JoinLine) -> None:
    """Ranks of the learner need the run's folder. Raises ConfigError if --dir names another folder."""
    if line.ranks and line.dir is not None:
        raise ConfigError("--dir: with --learner-ranks the folder is joined/NAME in the run's, which all ranks need")


def parse_join(arguments: Sequence[str]) -> JoinLine | None:
    """The command line; None when help is wanted. Raises ConfigError."""
    words = split_words(
        arguments,
        own=("dir", "name_prefix", "learner_ranks"),
        switches=("help",),
        positional=1,
        aliases={**ALIASES, "pool": "teacher.pool"},
    )
    if "help" in words.switches:
        return None
    if not words.positional:
        raise ConfigError("expected a RUN, got none; --help shows how to name one")
    refuse_foreign(words.overrides)
    own = words.own
    prefix = own.get("name_prefix", f"{_plain(platform.node())}-{secrets.token_hex(2)}")
    if not re.fullmatch(rf"[A-Za-z0-9._-]{{1,{LONGEST_PREFIX}}}", prefix):
        raise ConfigError(
            f"--name-prefix: got {prefix!r}, expected 1 to {LONGEST_PREFIX} letters, digits, dots, dashes, underscores"
        )
    ranks = own.get("learner_ranks", "0")
    if not ranks.isdecimal():
        raise ConfigError(f"--learner-ranks: got {ranks!r}, expected a number of ranks")
    return JoinLine(
        run=words.positional[0],
        dir=Path(own["dir"]).expanduser() if "dir" in own else None,
        prefix=prefix,
        ranks=int(ranks),
        overrides=words.overrides,
    )


def _check_names(link: BufferLink, joining: Joining, prefix: str) -> None:
    """Raises TryAgain when a worker with one of our names is in the run."""
    assert link.snapshot is not None
    counts = {"actor": joining.config.actors, "teacher": joining.config.teachers}
    names = {worker_name(role, index, prefix) for role, n in counts.items() for index in range(n)}
    taken = sorted(peer.name for peer in link.snapshot.peers if peer.alive and peer.name in names)
    if taken:
        raise TryAgain(
            f"--name-prefix: {', '.join(taken)} is in the run already; choose another prefix, or wait if that worker "
            "has just died: the buffer counts it as lost after buffer.peer_timeout_s"
        )


def _join(
    line: JoinLine, target: Target, joining: Joining, link: BufferLink, began_s: float, make_backend: MakeBackend
) -> JoinSummary:
    """Join and stay until the end; closes the link. Raises LaunchError when the folder cannot be made."""
    config = joining.config
    folder = _open_folder((line.dir or target.home / line.prefix).absolute(), target, joining, link.run_id)
    folder.log_launcher()
    status = JoinStatus(None if config.launch.status == "off" else config.launch.status_every_s, began_s)
    ranks = f" and {line.ranks} ranks of the learner" if line.ranks else ""
    status.say(
        f"joining {target.name} at {target.address} with {config.actors} actors and {config.teachers} teachers{ranks}, "
        f"named ...-{line.prefix}-N; logs in {folder.logs}"
    )
    plan = LaunchPlan(
        config=config,
        began_s=began_s,
        preload=preload_modules(config, joining.model_types, learner=False, roles=joining.roles),
        servers=joining.servers,
        placement=joining.placement,
        entries={**ENTRIES, "learner": JOINED_RANKS_ENTRY},
    )
    backend = make_backend(plan, folder)
    joiner = Joiner(
        plan, folder, status, backend, link, address=target.address, prefix=line.prefix, with_ranks=line.ranks > 0
    )
    if joining.placement.text:
        status.say(joining.placement.text)
    for warning in joining.warnings:
        status.say(f"warning: {warning}")
    summary = joiner.run(target.name)
    file = folder.path / "summary.json"
    write_atomic(file, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    for name, worker in summary.workers.items():
        if name.startswith("learner"):
            continue
        print(f"{name}: {worker.tokens:,} tokens, {worker.done:,} {'rollouts' if name[0] == 'a' else 'items'} done")
    return summary


def _open_folder(path: Path, target: Target, joining: Joining, run_id: str) -> WorkFolder:
    try:
        (path / "logs").mkdir(parents=True, exist_ok=True)
        point_to_keys(path / KEYS, target.keys)
        write_config(joining.config, path / "config.yaml")
    except OSError as error:
        raise LaunchError(f"{path} cannot be written: {error}; name another folder with --dir") from error
    return WorkFolder(path, run_id)


def point_to_keys(link: Path, keys: Path | None) -> None:
    """Workers look for keys in their launcher's folder. A link copies no secret; it is relative, so that it also holds
    on hosts that mount the run folder under another path."""
    if link.is_symlink():
        link.unlink()
    if link.exists():
        raise LaunchError(f"{link} exists already and is not a link to keys; name another folder with --dir")
    if keys is not None:
        link.symlink_to(os.path.relpath(keys.resolve(), link.parent.resolve()), target_is_directory=True)


def _plain(host: str) -> str:
    """The host name, cut to what a worker's name may contain."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", host.partition(".")[0])[:40] or "host"
