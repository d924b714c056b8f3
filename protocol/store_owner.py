"""The right to write into a run's store, which one launch has at a time, by the object `owner.json`.

    a launch begins     puts itself there, if nobody is there, or who is there has ended or shows no beat for SILENT_S
    while it runs       its launcher shows a beat every BEAT_S
    its learner         notes each epoch that it begins, and each checkpoint once all of its files are there
    it ends             notes that it is over

Every change of the object is a conditional write on the state that was read (Store.put_if), and every state but the
first names the launch by a random token. So whoever is displaced, however long it was away, cannot change the object
any more and learns it from its next attempt. A checkpoint counts only if the object names it. A displaced learner may
still put files into the store, but none of them counts; and because a launch begins with an epoch above all that are
noted, they have other names than those of the launch after it.

No clocks are compared: a launch that wants the store looks at the beats itself, for SILENT_S.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from stillhouse.protocol.atomic_file import write_atomic
from stillhouse.protocol.object_store import Store, StoreError

OWNER: Final = "owner.json"
BEAT_S: Final = 5.0
SILENT_S: Final = 30.0
"""A launch without a beat for so long is taken for dead by another one that wants the store."""
LOOK_S: Final = 1.0
ATTEMPTS: Final = 50
"""Most conditional writes for one change. Launcher and learner change the object now and then, so two may meet."""
TOKEN_FILE: Final = "store.json"
"""In the run's folder: Held, of the newest launch from there."""


class StoreTaken(StoreError):
    """Another launch has the store, and lives; or the store has a run, and a new one was to be started."""


class Displaced(StoreError):
    """Another launch has taken the store. This one must write there no more."""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """owner.json."""

    token: str
    run: str
    host: str
    pid: int
    since: str
    """When this launch took the store: its local time, ISO 8601."""
    beat: int = 0
    over: bool = False
    epoch: int = -1
    """The highest epoch that a learner has begun, of any launch; -1: none."""
    checkpoints: tuple[str, ...] = ()
    """Names of the complete checkpoints, oldest first."""

    def __str__(self) -> str:
        return f"{self.run} on {self.host} (pid {self.pid}, since {self.since})"


class StoreState(msgspec.Struct, frozen=True):
    """RUN/store.json: by which token this launch has its store."""

    url: str
    token: str


class StoreOwner:
    """The right of one launch to write, in any of its processes, from any thread."""

    def __init__(self, store: Store, token: str) -> None:
        self.store = store
        self._token = token

    @classmethod
    def of_folder(cls, run_dir: Path, url: str) -> StoreOwner:
        """The right of the launch that runs from this folder. Raises StoreError if it holds no store."""
        held = read_held(run_dir)
        if held is None or held.url != url:
            raise StoreError(f"{run_dir / TOKEN_FILE}: this launch does not hold {url}", errno.EPERM)
        return cls(Store(url), held.token)

    def keep(self, run_dir: Path) -> None:
        """For `of_folder`, in other processes. Raises OSError."""
        write_atomic(run_dir / TOKEN_FILE, msgspec.json.encode(StoreState(self.store.url, self._token)))

    def confirm(self) -> Owner:
        """The object, which names this launch. Raises Displaced, StoreError."""
        return self._own(self.store.read_tagged(OWNER)[0])

    def update(self, change: Callable[[Owner], Owner]) -> Owner:
        """Change the object. `change` is applied again to what another process of this launch has changed meanwhile.
        Returns the object as it is then. Raises Displaced, StoreError."""
        for _ in range(ATTEMPTS):
            text, tag = self.store.read_tagged(OWNER)
            mine = self._own(text)
            changed = change(mine)
            if changed == mine or self.store.put_if(OWNER, msgspec.json.encode(changed), tag):
                return changed
        raise StoreError(f"{self.store.url}: {OWNER} has changed {ATTEMPTS} times in a row while it was being written")

    def beat(self) -> None:
        self.update(lambda owner: msgspec.structs.replace(owner, beat=owner.beat + 1))

    def end(self) -> None:
        """The launch is over: the next one need not wait."""
        self.update(lambda owner: msgspec.structs.replace(owner, over=True))

    def begin_epoch(self, at_least: int) -> int:
        """Note the epoch of a learner that begins. Returns it: above all others."""
        return self.update(lambda owner: msgspec.structs.replace(owner, epoch=max(owner.epoch + 1, at_least))).epoch

    def _own(self, text: bytes) -> Owner:
        owner = _decoded(self.store, text)
        if owner is None or owner.token != self._token:
            who = owner or "somebody who has deleted its owner.json"
            raise Displaced(f"{self.store.url} was taken by {who}; this launch may write there no more", errno.EPERM)
        return owner


