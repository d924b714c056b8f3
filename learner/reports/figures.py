"""Figures of a step from what the buffer sends: token rates and staleness from its snapshots, rewards and lengths from
the rollouts of a batch, and the gauges of actors and teachers from their heartbeats. Tags are listed in
docs/metrics.md.

No torch: the launcher's status uses the rates, too.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from stillhouse.protocol.codec import Array
from stillhouse.protocol.messages import BatchItem, PeerView, Role, Snapshot
from stillhouse.protocol.payloads.aligned import NOT_SCORED

ROLES: Final[tuple[Role, ...]] = ("actor", "teacher", "learner")
MAX_TAGS: Final = 32
"""Number of tags with figures of their own, in order of appearance. Later tags share `other`: a data set may have
thousands, and TensorBoard keeps every figure forever."""
OTHER_TAG: Final = "other"
REPEATED_TOKENS: Final = 8
"""Length of a run of tokens that counts as repeated if it comes twice: longer than most set phrases."""
RATES_S: Final = 20.0
"""Token rates, on the status and in the metrics, are means over this window."""
_HASH_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)
ENVIRONMENT: Final = "env_"
"""Prefix of the totals that environments report through `info` (`actors.rollouts_running`)."""
SCORER_TOTALS: Final = ("computed_tokens", "prefix_hits", "prefix_evicted_tokens")
"""Totals that only embedded teachers report (`engines.torch.scorer`)."""


class TokenRates:
    """Computes rates from the running totals in the buffer's snapshots."""

    def __init__(self, window_s: float = 0.0) -> None:
        """Rates are means over about `window_s`; 0: between the last two snapshots."""
        self._window_s = window_s
        self._past: deque[tuple[float, dict[Role, int]]] = deque()

    def update(self, snapshot: Snapshot) -> None:
        """Add a snapshot. One of the same moment as the last is ignored. When the clock or a total has gone back, the
        buffer has restarted, and the history is cleared."""
        totals: dict[Role, int] = {role: snapshot.tokens_total(role) for role in ROLES}
        if self._past:
            last_s, last = self._past[-1]
            if snapshot.time_s == last_s:
                return
            if snapshot.time_s < last_s or any(totals[role] < last[role] for role in ROLES):
                self._past.clear()
        self._past.append((snapshot.time_s, totals))
        while len(self._past) > 2 and self._past[-1][0] - self._past[1][0] >= self._window_s:
            self._past.popleft()

    @property
    def tokens_per_s(self) -> dict[str, float]:
        """Tokens/s accepted from actors, scored by teachers, trained by the learner. Empty before two snapshots."""
        if len(self._past) < 2:
            return {}
        (first_s, first), (last_s, last) = self._past[0], self._past[-1]
        return {role: (last[role] - first[role]) / (last_s - first_s) for role in ROLES}


def staleness(tokens_by_distance: Mapping[int, int]) -> tuple[float, int]:
    """(mean, max) distance of tokens in optimizer steps; (0, 0) without tokens."""
    tokens = sum(tokens_by_distance.values())
    if tokens == 0:
        return 0.0, 0
    mean = sum(distance * n for distance, n in tokens_by_distance.items()) / tokens
    return mean, max(distance for distance, n in tokens_by_distance.items() if n)


class RolloutFigures:
    """Figures of the rollouts of each batch. Remembers the tags that it has seen. Owned by the learner's loop."""

    def __init__(self) -> None:
        self._tags: set[str] = set()

    def update(self, items: Sequence[BatchItem], arrays: Sequence[Array]) -> dict[str, float]:
        """`items` and `arrays` are those of one batch (`protocol.messages.Batch`). A rollout counts in the step that
        trains its last piece; a step without such a rollout has no figures of rollouts."""
        ended = [item for item in items if item.final]
        figures = {"rollouts/ended": float(len(ended)), **_of_rollouts("rollouts", ended), **_repetition(items, arrays)}
        figures |= _ending(items, arrays)
        for tag, its in self._by_tag(ended):
            figures |= _of_rollouts(f"rollouts/{tag}", its)
        return figures | _of_pools(items, arrays)

    def _by_tag(self, ended: Sequence[BatchItem]) -> Iterator[tuple[str, list[BatchItem]]]:
        """Rollouts per tag. Empty until the run has shown two tags: the figures of a single tag are those of all."""
        found: defaultdict[str, list[BatchItem]] = defaultdict(list)
        for item in ended:
            if item.tag not in self._tags and len(self._tags) < MAX_TAGS:
                self._tags.add(item.tag)
            found[item.tag if item.tag in self._tags else OTHER_TAG].append(item)
        if len(self._tags) > 1:
            yield from ((tag or "untagged", its) for tag, its in sorted(found.items()))


