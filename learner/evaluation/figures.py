"""Figures of evaluation rollouts, in total and by tag. No sockets, no torch.

Suffix N: tokens of one rollout; K: teachers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from stillhouse.learner.turns import pieces_of
from stillhouse.protocol.messages import BatchItem, WeightVersion
from stillhouse.protocol.payloads.aligned import NOT_SCORED

SOLVED: Final = 0.5
"""Least reward of a solved prompt."""
UNTAGGED: Final = "(untagged)"
"""Name of the empty tag in the figures."""


@dataclass(frozen=True, slots=True)
class EvalRollout:
    """One rollout, reduced to the inputs of the figures."""

    rollout_id: str
    task_id: int
    tag: str
    env: str
    reward: float | None
    finish_reason: str | None
    ids_N: npt.NDArray[np.int32]
    n_read: int
    """Tokens that the student read before it wrote its first one."""
    behaviour_N: npt.NDArray[np.float64]
    """Sampled tokens only, like `teacher_KN`."""
    teacher_KN: npt.NDArray[np.float64]
    turn_rewards: tuple[tuple[int, float], ...]
    """(turn, from 1; its reward), if there are several turns."""
    version_min: WeightVersion | None
    version_tokens: int
    version_steps: int
    """Sum over sampled tokens of their version's step."""
    written_N: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """Ids of the sampled tokens."""

    @classmethod
    def of(cls, item: BatchItem, frames: Sequence[np.ndarray], env: str = "") -> EvalRollout:
        """`env`: name of its environment."""
        ids_N, behaviour_N, mask_N, teacher_KN = frames
        sampled_N = mask_N.astype(bool)
        # Spans may include tokens that were not sampled.
        tokens = [int(sampled_N[span.start : span.end].sum()) for span in item.spans]
        return cls(
            rollout_id=item.rollout_id,
            task_id=item.task_id,
            tag=item.tag,
            env=env,
            reward=item.reward,
            finish_reason=item.finish_reason,
            ids_N=ids_N.copy(),  # a copy, because the frame would keep its whole message in memory
            n_read=int(sampled_N.argmax()) if sampled_N.any() else len(ids_N),
            behaviour_N=behaviour_N[sampled_N].astype(np.float64),
            teacher_KN=teacher_KN[:, sampled_N].astype(np.float64),
            turn_rewards=_turn_rewards(item, sampled_N),
            version_min=min((s.version for s, n in zip(item.spans, tokens, strict=True) if n), default=None),
            version_tokens=sum(tokens),
            version_steps=sum(n * span.version.step for n, span in zip(tokens, item.spans, strict=True)),
            written_N=ids_N[sampled_N],
        )


def _turn_rewards(item: BatchItem, sampled_N: npt.NDArray[np.bool_]) -> tuple[tuple[int, float], ...]:
    if item.n_turns < 2 or not item.turn_rewards:
        return ()
    turns = pieces_of(sampled_N, item.branches).of(np.array([one.end - 1 for one in item.turn_rewards]))
    return tuple((turn + 1, one.reward) for turn, one in zip(turns.tolist(), item.turn_rewards, strict=True))


class TagFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of all rollouts, or of those with one tag or in one environment. None: not measured (no reward, no
    teacher)."""

    accuracy_greedy: float | None = None
    """Share of greedy rollouts whose reward is at least 0.5, among those with a reward."""
    accuracy_sampled: float | None = None
    reward_greedy: float | None = None
    """Mean over the rollouts with a reward."""
    reward_sampled: float | None = None
    reverse_kl: float | None = None
    """Per token: mean over the sampled tokens of the temperature-1 half of (behaviour log-prob - teacher log-prob),
    the latter averaged over the teachers. Not finite if any log-prob is not."""
    n_greedy: int | None = None
    """Rollouts received. None in accounts of older versions, like `missing` and `failed`."""
    n_sampled: int | None = None
    at_k: dict[str, float] = {}
    """Figures of several answers per prompt at temperature 1 (`at_k`, `diversity`); empty with one answer."""


class EvalPoint(TagFigures, frozen=True, kw_only=True):
    """One evaluation in learner.json and summary.json."""

    step: int
    name: str = ""
    """Name of its set in learner.eval_sets; empty for the run's own."""
    missing: int | None = None
    """Rollouts neither received nor given up: 0 unless the learner stopped waiting."""
    failed: int | None = None
    """Rollouts given up by the buffer; no figure includes them."""
    tags: dict[str, TagFigures] = {}
    """Figures by tag; empty if the tasks have only one."""
    environments: dict[str, TagFigures] = {}
    """Figures by environment; empty if the tasks have only one, or if their tags are the environments."""


