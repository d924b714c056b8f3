"""Where the ranks of a learner on several machines meet (`learner.hosts`), before torch's elastic launcher starts them.

    host 0, in the run        a store (torch's TCPStore) at weights.host; RUN/ranks.json says where
    any other, by `join`      finds the file, connects, takes a number, shows every BEAT_S that it is there
    host 0                    once as many are there as it needs: gives each its place; all launch their ranks, which
                              meet in the same store

All hosts must see the run's folder under one path, because all ranks write checkpoints there: a host that finds
ranks.json under the path that host 0 told, with the name of this very start, sees it. Afterwards a thread on each host
watches the others: host 0 the beats, the others torch's store. Whoever misses one ends its own ranks."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from stillhouse.launch.config.run import RunConfig
from stillhouse.protocol.atomic_file import write_atomic
from stillhouse.protocol.context import RoleContext

log = logging.getLogger(__name__)
CARD: Final = "ranks.json"
LOOPBACK: Final = "127.0.0.1"
BEAT_S: Final = 1.0
SILENT_S: Final = 30.0
"""A host that has not shown itself for so long is gone."""
LOOK_S: Final = 0.25
CONNECT_S: Final = 10.0
END_S: Final = 2.0
"""Time for a launch to end by itself when the store is gone: in good order all end at about the same time."""


class HostsMissing(RuntimeError):
    """The ranks of other machines did not come, or this one cannot take part; the message says why."""


class FolderElsewhere(HostsMissing):
    """The run's folder is another one here. Waiting does not help."""


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """RUN/ranks.json: where the ranks of this start of the learner meet."""

    incarnation: str
    """Names the learner's process: each start has another."""
    host: str
    port: int
    folder: str
    """The run's folder on host 0."""
    hosts: int
    here: int
    """Hosts that are there by now, with host 0."""


def read_card(folder: Path) -> Card | None:
    """None while there is none, or none that can be read."""
    try:
        return msgspec.json.decode((folder / CARD).read_bytes(), type=Card)
    except (OSError, msgspec.MsgspecError):
        return None


@dataclass
class Rendezvous:
    """What a host has to know to launch its ranks."""

    store: Any
    host: str
    port: int
    node: int
    """0: the run's own."""
    hosts: int
    incarnation: str
    lost: list[str] = field(default_factory=list[str])
    """Why the ranks here were ended, if another host was the reason."""


