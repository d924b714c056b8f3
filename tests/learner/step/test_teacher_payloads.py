"""What teachers send beside log-probs through a whole optimizer step, from payloads as they come off the wire to the
gradient of the parameters: against a plain model, row by row in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from stillhouse.learner.batch import BatchError, TrainItem, UnreadableScores
from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.objectives.config import OfflineConfig
from stillhouse.learner.objectives.registry import DIVERGENCE
from stillhouse.learner.step.finite_step import finite_step
from stillhouse.learner.step.teacher_heads import HeadOf
from stillhouse.learner.step.train_step import Trainer
from stillhouse.models.logprobs import LmHead
from tests.learner.conftest import make_item, remade, tiny_student
from tests.learner.step.gradients import assert_close, step_gradients, stepped
from tests.learner.step.payload_batches import (
    SETS,
    STATES,
    VOCAB,
    Slow,
    config_of,
    head_of,
    items_with,
    trainer_of,
    with_payloads,
    with_sets,
    with_states,
)

GRPO: Final = ("grpo", {"std": False})
BASELINE: Final = ("k1", {"baseline": "expected_cost"})
COEFS: Final = {"coef": 0.3, "teacher_coefs": {"math": 2.0}}
SOME: Final = {"default": "sets", "math": "sets"}
CASES: Final[dict[str, tuple[dict[str, str], int, dict[str, Any]]]] = {
    # Divergences between distributions.
    **{f"{name}, 6 tokens and a tail": (SETS, 6, {"divergence": name}) for name in ("reverse_kl", "forward_kl", "jsd")},
    "forward KL, whole vocabulary": (SETS, VOCAB, {"divergence": "forward_kl", **COEFS}),
    "with rewards": (SETS, 6, {"divergence": ("mixed", {"weight": 0.2}), "advantage": GRPO, "coef": 0.5}),
    "context weights": (
        *(SETS, 6),
        {"divergence": ("jsd", {"beta": 0.8, "context_cap": 1.5}), "importance": ("truncated", {"cap": 1.5})},
    ),
    "mean of rollouts' means": (SETS, 6, {"divergence": "reverse_kl", "aggregation": "sequence_mean"}),
    "mean of rollouts' means, with rewards": (
        *(SETS, VOCAB),
        {"divergence": "forward_kl", "advantage": GRPO, "aggregation": "sequence_mean"},
    ),
    **{
        f"{name} of states, tempered": (STATES, VOCAB, {"divergence": (name, {"temperature": 1.7}), **COEFS})
        for name in ("reverse_kl", "forward_kl", "mixed", "jsd")
    },
    "states": (STATES, VOCAB, {"divergence": "reverse_kl", "pack_tokens": 1}),
    # Baselines of sampled tokens' costs.
    "baseline of a set": (SETS, 6, {"divergence": BASELINE, **COEFS}),
    "baseline, weights of rollouts": (SETS, 6, {"divergence": BASELINE, "importance": "sequence"}),
    "baseline of a clipped cost": (SETS, VOCAB, {"divergence": BASELINE, "cost_transform": ("clip", {"limit": 0.8})}),
    "baseline of states": (STATES, VOCAB, {"divergence": BASELINE}),
    "baseline of states, weights of rollouts": (STATES, VOCAB, {"divergence": BASELINE, "importance": "sequence"}),
    # Pools with divergences and payloads of their own.
    "a cost, sets and states": (
        *({"math": "sets", "style": "states"}, 6),
        {"divergence": "k1", "teacher_divergences": {"math": ("jsd", {"beta": 0.3}), "style": "reverse_kl"}}
        | {"advantage": GRPO, "pack_tokens": 1, **COEFS},
    ),
    "two costs and a baseline": (
        *({"default": "states", "math": "sets"}, 6),
        {"teacher_divergences": {"math": BASELINE, "style": ("k3", {"kl_student": "behaviour"})}}
        | {"divergence": "forward_kl", "cost_transform": ("clip", {"limit": 0.7}), **COEFS},
    ),
    "contexts of one pool and weights of rollouts": (
        *({"math": "sets", "style": "sets"}, 6),
        {"teacher_divergences": {"math": ("mixed", {"weight": 0.2, "context_cap": 1.5}), "style": "reverse_kl"}}
        | {"divergence": "k2", "importance": ("sequence", {"cap": 2.0}), **COEFS},
    ),
    # Without weight in the loss a pool needs no payloads: its figure is the cost of sampled tokens.
    "no weight": (SOME, 6, {"divergence": "reverse_kl", "coef": 0.3, "teacher_coefs": {"style": 0.0}}),
    "weights by name": (
        *(SOME, 6),
        {"divergence": "reverse_kl", "coef": 0.0, "teacher_coefs": {"default": 0.3, "math": 0.3}},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_gradient_and_figures_equal_the_slow_reference(case: str) -> None:
    """Sets have 16 bits: what is left is their rounding (see tests/builtin/test_topk_payloads.py for fewer)."""
    payloads, k, fields = CASES[case]
    items = items_with(payloads, k=k, forked=payloads is SETS and "baseline" not in case)
    config = config_of(**{"pack_tokens": 16, "logprob_chunk_tokens": 4, **fields})
    slow = Slow(tiny_student("eager", torch.float64), config, payloads, k)
    expected = slow.gradients(items)
    got, metrics = stepped(trainer_of(tiny_student(dtype=torch.float64), config), items)
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    assert scale > 1e-3
    exact = payloads is STATES
    assert_close(got, expected, atol=1e-6 if exact else 3e-4 * scale, rtol=1e-5 if exact else 3e-3)
    assert metrics.of_pools() == {
        f"teachers/{pool}/divergence": pytest.approx(np.mean(told), rel=3e-3, abs=1e-4)
        for pool, told in slow.told.items()
    }
    total, n_scored = sum(map(sum, slow.told.values())), sum(one.n_trained for one in items if one.item.teachers)
    assert metrics.divergence == pytest.approx(total / n_scored, rel=3e-3, abs=1e-4)
    if "states" in payloads.values():
        assert metrics.hidden_error is not None and metrics.hidden_error < 1e-5
    if "baseline" in case:  # and not 0 minus the baseline, whatever the student does
        assert metrics.divergence == pytest.approx(metrics.reverse_kl, rel=1e-3) or "clip" in case or "two" in case


def test_draws_are_the_steps_own() -> None:
    """The same after a resume, whatever was looked at in between, without one rollout of the batch; others in another
    step, and in a run with another seed."""
    items, config = items_with(SETS, k=6), config_of(divergence=("multi_sample", {"samples": 2}))

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


def test_the_teachers_rollouts_in_a_batch_have_their_own_divergence() -> None:
    """Off-policy logit distillation beside the student's own tokens: both gradients, under one divisor."""
    own, theirs = [make_item("a", [0, 1, 1, 1], vocab=VOCAB)], [with_sets(make_item("t", [0, 0, 1, 1], vocab=VOCAB))]

    def gradients(config: LearnerConfig, *items: Sequence[TrainItem]) -> dict[str, Tensor]:
        return step_gradients(trainer_of(tiny_student(dtype=torch.float64), config), *items)

    offline = OfflineConfig(file="t", student_fraction=0.5, divergence=DIVERGENCE.make("forward_kl"), coef=0.5)
    mixed = gradients(config_of(domain_scale="rms", offline=offline), own, theirs)
    sampled = gradients(config_of(domain_scale="rms"), own)
    of_theirs = gradients(config_of(divergence="forward_kl"), theirs)
    assert_close(mixed, {name: sampled[name] * 3 / 5 + 0.5 * of_theirs[name] * 2 / 5 for name in mixed})


