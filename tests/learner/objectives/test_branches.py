"""On a rollout that branches, what depends on other tokens of it follows the path that the token was read on: against
recursions over parents, on random trees, in float64. (`context_cap`: tests/learner/step/test_teacher_payloads.py.)"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import msgspec
import numpy as np
import pytest
import torch

from stillhouse.learner.batch import TrainItem, pack
from stillhouse.learner.objectives.batch_terms import batch_terms
from stillhouse.learner.objectives.importance import TokenRatios, context_weights
from stillhouse.learner.objectives.losses import make_objective
from stillhouse.learner.step.train_step import Trainer
from stillhouse.protocol.messages import TurnReward
from tests.learner.conftest import tiny_student
from tests.learner.objectives.test_turns import path_before, rollout, slow_turns
from tests.learner.settings import learner_config, objective_config
from tests.learner.step.gradients import assert_close, of_loss, step_gradients

SEEDS = range(12)


def tree(seed: int, name: str = "a") -> TrainItem:
    """A few calls of an agent: each goes on behind any token of what there is, or begins anew. Some responses have been
    trained before, and one in three turns has a reward."""
    random = Random(f"{seed} {name}")
    sampled, branches, turns = (
        [0, *(random.randrange(2) for _ in range(3))],
        list[tuple[int, int]](),
        list[TurnReward](),
    )
    for _ in range(random.randrange(2, 7)):
        start, response = len(sampled), [random.random() < 0.8 for _ in range(random.randrange(1, 5))]
        if random.random() < 0.8:
            follows = random.randrange(start)
            branches.append((start, follows))
            response = response if follows else [0, *response]
        sampled += response
        if random.random() < 0.3 and sampled[-1]:
            turns.append(TurnReward(len(sampled), random.choice((-1.0, 0.5, 2.0))))
    already = [t for t in range(len(sampled)) if random.random() < 0.15]
    made = rollout(name, sampled, branches=branches, already=already, reward=random.choice((0.0, 1.0, None)))
    parts = tuple(turns) if made.item.reward is not None else ()
    return replace(made, item=msgspec.structs.replace(made.item, turn_rewards=parts))


def trained(train_item: TrainItem) -> list[int]:
    return np.flatnonzero(train_item.train_mask_L).tolist()


def parent(train_item: TrainItem, t: int) -> int | None:
    """The last trained token before token `t` on its path."""
    return next((u for u in reversed(path_before(train_item, t)) if train_item.train_mask_L[u]), None)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_weight_of_a_context_is_that_of_the_tokens_in_it(seed: int) -> None:
    """Also where other rollouts stand beside it in the microbatch, in any order."""
    items = [tree(seed, name) for name in "abc"]
    (microbatch,) = pack([one for one in items if one.n_trained], 10_000).microbatches
    random = np.random.default_rng(seed)
    log_ratio_N, zeros_N = torch.tensor(random.normal(0.0, 0.3, len(microbatch.token_N))), torch.zeros(1)
    ratios = TokenRatios(log_ratio_N, zeros_N, zeros_N, zeros_N.long(), 1)
    got = context_weights(ratios, torch.from_numpy(microbatch.before_N), 1.2).tolist()
    places = iter(range(len(got)))
    for i in dict.fromkeys(microbatch.item_N.tolist()):
        one = [made for made in items if made.n_trained][i]
        own = {t: float(log_ratio_N[next(places)]) for t in trained(one)}

        def before(t: int | None, one: TrainItem = one, own: dict[int, float] = own) -> float:
            return 0.0 if t is None else own[t] + before(parent(one, t), one, own)

        expected = [min(float(np.exp(before(parent(one, t)))), 1.2) for t in own]
        first = next(n for n, of in enumerate(microbatch.item_N) if of == i)
        assert got[first : first + len(own)] == pytest.approx(expected, rel=1e-12)


def slow_prefix_weights(train_item: TrainItem, gain: float) -> dict[int, float]:
    distance = {
        t: abs(sum(float(train_item.behaviour_L[t]) - float(q) for q in train_item.teacher_ML[:, t]))
        for t in trained(train_item)
    }
    before = {t: sum(distance.get(u, 0.0) for u in path_before(train_item, t)) for t in distance}
    return {t: 1.0 + gain * (1.0 - before[t] / sum(distance.values())) for t in distance}


def slow_gae(train_item: TrainItem, value: dict[int, float], discount: float, decay: float) -> dict[int, float]:
    """By token. What follows a token is the mean of what follows it on each branch."""
    ends = {part.end - 1: part.reward for part in train_item.item.turn_rewards}
    rest = (train_item.item.reward or 0.0) - sum(ends.values())
    offsets = trained(train_item)
    children = {t: [u for u in offsets if parent(train_item, u) == t] for t in offsets}
    paid = {t: 0.0 if children[t] else rest for t in offsets}
    sampled = [t for span in train_item.item.spans for t in range(span.start, span.end)]
    written = replace(train_item, train_mask_L=np.isin(np.arange(train_item.item.end), sampled))
    begins = {t: begin for t, (begin, _) in slow_turns(written).items()}
    for last, reward in ends.items():
        begin = begins[last]
        own = [t for t in offsets if begins[t] == begin]
        before = [u for u in path_before(train_item, begin) if u in offsets]
        behind = [u for u in offsets if begin in path_before(train_item, u)]
        for at in own[-1:] or before[-1:] or behind[:1]:
            paid[at] += reward

    def advantage(t: int) -> float:
        mean = [
            statistics.fmean(column) for column in zip(*((value[u], advantage(u)) for u in children[t]), strict=True)
        ]
        following, later = mean or (0.0, 0.0)
        return paid[t] + discount * following - value[t] + discount * decay * later

    return {t: advantage(t) for t in offsets}


@pytest.mark.parametrize("seed", SEEDS)
def test_advantages_of_tokens_come_from_what_follows_them_on_their_own_branches(seed: int) -> None:
    items = [tree(seed, name) for name in "abcd"]
    n = sum(one.n_trained for one in items)
    value_N = torch.tensor(np.random.default_rng(seed).normal(size=n))
    objective = make_objective(objective_config(advantage=("gae", {"discount": 0.9, "decay": 0.8})), max_new_tokens=99)
    got = batch_terms(items, objective, values=lambda: value_N)
    assert got.values is not None
    expected: list[float] = []
    for one in items:
        value = {t: float(value_N[len(expected) + n]) for n, t in enumerate(trained(one))}
        of_tokens = slow_gae(one, value, 0.9, 0.8)
        expected += [of_tokens[t] + value[t] for t in of_tokens]
    judged_N = got.values.judged_N
    assert got.values.return_N[judged_N].tolist() == pytest.approx(torch.tensor(expected)[judged_N].tolist())


@pytest.mark.parametrize(
    "fields", [{"prefix_gain": 0.7}, {"advantage": "gae", "coef": 0.0}], ids=lambda of: next(iter(of))
)
def test_a_step_s_gradient_is_the_sum_of_single_tokens_by_these_weights(fields: dict[str, object]) -> None:
    """On plain forward passes of each token's path; the values are 0 before the first step."""
    items = [one for one in (tree(seed) for seed in (3, 5, 8)) if one.n_trained]
    config = learner_config(max_grad_norm=0.0, warmup_steps=0, importance="none", pack_tokens=9, **fields)
    got = step_gradients(Trainer(tiny_student(dtype=torch.float64), config, total_steps=9), items)
    model, loss = tiny_student("eager", torch.float64), torch.zeros((), dtype=torch.float64)
    factors = factors_of(items, by_reward="advantage" in fields)
    for one, factor in zip(items, factors, strict=True):
        ids_L = torch.from_numpy(one.tokens_L).long()
        for t in trained(one):
            s = torch.log_softmax(model(input_ids=ids_L[None, path_before(one, t)]).logits[0, -1], dim=-1)[ids_L[t]]
            cost = factor[t] * (
                1.0 if "advantage" in fields else -sum(s.item() - float(q) for q in one.teacher_ML[:, t])
            )
            loss = loss - cost * s / sum(each.n_trained for each in items)
    assert_close(got, of_loss(model, loss))