class Beats:
    """When each of the hosts that took a number was last heard of."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._heard: dict[int, tuple[int, float]] = {}

    def alive(self, number: int) -> bool:
        count, now_s = int(self._store.add(f"beat/{number}", 0)), time.monotonic()
        before, heard_s = self._heard.setdefault(number, (count, now_s))
        if count != before:
            self._heard[number] = (count, now_s)
        return count != before or now_s - heard_s < SILENT_S


def alone(ctx: RoleContext[RunConfig]) -> Rendezvous:
    """All ranks are on this machine: they meet in a store that listens on loopback only."""
    from stillhouse.weights.group_operations import host_store

    store = host_store(LOOPBACK)
    return Rendezvous(store, LOOPBACK, store.port, 0, 1, ctx.incarnation)


@contextmanager
def led(ctx: RoleContext[RunConfig]) -> Generator[Rendezvous]:
    """On host 0: wait for the others, at most launch.ready_timeout_s (HostsMissing), and watch them in the context."""
    from stillhouse.weights.group_operations import connect_store, host_store

    config = ctx.config
    hosts, host = config.learner.hosts, config.weights.host
    store = host_store(host)
    watched = connect_store(host, store.port, CONNECT_S)  # a connection of its own: those in use block
    store.set("incarnation", ctx.incarnation)
    beats, n_shown, deadline_s = Beats(watched), 0, time.monotonic() + config.launch.ready_timeout_s
    while True:
        there = [n for n in range(1, int(watched.add("numbers", 0)) + 1) if beats.alive(n)][: hosts - 1]
        if 1 + len(there) != n_shown:
            n_shown = 1 + len(there)
            folder = str(ctx.run_dir.resolve())
            card = Card(
                incarnation=ctx.incarnation, host=host, port=store.port, folder=folder, hosts=hosts, here=n_shown
            )
            write_atomic(ctx.run_dir / CARD, msgspec.json.encode(card))
            log.info("%d of %d hosts are here for the learner's ranks", n_shown, hosts)
        if n_shown == hosts:
            break
        if time.monotonic() > deadline_s:
            raise HostsMissing(
                f"{n_shown} of {hosts} hosts (learner.hosts) came within launch.ready_timeout_s = "
                f"{config.launch.ready_timeout_s:g} s; the others join by `stillhouse join {ctx.run_dir} "
                f"--learner-ranks {config.learner.ranks_each}`"
            )
        time.sleep(LOOK_S)
    for node, number in enumerate(there, start=1):
        watched.set(f"node/{number}", str(node))
    place = Rendezvous(store, host, store.port, 0, hosts, ctx.incarnation)

    def missing() -> str:
        for node, number in enumerate(there, start=1):
            if watched.check([f"done/{number}"]):
                continue
            if watched.check([f"failed/{number}"]):
                return f"the ranks of host {node} have ended"
            if not beats.alive(number):
                return f"host {node} was silent for {SILENT_S:.0f} s"
        return ""

    with _watching(place, missing):
        yield place


@contextmanager
def joined(ctx: RoleContext[RunConfig], folder: Path) -> Generator[Rendezvous]:
    """On any other host. `folder`: the run's, here. Waits at most launch.ready_timeout_s for a start of the learner
    (HostsMissing), and as long as it goes on waiting for others. Raises FolderElsewhere."""
    card, watched, number = _number(ctx, folder)

    def beat() -> str:
        try:
            watched.add(f"beat/{number}", 1)
        except RuntimeError as error:
            return f"host 0 is gone: {str(error).splitlines()[0]}"
        return ""

    from stillhouse.weights.group_operations import connect_store

    key = f"node/{number}"
    try:
        while not watched.check([key]):
            if problem := beat():
                raise HostsMissing(problem)
            time.sleep(LOOK_S)
        node, store = int(watched.get(key)), connect_store(card.host, card.port, CONNECT_S)
    except RuntimeError as error:
        raise HostsMissing(f"the learner did not start its ranks: {str(error).splitlines()[0]}") from None
    log.info("host %d of %d (counted from 0), learner %s", node, card.hosts, card.incarnation)
    place = Rendezvous(store, card.host, card.port, node, card.hosts, card.incarnation)
    ending = f"failed/{number}"
    try:
        with _watching(place, beat):
            yield place
        ending = f"done/{number}"
    finally:
        with suppress(RuntimeError):  # host 0 may be gone already
            watched.set(ending, "1")


def _number(ctx: RoleContext[RunConfig], folder: Path) -> tuple[Card, Any, int]:
    from stillhouse.weights.group_operations import GroupBroken, connect_store

    deadline_s, problem = time.monotonic() + ctx.config.launch.ready_timeout_s, f"there is no {folder / CARD}"
    while time.monotonic() < deadline_s:
        if (card := read_card(folder)) is not None:
            try:
                store = connect_store(card.host, card.port, CONNECT_S)
                if store.get("incarnation").decode() == card.incarnation:
                    _expect_folder(card, folder)
                    return card, store, int(store.add("numbers", 1))
                problem = f"{card.host}:{card.port} is of another start of the learner"
            except (GroupBroken, RuntimeError) as error:  # the last one's: the learner is being started again
                if isinstance(error, FolderElsewhere):
                    raise
                problem = str(error).splitlines()[0]
        time.sleep(LOOK_S)
    raise HostsMissing(f"no learner to join within launch.ready_timeout_s: {problem}")


def _expect_folder(card: Card, folder: Path) -> None:
    """Raises FolderElsewhere unless the path that host 0 has leads to the same folder here."""
    there = read_card(Path(card.folder))
    if there is None or there.incarnation != card.incarnation or not os.access(card.folder, os.W_OK):
        found = "is not there" if there is None else "is another one, or cannot be written"
        raise FolderElsewhere(
            f"the run's folder is {card.folder} on host 0, which {found} on this machine ({folder} was named): all "
            "ranks write checkpoints into it; expected one file system, mounted under the same path on all hosts"
        )


@contextmanager
def _watching(place: Rendezvous, problem: Callable[[], str]) -> Generator[None]:
    """Ask `problem` every BEAT_S, in a thread; its first answer ends this process's launch by SIGTERM."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(BEAT_S):
            try:
                found = problem()
            except RuntimeError as error:
                found = f"the store of the learner's hosts failed: {str(error).splitlines()[0]}"
            if found:
                if not over.wait(END_S):
                    place.lost.append(found)
                    os.kill(os.getpid(), signal.SIGTERM)
                return

    thread = threading.Thread(target=watch, name="hosts", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(CONNECT_S)
