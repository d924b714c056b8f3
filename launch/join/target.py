"""A run that another launcher started: finding its address, keys and configuration, and connecting to its buffer.

Two ways to name a run:

RUN folder              this machine, or one that shares its file system: run.json, buffer.json, config.yaml, keys/
exported folder         a copy of what launch.join.invite wrote: join.json, config.yaml, keys/
"""

from __future__ import annotations

import platform
import secrets
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import psutil

from stillhouse.launch.buffer_link import BufferLink, read_address
from stillhouse.launch.config.files import read_plain
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import Plain, build
from stillhouse.launch.errors import LaunchError
from stillhouse.launch.runfolder import RUNS, RunRecord, read_record
from stillhouse.launch.servers.plan import interface_of
from stillhouse.protocol.addresses import is_local
from stillhouse.protocol.errors import ConnectTimeout, HandshakeRefused, KeysUnusable, LinkError, ProtocolError
from stillhouse.protocol.keys import KEYS, Owner, load_client_keys
from stillhouse.protocol.messages import Role

JOIN_FILE: Final = "join.json"
JOINED: Final = "joined"
"""Folder inside a run folder or an exported folder, with one folder per join."""
ADDRESS_WAIT_S: Final = 120.0
"""How long a starting run may take until its buffer listens."""
SNAPSHOT_WAIT_S: Final = 15.0
TRY_AGAIN_EXIT_CODE: Final = 75
"""EX_TEMPFAIL of sysexits.h."""
WILDCARDS: Final = ("0.0.0.0", "[::]", "*")
HOW_TO_LISTEN: Final = (
    "start the run with --buffer.bind tcp://ADDRESS:PORT, and, for actors, with --weights.host ADDRESS (docs/hosts.md)"
)


class RunIsFinished(LaunchError):
    """The run ended well, so there is nothing left to join."""

    exit_code = 0


class TryAgain(LaunchError):
    """The run cannot be joined now, but perhaps later: it is stopped, starting, or out of reach."""

    exit_code = TRY_AGAIN_EXIT_CODE


class JoinCard(msgspec.Struct, frozen=True, kw_only=True):
    """join.json of an exported folder."""

    name: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a joining launcher knows of the run."""

    name: str
    address: str
    run_id: str
    """Empty when it is unknown: then whichever run listens there is joined."""
    keys: Path | None
    """Folder with `server.key` and the rest; None when the run's links are not encrypted."""
    settings: Plain
    """Its resolved configuration."""
    home: Path
    """Parent of the joining launcher's folder, unless --dir names another one."""

    @property
    def config(self) -> RunConfig:
        """`settings` as a RunConfig. Raises ConfigError."""
        return build(RunConfig, self.settings)

    @property
    def elsewhere(self) -> bool:
        """Whether the buffer is on another machine."""
        host = host_of(self.address)
        return not is_local(self.address) and interface_of(host.strip("[]")) is None

    def check_keys(self, roles: Sequence[Role]) -> list[str]:
        """Mistakes in the key files that these roles and the joiner itself need."""
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
                mistakes.append(f"{error}; `stillhouse invite` on the run's machine copies all that is needed")
        return list(dict.fromkeys(mistakes))


def find_target(run: str) -> Target:
    """Find the run; while it is starting, wait until its buffer listens. Raises ConfigError, RunIsFinished, TryAgain,
    or another LaunchError when there is no such run or it cannot be reached from here."""
    folder = find_folder(run)
    settings_file = folder / "config.yaml"
    if (folder / JOIN_FILE).is_file():
        card = msgspec.json.decode((folder / JOIN_FILE).read_bytes(), type=JoinCard)
        name, address, run_id = card.name, card.address, ""
        settings = read_plain(settings_file)
    else:
        record = running_record(folder)
        address = listening_address(folder, record)
        settings = read_plain(settings_file)  # only now: the launcher writes it before it starts the buffer
        name, run_id = record.name, record.run_id
        address = _address_from_here(address, record, build(RunConfig, settings))
    keys = folder / KEYS if build(RunConfig, settings).buffer.encrypted else None
    return Target(name=name, address=address, run_id=run_id, keys=keys, settings=settings, home=folder / JOINED)