def test_a_turn_discount_weighs_divergences_between_distributions() -> None:
    """Linear in the turns: the gradient is that of first turns plus discount times that of second ones."""
    items = items_with(SETS)

    def only_turn(one: TrainItem, depth: int) -> TrainItem:
        mask_L = one.train_mask_L.copy()
        if one.item.rollout_id in "bg":  # 0 1 1 0 0 1 0 and 0 1 0 1
            second = 2 if one.item.rollout_id == "g" else 3
            mask_L[slice(second, None) if depth == 0 else slice(0, second)] = False
        return replace(one, train_mask_L=mask_L)

    def gradients(keep: int | None, **fields: Any) -> dict[str, Tensor]:
        """`keep`: train turns of this depth only. "b" and "g" have two turns, all others one."""
        kept = [t for t in items if keep in (None, 0) or t.item.rollout_id in "bg"]
        if keep is not None:
            kept = [only_turn(one, keep) for one in kept]
        config = config_of(divergence="reverse_kl", aggregation="constant", **fields)
        n_rollouts = sum(t.n_trained > 0 for t in kept)
        of_kept = step_gradients(trainer_of(tiny_student(dtype=torch.float64), config), kept)
        return {name: gradient * n_rollouts for name, gradient in of_kept.items()}

    first, second, both = gradients(0), gradients(1), gradients(None, turn_discount=0.25)
    assert any(bool(gradient.any()) for gradient in second.values())
    assert_close(both, {name: first[name] + 0.25 * second[name] for name in both})