def read_owner(store: Store) -> Owner | None:
    """None where no launch ever was. Raises StoreError."""
    return _decoded(store, store.read_tagged(OWNER)[0])


def read_held(run_dir: Path) -> StoreState | None:
    try:
        return msgspec.json.decode((run_dir / TOKEN_FILE).read_bytes(), type=StoreState)
    except (OSError, msgspec.DecodeError):
        return None


def take(
    store: Store,
    claim: Owner,
    *,
    new: bool,
    dead: Callable[[Owner], bool] = lambda _: False,
    waits: Callable[[Owner], None] = lambda _: None,
) -> StoreOwner:
    """Make `claim` the owner. A launch that lives is waited for until its next beat (StoreTaken), one that is silent
    for SILENT_S (`waits` is told) or known to be `dead` is displaced. `new`: a run that begins, for which the store
    must not have one. Raises StoreError, also for a server that takes no notice of conditions."""
    seen, seen_s = claim, 0.0
    while True:
        text, tag = store.read_tagged(OWNER)
        found = _decoded(store, text)
        if found is not None and found.token == claim.token:  # it was put, and the reply was lost
            break
        if new and found is not None:
            expect_unused(store, found)
        free = found is None or found.over or dead(found)
        if found is not None and not free:
            if found.token != seen.token:
                seen, seen_s = found, time.monotonic()
                waits(found)
            elif found.beat != seen.beat:
                raise StoreTaken(_in_use(store, found), errno.EBUSY)
            free = time.monotonic() - seen_s > SILENT_S
        if not free:
            time.sleep(LOOK_S)
            continue
        if found is not None:
            claim = msgspec.structs.replace(claim, epoch=found.epoch, checkpoints=found.checkpoints)
        if store.put_if(OWNER, msgspec.json.encode(claim), tag):
            break
    owner = StoreOwner(store, claim.token)
    _expect_conditions(owner)
    return owner


def expect_unused(store: Store, found: Owner) -> None:
    """Raises StoreTaken if a learner has begun there."""
    if found.epoch >= 0:
        n = len(found.checkpoints)
        has = f"has checkpoints of a run ({n}, the newest is {found.checkpoints[-1]})" if n else "has a run"
        raise StoreTaken(
            f"{store.url} {has}, last {found}; go on from it with --resume, or name another prefix", errno.EEXIST
        )


def _expect_conditions(owner: StoreOwner) -> None:
    """Raises StoreError if the server puts what it must not: then it does not read the conditions."""
    text = msgspec.json.encode(owner.confirm())
    wrong = '"00000000000000000000000000000000"'
    if owner.store.put_if(OWNER, text, "") or owner.store.put_if(OWNER, text, wrong):
        raise StoreError(
            f"{owner.store.url}: this server ignores conditional writes (If-None-Match, If-Match of PutObject), "
            "without which two launches could write into one store; use a server that has them, as AWS S3 does",
            errno.ENOTSUP,
        )


def _decoded(store: Store, text: bytes) -> Owner | None:
    """None for the empty text of an object that is not there."""
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=Owner)
    except msgspec.DecodeError as error:
        raise StoreError(
            f"{store.url}: {OWNER} cannot be read ({error}). It names the complete checkpoints: put it back from a "
            "copy, or use another prefix"
        ) from error


def _in_use(store: Store, found: Owner) -> str:
    return (
        f"{store.url} is in use by {found}, which lives: stop it first, or name another prefix. One launch at a time "
        "writes into a store"
    )
