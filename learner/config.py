"""Settings of the learner. No torch here: the launcher checks them before any model loads.

How the sampling temperature enters. Teachers grade at temperature 1, so the two distributions are compared, and the
student is trained, at temperature 1. `tasks.temperature` only decides which tokens get sampled: mu is the log-prob
under the distribution really sampled from, s the one at temperature 1, and r = exp(s - mu) corrects the difference
exactly (up to the cap). At the default of 1 a fresh token has r = 1.
"""

from __future__ import annotations

import math
from typing import Final, Literal, TypeAlias

import msgspec

from learner.objectives.registry import (
    AGGREGATIONS,
    IMPORTANCE,
    advantage_group,
    check_member,
    needs_top_k,
)
from learner.objectives.value_config import ValueConfig
from learner.offline.config import OfflineConfig, check_seq_kd
from learner.prompts.config import TaskConfig
from learner.step.ema_config import EmaConfig
from learner.step.lora_config import LoraConfig

Schedule: TypeAlias = Literal["cosine", "constant"]
DomainScale: TypeAlias = Literal["none", "rms"]
KlStudent: TypeAlias = Literal["current", "behaviour"]
_NO_CORRECTION = ("none", "geometric", "geometric_masked", "gspo")
"""Importance weights that do not turn samples of one distribution into those of another, token by token."""
USUAL_BOUNDS: Final = {"ppo": (0.8, 1.2), "decoupled": (0.8, 1.2), "gspo": (0.9997, 1.0004)}
"""(ratio_low, ratio_high) by importance, where the configuration has none: PPO's eps of 0.2, GSPO's 3e-4 and 4e-4."""
WIDE_BOUNDS: Final = (0.5, 2.0)
"""Of all others."""


class LearnerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one optimizer step does, and what happens every so many of them."""

    tasks: TaskConfig = msgspec.field(default_factory=TaskConfig)
    """Which prompts, and how rollouts are sampled."""

    lr: float = 1e-5
    """Highest learning rate, reached after the warm-up. For billions of parameters try 1e-6 to 1e-5; the built-in
    student (under a million) gets its own default from the launcher."""
    min_lr_ratio: float = 0.1
    """The cosine schedule ends at lr times this."""
    warmup_steps: int = 10
    """Steps over which the learning rate rises linearly to lr."""
    schedule: Schedule = "cosine"
    """After the warm-up: cosine to min_lr_ratio at the last step of the run, or constant."""
    weight_decay: float = 0.0
    """AdamW's, on matrices and embeddings; never on norms and biases."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's."""
    eps: float = 1e-8
    """AdamW's."""
    max_grad_norm: float = 1.0
    """The gradient of a step is scaled down to this global norm when it is larger; 0 = never."""

    divergence: str = "k1"
    """From the student's distribution to the teachers'. Of sampled tokens: k1, k2: s - q, the gradient of the reverse
    KL; k3: 1 - exp(q - s), the gradient of the forward KL; seq_kd: -1, cross-entropy, for text that the teacher wrote.
    Between distributions, which need teacher.top_k: reverse_kl, forward_kl, mixed, jsd, multi_sample. All members of
    the objective: docs/objectives.md; further ones by entry point."""
    mixed_weight: float = 0.5
    """For mixed: of the forward KL; the reverse KL gets the rest."""
    jsd_beta: float = 0.5
    """For jsd: of the teacher in the mixture that both are compared with; in (0, 1)."""
    samples: int = 4
    """For multi_sample: tokens that are drawn at each position from the student."""
    context_weight: Literal["none", "truncated"] = "none"
    """For divergences between distributions, which no ratio of the sampled token can correct. none: each context counts
    as the student came upon it; truncated: times the product of r over the rollout's trained tokens before it, up to
    ratio_cap."""
    coef: float = 1.0
    """Weight of the divergence against the rewards: A = A_reward - sum over its teachers of coef * cost. Between
    distributions coef * divergence is added to the loss. 0: rewards only; with teachers = 0 nobody grades."""
    teacher_coefs: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    """Teacher pool -> its own coef, instead of the common one."""
    domain_scale: DomainScale = "none"
    """rms: the costs of each domain (tag) are divided by their root mean square over the batch, so that teachers whose
    log-probs differ in size pull equally hard. none: as they are."""
    kl_student: KlStudent = "current"
    """The student's log-prob inside the cost: `current` = recomputed in this step, `behaviour` = as when sampled."""
    importance: str = "truncated"
    """Weight of a token sampled by an older policy, from r = exp(s - mu). none: 1; truncated: min(r, ratio_cap);
    masked: r inside [ratio_low, ratio_high], else 0; ppo: r where PPO's clip to [ratio_low, ratio_high] leaves a
    gradient, else 0; of whole rollouts: sequence, sequence_masked, geometric, geometric_masked, gspo."""
    ratio_cap: float = 2.0
    """For truncated, sequence and geometric. A fresh token has r = 1, so 2 leaves room for all but the tail of what a
    few steps of staleness do and bounds what one token can weigh; the reverse KL is most biased by lowering it towards
    1."""
    ratio_low: float | None = None
    """Lower bound of r, for the masked ones, ppo, decoupled and gspo: at most 1. It is not eps, the distance from 1,
    which other trainers take: their 0.2 is 0.8 here. Left out: 0.8 for ppo and decoupled, 0.9997 for gspo, 0.5 for the
    masked ones."""
    ratio_high: float | None = None
    """Upper bound of r, at least 1; an eps of 0.28 is 1.28 here. Left out: 1.2 for ppo and decoupled, 1.0004 for gspo,
    2 for the masked ones."""
    ratio_dual: float = 0.0
    """For ppo and gspo: where A < 0, r above this gives nothing (dual clip; published: 3). 0 = off."""
    advantage: str = "none"
    """From the rewards: none; of whole rollouts grpo, reinforce_pp, reinforce_pp_baseline; of single tokens, by a
    learned value function, gae (PPO's). All but none need buffer.release = rollout."""
    advantage_std: bool = True
    """For grpo: divide by the group's standard deviation."""
    value: ValueConfig = msgspec.field(default_factory=ValueConfig)
    """For gae: the value function."""
    aggregation: str = "token_mean"
    """Of the loss over the batch: token_mean; sequence_mean, the mean over rollouts of their token means; constant, the
    sum over the tokens divided by rollouts times tasks.max_new_tokens, which no length changes (Dr. GRPO)."""

    updates_per_batch: int = 1
    """Optimizer updates that one step makes of its batch, all at the step's learning rate. Advantages from rewards,
    values and the policy that `decoupled` calls proximal are those from before the first. The version rises by one,
    and staleness, ledger and schedule count steps, as ever."""

    pack_tokens: int = 4096
    """Input tokens of one packed forward and backward pass; bounds memory, does not change the gradient."""
    logprob_chunk_tokens: int = 1024
    """Rows of logits that exist at one time: memory of 4 bytes x this x vocabulary, a few times over."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of matrix products and attention. auto: bfloat16 on a GPU, float32 on a CPU. Parameters, gradients and optimizer
    state are float32 in any case: 16 bytes per parameter, and with bfloat16 2 more for the copy that products read.
    float32 on a GPU is full float32, no TF32: several times slower, for comparisons."""
    device: str = "auto"
    """Torch device: auto (the first free GPU where there is one), cpu, cuda, cuda:1, ..."""

    lora: LoraConfig = msgspec.field(default_factory=LoraConfig)
    """Low-rank adapters instead of all weights."""
    offline: OfflineConfig = msgspec.field(default_factory=OfflineConfig)
    """Rollouts that the teacher wrote, mixed into the batches."""
    frozen: bool = False
    """Nothing is trained: the weights stay as they are, and the run only writes (python -m launch.write)."""
    record: str = ""
    """File to which every trained batch is appended, for python -m replay; a folder: batches.record in it.
    Empty: no recording."""
    record_max_bytes: int = 0
    """The file does not grow past this: later batches are counted instead. 0 = no bound."""

    ema: EmaConfig = msgspec.field(default_factory=EmaConfig)
    """The student's own average as its teacher."""

    publish_every: int = 1
    """Steps between two publications of weights to the actors."""
    eval_every: int = 20
    """Steps between two evaluations; 0 = none."""
    checkpoint_every: int = 50
    """Steps between two checkpoints; the last step always leaves one. 0 = at the last step only."""
    keep_checkpoints: int = 3
    """The newest so many are kept; older ones are deleted."""
    max_skipped_steps: int = 3
    """A rollout whose loss or gradient is not finite is left out of its step, and counted (masked: non_finite). A step
    of which nothing is left is skipped: the version rises, the weights stay. So many in a row end the run."""
    stall_timeout_s: float = 900.0
    """The run ends with an error when the learner waited this long for a batch or an acknowledgement. An evaluation is
    given up after it: the figures are of what is there, and say how many rollouts are missing."""

    def __post_init__(self) -> None:
        _positive(lr=self.lr, eps=self.eps, ratio_cap=self.ratio_cap)
        _at_least(1, pack_tokens=self.pack_tokens, logprob_chunk_tokens=self.logprob_chunk_tokens, samples=self.samples)
        _positive(stall_timeout_s=self.stall_timeout_s)
        _at_least(1, publish_every=self.publish_every, keep_checkpoints=self.keep_checkpoints)
        _at_least(1, max_skipped_steps=self.max_skipped_steps, updates_per_batch=self.updates_per_batch)
        _at_least(0, warmup_steps=self.warmup_steps, eval_every=self.eval_every, checkpoint_every=self.checkpoint_every)
        _at_least(0, record_max_bytes=self.record_max_bytes)
        _at_least(0, weight_decay=self.weight_decay, max_grad_norm=self.max_grad_norm)
        if not 0.0 <= self.min_lr_ratio <= 1.0:
            raise ValueError(f"min_lr_ratio must be in [0, 1], got {self.min_lr_ratio}")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas must be in [0, 1), got {self.betas}")
        self._check_ratio_bounds()
        if not self.device:
            raise ValueError("device is empty; expected auto, cpu, cuda or cuda:<n>")
        self._check_objective()
        self._check_domain_scale()
        self._refuse_sampling_that_cannot_be_corrected()

    @property
    def ratio_bounds(self) -> tuple[float, float]:
        """Of r: as configured, else what is usual with this importance."""
        low, high = USUAL_BOUNDS.get(self.importance, WIDE_BOUNDS)
        return low if self.ratio_low is None else self.ratio_low, high if self.ratio_high is None else self.ratio_high

    def _check_ratio_bounds(self) -> None:
        """Bounds on one side of 1 would leave tokens of the present policy, where r = 1, without any gradient."""
        low, high = self.ratio_bounds
        _positive(ratio_low=low, ratio_high=high)
        if high < 1.0:
            own_low = low if self.ratio_low is None else 1.0 - low
            raise ValueError(
                f"ratio_low = {low:g}, ratio_high = {high:g}: expected ratio_low <= 1 <= ratio_high, the bounds of the "
                "ratio itself. If these are eps_low and eps_high, the distances from 1 that verl, TRL and slime take, "
                f"use ratio_low = {own_low:g} and ratio_high = {1.0 + high:g}"
            )
        if low > 1.0:
            raise ValueError(
                f"ratio_low = {low:g}, ratio_high = {high:g}: expected ratio_low <= 1 <= ratio_high; tokens of the "
                "present policy have the ratio 1"
            )
        if not low < high:
            raise ValueError(f"ratio_low must be below ratio_high, got {low} and {high}")

    def _check_objective(self) -> None:
        """Names that exist, coefficients of pools that exist, and something to learn from."""
        between_distributions = needs_top_k(self.divergence)
        check_member(IMPORTANCE, self.importance)
        check_seq_kd("", self.divergence, self.importance)
        advantage_group(self.advantage)
        check_member(AGGREGATIONS, self.aggregation)
        _at_least(0, coef=self.coef, ratio_dual=self.ratio_dual)
        if not 0.0 <= self.mixed_weight <= 1.0:
            raise ValueError(f"mixed_weight must be in [0, 1], got {self.mixed_weight}")
        if not 0.0 < self.jsd_beta < 1.0:
            raise ValueError(
                f"jsd_beta must be inside (0, 1), got {self.jsd_beta}; at both ends the divergence is 0: use "
                "forward_kl or reverse_kl"
            )
        if between_distributions and self.kl_student == "behaviour":
            raise ValueError(
                f"kl_student = 'behaviour' with divergence = {self.divergence!r}: no log-prob of the sampled token is "
                "in it; use kl_student = 'current', or one of k1, k2, k3"
            )
        if not between_distributions and self.context_weight != "none":
            raise ValueError(
                f"context_weight = {self.context_weight!r} with divergence = {self.divergence!r}, which is a cost of "
                "sampled tokens: those are weighted by importance; use context_weight = 'none'"
            )
        for pool, coef in self.teacher_coefs.items():
            _at_least(0, **{f"teacher_coefs.{pool}": coef})
            if pool not in self.tasks.routes:
                pools = ", ".join(self.tasks.routes)
                raise ValueError(f"teacher_coefs names the pool {pool!r}; expected one of tasks.routes: {pools}")
        _, high = self.ratio_bounds
        if 0.0 < self.ratio_dual <= high:
            raise ValueError(f"ratio_dual must be 0 (off) or above ratio_high = {high}, got {self.ratio_dual}")
        if self.coef == 0.0 and not any(self.teacher_coefs.values()) and self.advantage == "none":
            raise ValueError(
                "coef = 0 with advantage = 'none' leaves nothing to learn from; expected a coef above 0 or an advantage"
            )
        if not self.tasks.routes and self.advantage == "none":
            raise ValueError(
                "tasks.routes = {} with advantage = 'none' leaves nothing to learn from, for no teacher grades "
                "anything; expected a pool in tasks.routes, or an advantage"
            )

    def _check_domain_scale(self) -> None:
        """The size of costs is taken from samples of the policy that is compared with the teachers."""
        if self.domain_scale == "none":
            return
        if needs_top_k(self.divergence):
            raise ValueError(
                f"domain_scale = {self.domain_scale!r} with divergence = {self.divergence!r}: only costs of sampled "
                "tokens are scaled by domain; use divergence = 'k1', 'k2' or 'k3', or domain_scale = 'none'"
            )
        if self.tasks.temperature != 1.0:
            raise ValueError(
                f"domain_scale = {self.domain_scale!r} with tasks.temperature = {self.tasks.temperature}: the size of "
                "costs is measured by the log-probs sampled with; use temperature 1, or domain_scale = 'none'"
            )

    def _refuse_sampling_that_cannot_be_corrected(self) -> None:
        """mu must belong to a distribution with the student's support, and be comparable where it is compared."""
        tasks = self.tasks
        if tasks.top_p < 1.0 or tasks.top_k > 0:
            raise ValueError(
                f"tasks.top_p = {tasks.top_p}, tasks.top_k = {tasks.top_k}: this never shows some tokens, so no "
                "importance ratio recovers the student's distribution; train with top_p = 1 and top_k = 0"
            )
        if tasks.temperature == 1.0:
            return
        if self.importance in _NO_CORRECTION:
            raise ValueError(
                f"tasks.temperature = {tasks.temperature} with importance = {self.importance!r}: the student is "
                "compared with its teacher at temperature 1, which needs the ratio of each token; use importance = "
                "'truncated', or temperature 1"
            )
        if self.kl_student == "behaviour":
            raise ValueError(
                f"tasks.temperature = {tasks.temperature} with kl_student = 'behaviour': mu at that temperature cannot "
                "be compared with a teacher at temperature 1; use kl_student = 'current', or temperature 1"
            )


def _positive(**fields: float) -> None:
    for name, value in fields.items():
        if not 0.0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}")


def _at_least(least: int, **fields: float) -> None:
    for name, value in fields.items():
        if not least <= value < math.inf:
            raise ValueError(f"{name} must be at least {least}, got {value}")