# ---------------------------------------------------------------------------------------- what cannot be trained on


def test_only_payloads_that_a_divergence_needs_are_read() -> None:
    bare = make_item("a", [0, 1, 1, 1], teachers=("math", "style"), vocab=VOCAB)
    config = config_of(divergence="k1", teacher_divergences={"math": "reverse_kl"})
    trainer_of(tiny_student(), config).step([with_payloads(bare, {"math": "sets"})])
    for payloads in ({"style": "sets"}, {}):
        trainer = trainer_of(tiny_student(), config)
        with pytest.raises(UnreadableScores, match="teacher 'math' sent no top-k set for 3 of the 3 tokens"):
            trainer.step([with_payloads(bare, payloads)])
        assert trainer.steps_done == 0
    plain = [
        step_gradients(trainer_of(tiny_student(), config_of()), [one]) for one in (bare, with_payloads(bare, SETS))
    ]
    assert all(torch.equal(gradient, plain[1][name]) for name, gradient in plain[0].items())
    assert not trainer_of(tiny_student(), config_of(divergence="null")).step([bare]).of_pools(), "no teacher has a part"


def _changed(one: TrainItem, **fields: Any) -> TrainItem:
    pieces = tuple(msgspec.structs.replace(piece, **fields) for piece in one.item.top_k)
    return replace(one, item=msgspec.structs.replace(one.item, top_k=pieces))


def _bytes(one: TrainItem, body: bytes) -> TrainItem:
    return replace(_changed(one, n_bytes=len(body)), payloads=np.frombuffer(body, np.uint8))


def _ending(cut: int, tail: bytes, one: TrainItem) -> TrainItem:
    return _bytes(one, one.payloads.tobytes()[:-cut] + tail)


SPOILT: dict[str, tuple[Callable[..., TrainItem], Callable[[TrainItem], TrainItem], int, str]] = {
    "missing": (with_sets, remade, VOCAB, "'default' sent no top-k set for 3 of the 3 tokens.*teacher.top_k"),
    "range": (with_sets, partial(_changed, end=3), VOCAB, "top-k sets of 3 tokens, expected 2"),
    "teacher": (with_sets, partial(_changed, teacher=1), VOCAB, "teacher 1; it has 1"),
    "bytes": (with_sets, partial(_changed, n_bytes=5), VOCAB, "top-k payload: got 5 bytes"),
    "vocabulary": (with_sets, replace, 19, "token id 19, the student's vocabulary has 19 tokens"),
    "states cut": (
        *(with_states, partial(_ending, 1, b""), VOCAB),
        "hidden-state payload: got 43 bytes",
    ),
    "states not finite": (
        *(with_states, partial(_ending, 2, b"\x80\x7f"), VOCAB),
        "hidden-state payload: got infinity or NaN in the state of token 2",
    ),
    "range of states": (with_states, partial(_changed, end=3), VOCAB, "hidden states of 3 tokens, expected 2"),
}


@pytest.mark.parametrize(("payloads", "spoil", "vocab_tokens", "message"), SPOILT.values(), ids=SPOILT)
def test_a_rollout_whose_payloads_cannot_be_read_is_left_out_by_name(
    payloads: Callable[..., TrainItem], spoil: Callable[[TrainItem], TrainItem], vocab_tokens: int, message: str
) -> None:
    bad, good = (payloads(make_item(name, [0, 1, 1, 1], vocab=VOCAB)) for name in ("bad", "good"))
    trainer = Trainer(
        tiny_student(), config_of(divergence="jsd"), total_steps=5, vocab_tokens=vocab_tokens, head_of=head_of
    )
    with pytest.raises(UnreadableScores, match=f"rollout 'bad': .*{message}") as caught:
        trainer.step([spoil(bad), good])
    assert "bad" in caught.value.rollout_ids and trainer.steps_done == 0
    if vocab_tokens == VOCAB:
        outcome = finite_step(trainer, [spoil(bad), good])
        assert outcome.masked == ("bad",) and outcome.figures is not None and outcome.figures.tokens == 3


