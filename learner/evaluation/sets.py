"""The prompts of all evaluation sets of a run: its own (`learner.tasks.eval_prompts`, or rows held out from training),
and those of `learner.eval_sets`."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.evaluation.evaluation import EvalPrompt, render_eval_set
from stillhouse.learner.prompts.records import PromptRecord
from stillhouse.learner.prompts.rendering import NO_READERS, Readers
from stillhouse.learner.prompts.tasks import load_prompts, separate_eval_prompts

log = logging.getLogger(__name__)


def records_of(config: LearnerConfig, name: str, environments: Collection[str] | None = None) -> Sequence[PromptRecord]:
    """The rows of one set; "" is the run's own. Raises DataError for a file that cannot be read."""
    if name:
        return separate_eval_prompts(config.eval_tasks(name), environments)
    return load_prompts(config.tasks, environments).evaluation


def render_eval_sets(
    config: LearnerConfig,
    own: Sequence[PromptRecord],
    tokenizer: PreTrainedTokenizerBase,
    environments: Collection[str] | None = None,
    readers: Readers = NO_READERS,
) -> Mapping[str, tuple[EvalPrompt, ...]]:
    """Prompts by the name of the set. `own`: the rows of the run's own set, named "". Raises DataError for a file that
    cannot be read, TokenizerError for a row that cannot be rendered."""
    found: dict[str, tuple[EvalPrompt, ...]] = {}
    for name in config.eval_names if config.eval_every else ("",):
        tasks = config.eval_tasks(name)
        records = records_of(config, name, environments) if name else own
        rendered = render_eval_set(records, tokenizer, tasks, readers)
        if rendered.dropped:
            log.warning(
                "%d evaluation prompts%s are left out: too long, or without privileged context for the teachers",
                rendered.dropped,
                f" of {name}" if name else "",
            )
        found[name] = rendered.prompts
    return found
