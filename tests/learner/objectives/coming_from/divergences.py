"""Divergences between distributions as other trainers compute them, written anew from reading their source
(see `formulas`)."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.learner.objectives.coming_from.batch import Batch, Given


def generalized_jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Summed over tokens. Log-probs over the same buckets; beta is the teacher's weight in the mixture."""
    p, q = student.exp(), teacher.exp()
    if beta == 0:
        return (q * (teacher - student)).sum()
    if beta == 1:
        return (p * (student - teacher)).sum()
    mixture = ((1 - beta) * p + beta * q).log()
    return beta * (q * (teacher - mixture)).sum() + (1 - beta) * (p * (student - mixture)).sum()


def trl_distillation(given: Given, batch: Batch) -> Tensor:
    """DistillationTrainer, GKDTrainer and GOLDTrainer: generalized_jsd_loss over the whole vocabulary, divided by the
    completion tokens."""
    beta = given.pop("beta")
    total = torch.zeros((), dtype=torch.float64)
    for rollout in batch.rollouts:
        total = total + generalized_jsd(rollout.z, rollout.t, beta)
    return total / batch.n_tokens


def trl_async_distillation(given: Given, batch: Batch) -> Tensor:
    """AsyncDistillationTrainer at beta = 0: the teacher's k likeliest tokens and one bucket for all others."""
    k, beta = given.pop("teacher_top_k"), given.pop("beta")
    assert given.pop("add_tail_bucket")
    total = torch.zeros((), dtype=torch.float64)
    for rollout in batch.rollouts:
        top = rollout.t.topk(k, dim=1)
        sides = (rollout.z.gather(1, top.indices), top.values)
        student, teacher = (torch.cat([x, (1 - x.exp().sum(1, keepdim=True)).log()], dim=1) for x in sides)
        total = total + generalized_jsd(student, teacher, beta)
    return total / batch.n_tokens


def nemo_distillation(given: Given, batch: Batch) -> Tensor:
    """DistillationLossFn, zero_outside_topk = false: both sides are normalised over the teacher's k likeliest."""
    kind, weight, k = given.pop("kl_type"), given.pop("mixed_kl_weight", 0.0), given.pop("topk_logits_k")
    assert not given.pop("zero_outside_topk")
    k = batch.teacher_NV.shape[1] if k == "vocabulary" else k
    total = torch.zeros((), dtype=torch.float64)
    for rollout in batch.rollouts:
        ids = rollout.t.topk(k, dim=1).indices
        student, teacher = (side.gather(1, ids).log_softmax(1) for side in (rollout.z, rollout.t))
        forward, reverse = generalized_jsd(student, teacher, 0), generalized_jsd(student, teacher, 1)
        shares: dict[str, float] = {"forward": 1.0, "reverse": 0.0, "mixed": weight}
        share = shares[kind]
        total = total + share * forward + (1 - share) * reverse
    return total / batch.n_tokens


def roll_distillation(given: Given, batch: Batch) -> Tensor:
    """VariousDivergence, with nothing of the cross-entropy."""
    assert given.pop("distill_loss_weight") == given.pop("kd_temperature") == 1.0
    beta = {"forward_kl": 0, "reverse_kl": 1, "js_divergence": 0.5}[given.pop("kd_objective")]
    total = torch.zeros((), dtype=torch.float64)
    for rollout in batch.rollouts:
        total = total + generalized_jsd(rollout.z, rollout.t, beta)
    return total / batch.n_tokens
