"""One snapshot of all shards: what each counts of its own tasks is added up, so the ledger balances if theirs do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeVar

from stillhouse.protocol.messages import (
    ForgottenPeers,
    Ledger,
    LedgerCounts,
    PeerView,
    Role,
    RolloutFailures,
    Snapshot,
)

KeyT = TypeVar("KeyT")
IN_A_ROW: Final = "batches_equal_in_a_row"
"""The one count among `queues` that is in units of a shard's part of a batch."""

LACKING: Final[dict[Role, str]] = {"actor": "shards_without_actors", "teacher": "shards_without_teachers"}


def whole_snapshot(parts: Sequence[Snapshot]) -> Snapshot:
    """The snapshot of a run from those of its shards. Its clock is that of the latest."""
    if len(parts) == 1:
        return parts[0]
    speaker = _speaker(parts)
    return Snapshot(
        time_s=max(part.time_s for part in parts),
        phase=speaker.phase,
        phase_reason=speaker.phase_reason,
        version=max(part.version for part in parts),
        published=max(part.published for part in parts),
        ledger=_ledger([part.ledger for part in parts]),
        queues=_queues(parts),
        staleness_hist=dict(sorted(summed(part.staleness_hist for part in parts).items())),
        max_staleness=parts[0].max_staleness,
        peers=_peers(parts),
        forgotten=_forgotten(parts),
        failures=_failures(parts),
    )


def summed(counts: Iterable[Mapping[KeyT, int]]) -> dict[KeyT, int]:
    """Sums by key."""
    sums: dict[KeyT, int] = {}
    for one in counts:
        for key, n in one.items():
            sums[key] = sums.get(key, 0) + n
    return sums


def _speaker(parts: Sequence[Snapshot]) -> Snapshot:
    """The shard whose phase is the run's: one that failed; else one that still runs; else any."""
    ranks = {"failed": 0, "running": 1, "finished": 2}
    return min(parts, key=lambda part: ranks[part.phase])


def _ledger(parts: Sequence[Ledger]) -> Ledger:
    def unit(of: Callable[[Ledger], LedgerCounts]) -> LedgerCounts:
        counts = [of(part) for part in parts]
        return LedgerCounts(
            accepted=sum(one.accepted for one in counts),
            trained=sum(one.trained for one in counts),
            masked=summed(one.masked for one in counts),
            dropped=summed(one.dropped for one in counts),
            waiting=sum(one.waiting for one in counts),
            in_flight=sum(one.in_flight for one in counts),
        )

    return Ledger(
        rollouts=unit(lambda one: one.rollouts),
        segments=unit(lambda one: one.segments),
        tokens=unit(lambda one: one.tokens),
        rejected=summed(part.rejected for part in parts),
        eval_tokens=unit(lambda one: one.eval_tokens),
    )


def _queues(parts: Sequence[Snapshot]) -> dict[str, int]:
    """With the number of shards that lack workers of a role which others have: they hold up every batch."""
    sums = summed(part.queues for part in parts)
    if IN_A_ROW in sums:
        sums[IN_A_ROW] //= len(parts)
    for role, name in LACKING.items():
        lacking = sum(not any(peer.role == role and peer.alive for peer in part.peers) for part in parts)
        if 0 < lacking < len(parts):
            sums[name] = lacking
    return sums


def _peers(parts: Sequence[Snapshot]) -> tuple[PeerView, ...]:
    """Actors and teachers are with one shard each; the learner and launchers with all."""
    views: dict[tuple[Role, str], list[PeerView]] = {}
    for part in parts:
        for peer in part.peers:
            views.setdefault((peer.role, peer.name), []).append(peer)
    return tuple(_peer(same) for same in views.values())


def _peer(views: Sequence[PeerView]) -> PeerView:
    if len(views) == 1:
        return views[0]
    # One that is connected says more of the peer than one that lost it; among those, who has heard it last.
    newest = min(views, key=lambda view: (not view.alive, view.silent_s))
    learner = newest.role == "learner"  # a batch is counted by each shard that had a piece of it
    return PeerView(
        role=newest.role,
        name=newest.name,
        alive=newest.alive,
        version=newest.version,
        silent_s=newest.silent_s,
        stats=newest.stats,
        held=max(view.held for view in views) if learner else sum(view.held for view in views),
        done_total=max(view.done_total for view in views) if learner else sum(view.done_total for view in views),
        tokens_total=sum(view.tokens_total for view in views),
        held_back=newest.held_back,
    )


def _forgotten(parts: Sequence[Snapshot]) -> dict[Role, ForgottenPeers]:
    sums: dict[Role, ForgottenPeers] = {}
    for part in parts:
        for role, gone in part.forgotten.items():
            sofar = sums.get(role, ForgottenPeers())
            sums[role] = ForgottenPeers(
                sofar.n + gone.n, sofar.done_total + gone.done_total, sofar.tokens_total + gone.tokens_total
            )
    return sums


def _failures(parts: Sequence[Snapshot]) -> tuple[RolloutFailures, ...]:
    """The order of reasons over shards is not known: the last of the last shard is last."""
    sums: dict[str, RolloutFailures] = {}
    for part in parts:
        for one in part.failures:
            former = sums.pop(one.reason, None)
            if former is None:
                sums[one.reason] = one
                continue
            n_examples = max(len(former.examples), len(one.examples))
            examples = tuple(dict.fromkeys((*former.examples, *one.examples)))[:n_examples]
            sums[one.reason] = RolloutFailures(one.reason, former.n + one.n, one.newest, examples)
    return tuple(sums.values())