class MeasuredTeacher(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Accuracy of the teachers of one pool on one evaluation set."""

    accuracy_sampled: float | None
    """Share of the prompts solved at temperature 1."""
    n_sampled: int
    """Prompts, with one answer each: all prompts of the student's evaluation that this pool scores."""
    accuracy_greedy: float | None = None
    n_greedy: int = 0


def whole_teacher(pools: Sequence[MeasuredTeacher]) -> MeasuredTeacher:
    """All pools together, each by its number of prompts."""
    means: dict[str, float | None] = {}
    for half in ("sampled", "greedy"):
        measured = [(getattr(one, f"accuracy_{half}"), getattr(one, f"n_{half}")) for one in pools]
        measured = [(value, n) for value, n in measured if value is not None]
        means[half] = ratio(sum(value * n for value, n in measured), sum(n for _, n in measured))
    return MeasuredTeacher(
        accuracy_sampled=means["sampled"],
        n_sampled=sum(one.n_sampled for one in pools),
        accuracy_greedy=means["greedy"],
        n_greedy=sum(one.n_greedy for one in pools),
    )


def figures_by(
    group: Literal["tag", "env"], names: Iterable[str], greedy: Sequence[EvalRollout], sampled: Sequence[EvalRollout]
) -> dict[str, TagFigures]:
    """Figures by tag or by environment, for all these names of the tasks, also those without results. Empty with one
    name."""
    halves = (greedy, sampled)
    found = sorted(set(names))
    if len(found) < 2:
        return {}
    return {
        name or UNTAGGED: figures_of(*([r for r in half if getattr(r, group) == name] for half in halves))
        for name in found
    }


def describe(figures: TagFigures) -> str:
    """The measured figures as text, with the number of rollouts."""
    return ", ".join(_parts(figures)) or "nothing could be measured"


def accuracy(rollouts: Sequence[EvalRollout]) -> float | None:
    return mean([float(r.reward >= SOLVED) for r in rollouts if r.reward is not None])


def reward(rollouts: Sequence[EvalRollout]) -> float | None:
    return mean([r.reward for r in rollouts if r.reward is not None])


def reverse_kl(rollouts: Sequence[EvalRollout]) -> float | None:
    total, n = 0.0, 0
    for r in (r for r in rollouts if len(r.teacher_KN)):
        scored_N = ~(r.teacher_KN == NOT_SCORED).any(axis=0)
        total += float(np.sum((r.behaviour_N - r.teacher_KN.mean(axis=0))[scored_N]))
        n += int(scored_N.sum())
    return ratio(total, n)


def at_k(rollouts: Sequence[EvalRollout]) -> dict[str, float]:
    """avg_at_N and pass_at_K of N answers to each prompt, for K = 2, 4, 8, ... below N, and N itself.

    avg_at_N is the mean over prompts of the share of solved answers, that is, pass@1. pass_at_K is the unbiased
    estimate of Chen et al. 2021 (arXiv 2107.03374): the mean over prompts of 1 - C(n - c, K) / C(n, K), where c of n
    answers are solved. n is the number of answers with a reward; a prompt with fewer than K of them is left out. N is
    the largest n. Empty if N is below 2."""
    judged: dict[int, list[bool]] = {}
    for rollout in rollouts:
        if rollout.reward is not None:
            judged.setdefault(rollout.task_id, []).append(rollout.reward >= SOLVED)
    counts = [(len(answers), sum(answers)) for answers in judged.values()]
    most = max((n for n, _ in counts), default=0)
    if most < 2:
        return {}
    found = {f"avg_at_{most}": sum(c / n for n, c in counts) / len(counts)}
    for k in [*(2**i for i in range(1, most.bit_length()) if 2**i < most), most]:
        passed = [1.0 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts if n >= k]
        found[f"pass_at_{k}"] = sum(passed) / len(passed)
    return found


def diversity(rollouts: Sequence[EvalRollout]) -> dict[str, float]:
    """How different the answers to one prompt are: distinct_n for n = 1, 2 and 4 (Li et al. 2016, arXiv 1510.03055),
    the number of different n-grams of tokens in all answers to a prompt, divided by that of all n-grams; and distinct,
    the share of different answers. Each is the mean over the prompts with several answers, for distinct_n of those with
    an n-gram. N equal answers without repetition have 1 / N. Empty if no prompt has several answers."""
    answers: dict[int, list[tuple[int, ...]]] = {}
    for rollout in rollouts:
        answers.setdefault(rollout.task_id, []).append(tuple(rollout.written_N.tolist()))
    several = [own for own in answers.values() if len(own) > 1]
    shares: dict[str, list[float]] = {"distinct": [len(set(own)) / len(own) for own in several]}
    for n in (1, 2, 4):
        grams = [[ids[i : i + n] for ids in own for i in range(len(ids) - n + 1)] for own in several]
        shares[f"distinct_{n}"] = [len(set(own)) / len(own) for own in grams if own]
    return {name: sum(values) / len(values) for name, values in shares.items() if values}


def mean(values: Sequence[float]) -> float | None:
    return ratio(sum(values), len(values))


def ratio(total: float, n: int) -> float | None:
    return total / n if n else None


def figures_of(greedy: Sequence[EvalRollout], sampled: Sequence[EvalRollout]) -> TagFigures:
    return TagFigures(
        accuracy_greedy=accuracy(greedy),
        accuracy_sampled=accuracy(sampled),
        reward_greedy=reward(greedy),
        reward_sampled=reward(sampled),
        reverse_kl=reverse_kl(sampled),
        n_greedy=len(greedy),
        n_sampled=len(sampled),
        at_k=at_k(sampled) | diversity(sampled),
    )


def _parts(figures: TagFigures) -> Iterator[str]:
    if figures.accuracy_greedy is not None:
        yield f"greedy {figures.accuracy_greedy:.3f} (of {figures.n_greedy})"
    if figures.accuracy_sampled is not None:
        yield f"sampled {figures.accuracy_sampled:.3f} (of {figures.n_sampled})"
    yield from (f"{name.replace('_at_', '@')} {value:.3f}" for name, value in figures.at_k.items())
    if figures.reverse_kl is not None:
        yield f"reverse KL {figures.reverse_kl:.3f}"
