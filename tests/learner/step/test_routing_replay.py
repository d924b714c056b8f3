"""Routing replay: a student's routers use the experts that an engine chose. The reference is transformers' own model,
one rollout at a time, whose routers are replaced by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stillhouse.learner.batch import TrainItem, UnreadableScores
from stillhouse.learner.config import LearnerConfig, LoraConfig
from stillhouse.learner.step.lora import Adapters
from stillhouse.learner.step.train_step import Trainer
from stillhouse.models import packed
from stillhouse.models.routing import RoutingError, expert_shape
from stillhouse.protocol.messages import EXPERT_IDS, Branch, ExpertShape
from stillhouse.protocol.payloads.expert_ids import encode_experts
from tests.learner.conftest import build_hybrid, make_item, remade, tiny_student
from tests.learner.step.gradients import PLAIN, assert_close, slow_gradients, step_gradients
from tests.learner.step.test_mixture_of_experts import student

Rows = dict[int, npt.NDArray[np.uint16]]
SHAPE = ExpertShape((0, 1), 8, 2)


def rows_for(n_tokens: int, seed: int, missing: tuple[int, ...] = ()) -> Rows:
    """By token, arbitrary experts of both layers: mostly not the student's own."""
    rng = np.random.default_rng(seed)
    drawn = rng.permuted(np.tile(np.arange(8, dtype=np.uint16), (n_tokens, 2, 1)), axis=2)[:, :, :2]
    return {token: drawn[token] for token in range(1, n_tokens) if token not in missing}


def with_rows(one: TrainItem, rows: Rows, *cuts: int, branches: tuple[Branch, ...] = ()) -> TrainItem:
    """As the buffer hands it on: a payload for each of the segments that end at `cuts` and at the end."""
    edges = [0, *cuts, len(one.tokens_L)]
    told = [
        encode_experts({t - start: rows[t] for t in rows if start <= t < end}, end - start, SHAPE)
        for start, end in itertools.pairwise(edges)
    ]
    payloads = [(EXPERT_IDS, *ends, body) for ends, body in zip(itertools.pairwise(edges), told, strict=True)]
    return remade(one, payloads, branches=branches)


def replayed_by_hand(rows_of: Mapping[tuple[int, ...], Rows], norm_topk_prob: bool) -> PreTrainedModel:
    return give_by_hand(student("eager", norm_topk_prob=norm_topk_prob), rows_of, norm_topk_prob)


