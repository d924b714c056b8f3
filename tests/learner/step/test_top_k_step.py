"""Divergences between distributions through a whole optimizer step: from teachers' logits, over payloads as they come
off the wire, to the gradient of the parameters, against a plain model and the whole vocabulary in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stillhouse.learner.batch import TrainItem, UnreadableScores, train_items
from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.objectives.config import OfflineConfig
from stillhouse.learner.objectives.options import Capped, Distributions, Jsd, Mixed
from stillhouse.learner.objectives.registry import DIVERGENCE
from stillhouse.learner.prompts.config import TaskConfig
from stillhouse.learner.step.finite_step import finite_step
from stillhouse.learner.step.train_step import Trainer
from stillhouse.protocol.messages import Branch, TopKPiece
from stillhouse.protocol.topk_codec import encode_top_k
from tests.learner.objectives.test_turns import path_before
from tests.learner.settings import learner_config
from tests.learner.step.gradients import step_gradients

Make = Callable[..., TrainItem]
Student = Callable[..., PreTrainedModel]
Floats = npt.NDArray[np.float64]
VOCAB = 20
"""Tokens; the tiny student has 23 rows."""
PLAIN: dict[str, Any] = {"max_grad_norm": 0.0, "warmup_steps": 0, "schedule": "constant"}
ROUTES = {"default": (), "math": ("math",), "style": ("style",)}
NAMES = ("reverse_kl", "forward_kl", "mixed", "jsd")


def _config(**fields: Any) -> LearnerConfig:
    return learner_config(tasks=TaskConfig(routes=ROUTES), **{**PLAIN, **fields})


def teacher_logprobs(train_item: TrainItem, name: str) -> Floats:
    """A teacher's log-probs [L, V] at every position of an item."""
    random = np.random.default_rng(sum(f"{name} {train_item.item.rollout_id}".encode()))
    logits_LV = random.normal(0.0, 2.0, (train_item.item.end, VOCAB))
    return logits_LV - np.logaddexp.reduce(logits_LV, axis=1, keepdims=True)


def edges_of(train_item: TrainItem, cut: int | None) -> list[int]:
    """Borders of the payloads: the range with tokens to train, cut in two at `cut`. Empty without such tokens."""
    trained = np.flatnonzero(train_item.train_mask_L)
    if not len(trained):
        return []
    first, last = int(trained[0]), int(trained[-1]) + 1
    return [first, last] if cut is None or not first < cut < last else [first, cut, last]


def with_sets(train_item: TrainItem, *, k: int = VOCAB, cut: int | None = None) -> TrainItem:
    """As the buffer hands it on: a payload per teacher and segment (cut in two at `cut`), for the range with tokens to
    train; masked tokens inside of the range have sets too."""
    edges = edges_of(train_item, cut)
    if not edges:
        return train_item
    pieces: list[TopKPiece] = []
    payloads: list[bytes] = []
    for start, end in itertools.pairwise(edges):
        for m, name in enumerate(train_item.item.teachers):
            logprobs_TV = teacher_logprobs(train_item, name)[start:end]
            ids_TK = np.argsort(-logprobs_TV, axis=1)[:, :k]
            logprobs_TK = np.take_along_axis(logprobs_TV, ids_TK, 1)
            payloads.append(encode_top_k(ids_TK, logprobs_TK, vocab_size=VOCAB, mass=1.0, max_k=k, logprob_bits=16))
            pieces.append(TopKPiece(m, start, end, len(payloads[-1])))
    item = msgspec.structs.replace(train_item.item, top_k=tuple(pieces))
    frames = [
        train_item.tokens_L,
        train_item.behaviour_L,
        train_item.train_mask_L.astype(np.uint8),
        train_item.teacher_ML,
    ]
    if pieces:
        frames.append(np.frombuffer(b"".join(payloads), np.uint8))
    return train_items([item], frames)[0]


def items_with_sets(make_item: Make, *, k: int = VOCAB, forked: bool = False) -> list[TrainItem]:
    """`forked`: one of them branches."""
    made = [
        make_item("a", [0, 0, 1, 1, 1], vocab=VOCAB, task_id=7, reward=1.0),
        make_item("b", [0, 1, 1, 0, 0, 1, 0], teachers=("math", "style"), vocab=VOCAB, task_id=7, reward=0.0),
        make_item("c", [0, 0, 0], vocab=VOCAB, task_id=7),
        make_item("d", [0] * 6 + [1] * 9, teachers=("style",), vocab=VOCAB, task_id=9, reward=0.5),
        make_item("e", [0, 1, 1], teachers=(), vocab=VOCAB, task_id=9, reward=-1.0),
    ]
    if forked:
        item = make_item("f", [0, 1, 1, 1, 0, 1, 1, 1, 1, 0, 1], vocab=VOCAB, task_id=9, reward=0.25)
        branches = (Branch(4, 2), Branch(7, 4), Branch(9, 0))
        made.append(replace(item, item=msgspec.structs.replace(item.item, branches=branches)))
    return [with_sets(train_item, k=k, cut=3) for train_item in made]


