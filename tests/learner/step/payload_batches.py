"""Batches with what teachers send beside log-probs (top-k sets, hidden states), as the buffer hands them on, and the
loss and figures of a step on them, row by row in float64: from the definitions, with a plain model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stillhouse.learner.batch import TrainItem
from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.objectives.options import Clip
from stillhouse.learner.prompts.config import TaskConfig
from stillhouse.learner.step.teacher_heads import HeadOf
from stillhouse.learner.step.train_step import Trainer
from stillhouse.models.logprobs import LmHead
from stillhouse.protocol.messages import Branch
from stillhouse.protocol.payloads.hidden import encode_hidden
from stillhouse.protocol.topk_codec import encode_top_k
from tests.learner.conftest import make_item, remade
from tests.learner.objectives.test_turns import path_before
from tests.learner.settings import learner_config
from tests.learner.step.gradients import PLAIN, of_loss

VOCAB: Final = 20
"""Tokens; the tiny student has 23 rows, the teachers' heads 25 and 21."""
POOLS: Final = ("default", "math", "style")
SETS: Final[dict[str, str]] = dict.fromkeys(POOLS, "sets")
STATES: Final[dict[str, str]] = dict.fromkeys(POOLS, "states")


def config_of(**fields: Any) -> LearnerConfig:
    routes = {pool: (pool,) if pool != "default" else () for pool in POOLS}
    return learner_config(tasks=TaskConfig(routes=routes), **{**PLAIN, **fields})


def teacher_logprobs(train_item: TrainItem, pool: str) -> npt.NDArray[np.float64]:
    """Of a teacher that sends sets, at every position: [L, V]."""
    random = np.random.default_rng(sum(f"{pool} {train_item.item.rollout_id}".encode()))
    logits_LV = random.normal(0.0, 2.0, (train_item.item.end, VOCAB))
    return logits_LV - np.logaddexp.reduce(logits_LV, axis=1, keepdims=True)


def head_of(pool: str, dtype: torch.dtype = torch.float64) -> LmHead:
    """Of different shapes; one has a bias, a scale and a softcap. Padding rows are likely, and must not count."""
    generator = torch.Generator().manual_seed(len(pool))
    rows, size = (25, 6) if pool == "math" else (21, 4)
    weight_VH = torch.randn(rows, size, generator=generator, dtype=torch.float64).to(dtype)
    weight_VH[VOCAB:] *= 3.0
    if pool != "math":
        return LmHead(weight_VH)
    return LmHead(weight_VH, torch.randn(rows, generator=generator, dtype=torch.float64).to(dtype), 0.7, 5.0)


def states_of(train_item: TrainItem, pool: str) -> Tensor:
    """[L, H] bfloat16: at token t the state that predicts it."""
    seed = sum(f"{pool} {train_item.item.rollout_id}".encode())
    size = head_of(pool).weight_VH.shape[1]
    return torch.randn(train_item.item.end, size, generator=torch.Generator().manual_seed(seed)).bfloat16()


def dense_q(train_item: TrainItem, pool: str) -> Tensor:
    """[L, V] log-probs of a teacher that sends states, written out."""
    head, states_LH = head_of(pool), states_of(train_item, pool).double()
    z_LV = states_LH @ head.weight_VH.T
    if head.bias_V is not None:
        z_LV = z_LV + head.bias_V
    z_LV = z_LV * head.scale
    if head.softcap is not None:
        z_LV = head.softcap * torch.tanh(z_LV / head.softcap)
    z_LV = z_LV[:, :VOCAB]
    return z_LV - z_LV.exp().sum(dim=1, keepdim=True).log()


