"""An image: the core and the sessions of its peers at one moment, as bytes. With the turns since, it is all that a
restart needs.

An image is read only by the release that wrote it, and so are the turns: another release may react to them in another
way. The release is identified by a hash of the source of everything that either depends on.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any, Final

import msgspec

from buffer import (
    arrivals,
    batch_size,
    breaker,
    config,
    core,
    evals,
    history,
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
from buffer.journal.freezer import Custom, Freezer
from protocol import messages
from protocol.session import BookImage, SessionBook

_NO_STATE: Final = ("loop.py", "server.py")
"""Files of this package that neither the core's state nor its reaction to a turn depends on."""
_PROTOCOL: Final = ("codec", "flow", "handshake", "session", "topk_codec")
"""Modules of `protocol` that they do depend on, besides `protocol.messages`."""

_CLASSES: dict[type[Any], Custom | None] = dict.fromkeys(
    (
        core.Core,
        state.BufferState,
        arrivals.Arrivals,
        breaker.Breaker,
        history.EndedRollouts,
        evals.EvalDesk,
        evals.Evaluation,
        ledger.FailureBook,
        pools.HedgeBudget,
        pools.HedgeCounts,
        pools.LeaseTimes,
        learner_desk.LearnerDesk,
        ledger.LedgerBook,
        ledger.KindCounts,
        ledger.UnitCounts,
        lifecycle.Lifecycle,
        peers.Outbox,
        pacing.Pacing,
        peers.PeerTable,
        peers.Peer,
        peers.ActorPeer,
        peers.TeacherPeer,
        peers.Lease,
        release.BatchDesk,
        rollouts.Rollout,
        rollouts.ScoreJob,
        rollouts.Segment,
        rollouts.Slot,
        rollouts.TaskRecord,
        history.Runs,
        scoring.ScoreDesk,
        pools.Pool,
        pools.TeacherHealth,
        task_book.TaskBook,
        tickets.TicketDesk,
        validation.SegmentChecker,
        versions.VersionTable,
    )
)
_CLASSES[tokens.TokenStore] = Custom(tokens.TokenStore.contents, tokens.TokenStore.fill)

_VALUES: tuple[type[Any], ...] = (
    config.BufferConfig,
    batch_size.Size,
    evals.Result,
    release.LeasedBatch,
    release.Piece,
    rollouts.SegmentState,
    scoring.Answer,
    rollouts.Fate,
    messages.BatchItem,
    messages.ForgottenPeers,
    messages.OpenTask,
    messages.PartialSample,
    messages.RolloutFailures,
    messages.ScoreCredit,
    messages.Segment,
    messages.Settled,
    messages.TicketCredit,
    messages.Task,
    messages.Ticket,
    messages.VersionSpan,
    messages.WeightVersion,
    messages.WeightsRef,
)


_freezer = Freezer(_CLASSES, _VALUES)


class Image(msgspec.Struct, frozen=True, array_like=True):
    """Content of an image. `newest_s`: reading of the core's clock."""

    newest_s: float
    core: bytes
    book: BookImage


def make_image(core_: core.Core, book: SessionBook, newest_s: float) -> bytes:
    """Encode the core and the sessions. Raises FreezeError for an object of a class that is not listed above."""
    return msgspec.msgpack.encode(Image(newest_s, _freezer.freeze(core_), book.image()))


def restore_image(body: bytes, book: SessionBook) -> tuple[core.Core, float]:
    """Decode the core and its clock; the sessions go into `book`. Raises ThawError or msgspec.DecodeError."""
    image = msgspec.msgpack.decode(body, type=Image)
    book.restore(image.book)
    return _freezer.thaw(image.core), image.newest_s


@functools.cache
def release_hash() -> str:
    """Hash of the source of everything that images and turns depend on."""
    package = Path(__file__).parents[1]
    protocol = package.parent / "protocol"
    state = [file for file in sorted(package.rglob("*.py")) if file.name not in _NO_STATE]
    wire = [*sorted((protocol / "messages").glob("*.py")), *(protocol / f"{name}.py" for name in _PROTOCOL)]
    digest = hashlib.sha256()
    for file in (*state, *wire):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
