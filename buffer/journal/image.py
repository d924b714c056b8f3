"""An image: the core and the sessions of its peers at one moment, as bytes. With the turns since, all there is.

An image is read only by the release that wrote it: so are the turns, for another release may react to them otherwise.
`RELEASE` is a hash of the source of everything that either depends on.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import msgspec

from buffer import (
    arrivals,
    batch_size,
    breaker,
    config,
    core,
    ended,
    evals,
    failures,
    go_back,
    hedging,
    learner_desk,
    ledger,
    lifecycle,
    outgoing,
    pacing,
    peer_table,
    peers,
    pools,
    release,
    rollouts,
    runs,
    scoring,
    state,
    task_book,
    teacher_health,
    tickets,
    tokens,
    validation,
    versions,
)
from buffer.journal.freezer import Custom, Freezer
from protocol import bit_packing, codec, flow, handshake, messages, session, topk_codec
from protocol.messages import learner as learner_messages
from protocol.messages import shared, workers
from protocol.session import BookImage, SessionBook

_STATE_MODULES = (
    arrivals, batch_size, breaker, config, core, ended, evals, failures, go_back, hedging, learner_desk, ledger,
    lifecycle, outgoing, pacing, peer_table, peers, pools, release, rollouts, runs, scoring, state, task_book,
    teacher_health, tickets, tokens, validation, versions,
    bit_packing, codec, flow, handshake, messages, learner_messages, shared, workers, session, topk_codec,
)  # fmt: skip

_CLASSES: dict[type[Any], Custom | None] = dict.fromkeys(
    (
        core.Core,
        state.BufferState,
        arrivals.Arrivals,
        breaker.Breaker,
        ended.EndedRollouts,
        evals.EvalDesk,
        evals.Evaluation,
        failures.FailureBook,
        hedging.HedgeBudget,
        hedging.HedgeCounts,
        hedging.LeaseTimes,
        learner_desk.LearnerDesk,
        ledger.LedgerBook,
        ledger.KindCounts,
        ledger.UnitCounts,
        lifecycle.Lifecycle,
        outgoing.Outbox,
        pacing.Pacing,
        peer_table.PeerTable,
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
        runs.Runs,
        scoring.ScoreDesk,
        pools.Pool,
        teacher_health.TeacherHealth,
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
    """`newest_s`: reading of the core's clock."""

    newest_s: float
    core: bytes
    book: BookImage


def make_image(core_: core.Core, book: SessionBook, newest_s: float) -> bytes:
    """Raises FreezeError for a core of which this module does not know all classes."""
    return msgspec.msgpack.encode(Image(newest_s, _freezer.freeze(core_), book.image()))


def restore_image(body: bytes, book: SessionBook) -> tuple[core.Core, float]:
    """The core and its clock; the sessions go into `book`. Raises ThawError or msgspec.DecodeError."""
    image = msgspec.msgpack.decode(body, type=Image)
    book.restore(image.book)
    return _freezer.thaw(image.core), image.newest_s


@functools.cache
def release_hash() -> str:
    """Of the source of all that images and turns depend on."""
    digest = hashlib.sha256()
    for module in _STATE_MODULES:
        assert module.__file__ is not None
        digest.update(Path(module.__file__).read_bytes())
    return digest.hexdigest()[:16]