class WorkerFigures:
    """Figures of actors and teachers per step. Owned by the learner's loop.

    Workers send running totals; a figure is what all of them added since the last step. A worker that restarts counts
    from 0 again. What a worker adds between its last heartbeat and its end is lost."""

    def __init__(self) -> None:
        self._before: dict[tuple[Role, str], dict[str, float]] = {}

    def update(self, snapshot: Snapshot) -> dict[str, float]:
        actors = [peer for peer in snapshot.peers if peer.role == "actor"]
        teachers = [peer for peer in snapshot.peers if peer.role == "teacher"]
        figures = {
            **_of_group("actors", actors, ("running", "waiting_for_weights", "rollouts_in_hand")),
            **_of_group("teachers", teachers, ("held_tokens", "prefix_tokens")),
            **_of_apis([peer.stats for peer in teachers if peer.alive]),
            **_of_actors(of_actors := self._added(actors)),
            **_of_teachers(of_teachers := self._added(teachers)),
            **_of_turns("actors", of_actors),
            **_of_turns("teachers", of_teachers),
        }
        self._before = {(peer.role, peer.name): peer.stats for peer in snapshot.peers}
        return figures

    def _added(self, peers: Sequence[PeerView]) -> defaultdict[str, float]:
        """Growth of each running total since the last snapshot, summed over these workers."""
        added: defaultdict[str, float] = defaultdict(float)
        for peer in peers:
            before = self._before.get((peer.role, peer.name), {})
            if any(peer.stats.get(name, 0.0) < before[name] for name in before if _only_rises(name)):
                before = {}  # it has restarted
            for name, value in peer.stats.items():
                if name.endswith("_total"):
                    added[name] += value - before.get(name, 0.0)
        return added


def _only_rises(name: str) -> bool:
    """Whether a worker's number is a total that falls only when the worker restarts. Environments may report negative
    numbers."""
    return name.endswith("_total") and not name.startswith(ENVIRONMENT)


def _of_rollouts(prefix: str, ended: Sequence[BatchItem]) -> dict[str, float]:
    if not ended:
        return {}
    lengths = [sum(span.end - span.start for span in item.spans) for item in ended]
    figures = {
        "length_mean": float(np.mean(lengths)),
        "length_max": float(max(lengths)),
        "truncated_share": sum(item.finish_reason == "length" for item in ended) / len(ended),
        "turns_mean": float(np.mean([item.n_turns for item in ended])),
        "unrewarded_share": sum(item.reward is None for item in ended) / len(ended),
    }
    rewards = [item.reward for item in ended if item.reward is not None]
    if rewards:
        figures |= {"reward_mean": float(np.mean(rewards)), "reward_std": float(np.std(rewards))}
    if turns := [len(item.turn_rewards) for item in ended if item.turn_rewards]:
        figures["rewarded_turns_mean"] = float(np.mean(turns))
    return {f"{prefix}/{name}": value for name, value in figures.items()}


def with_frames(items: Sequence[BatchItem], arrays: Sequence[Array]) -> Iterator[tuple[BatchItem, Sequence[Array]]]:
    """Each item of a batch with its token ids, behaviour log-probs, train mask and teacher log-probs, as they came
    (`protocol.messages.BatchItem`); `learner.batch.train_items`, which needs torch, has checked them."""
    at = 0
    for item in items:
        yield item, arrays[at : at + 4]
        at += 5 if item.top_k else 4


def _repetition(items: Sequence[BatchItem], arrays: Sequence[Array]) -> dict[str, float]:
    runs = repeated = 0
    for _, (ids_T, _, trained_T, _) in with_frames(items, arrays):
        ids = ids_T[trained_T.astype(bool)].astype(np.uint64)
        n = len(ids) - REPEATED_TOKENS + 1
        if n < 1:
            continue
        run_n = np.zeros(n, np.uint64)
        for place in range(REPEATED_TOKENS):  # a hash, modulo 2^64
            run_n = run_n * _HASH_FACTOR + ids[place : place + n] + np.uint64(1)
        runs += n
        repeated += n - len(np.unique(run_n))
    return {"rollouts/repetition": repeated / runs} if runs else {}


