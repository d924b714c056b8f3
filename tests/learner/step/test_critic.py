"""A step with a value function: against PPO written out token by token, packed in every way, and what it refuses."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stillhouse.learner.batch import TrainItem
from stillhouse.learner.config import LearnerConfig, LoraConfig
from stillhouse.learner.objectives import advantages
from stillhouse.learner.objectives.options import TokenAdvantage, ValueConfig
from stillhouse.learner.step.critic import CriticStateError, ValueCritic
from stillhouse.learner.step.finite_step import finite_step
from stillhouse.learner.step.lora import Adapters
from stillhouse.learner.step.train_step import NonFiniteError, Trainer
from tests.learner.conftest import make_item, tiny_student
from tests.learner.settings import learner_config
from tests.learner.step.gradients import PLAIN, assert_close, step_gradients
from tests.learner.step.plain_ppo import PlainPpo

PPO: dict[str, Any] = {"eps": 1e-4, "lr": 1e-2, "importance": "ppo", "coef": 0.3}


def config_of(*, value: Mapping[str, Any] | None = None, **fields: Any) -> LearnerConfig:
    given: dict[str, Any] = {"lr": 2e-2, **(value or {})}
    advantage = {name: given.pop(name, usual) for name, usual in (("discount", 0.97), ("decay", 0.8))}
    return learner_config(**(PLAIN | PPO | fields), advantage=("gae", {**advantage, "value": given}))


def value_of(config: LearnerConfig) -> ValueConfig:
    assert isinstance(config.objective.advantage, TokenAdvantage)
    return config.objective.advantage.value


def batch(model: PreTrainedModel) -> list[TrainItem]:
    """Unequal lengths, an environment's tokens in the middle of one, one that was not judged, one with nothing to
    train; log-probs of a slightly older student, so that clips bind for some tokens only."""
    items = [
        make_item("a", [0, 0, 1, 1, 1], reward=1.0),
        make_item("b", [0, 1, 1, 0, 0, 1, 0, 0], reward=0.0),
        make_item("c", [0, 0, 0], reward=0.25),
        make_item("d", [0] * 10 + [1] * 20, reward=-0.5),
        make_item("e", [0, 1, 1], reward=2.0, teachers=()),
        make_item("f", [0, 1, 1, 1, 1], reward=None),
    ]
    random = np.random.default_rng(0)
    for item in items:
        ids_L = torch.from_numpy(item.tokens_L).long()
        with torch.no_grad():
            logprobs_LV = torch.log_softmax(model(input_ids=ids_L[None]).logits[0], dim=-1)
        own_L = logprobs_LV[:-1].gather(1, ids_L[1:, None])[:, 0].double().numpy()
        item.behaviour_L[1:] = np.minimum(own_L + random.normal(0, 0.3, len(own_L)), -1e-3)
    return items


def critic_of(trainer: Trainer) -> ValueCritic:
    assert isinstance(trainer.critic, ValueCritic)
    return trainer.critic


def trainer_of(config: LearnerConfig, *, dtype: torch.dtype = torch.float64) -> Trainer:
    """Its values are not all 0."""
    trainer = Trainer(tiny_student(dtype=dtype), config, total_steps=10)
    with torch.no_grad():
        weight_1H = critic_of(trainer).head.linear.weight
        weight_1H.copy_(torch.linspace(-0.3, 0.5, weight_1H.shape[1])[None])
        critic_of(trainer).head.linear.bias.fill_(0.1)
    return trainer


def parameters(trainer: Trainer) -> dict[str, Tensor]:
    head = {f"value {name}": p for name, p in critic_of(trainer).head.named_parameters()}
    return {name: p.detach().clone() for name, p in {**dict(trainer.model.named_parameters()), **head}.items()}


def gradients(trainer: Trainer, items: Sequence[TrainItem], offline: Sequence[TrainItem] = ()) -> dict[str, Tensor]:
    """Of the student, and of the head."""
    seen: dict[str, Tensor] = {}
    critic = critic_of(trainer)

    def look(*_: Any) -> None:
        seen.update(
            {f"value {name}": p.grad.clone() for name, p in critic.head.named_parameters() if p.grad is not None}
        )

    hook = critic._optimizer.register_step_pre_hook(look)  # pyright: ignore[reportPrivateUsage]
    students = step_gradients(trainer, items, offline)
    hook.remove()
    return students | seen


# ----------------------------------------------------------------------------------- what a step does


VARIANTS: dict[str, dict[str, Any]] = {
    "one update": {},
    "through the backbone": {"value": {"through_backbone": True, "coef": 2.0}},
    "three updates, values clipped": {"updates_per_batch": 3, "value": {"through_backbone": True, "clip": 0.01}},
    "three updates, decoupled": {"updates_per_batch": 3, "importance": ("decoupled", {"cap": 1.1})},
    "three updates that move far, decoupled": {
        "updates_per_batch": 3,
        "importance": ("decoupled", {"low": 0.98, "high": 1.02}),
    },
    "mean of rollouts' means": {"aggregation": "sequence_mean", "value": {"through_backbone": True}},
}


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
def test_a_step_is_ppo_written_out_token_by_token(fields: dict[str, Any]) -> None:
    config = config_of(**fields, pack_tokens=16, logprob_chunk_tokens=5)
    items = batch(tiny_student("eager"))
    trainer = trainer_of(config)
    head = critic_of(trainer).head.linear
    plain = PlainPpo(tiny_student("eager", torch.float64), head.weight[0], float(head.bias.detach()), config)
    before, got = parameters(trainer), gradients(trainer, items)
    plain.step(items)
    expected: dict[str, Tensor | None] = {name: p.grad for name, p in plain.model.named_parameters()}
    assert plain.weight_H.grad is not None and plain.bias.grad is not None
    expected |= {"value linear.weight": plain.weight_H.grad[None], "value linear.bias": plain.bias.grad[None]}
    assert_close(got, {name: gradient for name, gradient in expected.items() if gradient is not None})
    weights = dict(plain.model.named_parameters())
    weights |= {"value linear.weight": plain.weight_H[None], "value linear.bias": plain.bias[None]}  # pyright: ignore
    after = parameters(trainer)
    for name, weight in weights.items():
        torch.testing.assert_close(after[name], weight.detach(), atol=1e-6, rtol=1e-5, msg=name)
        assert not torch.equal(after[name], before[name]), name
    assert trainer.steps_done == 1, "several updates are one step: the version rises by one"


def test_without_a_way_through_the_backbone_the_value_loss_leaves_the_student_alone() -> None:
    items = batch(tiny_student("eager"))
    trainers = [trainer_of(config_of(value={"coef": c}, max_grad_norm=1e-3)) for c in (0.1, 100.0)]
    students = [step_gradients(trainer, items) for trainer in trainers]
    for name, gradient in students[0].items():
        assert torch.equal(gradient, students[1][name]), name


@pytest.mark.parametrize("pack_tokens", [1, 4096])
def test_what_the_teacher_wrote_trains_no_value_and_shares_the_divisor(pack_tokens: int) -> None:
    items = batch(tiny_student("eager"))
    theirs = [make_item("t", [0, 0] + [1] * 7, reward=9.0), make_item("u", [0, 1, 1])]
    heads: list[dict[str, Tensor]] = []
    for offline in ([], theirs):
        trainer = trainer_of(config_of(pack_tokens=pack_tokens))
        heads.append({name: g for name, g in gradients(trainer, items, offline).items() if name.startswith("value")})
    alone, mixed = heads
    own = sum(item.n_trained for item in items)
    assert_close(mixed, {name: gradient * own / (own + 9) for name, gradient in alone.items()})


def test_figures_equal_a_loop_over_judged_tokens() -> None:
    config = config_of(updates_per_batch=2, pack_tokens=9)
    items = batch(tiny_student("eager"))
    trainer = trainer_of(config)
    head = critic_of(trainer).head.linear
    plain = PlainPpo(tiny_student("eager", torch.float64), head.weight[0], float(head.bias.detach()), config)
    with torch.no_grad():
        value = [[float(v) for _, v in plain._tokens(item)] for item in items]  # pyright: ignore[reportPrivateUsage]
    told = plain._advantages(items, value)  # pyright: ignore[reportPrivateUsage]
    pairs = [(v, back) for r, own in enumerate(told) for v, (_, back) in zip(value[r], own, strict=False)]
    values, returns = np.array(pairs).T
    figures = trainer.step(items).as_dict()
    expected = {
        "value_tokens": 28,
        "value_loss": 0.5 * ((values - returns) ** 2).mean(),
        "value_explained_variance": 1 - (returns - values).var() / returns.var(),
        "value_return_mean": returns.mean(),
        "value_mean": values.mean(),
        "updates_made": 2,
        "updates_lost": 0,
        "items_unrewarded": 1,
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert figures["updates_logprob_shift"] != 0.0 != figures["value_grad_norm"]


def test_adapters_learn_from_the_value_loss_where_they_may() -> None:
    def trained(through: bool) -> dict[str, Tensor]:
        model = tiny_student()
        torch.manual_seed(0)
        adapters = Adapters(model, LoraConfig(rank=2), base="student")
        config = config_of(coef=0.0, value={"through_backbone": through})
        trainer = Trainer(model, config, total_steps=9, adapters=adapters)
        items = [make_item(name, [0, 1, 1, 1], reward=1.0) for name in ("a", "b")]
        trainer.step(items)  # the head is at 0 before it: nothing comes through
        return step_gradients(trainer, items)

    alone, through = trained(False), trained(True)
    assert alone.keys() == through.keys() and all("lora_" in name for name in alone)
    assert any(not torch.allclose(alone[name], through[name], atol=1e-6) for name in alone)


# ------------------------------------------------------------------------------------------- not finite


@pytest.fixture
def any_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a reward beyond all limits had passed them."""
    monkeypatch.setattr(advantages, "MAX_REWARD", float("inf"))


