"""Configuration of the task stream and of evaluation: which prompts, how they are rendered, how they are sampled."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

MAX_EVAL_PROMPTS = 1_000_000
"""Task ids of one evaluation are numbered below this (`learner.evaluation.evaluation`)."""


class TaskConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where tasks come from, and what one task asks of the student."""

    prompts: str = ""
    """JSONL file, Parquet file (or folder of Parquet files), or folder of `datasets.save_to_disk`, with the fields
    `prompt` (text) or `messages` (chat turns), and optionally `tag` and `ground_truth`. Empty: the launcher fills in
    the built-in task."""
    eval_prompts: str = ""
    """The same for evaluation. Empty: rows are held out of `prompts` (see `eval_share`)."""
    eval_share: float = 0.02
    """Share of `prompts` held out for evaluation when `eval_prompts` is empty: rounded up, at most as many rows as
    the evaluations need. The rows depend on the number of rows only, so that runs of all seeds evaluate on the same."""
    system_prompt: str | None = None
    """A system turn put in front of every prompt, except where messages begin with one."""
    chat_template: Literal["auto", "off"] = "auto"
    """auto: `prompt` becomes one user turn if the tokenizer has a chat template. off: it is tokenised as it stands."""
    mix: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    """Tag -> share of the training tasks (relative; they need not sum to 1). Rows with other tags are left out. Empty:
    all rows, in the proportions of the file."""
    templates: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Tag -> text around the prompts with this tag, with {prompt} where the prompt goes. For rows with `prompt`."""
    privileged: str = ""
    """Text in front of the prompt that teachers read and the student does not, with {ground_truth} and {hint} filled in
    from the row, e.g. "The answer is {ground_truth}. ". Prompts whose row lacks it are dropped, and counted. Empty:
    teachers read what the student read."""
    privileged_tags: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """The same by tag, instead of the common one; an empty text = nothing for this tag."""
    max_teacher_prompt_tokens: int = 4096
    """Prompts that are longer than this with the privileged text are dropped, and counted."""
    max_prompt_tokens: int = 896
    """Longer prompts are dropped, and counted. With `max_new_tokens` it should fit into the actors' max_context."""
    shuffle: bool = True
    """A new order for every pass over the prompts, from the run's seed. False: the order of the file."""
    group_size: int = 8
    """Rollouts per prompt."""
    temperature: float = 1.0
    """Of the softmax that training rollouts are sampled from."""
    top_p: float = 1.0
    """Nucleus sampling; 1 = off."""
    top_k: int = 0
    """Sample among the k likeliest tokens; 0 = off."""
    max_new_tokens: int = 96
    """Sampled tokens per rollout at most, all turns together; evaluation uses the same limit."""
    env: str = "single_turn"
    """Environment that runs the rollouts (`actors.envs`)."""
    routes: dict[str, tuple[str, ...]] = msgspec.field(default_factory=lambda: {"default": ()})
    """Teacher pool -> tags of the tasks it grades; an empty list = all tasks. {} = nobody grades: rewards only."""
    eval_greedy: int = 64
    """Prompts answered greedily per evaluation (the first of the evaluation set); 0 = none."""
    eval_sampled: int = 64
    """Prompts answered once at temperature 1, without top-p or top-k, per evaluation; 0 = none. The reverse KL is
    measured on these."""
    eval_samples_shown: int = 4
    """Generations per evaluation written out as text (of either kind)."""

    def __post_init__(self) -> None:
        _at_least(1, max_prompt_tokens=self.max_prompt_tokens, group_size=self.group_size)
        _at_least(1, max_new_tokens=self.max_new_tokens, max_teacher_prompt_tokens=self.max_teacher_prompt_tokens)
        _at_least(0, top_k=self.top_k, eval_samples_shown=self.eval_samples_shown)
        _at_least(0, eval_greedy=self.eval_greedy, eval_sampled=self.eval_sampled)
        if max(self.eval_greedy, self.eval_sampled) > MAX_EVAL_PROMPTS:
            raise ValueError(f"at most {MAX_EVAL_PROMPTS} prompts per evaluation, got {self.eval_prompts_needed}")
        if not 0.0 <= self.eval_share < 1.0:
            raise ValueError(f"eval_share must be in [0, 1), got {self.eval_share}")
        if not 0.0 < self.temperature < float("inf"):
            raise ValueError(
                f"temperature must be positive and finite, got {self.temperature}; greedy rollouts teach nothing new "
                "about the student's distribution"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not self.env:
            raise ValueError('env must name an environment, e.g. "single_turn", got an empty string')
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
        """Rows that the evaluations use."""
        return max(self.eval_greedy, self.eval_sampled)

    def privileged_for(self, tag: str) -> str:
        """Template of what teachers read before the prompt of a task with this tag."""
        return self.privileged_tags.get(tag, self.privileged)

    @property
    def has_privileged(self) -> bool:
        return bool(self.privileged) or any(self.privileged_tags.values())

    def teachers_for(self, tag: str) -> tuple[str, ...]:
        """Pools that grade a task with this tag, in the order of `routes`; none = pure reward training."""
        return tuple(pool for pool, tags in self.routes.items() if not tags or tag in tags)


PROMPT_PLACE = "{prompt}"
"""Where a template takes the prompt."""


def n_held_out(n_rows: int, share: float, at_most: int) -> int:
    """Rows kept for evaluation: `share` of `n_rows` rounded up, but not above `at_most`, and never the last row that is
    left for training."""
    return min(math.ceil(share * n_rows), at_most, n_rows - 1)


def _at_least(least: int, **fields: int) -> None:
    for name, value in fields.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
