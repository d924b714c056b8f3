"""Pools with divergences and payloads of their own in one batch: the gradient of a whole step against a plain model,
row by row in float64, and against the losses of the pools one by one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stillhouse.learner.batch import TrainItem, UnreadableScores, train_items
from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.prompts.config import TaskConfig
from stillhouse.learner.step.train_step import Trainer
from stillhouse.protocol.messages import TopKPiece
from stillhouse.protocol.payloads.hidden import encode_hidden
from stillhouse.protocol.topk_codec import encode_top_k
from tests.learner.settings import learner_config
from tests.learner.step.gradients import step_gradients
from tests.learner.step.test_hidden_step import dense_q, head_of, states_of
from tests.learner.step.test_top_k_step import VOCAB, edges_of, teacher_logprobs

Make = Callable[..., TrainItem]
Student = Callable[..., PreTrainedModel]
PLAIN: Final[dict[str, Any]] = {"max_grad_norm": 0.0, "warmup_steps": 0, "schedule": "constant"}
ROUTES: Final = {"default": (), "math": ("math",), "style": ("style",)}
K: Final = 6
"""Tokens of a top-k set."""
Payloads = Mapping[str, str]
"""Pool -> `sets` or `states`; others send neither."""


def config_of(**fields: Any) -> LearnerConfig:
    return learner_config(tasks=TaskConfig(routes=ROUTES), **{**PLAIN, **fields})


def trainer_of(model: PreTrainedModel, config: LearnerConfig) -> Trainer:
    return Trainer(model, config, total_steps=10, vocab_tokens=VOCAB, head_of=head_of)


def with_payloads(train_item: TrainItem, payloads: Payloads) -> TrainItem:
    """As the buffer hands it on. Pools that send states have the scores that these give."""
    pieces: list[TopKPiece] = []
    bodies: list[bytes] = []
    scores_ML = train_item.teacher_ML.copy()
    ids_L1 = torch.from_numpy(train_item.tokens_L).long()[:, None]
    for (start, end), (m, pool) in itertools.product(
        itertools.pairwise(edges_of(train_item, 3)), enumerate(train_item.item.teachers)
    ):
        if payloads.get(pool) == "sets":
            logprobs_TV = teacher_logprobs(train_item, pool)[start:end]
            ids_TK = np.argsort(-logprobs_TV, axis=1)[:, :K]
            logprobs_TK = np.take_along_axis(logprobs_TV, ids_TK, 1)
            bodies.append(encode_top_k(ids_TK, logprobs_TK, vocab_size=VOCAB, mass=1.0, max_k=K, logprob_bits=16))
        elif payloads.get(pool) == "states":
            states_TH = states_of(train_item, pool)[start:end]
            bodies.append(encode_hidden(states_TH.view(torch.int16).numpy().view(np.uint16)))
            scores_ML[m] = dense_q(train_item, pool).gather(1, ids_L1)[:, 0].float().numpy()
        else:
            continue
        pieces.append(TopKPiece(m, start, end, len(bodies[-1])))
    frames: list[npt.NDArray[Any]] = [
        train_item.tokens_L,
        train_item.behaviour_L,
        train_item.train_mask_L.astype(np.uint8),
        scores_ML,
    ]
    if pieces:
        frames.append(np.frombuffer(b"".join(bodies), np.uint8))
    return train_items([msgspec.structs.replace(train_item.item, top_k=tuple(pieces))], frames)[0]


def items_with(make_item: Make, payloads: Payloads) -> list[TrainItem]:
    """Rollouts of one pool, of two or three at once, and of none."""
    made = [
        make_item("a", [0, 0, 1, 1, 1], vocab=VOCAB, task_id=7, reward=1.0),
        make_item("b", [0, 1, 1, 0, 0, 1, 0], teachers=("math", "style"), vocab=VOCAB, task_id=7, reward=0.0),
        make_item("c", [0, 0, 0], vocab=VOCAB, task_id=7),
        make_item("d", [0] * 6 + [1] * 9, teachers=("style",), vocab=VOCAB, task_id=9, reward=0.5),
        make_item("e", [0, 1, 1], teachers=(), vocab=VOCAB, task_id=9, reward=-1.0),
        make_item("f", [0, 1, 0, 1], teachers=("default", "math", "style"), vocab=VOCAB, task_id=9, reward=1.0),
    ]
    return [with_payloads(one, payloads) for one in made]


def buckets(train_item: TrainItem, pool: str, t: int, p_V: Tensor, payloads: Payloads) -> tuple[Tensor, Tensor]:
    """What student and teacher are compared on: the whole vocabulary, or the set and one bucket for the rest."""
    if payloads[pool] == "states":
        return p_V, dense_q(train_item, pool)[t].exp()
    q_V = torch.from_numpy(np.exp(teacher_logprobs(train_item, pool)[t]))
    top = torch.argsort(-q_V)[:K]
    return torch.cat([p_V[top], (1 - p_V[top].sum())[None]]), torch.cat([q_V[top], (1 - q_V[top].sum())[None]])


def divergence_between(name: str, options: Mapping[str, Any], p_B: Tensor, q_B: Tensor) -> Tensor:
    """From the definitions."""
    reverse, forward = (p_B * (p_B / q_B).log()).sum(), (q_B * (q_B / p_B).log()).sum()
    beta, weight = options.get("beta", 0.5), options.get("weight", 0.5)
    mixture_B = beta * q_B + (1 - beta) * p_B
    jsd = beta * (q_B * (q_B / mixture_B).log()).sum() + (1 - beta) * (p_B * (p_B / mixture_B).log()).sum()
    mixed = weight * forward + (1 - weight) * reverse
    return {"reverse_kl": reverse, "forward_kl": forward, "jsd": jsd, "mixed": mixed}[name]


def cost_of(name: str, s: float, q: float) -> float:
    return 1 - math.exp(q - s) if name == "k3" else s - q


class Slow:
    """The loss of a batch, row by row. `divergences`: pool -> (name, options). Weights truncated at 2, or of whole
    rollouts; `rewards`: GRPO without std."""

    def __init__(
        self,
        model: PreTrainedModel,
        divergences: Mapping[str, tuple[str, dict[str, Any]]],
        payloads: Payloads,
        coefs: Mapping[str, float],
        *,
        of_rollouts: bool,
        rewards: bool,
        clip: float = math.inf,
    ) -> None:
        self.model, self.divergences, self.payloads, self.coefs = model, divergences, payloads, coefs
        self.of_rollouts, self.rewards, self.clip = of_rollouts, rewards, clip
        self.told: dict[str, list[float]] = {}
        """Pool -> its divergence at each token that it scored."""

    def gradients(self, items: Sequence[TrainItem]) -> dict[str, Tensor]:
        loss, n_tokens = torch.zeros((), dtype=torch.float64), sum(one.n_trained for one in items)
        for train_item in items:
            rewards = [one.item.reward for one in items if one.item.task_id == train_item.item.task_id]
            known = [reward for reward in rewards if reward is not None]
            own = train_item.item.reward
            from_rewards = own - sum(known) / len(known) if self.rewards and own is not None else 0.0
            loss = loss + self._rollout(train_item, from_rewards) / n_tokens
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def _rollout(self, train_item: TrainItem, from_rewards: float) -> Tensor:
        trained = np.flatnonzero(train_item.train_mask_L).tolist()
        ids_L = torch.from_numpy(train_item.tokens_L).long()
        logits_LV = self.model(input_ids=ids_L[None]).logits[0]
        every_LV, tokens_LV = torch.log_softmax(logits_LV, dim=-1), torch.softmax(logits_LV[:, :VOCAB], dim=-1)
        logs = {t: every_LV[t - 1, ids_L[t]].item() - float(train_item.behaviour_L[t]) for t in trained}
        loss, before = torch.zeros((), dtype=torch.float64), 0.0
        for t in trained:
            s, advantage = every_LV[t - 1, ids_L[t]], from_rewards
            for m, pool in enumerate(train_item.item.teachers):
                name, options = self.divergences[pool]
                if name in ("k1", "k2", "k3"):
                    cost = self._cost(train_item, m, t, s.item(), tokens_LV[t - 1].detach())
                    advantage -= self.coefs[pool] * cost
                    continue
                p_B, q_B = buckets(train_item, pool, t, tokens_LV[t - 1], self.payloads)
                divergence = divergence_between(name, options, p_B, q_B)
                cap = options.get("context_cap", 0.0)
                loss = loss + self.coefs[pool] * (min(math.exp(before), cap) if cap else 1.0) * divergence
                self.told.setdefault(pool, []).append(divergence.item())
            ratio = math.exp(sum(logs.values()) if self.of_rollouts else logs[t])
            loss = loss - min(ratio, 2.0) * advantage * s
            before += logs[t]
        return loss

    def _cost(self, train_item: TrainItem, m: int, t: int, s: float, p_V: Tensor) -> float:
        pool, q = train_item.item.teachers[m], float(train_item.teacher_ML[m, t])
        name, options = self.divergences[pool]
        compared = s if options.get("kl_student", "current") == "current" else float(train_item.behaviour_L[t])
        cost = max(-self.clip, min(self.clip, cost_of(name, compared, q)))
        self.told.setdefault(pool, []).append(cost)
        if "baseline" not in options:
            return cost
        p_B, q_B = buckets(train_item, pool, t, p_V, self.payloads)
        costs = [cost_of(name, math.log(p), math.log(q)) for p, q in zip(p_B.tolist(), q_B.tolist(), strict=True)]
        return cost - sum(p * max(-self.clip, min(self.clip, c)) for p, c in zip(p_B.tolist(), costs, strict=True))


CASES: Final[dict[str, tuple[dict[str, tuple[str, dict[str, Any]]], dict[str, str], dict[str, Any]]]] = {
    "a cost, sets and states": (
        {"default": ("k1", {}), "math": ("jsd", {"beta": 0.3}), "style": ("reverse_kl", {})},
        {"math": "sets", "style": "states"},
        {"advantage": ("grpo", {"std": False})},
    ),
    "two costs and a baseline": (
        {
            "default": ("forward_kl", {}),
            "math": ("k1", {"baseline": "expected_cost"}),
            "style": ("k3", {"kl_student": "behaviour"}),
        },
        {"default": "states", "math": "sets"},
        {"cost_transform": ("clip", {"limit": 0.7})},
    ),
    "contexts of one pool and weights of rollouts": (
        {"default": ("k2", {}), "math": ("mixed", {"weight": 0.2, "context_cap": 1.5}), "style": ("reverse_kl", {})},
        {"math": "sets", "style": "sets"},
        {"importance": ("sequence", {"cap": 2.0})},
    ),
}


def fields_of(divergences: Mapping[str, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """The common divergence is that of `default`."""
    own = {pool: one for pool, one in divergences.items() if pool != "default"}
    return {"divergence": divergences["default"], "teacher_divergences": own}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pack_tokens", [1, 16])
def test_gradient_and_figures_equal_the_slow_reference(
    tiny_student: Student, make_item: Make, case: str, pack_tokens: int
) -> None:
    """Sets have 16 bits: what is left is their rounding."""
    divergences, payloads, more = CASES[case]
    items = items_with(make_item, payloads)
    config = config_of(**fields_of(divergences), **more, coef=0.3, teacher_coefs={"math": 2.0}, logprob_chunk_tokens=4)
    config = msgspec.structs.replace(config, pack_tokens=pack_tokens)
    slow = Slow(
        tiny_student("eager", torch.float64),
        divergences,
        payloads,
        {"default": 0.3, "math": 2.0, "style": 0.3},
        of_rollouts="importance" in more,
        rewards="advantage" in more,
        clip=0.7 if "cost_transform" in more else math.inf,
    )
    expected = slow.gradients(items)
    got = step_gradients(trainer_of(tiny_student(dtype=torch.float64), config), items)
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    assert got.keys() == expected.keys() and scale > 1e-3
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=3e-4 * scale, rtol=3e-3, msg=name)
    metrics = trainer_of(tiny_student(dtype=torch.float64), config).step(items)
    assert metrics.of_pools() == {
        f"teachers/{pool}/divergence": pytest.approx(np.mean(told), rel=3e-3, abs=1e-4)
        for pool, told in slow.told.items()
    }
    n_scored = sum(one.n_trained for one in items if one.item.teachers)
    total = sum(sum(told) for told in slow.told.values())
    assert metrics.divergence == pytest.approx(total / n_scored, rel=3e-3, abs=1e-4)


def test_only_payloads_that_a_divergence_needs_are_read(tiny_student: Student, make_item: Make) -> None:
    bare = make_item("a", [0, 1, 1, 1], teachers=("math", "style"), vocab=VOCAB)
    fields: dict[str, Any] = {"divergence": "k1", "teacher_divergences": {"math": "reverse_kl"}}
    trainer_of(tiny_student(), config_of(**fields)).step([with_payloads(bare, {"math": "sets"})])
    for payloads in ({"style": "sets"}, {}):
        trainer = trainer_of(tiny_student(), config_of(**fields))
        with pytest.raises(UnreadableScores, match="teacher 'math' sent no top-k set for 3 of the 3 tokens"):
            trainer.step([with_payloads(bare, payloads)])
        assert trainer.steps_done == 0


@pytest.mark.parametrize(
    "of_style",
    [{"coef": 0.3, "teacher_coefs": {"style": 0.0}}, {"coef": 0.0, "teacher_coefs": {"default": 0.3, "math": 0.3}}],
)
def test_a_pool_without_weight_in_the_loss_needs_no_payloads(
    tiny_student: Student, make_item: Make, of_style: dict[str, Any]
) -> None:
    """Its figure is the cost of sampled tokens, s - q."""
    payloads = {"default": "sets", "math": "sets"}
    items, common = items_with(make_item, payloads), ("reverse_kl", dict[str, Any]())
    slow = Slow(
        tiny_student("eager", torch.float64),
        {"default": common, "math": common, "style": ("k1", {})},
        payloads,
        {"default": 0.3, "math": 0.3, "style": 0.0},
        of_rollouts=False,
        rewards=False,
    )
    expected, config = slow.gradients(items), config_of(divergence="reverse_kl", logprob_chunk_tokens=4, **of_style)
    got = step_gradients(trainer_of(tiny_student(dtype=torch.float64), config), items)
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=3e-4 * scale, rtol=3e-3, msg=name)
    metrics = trainer_of(tiny_student(dtype=torch.float64), config).step(items)
    assert metrics.of_pools() == {
        f"teachers/{pool}/divergence": pytest.approx(np.mean(told), rel=3e-3, abs=1e-4)
        for pool, told in slow.told.items()
    }


def test_the_null_teacher_has_no_figures_of_pools(tiny_student: Student, make_item: Make) -> None:
    items = items_with(make_item, {})
    assert not trainer_of(tiny_student(), config_of(divergence="null")).step(items).of_pools()
