"""The keys of a run's encrypted links (CURVE): made once, kept in files, read by the processes that need them.

    RUN/keys/  (0700)   server.key  learner.key  actor.key  teacher.key  launcher.key            public halves
                        server.key_secret  learner.key_secret  ...               (0600)            both halves

The buffer has the server's pair, and lets in who has a role's pair; the pair says which role. The learner's pair also
serves its weight control channel. A process on another host needs `server.key`, `learner.key` and the `.key_secret` of
its own role, in a folder `keys` of its own run folder. The files are pyzmq's certificates (`zmq.auth`).
"""

from __future__ import annotations

import shutil
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

import zmq.auth
from zmq.utils import z85

from protocol.errors import KeysUnusable
from protocol.messages import Role

Owner: TypeAlias = Literal["server"] | Role

KEYS: Final = "keys"
"""Folder in a run folder. That it is there means that the links of this run are encrypted."""
OWNERS: Final[tuple[Owner, ...]] = ("server", *get_args(Role))
_KEY_BYTES: Final = 32


@dataclass(frozen=True, slots=True, repr=False)
class ServerKeys:
    """What a listening end needs: its pair, and whose public keys it lets in, as which role."""

    public: bytes
    """Z85 text, as all keys here."""
    secret: bytes
    roles: Mapping[bytes, Role]

    def __repr__(self) -> str:
        return f"ServerKeys(for {', '.join(sorted(self.roles.values()))})"


@dataclass(frozen=True, slots=True, repr=False)
class ClientKeys:
    """What a connecting end needs: its pair, and the public key of whom it expects to meet."""

    public: bytes
    secret: bytes
    server: bytes

    def __repr__(self) -> str:
        return "ClientKeys()"


def make_keys(folder: Path) -> None:
    """Make all pairs in `folder`, which must not exist; it appears with all of them or not at all."""
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(mode=0o700)
    for owner in OWNERS:
        for file in zmq.auth.create_certificates(draft, owner):
            Path(file).chmod(0o600)
    draft.rename(folder)


def load_server_keys(folder: Path, owner: Owner = "server", allowed: Sequence[Role] = get_args(Role)) -> ServerKeys:
    """`owner` listens, who has a key of the `allowed` roles may come. Raises KeysUnusable."""
    public, secret = _read_pair(folder, owner)
    roles: dict[bytes, Role] = {_read_public(folder, role): role for role in allowed}
    if len(roles) < len(allowed):
        raise KeysUnusable(f"two roles have the same key in {folder}; make the keys anew")
    return ServerKeys(public, secret, roles)


def load_client_keys(folder: Path, role: Role, server: Owner = "server") -> ClientKeys:
    """For a process of `role` that connects to `server`. Raises KeysUnusable."""
    public, secret = _read_pair(folder, role)
    return ClientKeys(public, secret, _read_public(folder, server))


def run_client_keys(run_dir: Path, role: Role, server: Owner = "server") -> ClientKeys | None:
    """The same, or None when this run has no keys: then its links are not encrypted. Raises KeysUnusable."""
    folder = run_dir / KEYS
    return load_client_keys(folder, role, server) if folder.is_dir() else None


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
