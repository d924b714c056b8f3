"""The keys of a run's encrypted links (CURVE): made once, kept in files, read by the processes that need them.

    RUN/keys/  (0700)   OWNER.key          public half
                        OWNER.key_secret   both halves (0600)

    owner               who uses the key
    server              the buffer, to listen
    learner             the learner; its weight control channel also listens with it
    launcher            the run's own launcher
    actor-0, ...        this one worker of the run, in whichever process it runs
    teacher-0, ...
    actor, teacher      workers that joined from elsewhere, under any name that is not a worker of the run
    joiner              the launchers of joined workers

A holder of an exported folder's keys can therefore not pose as `actor-0` or as the launcher. A process on another host
needs `server.key`, `learner.key` and the `.key_secret` of its own owner, in a folder `keys` of its own run folder. The
files are pyzmq's certificates (`zmq.auth`).

A listening end checks public keys by ZAP, in pyzmq's authenticator thread: a connection whose key is not on the list is
closed before it can send a message. Each received message then carries the owner of its connection's key (`owner_of`).
"""

from __future__ import annotations

import logging
import re
import shutil
import stat
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from stillhouse.protocol.errors import KeysUnusable
from stillhouse.protocol.messages import Role

Owner: TypeAlias = Literal["server", "joiner"] | Role | str
"""See the module's table; any other str is the name of one of the run's own workers."""

KEYS: Final = "keys"
"""Folder in a run folder. The links of a run are encrypted if it exists."""
OWNERS: Final[tuple[Owner, ...]] = ("server", "joiner", *get_args(Role))
"""The owners that every run has, besides its own workers."""
_OWN_WORKER: Final = re.compile(r"(actor|teacher)-\d+")
_KEY_BYTES: Final = 32
_DOMAIN: Final = "stillhouse"
_no_log = logging.Logger("zap")
"""pyzmq would log public keys at its debug level; keys of any kind must stay out of logs."""
_no_log.disabled = True


@dataclass(frozen=True, slots=True, repr=False)
class ServerKeys:
    """The keys of a listening end: its own pair, and the public keys that it accepts."""

    public: bytes
    """Z85 text, like all keys here."""
    secret: bytes
    owners: Mapping[bytes, Owner]

    def __repr__(self) -> str:
        return f"ServerKeys(for {', '.join(sorted(self.owners.values()))})"


@dataclass(frozen=True, slots=True, repr=False)
class ClientKeys:
    """The keys of a connecting end: its own pair, and the public key of the server it expects to reach."""

    public: bytes
    secret: bytes
    server: bytes

    def __repr__(self) -> str:
        return "ClientKeys()"


def speaks_for(owner: Owner, role: Role, name: str) -> bool:
    """Whether a process with the key of `owner` may be the peer `name` of `role`."""
    if owner in ("actor", "teacher"):
        return role == owner and _OWN_WORKER.fullmatch(name) is None
    if owner == "joiner":
        return role == "launcher" and name != "launcher"
    return role == role_of(owner) and (owner == "learner" or owner == name)


def role_of(owner: Owner) -> Role | None:
    """The role that an owner's key is for; None for the server's."""
    role = "launcher" if owner == "joiner" else owner.partition("-")[0]
    return role if role in ("actor", "teacher", "learner", "launcher") else None


# ------------------------------------------------------------------------------------------------------ files


def make_keys(folder: Path, workers: Iterable[str] = ()) -> None:
    """Make the pairs that `folder` lacks: those of every run, and of its own `workers`. Each pair appears whole."""
    missing = [owner for owner in (*OWNERS, *workers) if not (folder / f"{owner}.key_secret").exists()]
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(mode=0o700)
    for owner in missing:
        for file in zmq.auth.create_certificates(draft, owner):
            Path(file).chmod(0o600)
    if not folder.exists():
        draft.rename(folder)
        return
    for owner in missing:  # the secret last: until it is there, the pair counts as missing
        for kind in ("key", "key_secret"):
            (draft / f"{owner}.{kind}").rename(folder / f"{owner}.{kind}")
    draft.rmdir()


