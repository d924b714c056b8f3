"""An image: the core and the sessions of its peers at one moment, as bytes. With the turns since, it is all that a
restart needs.

An image is read only by the release that wrote it, and so are the turns: another release may react to them in another
way. The release is identified by a hash of the source of everything that either depends on.
"""

from __future__ import annotations

import enum
import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import msgspec

from stillhouse.buffer import (
    arrivals,
    batch_size,
    breaker,
    candidates,
    config,
    core,
    departure,
    evals,
    groups,
    history,
    holdings,
    items,
    learner_desk,
    ledger,
    lifecycle,
    pacing,
    peers,
    pools,
    release,
    rollouts,
    scoring,
    state,
    task_book,
    tickets,
    tokens,
    validation,
    versions,
)
from stillhouse.buffer.blobs import Load
from stillhouse.buffer.journal.freezer import Custom, Freezer, Frozen
from stillhouse.protocol.messages import learner as learner_messages
from stillhouse.protocol.messages import shared, workers
from stillhouse.protocol.session import BookImage, SessionBook

_NO_STATE: Final = ("loop.py", "server.py")
"""Files of this package that neither the core's state nor its reaction to a turn depends on."""
_PROTOCOL: Final = (
    *(
        "bit_words",
        "branches",
        "children",
        "codec",
        "flow",
        "handshake",
        "server_events",
        "session",
        "topk_codec",
        "topk_layout",
    ),
)
"""Modules of `protocol` that they do depend on, besides the packages `messages` and `payloads`."""

_STATE: Final = (
    arrivals, batch_size, breaker, candidates, config, core, departure, evals, groups, history, holdings, items,
    learner_desk, ledger, lifecycle, pacing, peers, pools, release, rollouts, scoring, state, task_book, tickets,
    tokens, validation, versions,
)  # fmt: skip
_WIRE: Final = (learner_messages, shared, workers)


def _defined_in(modules: Iterable[ModuleType], *, values: bool) -> list[type[Any]]:
    """Classes that the modules define: those compared by value (named tuples, structs, enums), or the others."""
    kinds = [
        kind
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type) and kind.__module__ == module.__name__
    ]
    return [kind for kind in kinds if issubclass(kind, (tuple, msgspec.Struct, enum.Enum)) == values]


_CLASSES: dict[type[Any], Custom | None] = dict.fromkeys(_defined_in(_STATE, values=False))
_CLASSES[tokens.TokenStore] = Custom(tokens.TokenStore.contents, tokens.TokenStore.fill)
_CLASSES[items.LeasedBatch] = Custom(items.LeasedBatch.contents, items.LeasedBatch.fill, late=True)
_CLASSES[rollouts.TaskRecord] = Custom(rollouts.TaskRecord.contents, rollouts.TaskRecord.fill)
_freezer = Freezer(_CLASSES, _defined_in((*_STATE, *_WIRE), values=True))


class Image(msgspec.Struct, frozen=True, array_like=True):
    """Content of an image. `newest_s`: reading of the core's clock."""

    newest_s: float
    core: bytes
    book: BookImage


def make_image(core_: core.Core, book: SessionBook, newest_s: float) -> Frozen:
    """Encode the core and the sessions. Raises FreezeError for an object of a class that is not listed above."""
    frozen = _freezer.freeze(core_)
    return Frozen(msgspec.msgpack.encode(Image(newest_s, frozen.body, book.image())), frozen.blobs)


def make_checked_image(core_: core.Core, book: SessionBook, newest_s: float) -> Frozen | None:
    """The same; None if a recount of everything that is held differs from the counts that are kept of it."""
    return make_image(core_, book, newest_s) if core_.state.counts_are_right else None


def restore_image(body: bytes, book: SessionBook, load: Load) -> tuple[core.Core, float]:
    """Decode the core and its clock; the sessions go into `book`. `load` reads the blobs to which the image refers.
    Raises ThawError or msgspec.DecodeError."""
    image = msgspec.msgpack.decode(body, type=Image)
    book.restore(image.book)
    return _freezer.thaw(image.core, load), image.newest_s


@functools.cache
def release_hash() -> str:
    """Hash of the source of everything that images and turns depend on."""
    package = Path(__file__).parents[1]
    protocol = package.parent / "protocol"
    state = [file for file in sorted(package.rglob("*.py")) if file.name not in _NO_STATE]
    packages = [file for name in ("messages", "payloads") for file in sorted((protocol / name).glob("*.py"))]
    wire = [*packages, *(protocol / f"{name}.py" for name in _PROTOCOL)]
    digest = hashlib.sha256()
    for file in (*state, *wire):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
