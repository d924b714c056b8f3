"""A run that somebody else started, and all that joining it takes: address, keys, configuration. Nothing is connected.

RUN folder              this machine, or one that shares its file system: run.json, buffer.json, config.yaml, keys/
exported folder         a copy of what launch.join.export wrote: join.json, config.yaml, keys/
tcp://HOST:PORT         with --config FILE (the run's config.yaml) and --keys FOLDER
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import psutil

from launch.buffer_link import read_address
from launch.config.files import read_plain
from launch.config.run import RunConfig
from launch.config.tree import Plain, build
from launch.errors import ConfigError, LaunchError
from launch.runfolder import RUNS, RunRecord, read_record
from launch.servers.plan import interface_of
from protocol.addresses import is_local
from protocol.errors import KeysUnusable
from protocol.keys import KEYS, Owner, load_client_keys
from protocol.messages import Role

JOIN_FILE: Final = "join.json"
JOINED: Final = "joined"
"""Folder of those who joined, in a run folder, in an exported one, or in runs/."""
ADDRESS_WAIT_S: Final = 120.0
"""How long a run that is being started may take until its buffer listens."""
WILDCARDS: Final = ("0.0.0.0", "[::]", "*")
HOW_TO_LISTEN: Final = (
    "start the run with --buffer.bind tcp://ADDRESS:PORT, and, for actors, with --weights.host ADDRESS "
    "--weights.allow_plain_network true (docs/cluster.md)"
)


class RunIsFinished(LaunchError):
    """It ended well; there is nothing to join any more."""


class JoinCard(msgspec.Struct, frozen=True, kw_only=True):
    """join.json of an exported folder."""

    name: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is known of the run."""

    name: str
    address: str
    run_id: str
    """Empty: whichever run listens there."""
    keys: Path | None
    """Folder with `server.key` and the rest; None: its links are not encrypted."""
    settings: Plain
    """Its resolved configuration."""
    home: Path
    """Where those who join leave their logs."""

    @property
    def config(self) -> RunConfig:
        """The same, typed. Raises ConfigError."""
        return build(RunConfig, self.settings)

    @property
    def elsewhere(self) -> bool:
        """Whether its buffer is on another machine."""
        host = host_of(self.address)
        return not is_local(self.address) and interface_of(host.strip("[]")) is None

    def check_keys(self, roles: Sequence[Role]) -> list[str]:
        """What is wrong with the keys for these roles, and for looking at the run (the joiner's)."""
        if self.keys is None:
            return []
        mistakes: list[str] = []
        needed: list[tuple[Owner, Owner]] = [("joiner", "server")]
        needed.extend((role, "server") for role in roles)
        if "actor" in roles:
            needed.append(("actor", "learner"))
        for role, server in needed:
            try:
                load_client_keys(self.keys, role, server)
            except KeysUnusable as error:
                mistakes.append(f"--keys: {error}; `cluster.py export` on the run's machine copies all that is needed")
        return list(dict.fromkeys(mistakes))


def find_target(run: str, *, keys: Path | None = None, config: Path | None = None) -> Target:
    """Waits until the buffer of a run that is being started listens. Raises LaunchError when there is no
    such run, it is over, or it cannot be reached from here."""
    if "://" in run:
        return _at_address(run, keys, config)
    folder = find_folder(run)
    keys = keys or (folder / KEYS if (folder / KEYS).is_dir() else None)
    settings_file = config or folder / "config.yaml"
    if (folder / JOIN_FILE).is_file():
        card = msgspec.json.decode((folder / JOIN_FILE).read_bytes(), type=JoinCard)
        told = Target(
            name=card.name,
            address=card.address,
            run_id="",
            keys=keys,
            settings=read_plain(settings_file),
            home=folder / JOINED,
        )
    else:
        record = running_record(folder)
        address = listening_address(folder, record)
        settings = read_plain(settings_file)  # only now: who starts a run writes it before the buffer is started
        address = _address_from_here(address, record, build(RunConfig, settings))
        told = Target(
            name=record.name,
            address=address,
            run_id=record.run_id,
            keys=keys,
            settings=settings,
            home=folder / JOINED,
        )
    return _with_keys_if_encrypted(told)


