"""Settings of the task stream and of evaluation: prompts, rendering, sampling. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from stillhouse.learner.prompts.known_sets import KNOWN_TAGS
from stillhouse.protocol.settings import NonNegativeInt, PositiveFloat, PositiveInt, Settings

MAX_EVAL_PROMPTS = 1_000_000
"""Task ids of one evaluation are numbered below this (`learner.evaluation.evaluation`)."""


class TaskConfig(Settings, frozen=True, kw_only=True):
    """Prompts, their rendering, sampling, and evaluation."""

    prompts: str = ""
    """Training prompts: a JSONL file, a Parquet file, a folder of Parquet files, a folder of `datasets.save_to_disk`,
    or hf:NAME[:CONFIG][:SPLIT] for what `datasets.load_dataset` reads; some are known by name. Fields: `prompt` (text)
    or `messages` (chat turns), and optionally `tag`, `ground_truth`, `hint` (see `privileged`), `env` and `env_options`
    (the row's environment and its options), `tools` and `chat_template_kwargs` (docs/prompts.md). The environment sees
    all columns. Empty: the built-in task."""
    columns: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Field -> the column that has it where its name is another, e.g. prompt = "question". Holds for all files of
    prompts."""
    eval_prompts: str = ""
    """Evaluation prompts, in the same formats. Empty: some rows of `prompts` are held out (see `eval_share`)."""
    eval_share: Annotated[float, Meta(ge=0, lt=1)] = 0.02
    """Share of `prompts` to hold out for evaluation when `eval_prompts` is empty. It is rounded up, and never more rows
    are held out than evaluations need. The choice does not depend on the seed, so all runs evaluate on the same
    rows."""
    system_prompt: str | None = None
    """System turn to put before every prompt, except where `messages` already begin with one."""
    chat_template: Literal["auto", "off"] = "auto"
    """auto: `prompt` becomes a user turn if the tokenizer has a chat template. off: the text is tokenised as it is."""
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """Arguments for the chat template, e.g. enable_thinking = false. Every prompt is rendered with them: the student's,
    the teachers', and later turns. A row's column `chat_template_kwargs` lies over them."""
    chat_template_kwargs_tags: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict[str, dict[str, Any]])
    """Tag -> arguments for prompts with this tag, over `chat_template_kwargs`."""
    mix: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    """Tag -> relative weight among the training tasks (the weights need not sum to 1). Rows with other tags are not
    used. Empty: all rows, in the proportions of the file."""
    templates: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Tag -> template for prompts with this tag; {prompt} stands for the prompt. For rows with `prompt` only."""
    privileged: str = ""
    """Privileged context: text before the prompt that teachers read and the student does not. {ground_truth} and {hint}
    are filled in from the row, e.g. "The answer is {ground_truth}. ". Prompts whose row lacks one are dropped and
    counted. Empty: teachers read what the student read."""
    privileged_tags: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Tag -> privileged context for prompts with this tag, in place of `privileged`. Empty text: none for this tag."""
    max_teacher_prompt_tokens: PositiveInt = 4096
    """Longest prompt with its privileged context. Longer ones are dropped and counted."""
    max_prompt_tokens: PositiveInt = 896
    """Longest prompt of a row. Longer ones are dropped and counted; prompts that environments make are not counted
    here. Together with `max_new_tokens` it should fit into the actors' max_context."""
    shuffle: bool = True
    """Shuffle the prompts anew for every pass, by the run's seed. Off: keep the order of the file."""
    group_size: PositiveInt = 8
    """Rollouts per prompt."""
    group_reward: str = ""
    """`module:function` that judges all answers of a group at once, in place of the environment's reward
    (docs/objectives.md). Needs an advantage, and buffer.release = rollout. Empty: none."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature of training rollouts."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that together have this probability; 1: off. With top_k."""
    top_k: NonNegativeInt = 0
    """Sample from the k most likely tokens; 0: off. What top_k, top_p and min_p leave travels to the learner, which
    compares the student with its teachers there (docs/objectives.md)."""
    min_p: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Sample only tokens with at least this share of the likeliest one's probability; 0: off. With top_k."""
    teacher_share: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Share of the teacher in what training rollouts are sampled from, alpha of MiniLLM: (1 - alpha) times the
    student's probabilities + alpha times those of models.teacher, which each embedded actor then also holds
    (docs/objectives.md). Evaluations are the student's alone. 0: off."""
    max_new_tokens: PositiveInt = 96
    """Most tokens the student may write per rollout, all turns together. Evaluations use the same limit."""
    env: str = "single_turn"
    """Environment of rows that name none: single_turn, calculator, one of a package or of your own, or the NAME of an
    actor.environments.NAME (docs/environments.md)."""
    routes: dict[str, tuple[str, ...]] = msgspec.field(default_factory=lambda: {"default": ()})
    """Teacher pool -> tags of the tasks that it scores; an empty list: all tasks. {}: no teacher scores anything, only
    rewards count."""
    eval_greedy: Annotated[int, Meta(ge=0, le=MAX_EVAL_PROMPTS)] = 64
    """Prompts per evaluation that are answered greedily, from the start of the evaluation set."""
    eval_sampled: Annotated[int, Meta(ge=0, le=MAX_EVAL_PROMPTS)] = 64
    """Prompts per evaluation that are answered at temperature 1, without top-p or top-k. The reverse KL is measured on
    them."""
    eval_samples: PositiveInt = 1
    """Answers to each prompt of `eval_sampled`. Above 1, avg@k and pass@k are reported."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.env:
            raise ValueError('env must name an environment, e.g. "single_turn", got an empty string')
        if self.group_reward and ":" not in self.group_reward:
            raise ValueError(f"group_reward: got {self.group_reward!r}, expected module:function")
        if any(not pool for pool in self.routes):
            raise ValueError(f"routes must name teacher pools, got an empty name in {list(self.routes)}")
        if any(not 0.0 <= share < math.inf for share in self.mix.values()):
            raise ValueError(f"mix must hold shares of at least 0, got {self.mix}")
        if self.mix and not sum(self.mix.values()) > 0.0:
            raise ValueError(f"mix must give some tag a share above 0, got {self.mix}")
        for tag, template in self.templates.items():
            if PROMPT_PLACE not in template:
                raise ValueError(f"templates.{tag} must contain {PROMPT_PLACE}, got {template!r}")

    @property
    def eval_prompts_needed(self) -> int:
        """Rows that evaluations use."""
        return max(self.eval_greedy, self.eval_sampled)

    @property
    def tags_named(self) -> list[str]:
        """Tags that training rows must have, because they are rendered in a way of their own. Templates of known sets
        may be those of evaluations."""
        templates = [tag for tag in self.templates if tag not in KNOWN_TAGS]
        return [*dict.fromkeys([*templates, *self.chat_template_kwargs_tags])]

    def template_kwargs_for(self, tag: str, of_row: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments for the chat template of a row with this tag and these arguments of its own."""
        return {**self.chat_template_kwargs, **self.chat_template_kwargs_tags.get(tag, {}), **of_row}

    def privileged_for(self, tag: str) -> str:
        """The privileged context of tasks with this tag, as a template."""
        return self.privileged_tags.get(tag, self.privileged)

    @property
    def has_privileged(self) -> bool:
        return bool(self.privileged) or any(self.privileged_tags.values())

    @property
    def truncated(self) -> bool:
        """Some tokens are never sampled in training."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    def teachers_for(self, tag: str) -> tuple[str, ...]:
        """Pools that score a task with this tag, in the order of `routes`; none: only rewards count."""
        return tuple(pool for pool, tags in self.routes.items() if not tags or tag in tags)


class EvalSetConfig(Settings, frozen=True, kw_only=True):
    """One more evaluation set, beside the run's own."""

    prompts: str
    """Its prompts, in the formats of `learner.tasks.prompts`. builtin: the prompts of the built-in task."""
    greedy: Annotated[int, Meta(ge=0, le=MAX_EVAL_PROMPTS)] = 0
    """Prompts that are answered greedily, from the start of the file."""
    sampled: Annotated[int, Meta(ge=0, le=MAX_EVAL_PROMPTS)] = 64
    """Prompts that are answered at temperature 1, from the start of the file."""
    samples: PositiveInt = 1
    """Answers to each of these. Above 1, avg@k and pass@k are reported."""
    max_new_tokens: NonNegativeInt = 0
    """Most tokens the student may write per rollout. 0: as `learner.tasks.max_new_tokens`."""
    max_turns: NonNegativeInt = 0
    """Most turns of the student per rollout, at most those of the environment. 0: as many as the environment allows."""
    every: NonNegativeInt = 0
    """Steps between two evaluations on this set. 0: as `learner.eval_every`. All sets are evaluated at both ends of the
    run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.prompts:
            raise ValueError("prompts is empty, expected a file of prompts")
        if not self.greedy and not self.sampled:
            raise ValueError("greedy and sampled are 0, so the set asks nothing; expected one of them above 0")

    def tasks(self, run: TaskConfig) -> TaskConfig:
        """The run's settings of tasks with this set in place of the run's own evaluation set."""
        return msgspec.structs.replace(
            run,
            eval_prompts=self.prompts,
            eval_greedy=self.greedy,
            eval_sampled=self.sampled,
            eval_samples=self.samples,
            max_new_tokens=self.max_new_tokens or run.max_new_tokens,
        )


PROMPT_PLACE = "{prompt}"
"""Placeholder for the prompt in a template."""


def n_held_out(n_rows: int, share: float, at_most: int) -> int:
    """Rows kept for evaluation: `share` of `n_rows` rounded up, but not above `at_most`, and never the last row that is
    left for training."""
    return min(math.ceil(share * n_rows), at_most, n_rows - 1)