def with_payloads(
    train_item: TrainItem,
    payloads: Mapping[str, str],
    *,
    k: int = VOCAB,
    cut: int | None = None,
    shift: int = 0,
    head: int = 0,
) -> TrainItem:
    """`payloads`: pool -> "sets" (of `k` tokens) or "states"; others send neither. One for the range with tokens to
    train, or two, cut at `cut`. `shift`: the fault of sending the states of so many positions later. Pools that send
    states have the scores that these give."""
    trained = np.flatnonzero(train_item.train_mask_L)
    if not len(trained):
        return train_item
    first, last = int(trained[0]), int(trained[-1]) + 1
    edges = [first, last] if cut is None or not first < cut < last else [first, cut, last]
    sent: list[tuple[int, int, int, bytes]] = []
    scores_ML = train_item.teacher_ML.copy()
    ids_L1 = torch.from_numpy(train_item.tokens_L).long()[:, None]
    for (start, end), (m, pool) in itertools.product(itertools.pairwise(edges), enumerate(train_item.item.teachers)):
        if payloads.get(pool) == "sets":
            logprobs_TV = teacher_logprobs(train_item, pool)[start:end]
            ids_TK = np.argsort(-logprobs_TV, axis=1)[:, :k]
            logprobs_TK = np.take_along_axis(logprobs_TV, ids_TK, 1)
            body = encode_top_k(ids_TK, logprobs_TK, vocab_size=VOCAB, mass=1.0, max_k=k, logprob_bits=16)
        elif payloads.get(pool) == "states":
            states_TH = states_of(train_item, pool).roll(-shift, 0)[start:end]
            body = encode_hidden(states_TH.view(torch.int16).numpy().view(np.uint16), head)
            scores_ML[m] = dense_q(train_item, pool).gather(1, ids_L1)[:, 0].float().numpy()
        else:
            continue
        sent.append((m, start, end, body))
    return remade(train_item, sent, teacher_ML=scores_ML)


def with_sets(train_item: TrainItem, **how: Any) -> TrainItem:
    return with_payloads(train_item, dict.fromkeys(train_item.item.teachers, "sets"), **how)


def with_states(train_item: TrainItem, **how: Any) -> TrainItem:
    return with_payloads(train_item, dict.fromkeys(train_item.item.teachers, "states"), **how)


def items_with(payloads: Mapping[str, str], *, k: int = VOCAB, forked: bool = False) -> list[TrainItem]:
    """Rollouts of one pool, of two or three at once, of none, and one with nothing to train. `forked`: one more, which
    branches."""
    made = [
        make_item("a", [0, 0, 1, 1, 1], vocab=VOCAB, task_id=7, reward=1.0),
        make_item("b", [0, 1, 1, 0, 0, 1, 0], teachers=("math", "style"), vocab=VOCAB, task_id=7, reward=0.0),
        make_item("c", [0, 0, 0], vocab=VOCAB, task_id=7),
        make_item("d", [0] * 6 + [1] * 9, teachers=("style",), vocab=VOCAB, task_id=9, reward=0.5),
        make_item("e", [0, 1, 1], teachers=(), vocab=VOCAB, task_id=9, reward=-1.0),
        make_item("g", [0, 1, 0, 1], teachers=POOLS, vocab=VOCAB, task_id=9, reward=1.0),
    ]
    if forked:
        plain = make_item("f", [0, 1, 1, 1, 0, 1, 1, 1, 1, 0, 1], vocab=VOCAB, task_id=9, reward=0.25)
        made.append(remade(plain, branches=(Branch(4, 2), Branch(7, 4), Branch(9, 0))))
    return [with_payloads(one, payloads, k=k, cut=3) for one in made]


def trainer_of(model: PreTrainedModel, config: LearnerConfig, heads: HeadOf = head_of) -> Trainer:
    return Trainer(model, config, total_steps=10, vocab_tokens=VOCAB, head_of=heads)


def between(name: str, options: Any, p_B: Tensor, q_B: Tensor) -> Tensor:
    """A divergence between distributions over the same buckets."""
    p_B, q_B = (one_B ** (1 / options.temperature) for one_B in (p_B, q_B))
    p_B, q_B = p_B / p_B.sum(), q_B / q_B.sum()
    reverse, forward = (p_B * (p_B / q_B).log()).sum(), (q_B * (q_B / p_B).log()).sum()
    if name == "jsd":
        m_B = options.beta * q_B + (1 - options.beta) * p_B
        return options.beta * (q_B * (q_B / m_B).log()).sum() + (1 - options.beta) * (p_B * (p_B / m_B).log()).sum()
    weight = {"reverse_kl": 0.0, "forward_kl": 1.0}.get(name, getattr(options, "weight", 0.5))
    return weight * forward + (1 - weight) * reverse