def find_folder(run: str) -> Path:
    """Of a path, or of a name in runs/. Raises LaunchError."""
    for folder in (Path(run).expanduser(), RUNS / run):
        if folder.is_dir():
            folder = folder.resolve()
            if (folder / "run.json").is_file() or (folder / JOIN_FILE).is_file():
                return folder
            raise LaunchError(f"{folder} holds no run (no run.json in it), nor what `cluster.py export` writes")
    raise LaunchError(f"no run {run!r}: neither a folder nor in {RUNS}/; an address looks like tcp://HOST:PORT")


def running_record(folder: Path) -> RunRecord:
    """run.json of a run that goes on. Raises LaunchError."""
    record = read_record(folder)
    if record is None:
        raise LaunchError(f"{folder} holds no run (no run.json in it)")
    if record.state != "running":
        code = "" if record.exit_code is None else f", exit code {record.exit_code}"
        over = RunIsFinished if record.state == "finished" else LaunchError
        raise over(f"the run {record.name} is over ({record.state}{code}); go on with it by --resume first")
    if record.host == platform.node() and not psutil.pid_exists(record.launcher_pid):
        raise LaunchError(
            f"the launcher of {record.name} (pid {record.launcher_pid}) is gone without having ended the run; go on "
            "with it by --resume first"
        )
    return record


def listening_address(folder: Path, record: RunRecord) -> str:
    """Where its buffer says that it listens; waits while it does not yet. Raises LaunchError."""
    deadline_s = time.monotonic() + ADDRESS_WAIT_S
    while (address := read_address(folder / "buffer.json", record.run_id)) is None:
        if time.monotonic() > deadline_s:
            raise LaunchError(f"the buffer of {record.name} does not listen yet; see {folder / 'logs'}")
        time.sleep(0.1)
        record = running_record(folder)
    return address


def _address_from_here(address: str, record: RunRecord, config: RunConfig) -> str:
    if record.host not in ("", platform.node()):
        return reachable(address, record.name, record.host, config)
    if host_of(address) in WILDCARDS:
        return f"tcp://127.0.0.1:{address.rpartition(':')[2]}"
    return address


def reachable(address: str, name: str, host: str, config: RunConfig) -> str:
    """The address of a run on `host` as other machines know it. Raises LaunchError when it has none."""
    if config.buffer.advertise:
        return config.buffer.advertise
    if is_local(address):
        raise LaunchError(f"{name} runs on {host} and listens on {address}, which only {host} reaches; {HOW_TO_LISTEN}")
    if host_of(address) in WILDCARDS:
        raise LaunchError(
            f"{name} runs on {host} and listens on all its addresses ({address}); say which of them others reach: "
            "start the run with --buffer.advertise tcp://ADDRESS:PORT, or join by that address"
        )
    return address


def host_of(address: str) -> str:
    """`10.0.0.7` of `tcp://10.0.0.7:5555`; IPv6 keeps its brackets."""
    return address.partition("://")[2].rpartition(":")[0]


def _at_address(address: str, keys: Path | None, config: Path | None) -> Target:
    if config is None:
        raise ConfigError(
            f"{address}: also needs --config FILE, the run's config.yaml (models, environments, engines); or join by a "
            "folder that `cluster.py export` wrote"
        )
    if not address.startswith("tcp://") or not address.rpartition(":")[2].isdecimal():
        raise ConfigError(f"{address}: expected tcp://HOST:PORT")
    if keys is not None and not keys.is_dir():
        raise ConfigError(f"--keys: no folder {str(keys)!r}")
    keys = keys.resolve() if keys is not None else None
    nested = keys / KEYS if keys is not None else None
    target = Target(
        name=address,
        address=address,
        run_id="",
        keys=nested if nested is not None and nested.is_dir() else keys,
        settings=read_plain(config),
        home=(RUNS / JOINED).absolute(),
    )
    return _with_keys_if_encrypted(target)


def _with_keys_if_encrypted(target: Target) -> Target:
    encrypted = target.config.buffer.encrypted
    if encrypted and target.keys is None:
        raise ConfigError(
            f"--keys: the links of {target.name} are encrypted; expected a folder with server.key, learner.key, "
            "joiner.key_secret and the .key_secret of each role that joins (`cluster.py export` makes one)"
        )
    if not encrypted and target.keys is not None:
        raise ConfigError(f"--keys: the links of {target.name} are not encrypted (buffer.encrypt); leave --keys out")
    return target
