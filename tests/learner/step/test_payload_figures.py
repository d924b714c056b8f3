"""Figures of a step about how far student and teachers agree: against loops in Python over the tokens, the teachers and
the vocabulary."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from stillhouse.learner.batch import TrainItem
from tests.learner.conftest import tiny_student
from tests.learner.step.payload_batches import SETS, VOCAB, config_of, items_with, teacher_logprobs, trainer_of

OF_SETS = ("set_teacher_mass", "set_student_mass", "set_overlap")


def _figures(model: PreTrainedModel, items: list[TrainItem], **fields: Any) -> dict[str, float]:
    return trainer_of(model, config_of(**{"pack_tokens": 12, **fields})).step(items).as_dict()


@torch.no_grad()
def _slow(model: PreTrainedModel, items: list[TrainItem], k: int) -> dict[str, float]:
    terms: dict[str, list[float]] = {name: [] for name in (*OF_SETS, "excess_share", "deficit_share")}
    for train_item in items:
        ids = train_item.tokens_L.tolist()
        logits_LV = model(input_ids=torch.tensor([ids])).logits[0]
        for t in np.flatnonzero(train_item.train_mask_L).tolist():
            s = float(torch.log_softmax(logits_LV[t - 1], 0)[ids[t]])
            p = torch.softmax(logits_LV[t - 1][:VOCAB], 0).tolist()
            for m, name in enumerate(train_item.item.teachers):
                q: list[float] = np.exp(teacher_logprobs(train_item, name)[t]).tolist()
                sent = np.argsort(-np.array(q))[:k].tolist()
                likeliest = np.argsort(-np.array(p))[: min(k, 16)].tolist()
                terms["set_teacher_mass"].append(sum(q[v] for v in sent))
                terms["set_student_mass"].append(sum(p[v] for v in sent))
                terms["set_overlap"].append(sum(v in sent for v in likeliest) / len(likeliest))
                gap = s - float(train_item.teacher_ML[m, t])
                terms["excess_share"].append(float(math.exp(gap) > 2.0))
                terms["deficit_share"].append(float(math.exp(gap) < 0.5))
    return {name: sum(values) / len(values) for name, values in terms.items()}


@pytest.mark.parametrize(
    ("k", "fields"),
    [
        *((k, {"divergence": "reverse_kl"}) for k in (1, 18, VOCAB)),
        (6, {"divergence": "multi_sample"}),
        (6, {"divergence": ("k1", {"baseline": "expected_cost"})}),
        (6, {"divergence": ("k1", {"baseline": "expected_cost"}), "importance": "sequence"}),
        (6, {"divergence": "reverse_kl", "updates_per_batch": 2}),
    ],
    ids=str,
)
def test_figures_of_sets_equal_the_loop(k: int, fields: dict[str, Any]) -> None:
    items = items_with(SETS, k=k)
    got = _figures(tiny_student(dtype=torch.float64), items, **fields, logprob_chunk_tokens=5)
    expected = _slow(tiny_student("eager", torch.float64), items, k)
    assert 0.0 < expected["excess_share"] < 1.0 and 0.0 < expected["deficit_share"] < 1.0
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, abs=2e-4), name  # payloads of 16 bits


def test_a_token_is_in_excess_or_deficit_beyond_a_factor_of_two() -> None:
    """Teachers at chosen distances from the student, on both sides of log 2. Tokens without a score do not count."""
    model, items = tiny_student("eager", torch.float64), items_with(SETS)
    gaps, n_scores, made = (0.6, 0.8, -0.6, -0.8, 0.0, 2.0, -0.68), 0, list[TrainItem]()
    counts = {"excess_share": 0, "deficit_share": 0}
    for train_item in items:
        with torch.no_grad():
            logits_LV = model(input_ids=torch.from_numpy(train_item.tokens_L).long()[None]).logits[0]
        teacher_ML = np.zeros_like(train_item.teacher_ML)
        for t in np.flatnonzero(train_item.train_mask_L).tolist():
            s = float(torch.log_softmax(logits_LV[t - 1], 0)[int(train_item.tokens_L[t])])
            for m in range(len(train_item.item.teachers)):
                gap = gaps[n_scores % len(gaps)]
                teacher_ML[m, t] = s - gap
                counts["excess_share"] += gap in (0.8, 2.0)
                counts["deficit_share"] += gap == -0.8
                n_scores += 1
        made.append(replace(train_item, teacher_ML=teacher_ML))
    got = _figures(tiny_student(dtype=torch.float64), made)
    assert n_scores > 2 * len(gaps)
    for name, count in counts.items():
        assert got[name] == pytest.approx(count / n_scores), name