def _divergence(divergence: Distributions, p_V: Tensor, q_V: Tensor) -> Tensor:
    """From the definitions, over buckets that hold all of both."""
    weight = divergence.weight if isinstance(divergence, Mixed) else 0.5
    beta = divergence.beta if isinstance(divergence, Jsd) else 0.5
    reverse = (p_V * (p_V.log() - q_V.log())).sum()
    forward = (q_V * (q_V.log() - p_V.log())).sum()
    mixture_V = beta * q_V + (1 - beta) * p_V
    of_teacher = (q_V * (q_V.log() - mixture_V.log())).sum()
    of_student = (p_V * (p_V.log() - mixture_V.log())).sum()
    return {
        "reverse_kl": reverse,
        "forward_kl": forward,
        "mixed": weight * forward + (1 - weight) * reverse,
        "jsd": beta * of_teacher + (1 - beta) * of_student,
    }[divergence.name]


def _slow(
    model: PreTrainedModel, items: Sequence[TrainItem], config: LearnerConfig, *, k: int = VOCAB
) -> tuple[dict[str, Tensor], float]:
    """Gradients, and the mean divergence of the graded tokens: item by item, token by token on its path, teacher by
    teacher, on the teacher's own numbers; with k tokens and one bucket for the others. Rewards: GRPO without std,
    truncated."""
    n_tokens, n_rollouts = sum(t.n_trained for t in items), sum(t.n_trained > 0 for t in items)
    loss, divergences = torch.zeros((), dtype=torch.float64), []
    objective = config.objective
    divergence, importance = cast(Distributions, objective.divergence), cast(Capped, objective.importance)
    for train_item in items:
        ids_L = torch.from_numpy(train_item.tokens_L).long()
        rewards = [t.item.reward for t in items if t.item.task_id == train_item.item.task_id]
        told = [reward for reward in rewards if reward is not None]
        advantage = 0.0
        if objective.advantage.name == "grpo" and train_item.item.reward is not None:
            advantage = train_item.item.reward - sum(told) / len(told)
        log_ratio = dict[int, float]()
        divisor = n_tokens if objective.aggregation == "token_mean" else n_rollouts * max(1, train_item.n_trained)
        for t in np.flatnonzero(train_item.train_mask_L).tolist():
            path = path_before(train_item, t)
            logits_V = model(input_ids=ids_L[None, path]).logits[0, -1]
            tokens_V = torch.softmax(logits_V[:VOCAB], dim=-1)
            s, mu = torch.log_softmax(logits_V, dim=-1)[ids_L[t]], float(train_item.behaviour_L[t])
            loss = loss - min(math.exp(s.item() - mu), importance.cap) * advantage * s / divisor
            cap = divergence.context_cap
            weight = min(math.exp(sum(log_ratio.get(u, 0.0) for u in path)), cap) if cap else 1.0
            log_ratio[t] = s.item() - mu
            total = 0.0
            for name in train_item.item.teachers:
                q_V = torch.from_numpy(np.exp(teacher_logprobs(train_item, name)[t]))
                top = torch.argsort(-q_V)[:k]
                p_B, q_B = tokens_V[top], q_V[top]
                if k < VOCAB:
                    p_B = torch.cat([p_B, (1 - p_B.sum())[None]])
                    q_B = torch.cat([q_B, (1 - q_B.sum())[None]])
                d = _divergence(divergence, p_B, q_B)
                loss = loss + objective.teacher_coefs.get(name, objective.coef) * weight * d / divisor
                total += d.item()
            if train_item.item.teachers:
                divergences.append(total)
    loss.backward()  # pyright: ignore[reportUnknownMemberType]
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, float(np.mean(divergences))


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    **{name: (VOCAB, {"divergence": name}) for name in NAMES},
    **{f"{name}, 6 tokens and a tail": (6, {"divergence": name}) for name in NAMES},
    "weights and coefficients": (
        VOCAB,
        {"divergence": ("mixed", {"weight": 0.2}), "coef": 0.3, "teacher_coefs": {"math": 2.0}},
    ),
    "with rewards": (6, {"divergence": "reverse_kl", "advantage": ("grpo", {"std": False}), "coef": 0.5}),
    "context weights": (
        6,
        {"divergence": ("jsd", {"beta": 0.8, "context_cap": 1.5}), "importance": ("truncated", {"cap": 1.5})},
    ),
    "mean of rollouts' means": (6, {"divergence": "reverse_kl", "aggregation": "sequence_mean"}),
    "mean of rollouts' means, with rewards": (
        VOCAB,
        {"divergence": "forward_kl", "advantage": ("grpo", {"std": False}), "aggregation": "sequence_mean"},
    ),
}


