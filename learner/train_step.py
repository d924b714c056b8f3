"""One optimizer step on one batch: pack, forward, loss, backward, clip, AdamW. The run's clock is `Trainer.steps_done`.

    items --pack--> microbatches --each: packed_hidden, head and loss at the predictors, backward-->
    gradients of the whole batch --clip--> AdamW at the scheduled learning rate --> steps_done + 1

The loss is normalised over the whole batch, so neither `pack_tokens` nor the order of the items
changes the gradient. A step either happens completely or raises and leaves weights and optimizer as they were.

Rollouts that the teacher wrote have an objective of their own (learner.offline): they are packed apart and share the
divisor.

Legend: T input tokens of a microbatch, N trained tokens of it, H hidden size, V vocabulary, M teachers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engines.logprobs import LmHead, lm_head
from engines.packed import packed_hidden
from learner.config import LearnerConfig
from learner.losses import LossTerms, TokenInputs, offline_config
from learner.objectives.batch_terms import BatchTerms, batch_terms, coefficients
from learner.optimizer import AdamWState, dump_adamw, learning_rate, load_adamw, make_adamw
from learner.packing import BatchError, EmptyBatchError, Microbatch, PackedBatch, TrainItem, pack
from learner.staged_weights import Weight
from learner.step_loss import MicrobatchTerms, StepLoss, make_step_loss
from learner.step_metrics import OfflineMetrics, StepMetrics, StepSums

if TYPE_CHECKING:
    from learner.lora import Adapters  # loads peft

__all__ = ["BatchError", "EmptyBatchError", "NonFiniteError", "Trainer"]


class NonFiniteError(BatchError):
    """The forward or backward pass gave NaN or infinity. `rollout_ids` are those that do so by themselves; empty when
    only their sum does. The step did not happen."""


class _Part(NamedTuple):
    """Items of a batch that one loss is for."""

    items: Sequence[TrainItem]
    batch: PackedBatch
    whole: BatchTerms
    """Of the whole batch, as these items see it."""
    loss: StepLoss


class Trainer:
    """Owns the model's parameters and the optimizer. One thread only.

    `model` is loaded with `load_causal_lm(..., attention="packed", dtype="float32", train=True)`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: LearnerConfig,
        *,
        total_steps: int,
        adapters: Adapters | None = None,
        vocab_tokens: int | None = None,
        seed: int = 0,
    ) -> None:
        """`adapters`: put on `model` already; they alone are trained. `vocab_tokens`: ids that the tokenizer has, where
        the model's embedding is padded past them. `seed`: of the run, for what is drawn. Raises ValueError: total_steps
        below 1, no trainable parameter, parameters that are not float32 or float64 (AdamW's small updates vanish in
        bfloat16; use config.dtype for bfloat16 products), names of the objective that cannot be loaded."""
        if total_steps < 1:
            raise ValueError(f"total_steps {total_steps}; expected at least 1")
        dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
        if not dtypes or not dtypes <= {torch.float32, torch.float64}:
            raise ValueError(
                f"trainable parameters have dtypes {dtypes or 'none'}; load the model with train=True and dtype="
                "'float32' (learner.dtype = bfloat16 affects matrix products only)"
            )
        self.model = model
        self.adapters = adapters
        self.config = config
        self.total_steps = total_steps
        self.steps_done = 0
        rows = lm_head(model).weight_VH.shape[0]
        n_vocab = rows if vocab_tokens is None else vocab_tokens
        self._loss = make_step_loss(config, vocab_tokens=n_vocab, rows=rows, seed=seed)
        self._offline_loss = make_step_loss(offline_config(config), vocab_tokens=n_vocab, rows=rows, seed=seed)
        self._optimizer = make_adamw(model, config)

    @property
    def next_lr(self) -> float:
        """Learning rate of the step to come."""
        return learning_rate(self.config, self.steps_done, self.total_steps)

    def step(self, items: Sequence[TrainItem], offline: Sequence[TrainItem] = ()) -> StepMetrics:
        """Train every token that the items' masks name, in one optimizer step. `offline`: rollouts that the student
        did not write, under the objective of `config.offline`.

        Raises EmptyBatchError when there is none, NonFiniteError when a number is not finite, BatchError for token
        ids outside the vocabulary; weights, optimizer and clock are then as before.
        """
        started_s = time.perf_counter()
        parts = self._parts(items, offline)
        try:
            sums, *sums_offline = self._accumulate(parts)
            grad_norm = self._clipped_norm(parts)
        except BaseException:
            self._optimizer.zero_grad()
            raise
        lr = self.next_lr
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.steps_done += 1
        batch = parts[0].batch
        return StepMetrics.of(
            sums,
            lr=lr,
            grad_norm=grad_norm,
            items=len(items),
            items_idle=batch.n_items_idle,
            items_unrewarded=parts[0].whole.items_unrewarded,
            microbatches=sum(len(part.batch.microbatches) for part in parts),
            input_tokens=sum(part.batch.n_inputs for part in parts),
            step_s=time.perf_counter() - started_s,
            offline=OfflineMetrics.of(sums_offline[0], items=len(offline)) if sums_offline else None,
            offline_loss=sum(part.loss for part in sums_offline),
        )

    def weights(self) -> Iterable[tuple[str, Weight]]:
        """The student as actors shall have it, by the names of its architecture; adapters are merged in."""
        return self.model.named_parameters() if self.adapters is None else self.adapters.published()

    def skip(self) -> None:
        """A step that could not be made counts all the same: the clock goes on, weights and moments stay."""
        self.steps_done += 1

    def gradient(self, items: Sequence[TrainItem], offline: Sequence[TrainItem] = ()) -> list[Tensor]:
        """The gradient of the same step, before clipping, by parameter; no step is made."""
        try:
            self._accumulate(self._parts(items, offline))
            return [p.grad.detach().clone() for p in self.model.parameters() if p.grad is not None]
        finally:
            self._optimizer.zero_grad()

    def state_dict(self) -> AdamWState:
        """Optimizer moments by parameter name, and the clock. The weights are the model's own."""
        return dump_adamw(self.model, self._optimizer, steps_done=self.steps_done)

    def load_state_dict(self, state: AdamWState) -> None:
        """Go on where `state_dict` was taken. Raises ValueError naming parameters that are missing, unknown or of
        another shape."""
        load_adamw(self.model, self._optimizer, state)
        self.steps_done = state.steps_done

    def _parts(self, items: Sequence[TrainItem], offline: Sequence[TrainItem]) -> list[_Part]:
        """The student's own items first. Raises EmptyBatchError and BatchError."""
        self._check_ids([*items, *offline])
        items, offline = self._loss.read(items, self.steps_done), self._offline_loss.read(offline, self.steps_done)
        own = pack(items, self.config.pack_tokens)
        whole = batch_terms(items, self._loss.objective, offline)
        parts = [_Part(items, own, whole.part(slice(len(items))), self._loss)]
        if offline:
            theirs = pack(offline, self.config.pack_tokens)
            parts.append(_Part(offline, theirs, whole.part(slice(len(items), None)), self._offline_loss))
        return parts

    def _accumulate(self, parts: Sequence[_Part]) -> list[StepSums]:
        """Add the gradients of all microbatches up; the sums of each part."""
        return [self._accumulate_part(part) for part in parts]

    def _accumulate_part(self, part: _Part) -> StepSums:
        sums = StepSums.zero()
        for microbatch in part.batch.microbatches:
            inputs = self._inputs(microbatch, part.batch.teachers, part.whole, part.loss)
            loss, terms, entropy_N = self._forward(microbatch, inputs, part)
            self._refuse_nonfinite(terms.student_N, microbatch, part.items)
            if not bool(torch.isfinite(loss)):
                per_token_N = terms.slope_N * terms.student_N + terms.divergence_N
                self._refuse_nonfinite(per_token_N, microbatch, part.items, what="loss")
                raise NonFiniteError(f"step {self.steps_done + 1}: the sum of the losses overflows; no step was made")
            loss.backward()  # pyright: ignore[reportUnknownMemberType]
            sums = sums.plus(_measure(loss.detach(), terms, entropy_N, inputs))
        return sums

    def _forward(self, microbatch: Microbatch, inputs: TokenInputs, part: _Part) -> MicrobatchTerms:
        """The loss of the N trained tokens, from the student's distributions at temperature 1."""
        ids_T = self._tensor(microbatch.ids_T)
        head = lm_head(self.model)
        half = self.config.dtype == "bfloat16"
        autocast = torch.autocast(self._device.type, torch.bfloat16) if half else contextlib.nullcontext()
        with autocast:
            hidden_TH = packed_hidden(self.model, ids_T, microbatch.lengths)
        hidden_NH = hidden_TH.index_select(0, self._tensor(microbatch.predictor_N))
        if half:
            bias_V = None if head.bias_V is None else head.bias_V.bfloat16()
            head = LmHead(head.weight_VH.bfloat16(), bias_V, head.scale, head.softcap)
            hidden_NH = hidden_NH.bfloat16()
        targets_N = self._tensor(microbatch.target_N)
        return part.loss(head, hidden_NH, targets_N, inputs, microbatch.top, part.whole.divisor)

    def _inputs(
        self, microbatch: Microbatch, teachers: Sequence[str], whole: BatchTerms, loss: StepLoss
    ) -> TokenInputs:
        item_N = self._tensor(microbatch.item_N)
        return TokenInputs(
            behaviour_N=self._tensor(microbatch.behaviour_N),
            teacher_MN=self._tensor(microbatch.teacher_MN),
            routed_MN=self._tensor(microbatch.routed_MN),
            coef_M=coefficients(teachers, loss.objective).to(self._device),
            reward_advantage_N=whole.reward_advantage_R.to(self._device)[item_N],
            share_N=whole.share_R.to(self._device)[item_N],
            sequence_N=item_N,
            n_sequences=len(whole.share_R),
            cost_scale_N=whole.cost_scale_R.to(self._device)[item_N],
        )

    def _clipped_norm(self, parts: Sequence[_Part]) -> float:
        """Global norm before clipping. Raises NonFiniteError."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if not bool(torch.isfinite(norm)):
            raise self._nonfinite_gradient(parts)
        if self.config.max_grad_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), self.config.max_grad_norm, norm)
        return float(norm)

    def _nonfinite_gradient(self, parts: Sequence[_Part]) -> NonFiniteError:
        """Find the culprits: the backward pass once more, one item at a time. Slow, and only on the way out."""
        named = [(name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None]
        parameters = [name for name, grad in named if not bool(torch.isfinite(grad).all())]
        culprits: list[str] = []
        for part, index in ((p, i) for p in parts for i in range(len(p.items))):
            train_item = part.items[index]
            if not train_item.n_trained:
                continue
            self._optimizer.zero_grad()
            alone = pack([train_item], self.config.pack_tokens)
            microbatch = alone.microbatches[0]
            inputs = self._inputs(microbatch, alone.teachers, part.whole.of(index), part.loss)
            self._forward(microbatch, inputs, part).loss.backward()  # pyright: ignore[reportUnknownMemberType]
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            if not bool(torch.isfinite(torch.nn.utils.get_total_norm(gradients))):
                culprits.append(train_item.item.rollout_id)
        return NonFiniteError(
            f"step {self.steps_done + 1}: the gradient of {len(parameters)} parameters is not finite (first: "
            f"{parameters[:3]}); by themselves it is caused by the rollouts {culprits or 'none, only by their sum'}; "
            "no step was made",
            culprits,
        )

    def _refuse_nonfinite(
        self, value_N: Tensor, microbatch: Microbatch, items: Sequence[TrainItem], *, what: str = "student log-prob"
    ) -> None:
        finite_N = torch.isfinite(value_N)
        if bool(finite_N.all()):
            return
        wrong = np.unique(microbatch.item_N[~finite_N.cpu().numpy()])
        culprits = [items[int(i)].item.rollout_id for i in wrong]
        raise NonFiniteError(
            f"step {self.steps_done + 1}: the {what} of {int((~finite_N).sum())} tokens is not finite, in the rollouts "
            f"{culprits}; no step was made (weights that have diverged give this for every rollout)",
            culprits,
        )

    def _check_ids(self, items: Sequence[TrainItem]) -> None:
        vocab_rows = lm_head(self.model).weight_VH.shape[0]
        used = [(t.item.rollout_id, t.tokens_L) for t in items if t.n_trained]
        wrong = [rollout_id for rollout_id, ids_L in used if ids_L.min() < 0 or ids_L.max() >= vocab_rows]
        if wrong:
            raise BatchError(
                f"token ids outside the student's vocabulary of {vocab_rows} in the rollouts {wrong}", wrong
            )

    @property
    def _device(self) -> torch.device:
        return lm_head(self.model).weight_VH.device

    def _tensor(self, array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(np.require(array, requirements="W")).to(self._device)


def _measure(loss: Tensor, terms: LossTerms, entropy_N: Tensor, inputs: TokenInputs) -> StepSums:
    graded_N = inputs.routed_MN.any(dim=0)
    ratio_N = (terms.student_N - inputs.behaviour_N).double().exp()
    sums = torch.stack(
        [
            loss.double(),
            terms.divergence_N.double().sum(),
            terms.reverse_kl_N.double().sum(),
            graded_N.double().sum(),
            ratio_N.sum(),
            ratio_N.square().sum(),
            terms.cut_N.double().sum(),
            terms.weights_N.double().sum(),
            entropy_N.double().sum(),
            terms.student_N.double().sum(),
            terms.advantage_N.double().sum(),
            ratio_N.max(),
        ]
    ).tolist()  # one transfer from the device for all of them
    return StepSums(terms.student_N.shape[0], *sums)
