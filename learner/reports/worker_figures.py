"""What actors and teachers say of themselves in their heartbeats, as figures per step.

Totals come as running sums of each worker; a figure is what all of them added since the step before. A worker that
began anew counts from 0 again, and what one adds after its last heartbeat before its end is lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from protocol.messages import PeerView, Role, Snapshot

ENVIRONMENT: Final = "env_"
"""Prefix of the totals that environments report by `info` (`actors.rollouts_running`)."""


class WorkerFigures:
    """Figures per step, by their tags in the metrics (docs/metrics.md). Owned by the learner's loop."""

    def __init__(self) -> None:
        self._before: dict[tuple[Role, str], dict[str, float]] = {}

    def update(self, snapshot: Snapshot) -> dict[str, float]:
        """`snapshot`: the buffer's newest."""
        actors = [peer for peer in snapshot.peers if peer.role == "actor"]
        teachers = [peer for peer in snapshot.peers if peer.role == "teacher"]
        figures = {
            **_of_group("actors", actors, ("running", "waiting_for_weights", "rollouts_in_hand")),
            **_of_group("teachers", teachers, ("held_tokens",)),
            **_of_actors(self._added(actors)),
            **_of_teachers(self._added(teachers)),
        }
        self._before = {(peer.role, peer.name): peer.stats for peer in snapshot.peers}
        return figures

    def _added(self, peers: Sequence[PeerView]) -> defaultdict[str, float]:
        """What each running total grew by since the last snapshot, over all of these workers."""
        added: defaultdict[str, float] = defaultdict(float)
        for peer in peers:
            before = self._before.get((peer.role, peer.name), {})
            for name, value in peer.stats.items():
                if name.endswith("_total"):
                    former = before.get(name, 0.0)
                    added[name] += value - former if value >= former else value
        return added


def _of_group(group: str, peers: Sequence[PeerView], summed: Sequence[str]) -> dict[str, float]:
    """How many are there, what they hold together, and how busy they are on average."""
    alive = [peer for peer in peers if peer.alive]
    figures = {f"{group}/alive": float(len(alive))}
    if not alive:
        return figures
    for name in summed:
        figures[f"{group}/{name}"] = sum(peer.stats.get(name, 0.0) for peer in alive)
    figures[f"{group}/busy_fraction"] = sum(peer.stats.get("busy_fraction", 0.0) for peer in alive) / len(alive)
    return figures


def _of_actors(added: defaultdict[str, float]) -> dict[str, float]:
    figures = {
        **_mean("actors/generation_s", added["generation_s_total"], added["generations_total"]),
        **_mean("actors/environment_s", added["environment_s_total"], added["environment_calls_total"]),
        **_mean("actors/tokens_per_decode_step", added["sampled_tokens_total"], added["decode_steps_total"]),
    }
    finished = added["rollouts_finished_total"]
    for name, value in sorted(added.items()):
        if name.startswith(ENVIRONMENT):
            told = name.removeprefix(ENVIRONMENT).removesuffix("_total")
            figures |= _mean(f"env/{told}_per_rollout", value, finished)
    return figures


def _of_teachers(added: defaultdict[str, float]) -> dict[str, float]:
    items = added["scored_items_total"]
    return {
        **_mean("teachers/score_s", added["score_s_total"], items),
        **_mean("teachers/items_per_batch", items, added["batches_total"]),
        **_mean("teachers/context_tokens_per_item", added["context_tokens_total"], items),
    }


def _mean(tag: str, total: float, n: float) -> dict[str, float]:
    """Nothing where there was nothing to take the mean of."""
    return {tag: total / n} if n > 0 else {}