def factors_of(items: Sequence[TrainItem], *, by_reward: bool) -> list[dict[int, float]]:
    if not by_reward:
        return [slow_prefix_weights(one, 0.7) for one in items]
    each = [slow_gae(one, dict.fromkeys(trained(one), 0.0), 1.0, 0.95) for one in items]
    judged = [a for of, one in zip(each, items, strict=True) if one.item.reward is not None for a in of.values()]
    mean, spread = statistics.fmean(judged), statistics.pstdev(judged) + 1e-6
    return [
        {t: (a - mean) / spread if one.item.reward is not None else 0.0 for t, a in of.items()}
        for of, one in zip(each, items, strict=True)
    ]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", ["sum", "mean"])
def test_a_discounted_cost_is_that_of_all_that_follows_on_any_branch(seed: int, how: str) -> None:
    items = [tree(seed, name) for name in "abc"]
    (microbatch,) = pack([one for one in items if one.n_trained], 10_000).microbatches
    cost_N = torch.tensor(np.random.default_rng(seed).normal(size=len(microbatch.token_N)))
    objective = make_objective(objective_config(cost_discount=0.8, cost_return=how), max_new_tokens=99)
    got = objective.returns(cost_N, torch.from_numpy(microbatch.before_N)).tolist()
    places = iter(range(len(got)))
    for i in dict.fromkeys(microbatch.item_N.tolist()):
        one = [made for made in items if made.n_trained][i]
        place = {t: next(places) for t in trained(one)}
        for t, at in place.items():
            total = weights = 0.0
            for u, other in place.items():
                distance, back = 0, u
                while back != t and (before := parent(one, back)) is not None:
                    distance, back = distance + 1, before
                if back == t:
                    total, weights = total + 0.8**distance * float(cost_N[other]), weights + 0.8**distance
            assert got[at] == pytest.approx(total / (weights if how == "mean" else 1.0), rel=1e-9, abs=1e-12)