@dataclass
class Slow:
    """`gradients` is what a step should have. Rewards: GRPO without std. Weights: truncated, of tokens or of whole
    rollouts."""

    model: PreTrainedModel
    config: LearnerConfig
    payloads: Mapping[str, str]
    k: int = VOCAB
    told: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Pool -> its divergence, or its cost without a baseline, at each token that it scored."""

    def gradients(self, items: Sequence[TrainItem]) -> dict[str, Tensor]:
        loss = torch.zeros((), dtype=torch.float64)
        n_tokens, n_rollouts = sum(one.n_trained for one in items), sum(one.n_trained > 0 for one in items)
        for one in items:
            judged = [each.item.reward for each in items if each.item.task_id == one.item.task_id]
            known = [reward for reward in judged if reward is not None]
            rewarded = self.config.objective.advantage.name == "grpo" and one.item.reward is not None
            by_token = self.config.objective.aggregation == "token_mean"
            divisor = n_tokens if by_token else n_rollouts * max(1, one.n_trained)
            from_rewards = one.item.reward - sum(known) / len(known) if rewarded else 0.0  # pyright: ignore
            loss = loss + self._rollout(one, from_rewards) / divisor
        return of_loss(self.model, loss)

    def _rollout(self, one: TrainItem, from_rewards: float) -> Tensor:
        trained = np.flatnonzero(one.train_mask_L).tolist()
        ids_L, objective = torch.from_numpy(one.tokens_L).long(), self.config.objective
        paths = {t: path_before(one, t) for t in trained}
        if one.item.branches:
            logits = {t: self.model(input_ids=ids_L[None, path]).logits[0, -1] for t, path in paths.items()}
        else:
            logits_LV = self.model(input_ids=ids_L[None]).logits[0]
            logits = {t: logits_LV[t - 1] for t in trained}
        of_tokens = {t: torch.log_softmax(logits[t], dim=-1)[ids_L[t]] for t in trained}
        logs = {t: s.item() - float(one.behaviour_L[t]) for t, s in of_tokens.items()}
        loss = torch.zeros((), dtype=torch.float64)
        for t, s in of_tokens.items():
            advantage, p_V = from_rewards, torch.softmax(logits[t][:VOCAB], dim=-1)
            for m, pool in enumerate(one.item.teachers):
                coef = objective.teacher_coefs.get(pool, objective.coef)
                options: Any = objective.teacher_divergences.get(pool, objective.divergence)
                if coef == 0.0 or options.name in ("k1", "k2", "k3"):
                    advantage -= coef * self._cost(one, m, t, s.item(), p_V.detach(), options)
                    continue
                divergence = between(options.name, options, *self._buckets(one, pool, t, p_V))
                before, cap = sum(logs.get(u, 0.0) for u in paths[t]), options.context_cap
                loss = loss + coef * (min(math.exp(before), cap) if cap else 1.0) * divergence
                self.told.setdefault(pool, []).append(divergence.item())
            importance: Any = objective.importance
            log_ratio = sum(logs.values()) if importance.name == "sequence" else logs[t]
            loss = loss - min(math.exp(log_ratio), importance.cap) * advantage * s
        return loss

    def _buckets(self, one: TrainItem, pool: str, t: int, p_V: Tensor) -> tuple[Tensor, Tensor]:
        """What student and teacher are compared on: the whole vocabulary, or the set and one bucket for the rest."""
        if self.payloads[pool] == "states":
            return p_V, dense_q(one, pool)[t].exp()
        q_V = torch.from_numpy(np.exp(teacher_logprobs(one, pool)[t]))
        if self.k == VOCAB:
            return p_V, q_V
        top = torch.argsort(-q_V)[: self.k]
        return torch.cat([p_V[top], (1 - p_V[top].sum())[None]]), torch.cat([q_V[top], (1 - q_V[top].sum())[None]])

    def _cost(self, one: TrainItem, m: int, t: int, s: float, p_V: Tensor, options: Any) -> float:
        pool, q, transform = one.item.teachers[m], float(one.teacher_ML[m, t]), self.config.objective.cost_transform
        limit = transform.limit if isinstance(transform, Clip) else math.inf

        def cost(s: float, q: float) -> float:
            return max(-limit, min(limit, 1 - math.exp(q - s) if options.name == "k3" else s - q))

        of_token = cost(float(one.behaviour_L[t]) if getattr(options, "kl_student", "") == "behaviour" else s, q)
        self.told.setdefault(pool, []).append(of_token)
        if getattr(options, "baseline", "none") == "none":
            return of_token
        p_B, q_B = self._buckets(one, pool, t, p_V)
        logs = ((p, math.log(p), math.log(q)) for p, q in zip(p_B.tolist(), q_B.tolist(), strict=True))
        return of_token - sum(p * cost(log_p, log_q) for p, log_p, log_q in logs)