def give_by_hand(
    model: PreTrainedModel, rows_of: Mapping[tuple[int, ...], Rows], norm_topk_prob: bool
) -> PreTrainedModel:
    """A plain model that looks up the experts of what it is asked to read."""
    reading: list[Rows] = [{}]

    def begin(_: Any, args: Any, kwargs: Any) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        reading[0] = rows_of[tuple(ids[0].tolist())]

    def gate_of(layer: int, weight_EH: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
        def forward(hidden_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits_TE = hidden_TH.reshape(-1, weight_EH.shape[1]) @ weight_EH.T
            weights, chosen = list[Tensor](), list[Tensor]()
            for place, logits_E in enumerate(logits_TE):
                shares_E = logits_E.exp() / logits_E.exp().sum()
                own = shares_E.argsort(descending=True)[:2].tolist()
                ids = reading[0][place + 1][layer].astype(int).tolist() if place + 1 in reading[0] else own
                total = shares_E[ids[0]] + shares_E[ids[1]] if norm_topk_prob else 1.0
                weights.append(torch.stack([shares_E[i] / total for i in ids]))
                chosen.append(torch.tensor(ids))
            return logits_TE, torch.stack(weights), torch.stack(chosen)

        return forward

    for layer in range(2):
        gate = next(m for n, m in model.named_modules() if n.endswith(f"layers.{layer}.mlp.gate"))
        gate.forward = gate_of(layer, gate.get_parameter("weight"))
    model.register_forward_pre_hook(begin, with_kwargs=True)
    return model


def batch() -> tuple[list[TrainItem], dict[tuple[int, ...], Rows]]:
    """With rows for all tokens, for some, in several pieces, and for none."""
    plain = [make_item("a", [0, 0, 1, 1, 1]), make_item("b", [0, 1, 1, 0, 0, 1]), make_item("c", [0] * 5 + [1] * 9)]
    plain.append(make_item("d", [0, 1, 1]))
    rows = [rows_for(5, 1), rows_for(6, 2, missing=(3, 4)), rows_for(14, 3, missing=(1, 2)), Rows()]
    items = [with_rows(one, own, *cuts) for one, own, cuts in zip(plain, rows, ((), (3,), (6, 7)), strict=False)]
    return [*items, plain[3]], {
        tuple(one.tokens_L[:end].tolist()): own
        for one, own in zip(plain, rows, strict=True)
        for end in (len(one.tokens_L), len(one.tokens_L) - 1)
    }


def config(**more: Any) -> LearnerConfig:
    common: dict[str, Any] = {"pack_tokens": 16, "logprob_chunk_tokens": 5, "routing_replay": True}
    return LearnerConfig(**(common | PLAIN | more))


@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize("more", [{}, {"pack_tokens": 1}, {"recompute": 1.0}], ids=str)
def test_the_gradient_is_that_of_a_replay_by_hand(more: dict[str, Any], norm_topk_prob: bool) -> None:
    items, rows_of = batch()
    got = step_gradients(Trainer(student(norm_topk_prob=norm_topk_prob), config(**more), total_steps=9), items)
    wanted = slow_gradients(replayed_by_hand(rows_of, norm_topk_prob), items, config())
    assert_close(got, wanted, atol=1e-5, rtol=1e-4)
    assert wanted["model.layers.0.mlp.gate.weight"].norm() > 0
    off = Trainer(student(norm_topk_prob=norm_topk_prob), config(routing_replay=False), total_steps=9)
    free = step_gradients(off, items)
    assert max(float((free[name] - wanted[name]).abs().max()) for name in wanted) > 1e-3


def test_padded_sequences_and_adapters_are_replayed_too() -> None:
    """A hybrid runs its sequences padded; its adapters alone are trained."""

    def hybrid() -> PreTrainedModel:
        model = build_hybrid(num_experts=8)
        packed.choose_way(model)
        assert packed.way_of(model) == "padded"
        return model

    def plain(model: PreTrainedModel) -> PreTrainedModel:
        return model

    def adapted(model: PreTrainedModel) -> PreTrainedModel:
        torch.manual_seed(3)
        Adapters(model, LoraConfig(rank=2, alpha=4.0), base="")
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        return model

    items, rows_of = batch()
    for prepare in (plain, adapted):
        got = step_gradients(Trainer(prepare(hybrid()), config(), total_steps=9), items)
        by_hand = give_by_hand(prepare(hybrid()), rows_of, norm_topk_prob=True)
        assert_close(got, slow_gradients(by_hand, items, config()), atol=1e-5, rtol=1e-4)


def test_each_branch_reads_the_experts_of_its_own_path() -> None:
    whole, rows = make_item("a", [0, 1, 1, 1, 0, 0, 1, 1]), rows_for(8, 5)
    got = step_gradients(
        Trainer(student(norm_topk_prob=False), config(), total_steps=9),
        [with_rows(whole, rows, 4, branches=(Branch(start=5, follows=3),))],
    )
    paths = ([0, 1, 2, 3], [0, 1, 2, 5, 6, 7])  # the token at 4 is of no branch with a token to train
    alone = [
        remade(
            whole,
            end=len(path),
            tokens_L=whole.tokens_L[path],
            behaviour_L=whole.behaviour_L[path],
            mask_L=whole.train_mask_L[path] & (np.array(path) >= first),
            teacher_ML=whole.teacher_ML[:, path],
        )
        for path, first in zip(paths, (0, 5), strict=True)
    ]
    rows_of = {
        tuple(one.tokens_L.tolist()): {place: rows[token] for place, token in enumerate(path) if token in rows}
        for one, path in zip(alone, paths, strict=True)
    }
    assert_close(got, slow_gradients(replayed_by_hand(rows_of, False), alone, config()), atol=1e-5, rtol=1e-4)


def test_the_figures_say_how_many_routers_disagree_and_how_many_tokens_have_no_experts() -> None:
    items, rows_of = batch()
    metrics = Trainer(student(norm_topk_prob=False), config(), total_steps=9).step(items)
    model, differ, given = replayed_by_hand(rows_of, False), 0, 0
    for layer in range(2):
        gate = model.get_submodule(f"model.layers.{layer}.mlp.gate")
        by_hand = gate.forward

        def look(hidden_TH: Tensor, layer: int = layer, by_hand: Any = by_hand) -> Any:
            nonlocal differ, given
            logits_TE, weights, chosen = by_hand(hidden_TH)
            for place, (logits_E, ids) in enumerate(zip(logits_TE, chosen, strict=True)):
                if place + 1 in current:
                    given += 1
                    differ += set(logits_E.topk(2).indices.tolist()) != set(ids.tolist())
            return logits_TE, weights, chosen

        gate.forward = look
    for one in items:
        ids_T = torch.from_numpy(one.tokens_L).long()[:-1]
        current = rows_of[tuple(ids_T.tolist())]
        model(input_ids=ids_T[None])
    assert metrics.routers_differ == pytest.approx(differ / given) and 0.5 < differ / given < 1
    # 4 + 5 + 13 + 2 tokens are read; b has no experts for tokens 3 and 4, c for 1 and 2, d for 1 and 2
    assert metrics.routers_free_trained == pytest.approx(2 / 24)
    assert metrics.routers_free_context == pytest.approx(4 / 24)
    off = Trainer(student(norm_topk_prob=False), config(routing_replay=False), total_steps=9).step(items)
    assert off.routers_differ is off.routers_free_trained is off.routers_free_context is None


def test_off_by_default_and_then_bit_for_bit_as_without() -> None:
    assert not LearnerConfig().routing_replay
    items, _ = batch()
    plain = [make_item("a", [0, 0, 1, 1, 1]), make_item("b", [0, 1, 1, 0, 0, 1]), make_item("c", [0] * 5 + [1] * 9)]
    off = config(routing_replay=False, recompute=1.0)
    got, wanted = (step_gradients(Trainer(student(), off, total_steps=9), each) for each in (items, [*plain, items[3]]))
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (encode_experts(rows_for(5, 1), 5, SHAPE)[:-1], "experts of the routers"),
        (encode_experts({}, 4, SHAPE), "experts of the routers"),
        (encode_experts({1: np.zeros((1, 1), np.uint16)}, 5, ExpertShape((0,), 8, 1)), "experts of the routers"),
    ],
    ids=["cut", "of fewer tokens", "of another model"],
)
def test_experts_that_cannot_be_read_name_their_rollout(told: bytes, says: str) -> None:
    one = make_item("a", [0, 0, 1, 1, 1])
    bad = [remade(one, [(EXPERT_IDS, 0, 5, told)])]
    with pytest.raises(UnreadableScores, match=says) as caught:
        Trainer(student(), config(), total_steps=9).step(bad)
    assert caught.value.rollout_ids == ("a",)


def test_models_whose_routers_cannot_be_given_a_choice_are_refused_by_name() -> None:
    assert expert_shape(student()) == SHAPE
    with pytest.raises(RoutingError, match=r"qwen3.*expected a mixture"):
        Trainer(tiny_student(), config(), total_steps=9)
    grouped = student()
    grouped.config.topk_method = "group_limited_greedy"
    with pytest.raises(RoutingError, match="topk_method"):
        expert_shape(grouped)
