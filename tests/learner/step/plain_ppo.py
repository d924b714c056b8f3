"""PPO as published, one rollout, token and sum after the other: what a step with a value function is compared with.

Two AdamW, float64, no packing. Surrogates are written with min and clip and left to autograd."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stillhouse.learner.batch import TrainItem
from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.objectives.options import Clipped, Decoupled, TokenAdvantage
from stillhouse.models.logprobs import lm_head


class PlainPpo:
    """`step` makes the updates of one batch; gradients of the last one stay in the parameters."""

    def __init__(self, model: PreTrainedModel, weight_H: Tensor, bias: float, config: LearnerConfig) -> None:
        assert isinstance(config.objective.advantage, TokenAdvantage)
        assert isinstance(config.objective.importance, Clipped)
        self.model, self.config = model, config
        self.advantage, self.importance = config.objective.advantage, config.objective.importance
        self.weight_H = weight_H.detach().double().clone().requires_grad_()
        self.bias = torch.tensor(bias, dtype=torch.float64, requires_grad=True)
        self._students = torch.optim.AdamW(model.parameters(), lr=config.lr, eps=config.eps, weight_decay=0.0)
        self._heads = torch.optim.AdamW(
            [self.weight_H, self.bias], lr=self.advantage.value.lr, eps=config.eps, weight_decay=0.0
        )

    def step(self, items: Sequence[TrainItem]) -> None:
        with torch.no_grad():
            first = [self._tokens(item) for item in items]
        told = self._advantages(items, [[float(v) for _, v in tokens] for tokens in first])
        for _ in range(self.config.updates_per_batch):
            self._students.zero_grad()
            self._heads.zero_grad()
            self._loss(items, first, told).backward()  # pyright: ignore[reportUnknownMemberType]
            self._students.step()
            self._heads.step()

    def _tokens(self, item: TrainItem) -> list[tuple[Tensor, Tensor]]:
        """(log-prob, value) of each trained token."""
        ids_L = torch.from_numpy(item.tokens_L).long()
        hidden_LH = self.model.get_decoder()(input_ids=ids_L[None]).last_hidden_state[0]
        logprobs_LV = torch.log_softmax(lm_head(self.model).logits(hidden_LH), dim=-1)
        states_LH = hidden_LH if self.advantage.value.through_backbone else hidden_LH.detach()
        return [
            (logprobs_LV[t - 1, ids_L[t]], states_LH[t - 1] @ self.weight_H + self.bias)
            for t in range(len(ids_L))
            if item.train_mask_L[t]
        ]

    def _advantages(self, items: Sequence[TrainItem], values: Sequence[list[float]]) -> list[list[tuple[float, float]]]:
        """(whitened advantage, return) of each token; nothing for a rollout that was not judged."""
        discount, decay = self.advantage.discount, self.advantage.decay
        told: list[list[tuple[float, float]]] = []
        for item, own in zip(items, values, strict=True):
            advantage, after, pairs = 0.0, 0.0, list[tuple[float, float]]()
            for place in reversed(range(len(own))):
                reward = item.item.reward if place == len(own) - 1 else 0.0
                if reward is None or item.item.reward is None:
                    break
                advantage = reward + discount * after - own[place] + discount * decay * advantage
                after = own[place]
                pairs.insert(0, (advantage, advantage + own[place]))
            told.append(pairs)
        every = [advantage for pairs in told for advantage, _ in pairs]
        mean, spread = statistics.fmean(every), statistics.pstdev(every)
        return [[((a - mean) / (spread + 1e-6), back) for a, back in pairs] for pairs in told]

    def _loss(
        self,
        items: Sequence[TrainItem],
        first: Sequence[list[tuple[Tensor, Tensor]]],
        told: Sequence[list[tuple[float, float]]],
    ) -> Tensor:
        objective, value_config, total = (
            self.config.objective,
            self.advantage.value,
            torch.zeros((), dtype=torch.float64),
        )
        for r, item in enumerate(items):
            places = [t for t in range(len(item.tokens_L)) if item.train_mask_L[t]]
            own = torch.zeros((), dtype=torch.float64)
            for n, (s, value) in enumerate(self._tokens(item)):
                mu, proximal = float(item.behaviour_L[places[n]]), float(first[r][n][0])
                advantage = told[r][n][0] if told[r] else 0.0
                for q in item.teacher_ML[:, places[n]]:
                    advantage -= objective.coef * (s.item() - float(q))
                if isinstance(self.importance, Decoupled):
                    outer = min(torch.tensor(proximal - mu).double().exp().item(), self.importance.cap)
                    ratio = torch.exp(s - proximal)
                else:  # ppo
                    outer, ratio = 1.0, torch.exp(s - mu)
                clipped = ratio.clamp(self.importance.low, self.importance.high)
                own = own - outer * torch.minimum(ratio * advantage, clipped * advantage)
                if told[r]:
                    old, back, clip = float(first[r][n][1]), told[r][n][1], value_config.clip
                    error = (value - back) ** 2
                    if clip > 0:
                        error = torch.maximum(error, (old + (value - old).clamp(-clip, clip) - back) ** 2)
                    own = own + value_config.coef * 0.5 * error
            total = total + (own / max(1, len(places)) if objective.aggregation == "sequence_mean" else own)
        if objective.aggregation == "sequence_mean":
            return total / sum(item.n_trained > 0 for item in items)
        return total / sum(item.n_trained for item in items)
