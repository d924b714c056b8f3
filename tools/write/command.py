"""Lets the teacher write and score rollouts on which a student can be trained off-policy:

    stillhouse write FILE --teacher DIR --steps 50      (any key of a run)

This is a run whose student is the teacher's checkpoint and is never trained; the batches that reach the learner are
recorded in FILE: `steps` times `buffer.batch_rollouts` rollouts. With `learner.tasks.privileged` the teacher reads that
text when it writes, and the recording has the prompts without it (`learner.written`).

    stillhouse write FILE --from ROWS --student DIR

records text that is there instead: prompts with responses, for SFT, or for distillation with `teacher.top_k`
(`tools.write.given`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from stillhouse.launch import run
from stillhouse.launch.checks.model_files import find_model
from stillhouse.launch.config.command_line import parse_arguments, resolve_config
from stillhouse.launch.errors import WRONG_CONFIG_EXIT_CODE, ConfigError, LaunchError, refuse
from stillhouse.tools.write.given import write_given

RECIPE: Final = (
    "--learner.eval_every=0",
    "--learner.checkpoint_every=0",
    "--learner.tasks.group_size=1",
    "--buffer.release=rollout",
    "--buffer.max_staleness=7",
    "--learner.publish_every=8",
)
"""Defaults that the user can override: whole rollouts, one per prompt, and rare weight updates, as weights never
change."""
USAGE: Final = f"""\
usage: stillhouse write FILE [--teacher DIR] [--steps N] [--KEY VALUE ...]
       stillhouse write FILE --from ROWS [--student DIR] [--teacher DIR --teacher.top_k K] [--KEY VALUE ...]

The teacher writes and scores rollouts, which are recorded in FILE, for --learner.offline.file of a run and for
stillhouse replay. The keys are those of a run. Defaults here: {" ".join(RECIPE)}

With --from, the text is there already: ROWS are prompts with `response`, or `messages` with the assistant's turns
(docs/prompts.md). Nothing is sampled; with --teacher.top_k the teacher scores the responses.
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code of launch.run."""
    if not arguments or arguments[0].startswith("-"):
        print(USAGE, file=sys.stdout if arguments[:1] == ["--help"] else sys.stderr)
        return 0 if arguments[:1] == ["--help"] else WRONG_CONFIG_EXIT_CODE
    file, *rest = arguments
    try:
        rows, rest = _given(rest)
        config = resolve_config(parse_arguments(rest))
        if rows is not None:
            return write_given(file, rows, config)
        teacher = find_model("models.teacher", config.models.teacher)
    except LaunchError as error:
        return refuse(error)
    writer = (f"--models.student={teacher}", f"--models.teacher={teacher}", "--learner.frozen=true")
    return run.main([*RECIPE, *rest, *writer, f"--learner.record={file}"])


def _given(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of --from, and all other words. Raises ConfigError."""
    rows, others, left = None, list[str](), list(words)
    while left:
        word = left.pop(0)
        name, equals, text = word.partition("=")
        if name != "--from":
            others.append(word)
            continue
        rows = text if equals else left.pop(0) if left and not left[0].startswith("--") else ""
        if not rows:
            raise ConfigError("--from: expected a path of rows with answers, as for learner.tasks.prompts")
    return rows, others