@pytest.mark.usefixtures("any_reward")
def test_a_reward_that_overflows_the_value_loss_leaves_its_rollout_out_of_the_step() -> None:
    items = [make_item(name, [0, 1, 1], reward=1.0, seed=n) for n, name in enumerate("abc")]
    items[1] = make_item("b", [0, 1, 1], reward=1e30, seed=1)
    trainer = trainer_of(config_of(updates_per_batch=2), dtype=torch.float32)
    before = parameters(trainer)
    with pytest.raises(NonFiniteError, match=r"step 1: the value loss of 2 tokens is not finite, .*\['b'\]"):
        trainer.step(items)
    after = parameters(trainer)
    assert all(torch.equal(after[name], before[name]) for name in before) and trainer.steps_done == 0
    assert not critic_of(trainer).gradients()
    outcome = finite_step(trainer, items)
    assert outcome.masked == ("b",) and outcome.figures is not None and trainer.steps_done == 1
    assert outcome.figures.as_dict()["value_return_mean"] < 2.0


@pytest.mark.usefixtures("any_reward")
def test_a_gradient_of_the_value_head_that_is_not_finite_is_not_applied() -> None:
    """Its loss and the student's gradient are: its norm alone overflows."""
    items = [make_item(name, [0, 1, 1], reward=reward, seed=3) for name, reward in (("a", 1.0), ("b", 1.5e19))]
    trainer = trainer_of(config_of(value={"coef": 1.0}), dtype=torch.float32)
    before, head = parameters(trainer), critic_of(trainer).state_dict()
    with pytest.raises(NonFiniteError, match=r"the gradient of .* is not finite .*by the rollouts \['b'\]"):
        trainer.step(items)
    assert all(torch.equal(value, before[name]) for name, value in parameters(trainer).items())
    assert all(torch.equal(value, head[name]) for name, value in critic_of(trainer).state_dict().items())
    assert trainer.steps_done == 0 and finite_step(trainer, items).masked == ("b",)


