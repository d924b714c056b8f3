"""The keys of a run's encrypted links (CURVE): made once, kept in files, read by the processes that need them.

    RUN/keys/  (0700)   OWNER.key          public half
                        OWNER.key_secret   both halves (0600)

    owner               who may speak with its key
    server              the buffer listens with it
    learner             the learner; its weight control channel listens with it, too
    launcher            the run's own launcher
    actor-0, ...        this one worker of the run's own, in whichever process
    teacher-0, ...
    actor, teacher      workers that joined, under no name of the run's own
    joiner              the launchers of those who joined

So who has the keys that an exported folder holds cannot become `actor-0`, nor the launcher. A process on another host
needs `server.key`, `learner.key` and the `.key_secret` of its own owner, in a folder `keys` of its own run folder. The
files are pyzmq's certificates (`zmq.auth`).
"""

from __future__ import annotations

import re
import shutil
import stat
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

import zmq.auth
from zmq.utils import z85

from protocol.errors import KeysUnusable
from protocol.messages import Role

Owner: TypeAlias = Literal["server", "joiner"] | Role | str
"""As above; a str is a worker of the run's own."""

KEYS: Final = "keys"
"""Folder in a run folder. That it is there means that the links of this run are encrypted."""
OWNERS: Final[tuple[Owner, ...]] = ("server", "joiner", *get_args(Role))
"""Of every run; its own workers come on top."""
_OWN_WORKER: Final = re.compile(r"(actor|teacher)-\d+")
_KEY_BYTES: Final = 32


@dataclass(frozen=True, slots=True, repr=False)
class ServerKeys:
    """What a listening end needs: its pair, and whose public keys it lets in."""

    public: bytes
    """Z85 text, as all keys here."""
    secret: bytes
    owners: Mapping[bytes, Owner]

    def __repr__(self) -> str:
        return f"ServerKeys(for {', '.join(sorted(self.owners.values()))})"


@dataclass(frozen=True, slots=True, repr=False)
class ClientKeys:
    """What a connecting end needs: its pair, and the public key of whom it expects to meet."""

    public: bytes
    secret: bytes
    server: bytes

    def __repr__(self) -> str:
        return "ClientKeys()"


def speaks_for(owner: Owner, role: Role, name: str) -> bool:
    """Whether who has the key of `owner` may be the peer `name` of `role`."""
    if owner in ("actor", "teacher"):
        return role == owner and _OWN_WORKER.fullmatch(name) is None
    if owner == "joiner":
        return role == "launcher" and name != "launcher"
    return role == role_of(owner) and (owner == "learner" or owner == name)


def role_of(owner: Owner) -> Role | None:
    """None: of the server."""
    role = "launcher" if owner == "joiner" else owner.partition("-")[0]
    return role if role in ("actor", "teacher", "learner", "launcher") else None


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
    for owner in missing:  # the secret last: until it is there, the pair is missing
        for kind in ("key", "key_secret"):
            (draft / f"{owner}.{kind}").rename(folder / f"{owner}.{kind}")
    draft.rmdir()


def load_server_keys(folder: Path, owner: Owner = "server", allowed: Sequence[Role] = get_args(Role)) -> ServerKeys:
    """`owner` listens, who has a key of one of the `allowed` roles may come. Raises KeysUnusable."""
    public, secret = _read_pair(folder, owner)
    wanted = [found for file in sorted(folder.glob("*.key")) if role_of(found := file.stem) in allowed]
    owners: dict[bytes, Owner] = {_read_public(folder, found): found for found in wanted}
    if len(owners) < len(wanted):
        raise KeysUnusable(f"two have the same key in {folder}; make the keys anew")
    if lacking := [role for role in allowed if role not in wanted]:
        raise KeysUnusable(f"{folder / f'{lacking[0]}.key'} is missing or holds no key; make the keys anew")
    return ServerKeys(public, secret, owners)


def load_client_keys(folder: Path, owner: Owner, server: Owner = "server") -> ClientKeys:
    """For a process that is, or speaks for, `owner` and connects to `server`. Raises KeysUnusable."""
    public, secret = _read_pair(folder, owner)
    return ClientKeys(public, secret, _read_public(folder, server))


def run_client_keys(run_dir: Path, role: Role, name: str, server: Owner = "server") -> ClientKeys | None:
    """The same for the peer `name`, or None when this run has no keys: then its links are not encrypted. Raises
    KeysUnusable."""
    folder = run_dir / KEYS
    owner = name if (folder / f"{name}.key_secret").exists() else role
    return load_client_keys(folder, owner, server) if folder.is_dir() else None


def run_server_keys(run_dir: Path, owner: Owner, allowed: Sequence[Role]) -> ServerKeys | None:
    """The same for a listening end. Raises KeysUnusable."""
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
    """No error may quote what a file holds, so none is chained."""
    try:
        public, secret = zmq.auth.load_certificate(file)
    except (OSError, ValueError):
        raise KeysUnusable(f"{file} is missing or holds no key; copy it again, or make the keys anew") from None
    if not _is_key(public):
        raise KeysUnusable(f"{file} holds no public key; copy it again, or make the keys anew")
    return public, secret


def _is_key(text: bytes) -> bool:
    """32 bytes as Z85."""
    try:
        return len(z85.decode(text)) == _KEY_BYTES
    except (KeyError, ValueError, struct.error):
        return False
