"""One optimizer step on one batch: pack, forward, loss, backward, clip, update. The clock is `Trainer.steps_done`.

    items --pack--> microbatches --each: packed_hidden, head and loss at the predictors, backward-->
    gradients of the whole batch --clip--> update at the scheduled learning rate --> steps_done + 1
                                           `updates_per_batch` times, from the first arrow on

The loss is normalised over the whole batch, so neither `pack_tokens` nor the order of the items changes the gradient. A
step happens completely, or raises and leaves weights and optimizer unchanged. With several updates per batch this holds
for the first one; if a later one is not finite, the step ends with the updates made before it (`updates_lost`).

Rollouts that a teacher wrote have their own objective (learner.offline). They are packed separately and share the
divisor.

Legend: T input tokens of a microbatch, N trained tokens of it, H hidden size, V vocabulary, M teachers.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stillhouse.learner.batch import (
    BatchError,
    EmptyBatchError,
    Microbatch,
    NonFiniteError,
    PackedBatch,
    TrainItem,
    divide,
    pack_share,
)
from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.objectives.batch_terms import batch_terms
from stillhouse.learner.ranks.group import Ranks
from stillhouse.learner.ranks.messages import dump_items
from stillhouse.learner.reports.step_metrics import OfflineMetrics, StepMetrics, StepSums, UpdatesMetrics
from stillhouse.learner.step.critic import make_critic, value_metrics
from stillhouse.learner.step.forward import (
    BatchPart,
    PassLeft,
    States,
    StepPass,
    batch_values,
    predictor_states,
    refuse_other_head,
)
from stillhouse.learner.step.optimizer import (
    OptimizerState,
    dump_optimizer,
    learning_rate,
    load_optimizer,
    set_learning_rate,
    stored_in,
)
from stillhouse.learner.step.optimizers import make_optimizer
from stillhouse.learner.step.pack_ahead import PackAhead
from stillhouse.learner.step.recompute import recompute
from stillhouse.learner.step.step_loss import StepLoss, make_step_loss
from stillhouse.learner.step.teacher_heads import HeadOf, no_heads
from stillhouse.models.description import resolve_dtype
from stillhouse.models.loading import converted_on_saving, weights_to_save
from stillhouse.models.logprobs import lm_head
from stillhouse.models.packed import refuse_undividable
from stillhouse.models.precision import halve_frozen
from stillhouse.models.routing import expert_shape, prepare
from stillhouse.models.transfer import Shares, read, share_of, upload, whole
from stillhouse.weights.server_checks import prompt_logprobs
from stillhouse.weights.staged_weights import Weight

if TYPE_CHECKING:
    from stillhouse.learner.step.lora import Adapters  # loads peft

__all__ = ["BatchError", "EmptyBatchError", "NonFiniteError", "Trainer"]

log = logging.getLogger(__name__)


class _Update(NamedTuple):
    sums: list[StepSums]
    """Sums of each part."""
    grad_norm: float
    value_grad_norm: float


class Staged(NamedTuple):
    """Copies for a checkpoint."""

    weights: Shares
    """Adapters if there are any, else all weights."""
    optimizer: OptimizerState


def _trained_dtype(model: PreTrainedModel) -> torch.dtype:
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    if not dtypes or not dtypes <= {torch.float32, torch.float64}:
        raise ValueError(
            f"trainable parameters have dtypes {dtypes or 'none'}; load the model with train=True and dtype='float32' "
            "(learner.dtype = bfloat16 affects matrix products only)"
        )
    return torch.float64 if dtypes == {torch.float64} else torch.float32


class Trainer:
    """Owns the model's parameters and the optimizer. One thread only, except for `pack_ahead`.

    With several ranks each has a trainer, and all make the same calls. The methods up to `logprobs` see to that: on
    rank 0 they have the others join (learner.ranks).

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
        ranks: Ranks | None = None,
        head_of: HeadOf = no_heads,
    ) -> None:
        """`adapters` are already on `model`; only they are trained. `vocab_tokens`: number of ids of the tokenizer, if
        the model's embedding is padded past them. `seed`: the run's, for random draws. `ranks`: the processes that
        share this work; default: this one alone. `head_of`: for teachers that send hidden states.

        Raises ValueError for total_steps below 1, a model without trainable parameters, parameters other than float32
        and float64 (small updates vanish in bfloat16), names of the objective that cannot be loaded, and
        (PackingError) an architecture whose sequences ranks cannot divide."""
        if total_steps < 1:
            raise ValueError(f"total_steps {total_steps}; expected at least 1")
        dtype = _trained_dtype(model)
        self.ranks = ranks or Ranks()
        device = self.ranks.device or model.device
        self.bfloat16: Final = resolve_dtype(config.dtype, device.type) == "bfloat16"
        """True if matrix products are in bfloat16. Trained parameters are not."""
        if self.bfloat16 and (saved := halve_frozen(model)):
            log.info("frozen weights are kept in bfloat16: %.2f GB less", saved / 1e9)
        if self.ranks.context_group is not None:
            refuse_undividable(model.config)
        self.experts = expert_shape(model) if config.routing_replay else None
        """The routers that are given the engine's choices; None: all choose freely."""
        if self.experts is not None:
            prepare(model, self.experts)
        recompute(model, config.recompute)
        self.ranks.shard(model, bfloat16=self.bfloat16)
        self.model = model
        self.adapters = adapters
        self.sends_adapters = False
        """Publish the adapters alone, for actors that load them."""
        self.config = config
        self.total_steps = total_steps
        self.steps_done = 0
        rows = lm_head(model).weight_VH.shape[0]
        n_vocab = rows if vocab_tokens is None else vocab_tokens
        self._loss, self._offline_loss = (
            make_step_loss(
                objective,
                max_new_tokens=config.tasks.max_new_tokens,
                chunk_tokens=config.logprob_chunk_tokens,
                vocab_tokens=n_vocab,
                rows=rows,
                seed=seed,
                head_of=head_of,
                experts=self.experts,
            )
            for objective in (config.objective, config.offline.objective)
        )
        self._ahead = PackAhead(self._loss.read, config.pack_tokens)
        self._optimizer = make_optimizer(model, config)
        hidden_size = lm_head(model).weight_VH.shape[1]
        self.critic = make_critic(hidden_size, config, total_steps=total_steps, dtype=dtype, device=device)

    @property
    def next_lr(self) -> float:
        """Learning rate of the next step."""
        return learning_rate(self.config, self.steps_done, self.total_steps)

    def step(self, items: Sequence[TrainItem], offline: Sequence[TrainItem] = ()) -> StepMetrics:
        """Train the tokens selected by the items' masks, in `config.updates_per_batch` updates at one learning rate.
        `offline`: rollouts that the student did not write, trained with `config.offline`. All figures except `updates`
        are those of the first update, that is of the policy that the step started with.

        Raises EmptyBatchError when there is none, NonFiniteError when a number of the first update is not finite,
        BatchError for token ids outside the vocabulary; weights, optimizer and clock are then as before.
        """
        started_s = time.perf_counter()
        self.ranks.announce("step", lambda: dump_items(items, offline))
        parts, lr = self._parts(items, offline), self.next_lr
        updates = self._updates(parts)
        self.steps_done += 1
        (sums, *sums_offline), batch, whole = updates[0].sums, parts[0].batch, parts[0].whole
        value_norm = updates[0].value_grad_norm
        asked, last = self.config.updates_per_batch, updates[-1]
        return StepMetrics.of(
            sums,
            lr=lr,
            grad_norm=updates[0].grad_norm,
            items=len(items),
            items_idle=batch.n_items_idle,
            items_unrewarded=whole.items_unrewarded,
            length_penalty=whole.length_penalty,
            microbatches=sum(part.batch.n_microbatches for part in parts),
            input_tokens=sum(part.batch.n_inputs for part in parts),
            step_s=time.perf_counter() - started_s,
            offline=OfflineMetrics.of(sums_offline[0], items=len(offline)) if sums_offline else None,
            offline_loss=sum(part["loss"] for part in sums_offline),
            value=None if whole.values is None else value_metrics(whole.values, sums["value_error"], value_norm),
            updates=UpdatesMetrics.of(sums, last.sums[0], len(updates), asked, last.grad_norm) if asked > 1 else None,
        )

    def pack_ahead(self, items: Sequence[TrainItem], step: int) -> None:
        """Read and pack what the step from `step` on will train, so that it need not. May be called from another thread
        while a step is under way. With several ranks each reads its own share when the step begins."""
        if self.ranks.world_size == 1:
            self._ahead.make(items, step)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """The student's weights by the names of its architecture, with adapters merged in. With several ranks all of
        them must be read, each once and in this order (`weights.staged_weights.tensor_of`); the others are
        told when the first is asked for."""
        self.ranks.announce("weights")
        yield from self._merged()

    def named_weights(self) -> Iterable[tuple[str, Weight]]:
        """The same for their names and shapes, and for a publisher, whose copies have all ranks take part
        (`Ranks.staging`). With `sends_adapters` the adapters' matrices by peft's names."""
        if self.sends_adapters and self.adapters is not None:
            return self.adapters.tensors().items()
        return self._merged()

    def _merged(self) -> Iterable[tuple[str, Weight]]:
        return self.model.named_parameters() if self.adapters is None else self.adapters.published()

    def skip(self) -> None:
        """Count a step that could not be made: the clock advances, weights and moments stay."""
        self.ranks.announce("skip")
        self.steps_done += 1

    def stage(self, draft: Path) -> Staged | None:
        """Copies in host memory of what a checkpoint has of weights and optimizer, on each rank of its share; None on a
        rank whose share another one writes. `draft`: the folder that all ranks write it into."""
        self.ranks.announce("checkpoint", lambda: str(draft).encode())
        all_weights = self.adapters is None
        converted = all_weights and any(self.ranks.all_gather(lambda: converted_on_saving(self.model), bool))
        if not self.ranks.writes:
            return None
        named = weights_to_save(self.model, converted=converted) if self.adapters is None else self.adapters.tensors()
        return Staged(Shares.copied(named.items()), self.state_dict())

    def logprobs(self, ids: Sequence[int]) -> Tensor:
        """[T - 1] log-probs of the tokens after the first, on the model's device."""
        self.ranks.announce("logprobs", lambda: json.dumps(list(ids)).encode())
        return self.ranks.forward(partial(prompt_logprobs, self.model, ids, bfloat16=self.bfloat16))

    def gradient(self, items: Sequence[TrainItem], offline: Sequence[TrainItem] = ()) -> list[Tensor]:
        """The gradient of such a step, before clipping, by parameter. No step is made. Not announced to other ranks."""
        try:
            parts, update = self._parts(items, offline), self._update_name(1)
            self._sums(parts, self._accumulate(parts), (), update)
            return [whole(p.grad.detach()).clone() for p in self.model.parameters() if p.grad is not None]
        finally:
            self._zero_grad()

    def state_dict(self) -> OptimizerState:
        """Copies of the optimizer's moments by parameter name, and the clock. Weights and critic are saved separately.
        Not announced: each rank has its share."""
        return dump_optimizer(self.model, self._optimizer, steps_done=self.steps_done)

    def load_state_dict(self, state: OptimizerState) -> None:
        """Resume from a `state_dict`. Raises ValueError naming parameters that are missing, unknown or of
        another shape."""
        load_optimizer(self.model, self._optimizer, state)
        self.steps_done = state.steps_done

    def moments(self) -> Iterator[Tensor]:
        """The optimizer's state that is on the model's device, as plain tensors. One rank only."""
        device = self.model.device
        for state in self._optimizer.state.values():
            tensors = (one for value in state.values() for one in stored_in(value).values())
            yield from (one for one in tensors if one.device == device)

    def _parts(self, items: Sequence[TrainItem], offline: Sequence[TrainItem]) -> list[BatchPart]:
        """The student's own items first. Raises EmptyBatchError and BatchError."""
        self._check_ids([*items, *offline])
        ahead, first = self._ahead.take(items, self.steps_done), self._update_name(1)
        items, own = (items, ahead) if ahead is not None else self._packed(items, self._loss)

        def states_of(microbatch: Microbatch) -> Tensor:
            return self._states(microbatch).exact_NH

        def values() -> Tensor:
            return batch_values(self.critic, states_of, own, items, update=first, ranks=self.ranks)

        terms = batch_terms(items, self._loss.objective, offline, values=values)
        parts = [BatchPart(items, own, terms.part(slice(len(items))), self._loss)]
        if offline:
            offline, theirs = self._packed(offline, self._offline_loss)
            parts.append(BatchPart(offline, theirs, terms.part(slice(len(items), None)), self._offline_loss))
        return parts

    def _packed(self, items: Sequence[TrainItem], loss: StepLoss) -> tuple[Sequence[TrainItem], PackedBatch]:
        """The items, with the payloads read of those that this rank trains, and its microbatches. Raises
        EmptyBatchError and UnreadableScores."""
        divided = divide(items, self.config.pack_tokens, self.ranks.mesh.parts)
        part = self.ranks.mesh.part(self.ranks.rank)
        mine = sorted(i for members in divided[part] for i in members)
        ready = list(items)
        read_ones = self.ranks.on_all(lambda: loss.read([items[i] for i in mine], self.steps_done))
        for i, train_item in zip(mine, read_ones, strict=True):
            ready[i] = train_item
        return ready, pack_share(ready, divided, part, self.ranks.context_group)

    def _updates(self, parts: Sequence[BatchPart]) -> list[_Update]:
        """The updates that were made. Raises NonFiniteError if the first is not finite."""
        asked, made = self.config.updates_per_batch, list[_Update]()
        try:
            while len(made) < asked:
                made.append(self._update(parts, self._update_name(len(made) + 1)))
        except NonFiniteError as error:
            if not made:
                raise
            log.error("%s; the step ends with %d of %d updates", error, len(made), asked)
        finally:
            self._zero_grad()
        return made

    def _update(self, parts: Sequence[BatchPart], name: str) -> _Update:
        left = self._accumulate(parts)
        self.critic.add_up(self.ranks)
        norm, value_norm = self._norms()
        sums, (norm_read, value_norm_read) = self._sums(parts, left, (norm, value_norm), name)
        if not (math.isfinite(norm_read) and math.isfinite(value_norm_read)):
            raise self._nonfinite_gradient(parts, name)
        if self.config.max_grad_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), self.config.max_grad_norm, norm)
        set_learning_rate(self._optimizer, self.next_lr)
        self._optimizer.step()
        self.critic.update(self.steps_done)
        self._zero_grad()
        return _Update(sums, norm_read, value_norm_read)

    def _update_name(self, number: int) -> str:
        return f"step {self.steps_done + 1}" if number == 1 else f"step {self.steps_done + 1}, update {number}"

    def _accumulate(self, parts: Sequence[BatchPart]) -> list[list[PassLeft]]:
        """Accumulate the gradients of all microbatches, finite or not; returns what the passes of each part left. The
        host only queues work here: reading a result would make it wait for the GPU at each microbatch."""
        left: list[list[PassLeft]] = []
        for part in parts:
            left.append([])
            for microbatch, counts in part.batch.passes:
                forward = self._backward(microbatch, part, counts=counts)
                if counts:
                    left[-1].append(forward.left(microbatch, part.items))
        return left

    def _backward(self, microbatch: Microbatch, part: BatchPart, *, counts: bool) -> StepPass:
        """Add the gradient of a pass. One that does not count is made because all ranks make it together."""
        forward = self._forward(microbatch, part)
        loss = forward.loss if counts else forward.loss * 0.0
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        return forward

    def _sums(
        self, parts: Sequence[BatchPart], left: list[list[PassLeft]], further: Sequence[Tensor], update: str
    ) -> tuple[list[StepSums], list[float]]:
        """The sums of each part over all ranks, and the `further` scalars, in one transfer from the device. Raises
        NonFiniteError and BatchError."""
        passes = [made.figures for of_part in left for made in of_part]
        device = self.model.device
        queued = [*passes, *(upload(scalar.double()[None], device) for scalar in further)]
        numbers = read(torch.cat(queued)).tolist() if queued else []
        of_ranks = self.ranks.all_gather(lambda: self._own_sums(parts, left, numbers, update), list[StepSums])
        sums = [functools.reduce(StepSums.plus, of_part) for of_part in zip(*of_ranks, strict=True)]
        for of_part in sums:
            refuse_other_head(of_part, update=update)
        return sums, numbers[len(numbers) - len(further) :]

    def _own_sums(
        self, parts: Sequence[BatchPart], left: list[list[PassLeft]], numbers: list[float], update: str
    ) -> list[StepSums]:
        """The sums of each part over the passes of this rank. Raises NonFiniteError."""
        unread = iter(numbers)
        sums: list[StepSums] = []
        for part, of_part in zip(parts, left, strict=True):
            total = StepSums.zero()
            for made in of_part:
                total = total.plus(made.sums(list(islice(unread, len(made.figures))), part.items, update=update))
            sums.append(total)
            if self.config.updates_per_batch > 1 and part.proximal_N is None:
                part.keep_proximal([made.student_N for made in of_part], self.model.device)
        return sums

    def _forward(self, microbatch: Microbatch, part: BatchPart) -> StepPass:
        return self.ranks.forward(partial(self._pass, microbatch, part))

    def _pass(self, microbatch: Microbatch, part: BatchPart) -> StepPass:
        head, hidden_NH, exact_NH, experts = self._states(microbatch)
        inputs, divisor = part.inputs(microbatch, exact_NH.device), part.whole.divisor
        targets_N = upload(microbatch.target_N, exact_NH.device)
        rollouts = part.rollouts(microbatch, exact_NH.device, self.ranks.context_group)
        student = part.loss(head, hidden_NH, targets_N, inputs, microbatch, divisor, rollouts)
        value = self.critic.loss(exact_NH, part.values(microbatch), inputs.share_N, divisor)
        compared = inputs.teachers if part.loss.objective.reads_teachers else ()
        return StepPass(inputs, student, value, compared, None if experts is None else experts.differing)

    def _states(self, microbatch: Microbatch) -> States:
        return predictor_states(
            self.model, microbatch, bfloat16=self.bfloat16, group=self.ranks.context_group, shape=self.experts
        )

    def _norms(self) -> tuple[Tensor, Tensor]:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = whole(torch.nn.utils.get_total_norm(gradients))
        return norm, torch.nn.utils.get_total_norm(self.critic.gradients())

    def _nonfinite_gradient(self, parts: Sequence[BatchPart], update: str) -> NonFiniteError:
        """Find the rollouts that cause it, by a backward pass per item. Slow, and used only on this error."""
        named = [(name, share_of(p.grad)) for name, p in self.model.named_parameters() if p.grad is not None]
        named += [("the value head", gradient) for gradient in self.critic.gradients()]
        own = [name for name, grad in named if not bool(torch.isfinite(grad).all())]
        parameters = sorted({name for of_rank in self.ranks.all_gather(lambda: own, list[str]) for name in of_rank})
        culprits: list[str] = []
        for part, index in ((p, i) for p in parts for i in range(len(p.items))):
            train_item = part.items[index]
            if not train_item.n_trained:
                continue
            self._zero_grad()
            alone = part.alone(index, self.config.pack_tokens, self.steps_done, self.ranks.context_group)
            for microbatch, counts in alone.batch.passes:
                self._backward(microbatch, alone, counts=counts)
            if not all(bool(torch.isfinite(norm)) for norm in self._norms()):
                culprits.append(train_item.item.rollout_id)
        return NonFiniteError(
            f"{update}: the gradient of {len(parameters)} parameters is not finite (first: {parameters[:3]}); by "
            f"themselves it is caused by the rollouts {culprits or 'none, only by their sum'}; it was not made",
            culprits,
        )

    def _zero_grad(self) -> None:
        self._optimizer.zero_grad()
        self.critic.zero_grad()

    def _check_ids(self, items: Sequence[TrainItem]) -> None:
        vocab_rows = lm_head(self.model).weight_VH.shape[0]
        used = [(t.item.rollout_id, t.tokens_L) for t in items if t.n_trained]
        wrong = [rollout_id for rollout_id, ids_L in used if ids_L.min() < 0 or ids_L.max() >= vocab_rows]
        if wrong:
            raise BatchError(
                f"token ids outside the student's vocabulary of {vocab_rows} in the rollouts {wrong}", wrong
            )