@pytest.mark.parametrize(("k", "fields"), CASES.values(), ids=CASES)
def test_gradient_equals_the_slow_reference(
    tiny_student: Student, make_item: Make, k: int, fields: dict[str, Any]
) -> None:
    """Payloads of 16 bits: what is left is their rounding (see tests/builtin/test_topk_payloads.py for fewer)."""
    items, config = (
        items_with_sets(make_item, k=k, forked=True),
        _config(**fields, pack_tokens=16, logprob_chunk_tokens=5),
    )
    trainer = Trainer(tiny_student(dtype=torch.float64), config, total_steps=10, vocab_tokens=VOCAB)
    got = step_gradients(trainer, items)
    expected, divergence = _slow(tiny_student("eager", torch.float64), items, config, k=k)
    assert got.keys() == expected.keys()
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=2e-4 * scale, rtol=2e-3, msg=name)
    again = Trainer(tiny_student(dtype=torch.float64), config, total_steps=10, vocab_tokens=VOCAB).step(items)
    assert again.divergence == pytest.approx(divergence, rel=1e-3)


def test_draws_are_the_steps_own(tiny_student: Student, make_item: Make) -> None:
    """The same after a resume, whatever was looked at in between, without one rollout of the batch; others in another
    step, and in a run with another seed."""
    items, config = items_with_sets(make_item, k=6), _config(divergence=("multi_sample", {"samples": 2}))

    def trainer(seed: int = 0) -> Trainer:
        return Trainer(tiny_student(dtype=torch.float64), config, total_steps=9, vocab_tokens=VOCAB, seed=seed)

    def difference(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
        return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))

    undisturbed, looked_at, resumed = trainer(), trainer(), trainer()
    first = undisturbed.gradient(items)
    undisturbed.step(items)
    looked_at.gradient(items[:2])
    looked_at.step(items)
    resumed.model.load_state_dict(looked_at.model.state_dict())
    resumed.load_state_dict(looked_at.state_dict())
    for one in (undisturbed, looked_at, resumed):
        one.step(items)
    for one, other, third in zip(*(t.model.parameters() for t in (undisturbed, looked_at, resumed)), strict=True):
        assert torch.equal(one, other) and torch.equal(one, third)
    busy = [train_item for train_item in items if train_item.n_trained]
    shares = [train_item.n_trained / sum(one.n_trained for one in busy) for train_item in busy]
    added = [torch.zeros_like(gradient) for gradient in first]
    for train_item, share in zip(busy, shares, strict=True):
        for total, gradient in zip(added, trainer().gradient([train_item]), strict=True):
            total += share * gradient
    assert difference(added, first) < 1e-6  # one other draw is 1e-3
    later = trainer()
    later.skip()
    for other in (later, trainer(seed=1)):
        assert difference(first, other.gradient(items)) > 1e-3


def test_sets_that_nobody_asked_for_change_nothing(tiny_student: Student, make_item: Make) -> None:
    plain = make_item("a", [0, 1, 1], vocab=VOCAB)
    gradients = [
        step_gradients(Trainer(tiny_student(), _config(), total_steps=5), [one]) for one in (plain, with_sets(plain))
    ]
    for name, gradient in gradients[0].items():
        assert torch.equal(gradients[1][name], gradient)


def test_the_teachers_rollouts_in_a_batch_have_their_own_divergence(tiny_student: Student, make_item: Make) -> None:
    """Off-policy logit distillation beside the student's own tokens: both gradients, under one divisor."""
    own, theirs = [make_item("a", [0, 1, 1, 1], vocab=VOCAB)], [with_sets(make_item("t", [0, 0, 1, 1], vocab=VOCAB))]

    def gradients(config: LearnerConfig, *items: Sequence[TrainItem]) -> dict[str, Tensor]:
        trainer = Trainer(tiny_student(dtype=torch.float64), config, total_steps=1, vocab_tokens=VOCAB)
        return step_gradients(trainer, *items)

    offline = OfflineConfig(file="t", student_fraction=0.5, divergence=DIVERGENCE.make("forward_kl"), coef=0.5)
    mixed = gradients(_config(domain_scale="rms", offline=offline), own, theirs)
    sampled = gradients(_config(domain_scale="rms"), own)
    between = gradients(_config(divergence="forward_kl"), theirs)
    for name, gradient in mixed.items():
        expected = sampled[name] * 3 / 5 + 0.5 * between[name] * 2 / 5
        torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-5, msg=name)