def find_folder(run: str) -> Path:
    """Folder for a path, or for a name in runs/. Raises LaunchError."""
    for folder in (Path(run).expanduser(), RUNS / run):
        if folder.is_dir():
            folder = folder.resolve()
            if (folder / "run.json").is_file() or (folder / JOIN_FILE).is_file():
                return folder
            raise LaunchError(f"{folder} holds no run (no run.json in it), and was not written by `stillhouse invite`")
    raise LaunchError(f"no run {run!r}: neither a folder nor in {RUNS}/")


def running_record(folder: Path) -> RunRecord:
    """run.json of a running run. Raises RunIsFinished, TryAgain, or LaunchError where there is no run."""
    record = read_record(folder)
    if record is None:
        raise LaunchError(f"{folder} holds no run (no run.json in it)")
    if record.state != "running":
        code = "" if record.exit_code is None else f", exit code {record.exit_code}"
        over = RunIsFinished if record.state == "finished" else TryAgain
        raise over(f"the run {record.name} is over ({record.state}{code}); resume it first (--resume)")
    if record.host == platform.node() and not psutil.pid_exists(record.launcher_pid):
        raise TryAgain(
            f"the launcher of {record.name} (pid {record.launcher_pid}) died without ending the run; resume it first "
            "(--resume)"
        )
    return record


def listening_address(folder: Path, record: RunRecord) -> str:
    """Address in buffer.json; waits until it is there. Raises LaunchError, TryAgain after ADDRESS_WAIT_S."""
    deadline_s = time.monotonic() + ADDRESS_WAIT_S
    while (address := read_address(folder / "buffer.json", record.run_id)) is None:
        if time.monotonic() > deadline_s:
            raise TryAgain(f"the buffer of {record.name} does not listen yet; see {folder / 'logs'}")
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
    """Address by which other machines reach a run on `host`. Raises LaunchError when there is none."""
    if config.buffer.advertise:
        return config.buffer.advertise
    if is_local(address):
        raise LaunchError(
            f"{name} runs on {host} and listens on {address}, which only {host} can reach; {HOW_TO_LISTEN}"
        )
    if host_of(address) in WILDCARDS:
        raise LaunchError(
            f"{name} runs on {host} and listens on all its addresses ({address}); name the one that other "
            "machines can reach: start the run with --buffer.advertise tcp://ADDRESS:PORT"
        )
    return address


def host_of(address: str) -> str:
    """`10.0.0.7` for `tcp://10.0.0.7:5555`; IPv6 addresses keep their brackets."""
    return address.partition("://")[2].rpartition(":")[0]


def connect(target: Target, prefix: str) -> BufferLink:
    """The joining launcher's own link to the buffer, with a first snapshot. Raises as `find_target`.

    Where the run id is unknown, a first link only asks for it. A link that stays without one would follow the address
    to whatever run listens there later."""
    name = f"joiner-{prefix}-{secrets.token_hex(2)}"
    try:
        keys = load_client_keys(target.keys, "joiner") if target.keys is not None else None
        run_id = target.run_id
        if not run_id:
            asking = BufferLink(target.address, "", secrets.token_hex(8), keys, name=f"{name}-asks")
            run_id = asking.run_id
            asking.close()
        link = BufferLink(target.address, run_id, secrets.token_hex(8), keys, name=name)
    except ProtocolError as error:
        other_run = isinstance(error, HandshakeRefused) and error.refused.code == "run_id"
        here = "; that address is on this machine" if is_local(target.address) else ""
        text = f"{error}{here}" if isinstance(error, ConnectTimeout) else f"{target.address}: {error}"
        raise (TryAgain if other_run or isinstance(error, LinkError) else LaunchError)(text) from error
    with close_on_error(link):
        _await_snapshot(link)
    return link


@contextmanager
def close_on_error(link: BufferLink) -> Generator[None]:
    try:
        yield
    except BaseException:
        link.close()
        raise


def _await_snapshot(link: BufferLink) -> None:
    deadline_s = time.monotonic() + SNAPSHOT_WAIT_S
    while link.snapshot is None and link.shutdown is None and link.lost is None and time.monotonic() < deadline_s:
        link.ask(time.monotonic(), 1.0)
        link.take()
        time.sleep(0.01)
    if link.shutdown is not None:
        raise (RunIsFinished if link.shutdown.ok else TryAgain)(f"the run is over: {link.shutdown.reason}")
    if link.snapshot is None:
        raise TryAgain(f"the buffer sent no snapshot of the run ({link.lost or f'waited {SNAPSHOT_WAIT_S:.0f} s'})")
