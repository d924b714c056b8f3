"""What the rollouts of a training batch were like: rewards, lengths, how they ended, and what each pool made of them.

No torch: the figures come from a batch as it arrived, before the model reads it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from protocol.codec import Array
from protocol.messages import BatchItem

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
