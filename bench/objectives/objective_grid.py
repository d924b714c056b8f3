"""The grid of docs/results/objectives.md: which runs are made, as words of the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stillhouse.launch.config.run import RunConfig

BATCH_ROLLOUTS: Final = 64
USUAL: Final = RunConfig()
BASE: Final = (
    "--learner.lr=3e-4",  # the highest at which k1 holds
    f"--divergence={USUAL.learner.objective.divergence.name}",
    f"--teacher.payload={USUAL.teacher.payload}",
    f"--teacher.top_k={USUAL.teacher.top_k}",
    f"--learner.updates_per_batch={USUAL.learner.updates_per_batch}",
    f"--learner.tasks.group_size={USUAL.learner.tasks.group_size}",
    "--learner.checkpoint_every=0",
)
"""Over examples/demo.toml, and under what a row says: the defaults, where the demo has settings of its own."""
TOP_K: Final = ("--teacher.top_k=256",)
WHOLE_GROUPS: Final = ("--buffer.release=rollout",)
GRPO: Final = ("--advantage=grpo", "--importance=ppo", "--learner.objective.importance.low=0.8",
               "--learner.objective.importance.high=1.2", *WHOLE_GROUPS)  # fmt: skip
UNLIKELY: Final = 0.02
"""Nats. A fifth of the tokens that the built-in student samples before training have a log-prob below minus this. In
that row a teacher is there for the reverse KL of evaluations only."""
STALENESS_LR: Final = "--learner.lr=1e-4"
PAIRS_TEACHER: Final = "runs/pairs-teacher"
"""Made by `stillhouse builtin build --pairs runs/pairs-teacher`."""
STALENESS: Final = (0, 1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Row:
    """One setting, run once per seed. Each row of a table sees as many rollouts as the others."""

    table: str
    name: str
    arguments: tuple[str, ...]
    prepare: tuple[str, ...] | None = None
    """Words of `stillhouse write`, run before, once per seed; the run is then a replay of what the teacher wrote:
    as many rollouts in as many steps. None: a run of its own."""
    batch_rollouts: int = BATCH_ROLLOUTS
    steps_times: int = 1
    """Steps, in those that were asked for."""

    @property
    def folder(self) -> str:
        return f"{self.table}/{self.name.replace(' ', '_').replace(',', '')}"


def objectives() -> list[Row]:
    rows = {
        "OPD, k1": (),
        "OPD, k3": ("--divergence=k3",),
        "OPD, k1 with a baseline": ("--learner.objective.divergence.baseline=expected_cost", *TOP_K),
        "OPD, k1 clipped at 2": (
            "--learner.objective.cost_transform=clip",
            "--learner.objective.cost_transform.limit=2",
        ),
        "OPD, k1 log": ("--learner.objective.cost_transform=log",),
        "OPD, k1 early tokens 0.5": ("--learner.objective.prefix_gain=0.5",),
        "OPD, k1 entropy 0.01": ("--learner.objective.entropy_coef=0.01",),
        "no teacher, null": ("--divergence=null", f"--learner.objective.divergence.threshold={UNLIKELY}"),
        "OPD, multi-sample 4": (
            "--divergence=multi_sample",
            "--learner.objective.divergence.samples=4",
            *TOP_K,
        ),
        "OPD, top-k reverse KL": ("--divergence=reverse_kl", *TOP_K),
        "OPD, top-k forward KL": ("--divergence=forward_kl", *TOP_K),
        "OPD, top-k JSD": ("--divergence=jsd", *TOP_K),
        "RL, GRPO": ("--learner.objective.coef=0", *GRPO),
        "OPD k1 + GRPO": ("--learner.objective.coef=1", *GRPO),
    }
    off_policy = {
        "off-policy SFT, seq_kd": (("--divergence=seq_kd",), ()),
        "off-policy logit KD": (("--divergence=forward_kl",), TOP_K),
    }
    return [
        *(Row("objectives", name, arguments) for name, arguments in rows.items()),
        *(Row("objectives", name, arguments, prepare) for name, (arguments, prepare) in off_policy.items()),
    ]


def staleness() -> list[Row]:
    """The bound, with and without weights, and where the student's log-prob in the cost comes from. Many small steps at
    a learning rate that leaves room: at the demo's 3e-4 runs collapse from a bound of 2 on
    (docs/decisions/staleness-in-practice.md). At a bound of 0 all ratios are 1 and both log-probs the same, so that
    there is one row of it."""
    kinds = {
        "truncated, current": (),
        "no weights, current": ("--importance=none",),
        "truncated, behaviour": ("--learner.objective.divergence.kl_student=behaviour",),
        "no weights, behaviour": (
            "--importance=none",
            "--learner.objective.divergence.kl_student=behaviour",
        ),
    }
    return [
        Row(
            "staleness",
            f"{bound} {name}",
            (f"--buffer.max_staleness={bound}", STALENESS_LR, *arguments),
            batch_rollouts=16,
            steps_times=2,
        )
        for bound in STALENESS
        for name, arguments in (kinds.items() if bound else [("synchronous", ())])
    ]


def tokenizers() -> list[Row]:
    other = ("--teacher.tokenizer=other", f"--models.teacher={PAIRS_TEACHER}")
    sets = ("--divergence=reverse_kl", "--teacher.top_k=64", "--teacher.tail=pooled")
    return [
        Row("tokenizers", f"{whose}{how}", (*arguments, *words))
        for how, words in (("", ()), (", top-k reverse KL", sets))
        for whose, arguments in (("the student's tokenizer", ()), ("another tokenizer", other))
    ]