@pytest.mark.parametrize("shift", [-1, 1])
def test_states_of_the_next_position_end_the_step(shift: int) -> None:
    good = make_item("a", [0, 0, 0] + [1] * 12, teachers=("math",), vocab=VOCAB)
    trainer = trainer_of(tiny_student(), config_of(divergence="reverse_kl"))
    trainer.step([with_states(good)])
    weights = [parameter.clone() for parameter in trainer.model.parameters()]
    with pytest.raises(BatchError, match=r"nats on average.*models\.teacher"):
        trainer.step([with_states(good, shift=shift)])
    assert all(torch.equal(a, b) for a, b in zip(weights, trainer.model.parameters(), strict=True))
    assert trainer.steps_done == 1


def always(head: LmHead) -> HeadOf:
    return {"math": head}.__getitem__


def test_the_head_of_another_model_ends_the_step() -> None:
    item = with_states(make_item("a", [0] + [1] * 12, teachers=("math",), vocab=VOCAB))
    config = config_of(divergence="reverse_kl")
    right = head_of("math")
    same_size = replace(right, weight_VH=right.weight_VH.roll(1, 0))
    with pytest.raises(BatchError, match="the learner must read the output head of the model"):
        trainer_of(tiny_student(), config, always(same_size)).step([item])
    for other, got in ((head_of("style"), "21 rows of 4"), (replace(right, weight_VH=right.weight_VH[:19]), "19 rows")):
        with pytest.raises(ValueError, match=f"hidden states of 6 numbers for an output head of {got}"):
            trainer_of(tiny_student(), config, always(other)).step([item])
    with pytest.raises(ValueError, match="has no teacher's output head"):
        Trainer(tiny_student(), config, total_steps=3, vocab_tokens=VOCAB).step([item])


def test_states_of_another_head_are_refused_by_its_name() -> None:
    """A difference that the numbers would not show."""
    item, right = make_item("a", [0] + [1] * 12, teachers=("math",), vocab=VOCAB), head_of("math")
    trainer = trainer_of(tiny_student(), config_of(divergence="reverse_kl"), always(right))
    trainer.step([with_states(item, head=right.identity)])
    other = replace(right, weight_VH=right.weight_VH * 1.01).identity
    belongs = f"belong to the output head {other:016x}, the learner has {right.identity:016x}"
    with pytest.raises(ValueError, match=belongs):
        trainer.step([with_states(item, head=other)])


def test_a_head_that_is_a_little_off_for_one_tag_ends_the_step() -> None:
    """The mean over all tags is below the bound; what is above it is the one teacher's, at one tag's tokens."""
    good = [with_states(make_item(f"a{i}", [0] + [1] * 20, teachers=("math",), vocab=VOCAB)) for i in range(9)]
    other = with_states(make_item("b", [0] + [1] * 12, teachers=("style",), vocab=VOCAB))
    other = replace(other, item=msgspec.structs.replace(other.item, tag="rare"))
    heads = {"math": head_of("math"), "style": replace(head_of("style"), scale=0.85)}
    trainer = trainer_of(tiny_student(), config_of(divergence="reverse_kl"), heads.__getitem__)
    with pytest.raises(BatchError, match=r"teacher 'style', tag 'rare'\) differ by 0\.\d+ nats"):
        trainer.step([*good, other])
    error = trainer.step(good).hidden_error
    assert error is not None and error < 1e-3


def test_states_of_two_sizes_from_one_teacher_are_refused() -> None:
    one = with_states(make_item("a", [0, 1, 1], vocab=VOCAB))
    other = with_states(make_item("b", [0, 1, 1], teachers=("math",), vocab=VOCAB))
    other = replace(other, item=msgspec.structs.replace(other.item, teachers=("default",)))
    for pair, message in (([one, other], r"numbers; expected one size"), ([one, with_sets(other)], "one of them")):
        with pytest.raises(ValueError, match=message):
            trainer_of(tiny_student(), config_of(divergence="jsd")).step(pair)
