"""Settings of the learner. No torch here: the launcher checks them before any model loads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

import msgspec
from msgspec import Meta

from stillhouse.learner.objectives.config import ObjectiveConfig, OfflineConfig
from stillhouse.learner.objectives.registry import Group, MemberChoice
from stillhouse.learner.prompts.config import MAX_EVAL_PROMPTS, EvalSetConfig, TaskConfig
from stillhouse.models.description import Quantized
from stillhouse.protocol.settings import (
    Member,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Settings,
    Share,
)

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
"""Files of adapters, in peft's format."""
RUN_FOLDER: Final = "{run}"
"""Stands for the run's own folder, which has its name only when the run starts, and may be moved."""


def record_path(record: str, run: Path) -> Path:
    """Where `LearnerConfig.record` is for the run in the folder `run`: a file, or the folder of one."""
    return Path(record.replace(RUN_FOLDER, str(run), 1)).expanduser()


class LoraConfig(Settings, frozen=True, kw_only=True):
    """Low-rank adapters (LoRA, arXiv 2106.09685): train A and B of W + (alpha / rank) B A, and freeze W."""

    rank: NonNegativeInt = 0
    """Rank of the adapters. 0: no adapters; all weights are trained."""
    alpha: PositiveFloat = 32.0
    """Scale: the product B A is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Layers that get an adapter, by the last part of their names (q_proj). Empty: all linear ones but the output
    head."""
    quantize: Quantized = "none"
    """Bits in which the learner keeps W of linear layers. nf4: 4, by bitsandbytes (QLoRA, arXiv 2305.14314). Actors are
    sent W as it is in 4 bits, with the adapters added in, in weights.dtype (docs/small-cards.md)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(self.targets):
            raise ValueError(f"lora.targets: got {self.targets}, expected names of layers, e.g. q_proj")
        if self.targets and not self.rank:
            raise ValueError(
                f"lora.targets = {self.targets} with lora.rank = 0 trains no adapter; give a rank, e.g. 16"
            )
        if self.quantize != "none" and not self.rank:
            raise ValueError(
                f"lora.quantize = {self.quantize} with lora.rank = 0 would train weights in 4 bits, which cannot be; "
                "give a rank, e.g. 16, or quantize = none"
            )


class Optimizer(Member, frozen=True, kw_only=True):
    """An optimizer's own options. Rates, weight decay, clipping and what AdamW has are settings of the learner."""

    name: str = "adamw"
    matrix_bytes: ClassVar[float] = 8.0
    """Bytes that its state has for each number of a hidden matrix, for the planner."""
    table_bytes: ClassVar[float] = 8.0
    """The same for embedding and output head."""


class Muon(Optimizer, frozen=True, kw_only=True):
    """Muon (https://kellerjordan.github.io/posts/muon/) for hidden matrices, AdamW for all else."""

    name: str = "muon"
    matrix_bytes: ClassVar[float] = 4.0
    momentum: Share = 0.95
    """Share of the previous momentum."""
    nesterov: bool = True
    """Nesterov's momentum."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """How the learning rate depends on a matrix's shape [a, b]. match_rms_adamw: 0.2 sqrt(max(a, b)) times lr, with
    which updates are as large as AdamW's, so that rates for AdamW can be used (arXiv 2502.16982). original:
    sqrt(max(1, a / b)) times lr."""


class AdamW8bit(Optimizer, frozen=True, kw_only=True):
    """AdamW whose moments of matrices have 8 bits (arXiv 2110.02861)."""

    name: str = "adamw8bit"
    matrix_bytes: ClassVar[float] = 2.0 * (1.0 + 4.0 / 256.0)
    table_bytes: ClassVar[float] = 2.0 * (1.0 + 4.0 / 256.0)


OPTIMIZERS: Final = Group(
    "optimizer",
    "stillhouse.optimizers",
    {name: f"stillhouse.learner.step.optimizers:{name}" for name in ("adamw", "muon", "adamw8bit")},
    Optimizer,
    {"muon": Muon, "adamw8bit": AdamW8bit},
)
"""From a student to its optimizer: `learner.step.optimizers.OptimizerFn`."""
OPTIMIZER: Final = MemberChoice(OPTIMIZERS)


class EmaConfig(Settings, frozen=True, kw_only=True):
    """Self-distillation: the teacher is an exponential moving average of the student's weights.

    After each step e <- decay * e + (1 - decay) * w. The teachers of one pool start with the student's model and load
    each snapshot of the average."""

    decay: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Weight of the previous average, in [0, 1). 0.99 averages over about the last 100 steps. 0: off."""
    pool: str = "default"
    """Pool of teachers that load the average."""
    every: PositiveInt = 10
    """Steps between two snapshots of the average."""
    device: Literal["cpu", "learner"] = "cpu"
    """Device that holds the average: the CPU, or the learner's device. It takes 4 bytes per parameter."""


