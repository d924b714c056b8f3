"""Tokens per second and role, from the running totals in the buffer's snapshots.

What the rollouts of a training batch were like: rewards, lengths, how they ended, and what each pool made of them.

No torch: the figures come from a batch as it arrived, before the model reads it.

What actors and teachers say of themselves in their heartbeats, as figures per step.

Totals come as running sums of each worker; a figure is what all of them added since the step before. A worker that
began anew counts from 0 again, and what one adds after its last heartbeat before its end is lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from protocol.codec import Array
from protocol.messages import BatchItem, PeerView, Role, Snapshot

ROLES: tuple[Role, ...] = ("actor", "teacher", "learner")


class TokenRates:
    """Differences between one snapshot and the one before it."""

    def __init__(self) -> None:
        self._time_s: float | None = None
        self._totals: dict[Role, int] = {}

    def update(self, snapshot: Snapshot) -> dict[Role, float]:
        """Tokens/s since the last snapshot: accepted from actors, scored by teachers, trained by the learner.

        Empty for the first one, for one taken at the same moment, and when a total or the clock went back (the buffer
        began anew): there is no interval to speak of then."""
        totals: dict[Role, int] = {role: snapshot.tokens_total(role) for role in ROLES}
        before_s, before = self._time_s, self._totals
        self._time_s, self._totals = snapshot.time_s, totals
        if before_s is None or snapshot.time_s <= before_s or any(totals[role] < before[role] for role in ROLES):
            return {}
        return {role: (totals[role] - before[role]) / (snapshot.time_s - before_s) for role in ROLES}


MAX_TAGS: Final = 32
"""Tags with figures of their own, in the order of their first rollout. Later ones share `other`: a data set may have
thousands, and TensorBoard keeps each figure for ever."""
OTHER_TAG: Final = "other"


class RolloutFigures:
    """Figures per step, by their tags in the metrics (docs/metrics.md). Owned by the learner's loop."""

    def __init__(self) -> None:
        self._tags: set[str] = set()

    def update(self, items: Sequence[BatchItem], arrays: Sequence[Array]) -> dict[str, float]:
        """`items` and `arrays`: of one batch (`protocol.messages.Batch`). A rollout counts in the step that trains its
        last piece; a step without such a rollout has no figures of rollouts."""
        ended = [item for item in items if item.final]
        figures = {"rollouts/ended": float(len(ended)), **_of_rollouts("rollouts", ended)}
        for tag, its in self._by_tag(ended):
            figures |= _of_rollouts(f"rollouts/{tag}", its)
        return figures | _of_pools(items, arrays)

    def _by_tag(self, ended: Sequence[BatchItem]) -> Iterator[tuple[str, list[BatchItem]]]:
        """Rollouts per tag; nothing while the run has shown only one tag, whose figures are those of all."""
        found: defaultdict[str, list[BatchItem]] = defaultdict(list)
        for item in ended:
            if item.tag not in self._tags and len(self._tags) < MAX_TAGS:
                self._tags.add(item.tag)
            found[item.tag if item.tag in self._tags else OTHER_TAG].append(item)
        if len(self._tags) > 1:
            yield from ((tag or "untagged", its) for tag, its in sorted(found.items()))


def _of_rollouts(prefix: str, ended: Sequence[BatchItem]) -> dict[str, float]:
    if not ended:
        return {}
    lengths = [sum(span.end - span.start for span in item.spans) for item in ended]
    figures = {
        "length_mean": float(np.mean(lengths)),
        "length_max": float(max(lengths)),
        "truncated_share": sum(item.finish_reason == "length" for item in ended) / len(ended),
        "turns_mean": float(np.mean([item.n_turns for item in ended])),
    }
    rewards = [item.reward for item in ended if item.reward is not None]
    if rewards:
        figures |= {"reward_mean": float(np.mean(rewards)), "reward_std": float(np.std(rewards))}
    return {f"{prefix}/{name}": value for name, value in figures.items()}


def _of_pools(items: Sequence[BatchItem], arrays: Sequence[Array]) -> dict[str, float]:
    """Per pool of teachers: its share of the trained tokens, and the mean over them of mu - q, the reverse KL from the
    policy that sampled them (the step's own `train/reverse_kl` is from the current one)."""
    tokens: defaultdict[str, int] = defaultdict(int)
    sums: defaultdict[str, float] = defaultdict(float)
    trained_total = at = 0
    for item in items:
        _, mu_T, trained_T, q_PT = arrays[at : at + 4]
        at += 5 if item.top_k else 4
        trained = trained_T.astype(bool)
        n = int(trained.sum())
        trained_total += n
        if not n:
            continue
        for row, pool in enumerate(item.teachers):
            tokens[pool] += n
            sums[pool] += float((mu_T[trained].astype(np.float64) - q_PT[row][trained]).sum())
    return {
        f"teachers/{pool}/{name}": value
        for pool, n in sorted(tokens.items())
        for name, value in (("token_share", n / trained_total), ("reverse_kl", sums[pool] / n))
    }


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