def test_a_value_that_is_no_number_is_said_before_it_is_in_every_advantage() -> None:
    trainer = trainer_of(config_of())
    with torch.no_grad():
        critic_of(trainer).head.linear.bias.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match=r"the value of 2 tokens is not finite, in the rollouts \['a'\]"):
        trainer.step([make_item("a", [0, 1, 1], reward=1.0)])


def test_a_later_update_that_is_not_finite_ends_the_step_with_those_before_it(caplog: pytest.LogCaptureFixture) -> None:
    """A learning rate that blows the weights up at once: the second of three updates cannot be made."""
    items = [make_item(name, [0, 1, 1], reward=float(n)) for n, name in enumerate("ab")]
    one, three = (trainer_of(config_of(updates_per_batch=n, lr=1e30), dtype=torch.float32) for n in (1, 3))
    assert finite_step(one, items).figures is not None
    with caplog.at_level(logging.ERROR):
        outcome = finite_step(three, items)
    assert "step 1, update 2: the gradient of" in caplog.text and "ends with 1 of 3 updates" in caplog.text
    assert outcome.masked == () and outcome.figures is not None, "the first update has trained them"
    assert outcome.figures.updates is not None
    assert (outcome.figures.updates.made, outcome.figures.updates.lost, three.steps_done) == (1, 2, 1)
    assert_close(parameters(three), parameters(one))
    assert all(p.grad is None for p in three.model.parameters()) and not critic_of(three).gradients()
    assert finite_step(three, items) == (None, ("a", "b")), "the next step begins with these weights, and says so"


# -------------------------------------------------------------------------------------------------- state


def test_the_head_is_the_learners_alone_and_draws_no_random_number() -> None:
    model = tiny_student()
    state = torch.get_rng_state()
    trainer = Trainer(model, config_of(), total_steps=9)
    assert torch.equal(torch.get_rng_state(), state)
    plain = Trainer(tiny_student(), LearnerConfig(), total_steps=9)
    assert [name for name, _ in trainer.weights()] == [name for name, _ in plain.weights()]
    assert trainer.state_dict().never_stepped == plain.state_dict().never_stepped