class UntilConfig(Settings, frozen=True, kw_only=True):
    """An earlier end than `steps`, in order, by what evaluations find.

    An evaluation in the middle of a run goes on beside training, so the run ends a few steps after it."""

    figure: Literal["accuracy_sampled", "accuracy_greedy", "reward_sampled", "reward_greedy", "reverse_kl"] = (
        "accuracy_sampled"
    )
    """Figure of the evaluations that counts. Lower is better for reverse_kl only."""
    eval_set: str = ""
    """Set that it is of: a NAME of learner.eval_sets. Empty: the run's own set."""
    plateau: NonNegativeInt = 0
    """End after so many evaluations in a row that are not better than the best before them. 0: never."""
    min_gain: NonNegativeFloat = 0.0
    """How much better one must be to count as better."""
    gap: NonNegativeFloat | None = None
    """End when the teacher is better than the student by at most this. For accuracies, with learner.eval_teacher.
    None: never."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gap is not None and not self.figure.startswith("accuracy"):
            raise ValueError(
                f"gap is {self.gap} with figure = {self.figure!r}: of a teacher only accuracies are measured; expected "
                "accuracy_sampled or accuracy_greedy"
            )


class LearnerConfig(Settings, frozen=True, kw_only=True):
    """Settings of an optimizer step, and of what happens every few steps."""

    tasks: TaskConfig = msgspec.field(default_factory=TaskConfig)
    """Prompts, sampling of rollouts, and evaluation."""

    lr: PositiveFloat = 1e-5
    """Peak learning rate, reached after the warm-up. For models with billions of parameters try 1e-6 to 1e-5. The
    built-in student has its own default."""
    min_lr_ratio: Share = 0.1
    """The cosine schedule ends at this fraction of lr."""
    warmup_steps: NonNegativeInt = 10
    """Steps over which the learning rate rises linearly to lr."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Learning rate after the warm-up. cosine: falls to min_lr_ratio * lr at the last step. constant: stays at lr."""
    optimizer: Annotated[Optimizer, OPTIMIZER] = Optimizer()
    """What makes an update of a gradient. adamw. muon: Muon for hidden matrices, AdamW for embeddings, head and norms.
    adamw8bit: AdamW with moments in 8 bits, a quarter of the memory (needs torchao). Packages add more by entry point
    (docs/small-cards.md#optimizers)."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay, on matrices and embeddings only."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Betas of AdamW, each in [0, 1)."""
    eps: PositiveFloat = 1e-8
    """Epsilon of AdamW."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Global norm to which a larger gradient is scaled down. 0: no clipping."""

    objective: ObjectiveConfig = msgspec.field(default_factory=ObjectiveConfig)
    """The objective to minimise."""

    updates_per_batch: PositiveInt = 1
    """Optimizer updates per batch, all at the step's learning rate. Advantages, values and the proximal policy of
    `decoupled` are computed once, before the first update. The version rises by one per batch; staleness and the
    schedule count batches."""

    pack_tokens: PositiveInt = 4096
    """Input tokens of one packed forward and backward pass. It bounds memory and does not change the gradient."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits are in memory at one time. It takes a few times 4 bytes x this x vocabulary size."""
    recompute: Share = 0.0
    """Share of the student's layers whose activations are computed again in the backward pass and not kept. It saves
    most of the memory that grows with `pack_tokens`, and takes up to a third more time per step."""
    routing_replay: bool = False
    """For mixtures of experts: the student's routers use the experts that those of the engine chose when it sampled
    (routing replay, R3, arXiv 2510.11370). Gate weights stay the student's own."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of matrix products and attention. auto: bfloat16 on a GPU, float32 on a CPU. Parameters, gradients
    and optimizer state are always float32 (16 bytes per parameter; bfloat16 adds 2 for a copy). float32 on a GPU is
    full float32 without TF32, several times slower; use it for comparisons."""
    moments: Literal["device", "host"] = "device"
    """Where AdamW's moments are, 8 bytes per parameter. host: in pinned host memory; each update passes them through
    the device piece by piece, with the same results. It takes the time to move 16 bytes per parameter and update,
    divided by ranks. On a CPU it saves nothing."""
    ranks: PositiveInt = 1
    """Processes that train together, each with its share of parameters, gradients and optimizer state (FSDP2). On GPUs
    each needs one of its own."""
    hosts: PositiveInt = 1
    """Machines over which the ranks are divided equally. The run starts its own share; each of the others joins with
    `stillhouse join RUN --learner-ranks K`, K = ranks / hosts. The ranks meet at `weights.host`."""
    replicas: PositiveInt = 1
    """Copies of the student that the ranks hold: each parameter is divided over ranks / replicas of them. More copies
    need more memory, and ranks of different copies exchange nothing but gradients."""
    context_parallel: PositiveInt = 1
    """Ranks that divide each sequence among them, for sequences that are too long for one (context parallelism). Each
    has its part of the activations of a pass of `pack_tokens`, and gathers keys and values. `ranks` must be a multiple
    of it. For models with full attention."""
    rank_timeout_s: PositiveFloat = 300.0
    """Seconds that ranks wait for one that does not come to a common operation. Then all start again from the newest
    checkpoint."""
    device: str = "auto"
    """Torch device: auto (the first free GPU, else the CPU), cpu, cuda, cuda:1, ..."""

    lora: LoraConfig = msgspec.field(default_factory=LoraConfig)
    """Low-rank adapters, trained in place of all weights."""
    offline: OfflineConfig = msgspec.field(default_factory=OfflineConfig)
    """Rollouts that the teacher wrote, mixed into the batches."""
    frozen: bool = False
    """Train nothing: the weights stay as they are, and the run only records rollouts (stillhouse write)."""
    record: str = ""
    """File to which every trained batch is appended, for stillhouse replay and view. A folder: batches.record in it.
    {run}: the run's own folder. Empty: no recording."""
    record_max_bytes: NonNegativeInt = 0
    """Maximum size of the recording, bytes; later batches are counted but not recorded. 0: unlimited."""

    trackers: tuple[str, ...] = ()
    """Where the metrics also go, beside metrics.jsonl and TensorBoard: wandb (Weights & Biases), mlflow, an entry point
    of the group stillhouse.trackers, or module:Class. A tracker that fails or hangs costs no step."""

    ema: EmaConfig = msgspec.field(default_factory=EmaConfig)
    """Moving average of the student as its teacher."""

    publish_every: PositiveInt = 1
    """Steps between two publications of weights to the actors."""
    eval_every: NonNegativeInt = 20
    """Steps between two evaluations. 0: none, on no set."""
    eval_sets: dict[str, EvalSetConfig] = msgspec.field(default_factory=dict[str, EvalSetConfig])
    """More evaluation sets, beside the run's own (learner.tasks.eval_prompts): one section `[learner.eval_sets.NAME]`
    each, with its prompts and limits."""
    eval_teacher: bool = False
    """Before the first step, let the embedded teacher answer the prompts of all evaluation sets, once. Then evaluations
    show its accuracy and the student's gap to it."""
    until: UntilConfig = msgspec.field(default_factory=UntilConfig)
    """An end before `steps`."""
    checkpoint_every: NonNegativeInt = 50
    """Steps between two checkpoints. The last step always writes one. 0: only the last step does. Training waits only
    while weights and moments are copied into host memory (12 bytes per parameter); they are written while it goes on.
    One that comes due meanwhile is put off until the writing is done."""
    keep_checkpoints: PositiveInt = 3
    """Number of recent checkpoints to keep. Older ones are deleted."""
    stop_on_alarm: bool = False
    """End the run, with a checkpoint, when an alarm is raised (docs/metrics.md#alarms). The exit code is then 5."""
    stall_timeout_s: PositiveFloat = 900.0
    """Seconds to wait for a batch or an acknowledgement before the run ends with an error. An evaluation that takes
    longer is closed with the rollouts received so far, and its figures report how many are missing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas: got {self.betas}, expected two numbers in [0, 1)")
        if not self.device:
            raise ValueError("device is empty; expected auto, cpu, cuda or cuda:<n>")
        if self.ranks > 1 and self.frozen:
            raise ValueError(f"ranks is {self.ranks} with frozen: nothing is trained; expected 1")
        if self.ranks % self.replicas:
            raise ValueError(f"replicas is {self.replicas} with {self.ranks} ranks; expected a divisor of their number")
        if self.ranks % self.hosts:
            raise ValueError(f"hosts is {self.hosts} with {self.ranks} ranks; expected a divisor of their number")
        if self.ranks % self.context_parallel:
            raise ValueError(
                f"context_parallel is {self.context_parallel} with {self.ranks} ranks; expected a divisor of their "
                "number"
            )
        OPTIMIZER.check(self.optimizer)
        if self.moments == "host" and self.optimizer.name != "adamw":
            raise ValueError(
                f"moments is host with optimizer {self.optimizer.name}: only those of adamw can be in host memory; "
                "expected device"
            )
        self.objective.check_tasks(self.tasks)
        self._check_eval_sets()
        self._check_until()

    @property
    def ranks_each(self) -> int:
        """Ranks on each host."""
        return self.ranks // self.hosts

    @property
    def prompt_files(self) -> dict[str, str]:
        """Paths of all files of prompts, by key."""
        files = {"learner.tasks.prompts": self.tasks.prompts, "learner.tasks.eval_prompts": self.tasks.eval_prompts}
        of_sets = {f"learner.eval_sets.{name}.prompts": one.prompts for name, one in self.eval_sets.items()}
        return {key: path for key, path in files.items() if path} | of_sets

    def evaluated_at(self, step: int) -> tuple[str, ...]:
        """Names of the sets to evaluate after this step, if it is not the last one; the run's own set has the name
        ""."""
        if not self.eval_every:
            return ()
        every = {"": self.eval_every} | {name: one.every or self.eval_every for name, one in self.eval_sets.items()}
        return tuple(name for name, steps in every.items() if step % steps == 0)

    @property
    def eval_names(self) -> tuple[str, ...]:
        """Names of all evaluation sets, the run's own first."""
        return ("", *self.eval_sets)

    def eval_tasks(self, name: str) -> TaskConfig:
        """The settings of tasks of one evaluation set."""
        return self.eval_sets[name].tasks(self.tasks) if name else self.tasks

    def first_eval_prompt(self, name: str) -> int:
        """Number of the first prompt of a set. Task ids are made of such numbers, so those of two sets differ."""
        before = self.eval_names[: self.eval_names.index(name)]
        return sum(self.eval_tasks(other).eval_prompts_needed for other in before)

    def _check_until(self) -> None:
        until = self.until
        ends = until.plateau > 0 or until.gap is not None
        if (ends or self.eval_teacher) and not self.eval_every:
            raise ValueError("until, eval_teacher: they read evaluations, and eval_every is 0; expected more")
        if until.eval_set not in self.eval_names:
            names = ", ".join(filter(None, self.eval_names)) or "none"
            raise ValueError(f"until.eval_set: got {until.eval_set!r}, expected a name of learner.eval_sets: {names}")
        tasks = self.eval_tasks(until.eval_set)
        half = tasks.eval_greedy if until.figure.endswith("greedy") else tasks.eval_sampled
        if ends and not half:
            raise ValueError(f"until.figure: got {until.figure!r}, but the set asks no prompt of that kind")
        if until.gap is not None and not self.eval_teacher:
            raise ValueError(f"until.gap is {until.gap}: expected eval_teacher = true, which measures the teacher")

    def _check_eval_sets(self) -> None:
        for name in self.eval_sets:
            if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
                raise ValueError(f"eval_sets: got the name {name!r}, expected letters, digits, '_', '.' and '-'")
        asked = sum(self.eval_tasks(name).eval_prompts_needed for name in self.eval_names)
        if asked > MAX_EVAL_PROMPTS:
            raise ValueError(f"eval_sets: all sets ask {asked:,} prompts, expected at most {MAX_EVAL_PROMPTS:,}")