def _ending(items: Sequence[BatchItem], arrays: Sequence[Array]) -> dict[str, float]:
    """Mean of mu - q, over a token's teachers, at the last token of the rollouts that the student ended itself. It is
    what tells answers that got short because the teacher's are from those of a student that gives up early."""
    gaps: list[float] = []
    for item, (_, mu_T, trained_T, q_PT) in with_frames(items, arrays):
        trained = np.flatnonzero(trained_T)
        if item.final and item.finish_reason == "stop" and item.teachers and len(trained):
            last = trained[-1]
            if not (q_PT[:, last] == NOT_SCORED).any():
                gaps.append(float(mu_T[last]) - float(np.mean(q_PT[:, last])))
    return {"rollouts/ending_gap": float(np.mean(gaps))} if gaps else {}


def _of_pools(items: Sequence[BatchItem], arrays: Sequence[Array]) -> dict[str, float]:
    """Per pool of teachers: its share of the trained tokens, and their mean mu - q, which is the reverse KL of the
    policy that sampled them (`train/reverse_kl` is that of the current policy)."""
    tokens: defaultdict[str, int] = defaultdict(int)
    sums: defaultdict[str, float] = defaultdict(float)
    trained_total = 0
    for item, (_, mu_T, trained_T, q_PT) in with_frames(items, arrays):
        trained = trained_T.astype(bool)
        n = int(trained.sum())
        trained_total += n
        if not n:
            continue
        for row, pool in enumerate(item.teachers):
            scored = trained & (q_PT[row] != NOT_SCORED)
            tokens[pool] += int(scored.sum())
            sums[pool] += float((mu_T[scored].astype(np.float64) - q_PT[row][scored]).sum())
    return {
        f"teachers/{pool}/{name}": value
        for pool, n in sorted(tokens.items())
        for name, value in (("token_share", n / trained_total), *([("reverse_kl", sums[pool] / n)] if n else []))
    }


def _of_group(group: str, peers: Sequence[PeerView], summed: Sequence[str]) -> dict[str, float]:
    alive = [peer for peer in peers if peer.alive]
    figures = {f"{group}/alive": float(len(alive))}
    if not alive:
        return figures
    for name in summed:
        figures[f"{group}/{name}"] = sum(peer.stats.get(name, 0.0) for peer in alive)
    figures[f"{group}/busy_fraction"] = sum(peer.stats.get("busy_fraction", 0.0) for peer in alive) / len(alive)
    return figures


def _of_turns(group: str, added: Mapping[str, float]) -> dict[str, float]:
    return {
        f"turns/{group}_{key}": added[f"{key}_total"]
        for key in ("turns", "turn_s", "turn_wait_s")
        if f"{key}_total" in added
    }


def _of_actors(added: defaultdict[str, float]) -> dict[str, float]:
    figures = {
        **_mean("actors/generation_s", added["generation_s_total"], added["generations_total"]),
        **_mean("actors/environment_s", added["environment_s_total"], added["environment_calls_total"]),
        **_mean("actors/tokens_per_decode_step", added["sampled_tokens_total"], added["decode_steps_total"]),
    }
    for name in ("calls", "roots", "forks", "drift_tokens", "dropped_responses"):
        figures |= _mean(f"agents/{name}_per_rollout", added[f"agent_{name}_total"], added["agent_rollouts_total"])
    finished = added["rollouts_finished_total"]
    for name, value in sorted(added.items()):
        if name.startswith(ENVIRONMENT):
            reported = name.removeprefix(ENVIRONMENT).removesuffix("_total")
            figures |= _mean(f"env/{reported}_per_rollout", value, finished)
    return figures


def _of_teachers(added: defaultdict[str, float]) -> dict[str, float]:
    items = added["scored_items_total"]
    return {
        **_mean("teachers/score_s", added["score_s_total"], items),
        **_mean("teachers/items_per_batch", items, added["batches_total"]),
        **_mean("teachers/context_tokens_per_item", added["context_tokens_total"], items),
        **_mean("teachers/spans_with_set", added["sets_total"], added["spans_total"]),
        **_mean("teachers/mapped_mass", added["sets_mass_total"], added["sets_total"]),
        **{
            f"teachers/{name.removesuffix('_total')}_per_item": value / items
            for name, value in sorted(added.items())
            if items > 0 and name.startswith("unaligned_")
        },
        **{
            f"teachers/{name}_per_item": added[f"{name}_total"] / items
            for name in SCORER_TOTALS
            if items > 0 and f"{name}_total" in added
        },
    }


def _of_apis(stats: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What was sent to APIs and what came back without use (`engines.api.scorer`), over all their teachers."""
    names = {name for one in stats for name in one if name.startswith(("api_sent", "api_money", "api_unscored"))}
    return {f"teachers/{name}": sum(one.get(name, 0.0) for one in stats) for name in sorted(names)}


def _mean(tag: str, total: float, n: float) -> dict[str, float]:
    """Empty without anything to take the mean of."""
    return {tag: total / n} if n > 0 else {}
