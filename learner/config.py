"""Settings of the learner. No torch here: the launcher checks them before any model loads."""

from __future__ import annotations

import math
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from learner.objectives.config import ObjectiveConfig, OfflineConfig
from learner.prompts.config import TaskConfig
from protocol.settings import NonNegativeInt, PositiveFloat, PositiveInt, Settings


class LoraConfig(Settings, frozen=True, kw_only=True):
    """Low-rank adapters: train W + (alpha / rank) B A, and keep W as it is."""

    rank: NonNegativeInt = 0
    """Rank of the adapters. 0: no adapters, all weights are trained."""
    alpha: PositiveFloat = 32.0
    """Scale: the product B A is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Linear layers that get an adapter, by the end of their names (q_proj). Empty: all except the output head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(self.targets):
            raise ValueError(f"lora.targets must name layers, e.g. q_proj, got {self.targets}")
        if self.targets and not self.rank:
            raise ValueError(
                f"lora.targets = {self.targets} with lora.rank = 0 trains no adapter; give a rank, e.g. 16"
            )


class EmaConfig(Settings, frozen=True, kw_only=True):
    """Exponential moving average of the student's weights as the teacher (self-distillation). After each step
    e <- decay * e + (1 - decay) * w; the teachers of one pool load it now and then. They begin with the student's
    model."""

    decay: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Weight of the former average, in [0, 1). 0.99 averages over about the last 100 steps. 0: off."""
    pool: str = "default"
    """Pool of teachers that load the average."""
    every: PositiveInt = 10
    """Steps between two snapshots of the average."""
    device: Literal["cpu", "learner"] = "cpu"
    """Where the average is kept. It takes 4 bytes per parameter."""


Schedule: TypeAlias = Literal["cosine", "constant"]


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

    objective: ObjectiveConfig = msgspec.field(default_factory=ObjectiveConfig)
    """What is minimised, and how tokens are weighed."""

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
        _positive(lr=self.lr, eps=self.eps)
        _at_least(1, pack_tokens=self.pack_tokens, logprob_chunk_tokens=self.logprob_chunk_tokens)
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
        if not self.device:
            raise ValueError("device is empty; expected auto, cpu, cuda or cuda:<n>")
        self.objective.check_tasks(self.tasks)


def _positive(**fields: float) -> None:
    for name, value in fields.items():
        if not 0.0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}")


def _at_least(least: int, **fields: float) -> None:
    for name, value in fields.items():
        if not least <= value < math.inf:
            raise ValueError(f"{name} must be at least {least}, got {value}")
