"""`cluster.py join RUN`: more actors and teachers for a run that goes on, from this machine or another.

Exit codes: 0 the run finished; 1 it failed, or this end did; 2 the command line or the machine does not fit the run
(nothing was started); 128 + n stopped by signal n (130: Ctrl-C), the run goes on.
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

from launch.buffer_link import BufferLink
from launch.config import ALIASES
from launch.config_file import write_config
from launch.config_tree import Key
from launch.errors import ConfigError, LaunchError, interrupted, refuse
from launch.join_config import Joining, check_joining
from launch.join_status import JoinStatus, JoinSummary
from launch.joiner import Joiner
from launch.run import log_to, preload_modules
from launch.runfolder import write_atomic
from launch.slots import worker_name
from launch.target import Target, find_target
from launch.words import split_words
from launch.work_folder import WorkFolder
from protocol.addresses import is_local
from protocol.errors import ConnectTimeout, ProtocolError
from protocol.keys import KEYS, load_client_keys
from protocol.messages import Snapshot

SNAPSHOT_WAIT_S: Final = 15.0
LONGEST_PREFIX: Final = 60
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


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    began_s = time.monotonic()
    try:
        line = parse_join(arguments)
        if line is None:
            print(USAGE, end="")
            return 0
        target = find_target(line.run, keys=line.keys, config=line.config)
        joining = check_joining(target, line.overrides, line.prefix)
        link = connect(target, joining, line.prefix)
        try:
            return join(line, target, joining, link, began_s).exit_code
        finally:
            link.close()
    except LaunchError as error:
        return refuse(error)
    except KeyboardInterrupt:
        return interrupted()


def parse_join(arguments: Sequence[str]) -> JoinLine | None:
    """None: help is wanted. Raises ConfigError."""
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


def connect(target: Target, joining: Joining, prefix: str) -> BufferLink:
    """The joiner's own link, to a run that goes on and has none of our names yet. Raises LaunchError."""
    name = f"joiner-{prefix}-{secrets.token_hex(2)}"
    try:
        keys = load_client_keys(target.keys, "launcher") if target.keys is not None else None
        run_id = target.run_id
        if not run_id:  # asked on a link of its own: one without a run id would follow the address to another run
            asking = BufferLink(target.address, "", secrets.token_hex(8), keys, name=f"{name}-asks")
            run_id = asking.run_id
            asking.close()
        link = BufferLink(target.address, run_id, secrets.token_hex(8), keys, name=name)
    except ConnectTimeout as error:
        here = "; that address is this machine's own" if is_local(target.address) else ""
        raise LaunchError(f"{error}{here}") from error
    except ProtocolError as error:
        raise LaunchError(f"{target.address}: {error}") from error
    try:
        _check_names(_first_snapshot(link), joining, prefix)
    except LaunchError:
        link.close()
        raise
    return link


def _first_snapshot(link: BufferLink) -> Snapshot:
    deadline_s = time.monotonic() + SNAPSHOT_WAIT_S
    while link.snapshot is None and link.shutdown is None and link.lost is None and time.monotonic() < deadline_s:
        link.ask(time.monotonic(), 1.0)
        link.take()
        time.sleep(0.01)
    if link.shutdown is not None:
        raise LaunchError(f"the run is over: {link.shutdown.reason}")
    if link.snapshot is None:
        raise LaunchError(f"the buffer tells nothing of the run ({link.lost or f'for {SNAPSHOT_WAIT_S:.0f} s'})")
    return link.snapshot


def _check_names(snapshot: Snapshot, joining: Joining, prefix: str) -> None:
    config = joining.config
    names = {worker_name("actor", i, prefix) for i in range(config.actors)}
    names |= {worker_name("teacher", i, prefix) for i in range(config.teachers)}
    taken = sorted(peer.name for peer in snapshot.peers if peer.alive and peer.name in names)
    if taken:
        raise LaunchError(
            f"--name-prefix: {', '.join(taken)} is in the run already; choose another prefix (or wait, if that one has "
            f"just died: the buffer counts it as lost after buffer.peer_timeout_s)"
        )


def join(line: JoinLine, target: Target, joining: Joining, link: BufferLink, began_s: float) -> JoinSummary:
    """Join, stay, leave. Raises LaunchError when the folder cannot be made."""
    config = joining.config
    folder = _open_folder(line.dir or target.home / line.prefix, target, joining, link.run_id)
    log_to(folder.logs / "launcher.log")
    status = JoinStatus(None if config.launch.status == "off" else config.launch.status_every_s, began_s)
    status.say(
        f"joining {target.name} at {target.address} with {config.actors} actors and {config.teachers} teachers, called "
        f"...-{line.prefix}-N; logs in {folder.logs}"
    )
    joiner = Joiner(
        config,
        folder,
        status,
        link,
        address=target.address,
        prefix=line.prefix,
        began_s=began_s,
        preload=preload_modules(config, joining.model_types, learner=False, roles=joining.roles),
        servers=joining.servers,
    )
    summary = joiner.run(target.name)
    write_atomic(folder.path / "summary.json", msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    for name, worker in summary.workers.items():
        print(f"{name}: {worker.tokens:,} tokens, {worker.done:,} {'rollouts' if name[0] == 'a' else 'items'} done")
    return summary


def _open_folder(path: Path, target: Target, joining: Joining, run_id: str) -> WorkFolder:
    path = path.absolute()
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