def load_server_keys(folder: Path, owner: Owner = "server", allowed: Sequence[Role] = get_args(Role)) -> ServerKeys:
    """The pair of `owner`, and the public keys of all peers of the `allowed` roles. Raises KeysUnusable."""
    public, secret = _read_pair(folder, owner)
    wanted = [found for file in sorted(folder.glob("*.key")) if role_of(found := file.stem) in allowed]
    owners: dict[bytes, Owner] = {_read_public(folder, found): found for found in wanted}
    if len(owners) < len(wanted):
        raise KeysUnusable(f"two owners have the same key in {folder}; make the keys anew")
    if lacking := [role for role in allowed if role not in wanted]:
        raise KeysUnusable(f"{folder / f'{lacking[0]}.key'} is missing or holds no key; make the keys anew")
    return ServerKeys(public, secret, owners)


def load_client_keys(folder: Path, owner: Owner, server: Owner = "server") -> ClientKeys:
    """The pair of `owner`, and the public key of the `server` it connects to. Raises KeysUnusable."""
    public, secret = _read_pair(folder, owner)
    return ClientKeys(public, secret, _read_public(folder, server))


def run_client_keys(run_dir: Path, role: Role, name: str, server: Owner = "server") -> ClientKeys | None:
    """The keys of the peer `name` in this run folder; None if the run is not encrypted. Raises KeysUnusable."""
    folder = run_dir / KEYS
    owner = name if (folder / f"{name}.key_secret").exists() else role
    return load_client_keys(folder, owner, server) if folder.is_dir() else None


def run_server_keys(run_dir: Path, owner: Owner, allowed: Sequence[Role]) -> ServerKeys | None:
    """The keys of a listening end in this run folder; None if the run is not encrypted. Raises KeysUnusable."""
    folder = run_dir / KEYS
    return load_server_keys(folder, owner, allowed) if folder.is_dir() else None


def _read_pair(folder: Path, owner: Owner) -> tuple[bytes, bytes]:
    file = folder / f"{owner}.key_secret"
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
    except OSError as error:
        raise KeysUnusable(f"cannot read {file}: {error.strerror}; was it copied to this host?") from None
    if mode & 0o077:
        raise KeysUnusable(f"{file} may be read by others (mode {mode:04o}), expected 0600; chmod it, or make new keys")
    public, secret = _read(file)
    if secret is None or not _is_key(secret) or zmq.curve_public(secret) != public:
        raise KeysUnusable(f"{file} does not hold a pair of keys; copy it again, or make the keys anew")
    return public, secret


def _read_public(folder: Path, owner: Owner) -> bytes:
    return _read(folder / f"{owner}.key")[0]


def _read(file: Path) -> tuple[bytes, bytes | None]:
    """The halves in a key file. Its errors must not quote the file's contents, so no cause is chained."""
    try:
        public, secret = zmq.auth.load_certificate(file)
    except (OSError, ValueError):
        raise KeysUnusable(f"{file} is missing or holds no key; copy it again, or make the keys anew") from None
    if not _is_key(public):
        raise KeysUnusable(f"{file} holds no public key; copy it again, or make the keys anew")
    return public, secret


def _is_key(text: bytes) -> bool:
    try:
        return len(z85.decode(text)) == _KEY_BYTES
    except (KeyError, ValueError, struct.error):
        return False


# ---------------------------------------------------------------------------------------------------- sockets


class Gatekeeper(ThreadAuthenticator):
    """Accepts connections with one of `keys.owners`. Each ZeroMQ context has one, from before `bind` until `stop`.

    pyzmq's own list of keys is a folder that it reads; ours is in memory and also gives the owner."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys) -> None:
        super().__init__(context, log=_no_log)
        self._owners = dict(keys.owners)
        self.configure_curve_callback(_DOMAIN, self)
        self.start()

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by pyzmq with a public key as Z85 text."""
        return key in self._owners

    def curve_user_id(self, client_public_key: bytes) -> str:
        return self._owners[z85.encode(client_public_key)]


def encrypt_server(socket: zmq.Socket[bytes], keys: ServerKeys) -> None:
    """Call it before `bind`. The socket's context must have a Gatekeeper: without one no connection is accepted."""
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_SECRETKEY, keys.secret)
    socket.set(zmq.ZAP_DOMAIN, _DOMAIN.encode())
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)


def encrypt_client(socket: zmq.Socket[bytes], keys: ClientKeys) -> None:
    """Call it before `connect`."""
    socket.set(zmq.CURVE_PUBLICKEY, keys.public)
    socket.set(zmq.CURVE_SECRETKEY, keys.secret)
    socket.set(zmq.CURVE_SERVERKEY, keys.server)


def owner_of(frame: zmq.Frame) -> Owner:
    """The owner of the key with which this received frame's connection is encrypted."""
    return str(frame.get("User-Id"))