def _changed(train_item: TrainItem, **fields: Any) -> TrainItem:
    pieces = tuple(msgspec.structs.replace(piece, **fields) for piece in train_item.item.top_k)
    return replace(train_item, item=msgspec.structs.replace(train_item.item, top_k=pieces))


def _without_sets(train_item: TrainItem) -> TrainItem:
    return replace(train_item, item=msgspec.structs.replace(train_item.item, top_k=()), payloads=np.zeros(0, np.uint8))


SPOILT: dict[str, tuple[Callable[[TrainItem], TrainItem], int, str]] = {
    "missing": (_without_sets, VOCAB, "'default' sent no top-k set for 3 of the 3 tokens.*teacher.top_k"),
    "range": (partial(_changed, end=3), VOCAB, "top-k sets of 3 tokens, expected 2"),
    "teacher": (partial(_changed, teacher=1), VOCAB, "teacher 1; it has 1"),
    "bytes": (partial(_changed, n_bytes=5), VOCAB, "top-k payload: got 5 bytes"),
    "vocabulary": (replace, 19, "token id 19, the student's vocabulary has 19 tokens"),
}


@pytest.mark.parametrize(("spoil", "vocab_tokens", "message"), SPOILT.values(), ids=SPOILT)
def test_sets_that_do_not_fit_stop_the_step_and_name_the_rollout(
    tiny_student: Student,
    make_item: Make,
    spoil: Callable[[TrainItem], TrainItem],
    vocab_tokens: int,
    message: str,
) -> None:
    good = with_sets(make_item("bad", [0, 1, 1, 1], vocab=VOCAB))
    trainer = Trainer(tiny_student(), _config(divergence="jsd"), total_steps=5, vocab_tokens=vocab_tokens)
    with pytest.raises(UnreadableScores, match=f"rollout 'bad': .*{message}") as caught:
        trainer.step([spoil(good)])
    assert caught.value.rollout_ids == ("bad",) and trainer.steps_done == 0


def test_a_rollout_whose_sets_cannot_be_read_is_left_out_of_the_step(tiny_student: Student, make_item: Make) -> None:
    good = with_sets(make_item("good", [0, 1, 1, 1], vocab=VOCAB))
    bad = _changed(with_sets(make_item("bad", [0, 1, 1, 1], vocab=VOCAB)), n_bytes=5)
    trainer = Trainer(tiny_student(), _config(divergence="jsd"), total_steps=5, vocab_tokens=VOCAB)
    outcome = finite_step(trainer, [bad, good])
    assert outcome.masked == ("bad",)
    assert outcome.figures is not None and outcome.figures.tokens == 3


def test_a_turn_discount_weighs_divergences_between_distributions(tiny_student: Student, make_item: Make) -> None:
    """Linear in the turns: the gradient is that of first turns plus discount times that of second ones."""
    items = items_with_sets(make_item)

    def gradients(keep: int | None, **fields: Any) -> dict[str, Tensor]:
        """`keep`: train turns of this depth only. "b" has two turns, all others one."""
        kept = [t for t in items if keep in (None, 0) or t.item.rollout_id == "b"]
        if keep is not None:
            kept = [_only_turn(train_item, keep) for train_item in kept]
        config = _config(divergence="reverse_kl", aggregation="constant", **fields)
        trainer = Trainer(tiny_student(dtype=torch.float64), config, total_steps=10, vocab_tokens=VOCAB)
        n_rollouts = sum(t.n_trained > 0 for t in kept)
        return {name: gradient * n_rollouts for name, gradient in step_gradients(trainer, kept).items()}

    first, second, both = gradients(0), gradients(1), gradients(None, turn_discount=0.25)
    assert any(bool(gradient.any()) for gradient in second.values())
    for name, gradient in both.items():
        torch.testing.assert_close(gradient, first[name] + 0.25 * second[name], atol=1e-6, rtol=1e-5, msg=name)


def _only_turn(train_item: TrainItem, depth: int) -> TrainItem:
    mask_L = train_item.train_mask_L.copy()
    if train_item.item.rollout_id == "b":  # 0 1 1 0 0 1 0
        mask_L[slice(3, None) if depth == 0 else slice(0, 3)] = False
    return replace(train_item, train_mask_L=mask_L)