@pytest.mark.parametrize("steps", [0, 2])
def test_a_restored_critic_goes_on_exactly(steps: int) -> None:
    batches = [
        [make_item(f"{k}{i}", [0, 1, 1, 1], reward=float(i), seed=9 * k + i) for i in range(3)] for k in range(4)
    ]
    config = config_of(updates_per_batch=2, warmup_steps=3, schedule="cosine")
    straight = trainer_of(config, dtype=torch.float32)
    for items in batches[:steps]:
        straight.step(items)
    adamw, critic = straight.state_dict(), straight.critic.state_dict()
    resumed = Trainer(tiny_student(), config, total_steps=10)
    resumed.model.load_state_dict({name: p.clone() for name, p in straight.model.named_parameters()}, strict=False)
    resumed.load_state_dict(adamw)
    resumed.critic.load_state_dict(critic)
    for items in batches[steps:]:
        one, other = straight.step(items).as_dict(), resumed.step(items).as_dict()
        assert {**one, "step_s": 0} == {**other, "step_s": 0}
    expected = parameters(straight)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in parameters(resumed).items())


def test_a_checkpoint_without_a_head_is_refused_and_one_too_many_is_said(caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_of(config_of())
    with pytest.raises(CriticStateError, match=r"has no value head, which learner.objective.advantage = 'gae' needs"):
        trainer.critic.load_state_dict({})
    trainer.step([make_item("a", [0, 1, 1], reward=1.0)])
    state = trainer.critic.state_dict()
    with pytest.raises(CriticStateError, match="belongs to another student"):
        trainer.critic.load_state_dict({**state, "head/linear.weight": torch.zeros((1, 3))})
    with pytest.raises(CriticStateError, match="optimizer state does not fit"):
        trainer.critic.load_state_dict({**state, "optimizer/exp_avg/linear.weight": torch.zeros((1, 3))})
    with caplog.at_level(logging.WARNING):
        Trainer(tiny_student(), LearnerConfig(), total_steps=9).critic.load_state_dict(state)
    assert "value head is left out" in caplog.text


class PlainAdamW:
    """As published (Loshchilov and Hutter 2019), over a clipped gradient, in Python."""

    def __init__(self, weights: Mapping[str, Tensor], config: LearnerConfig) -> None:
        self.weights = {name: weight.clone() for name, weight in weights.items()}
        self._moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in weights.items()}
        self._config, self._steps = config, 0

    def step(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        config, (beta, gamma) = self._config, self._config.betas
        norm = sum(float((g**2).sum()) for g in gradients.values()) ** 0.5
        shrunk = min(1.0, config.max_grad_norm / (norm + 1e-6))
        self._steps += 1
        for name, gradient in gradients.items():
            weight, (mean, square), g = self.weights[name], self._moments[name], gradient * shrunk
            mean.mul_(beta).add_((1 - beta) * g)
            square.mul_(gamma).add_((1 - gamma) * g**2)
            mean_hat, square_hat = mean / (1 - beta**self._steps), square / (1 - gamma**self._steps)
            if weight.ndim >= 2 and not name.startswith("value"):
                weight.mul_(1 - lr * config.weight_decay)
            weight.sub_(lr * mean_hat / (square_hat.sqrt() + config.eps))


def unclipped_gradients(trainer: Trainer, items: Sequence[TrainItem], patch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Of student and head in one step, which is made."""
    seen: dict[str, Tensor] = {}
    clip = Trainer._norms  # pyright: ignore[reportPrivateUsage]

    def look(self: Trainer, *args: Any) -> Any:
        named = [*self.model.named_parameters()]
        named += [(f"value {name}", p) for name, p in critic_of(self).head.named_parameters()]
        seen.update({name: p.grad.clone() for name, p in named if p.grad is not None})
        return clip(self, *args)

    with patch.context() as patched:
        patched.setattr(Trainer, "_norms", look)
        trainer.step(items)
    return seen


def test_student_and_head_move_as_adamw_does_each_at_its_scheduled_rate_from_its_own_clipped_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields: dict[str, Any] = {"schedule": "cosine", "warmup_steps": 2, "min_lr_ratio": 0.1, "weight_decay": 0.1}
    config = config_of(**fields, lr=3e-3, eps=1e-2, max_grad_norm=0.02, value={"lr": 4e-2})
    trainer, items = trainer_of(config), batch(tiny_student("eager"))
    is_value = {name: name.startswith("value") for name in parameters(trainer)}
    plain = [PlainAdamW({n: w for n, w in parameters(trainer).items() if is_value[n] == own}, config) for own in (0, 1)]
    rates = [0.5, 1.0, 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 8)), 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))]
    for rate in rates:
        seen = unclipped_gradients(trainer, items, monkeypatch)
        for own, adamw in enumerate(plain):
            gradients_of = {n: g for n, g in seen.items() if is_value[n] == own}
            adamw.step(gradients_of, rate * (value_of(config).lr if own else config.lr))
        after = parameters(trainer)
        for name, weight in (plain[0].weights | plain[1].weights).items():
            torch.testing.assert_close(after[name], weight, atol=1e-9, rtol=1e-7, msg=name)
