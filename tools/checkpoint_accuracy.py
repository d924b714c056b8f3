"""Lets a checkpoint of a run answer the run's evaluation prompts, at any time, and also after the run.

    python -m stillhouse.tools.checkpoint_accuracy PARENT_PID CHECKPOINT [flags of a run]  prints JSON

A process of its own does it, so that a notebook loads no model and keeps no memory. No teacher scores the answers: the
figures are accuracies, rewards and lengths. Prompts, seeds and environments are those of the run's own evaluations.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from stillhouse.launch.config.command_line import parse_arguments, resolve_config
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.errors import LaunchError, refuse
from stillhouse.launch.processes.local import worker_environment
from stillhouse.learner.checkpoints.files import CHECKPOINTS, MANIFEST, newest, read_manifest
from stillhouse.learner.config import ADAPTER_CONFIG
from stillhouse.protocol.children import die_with_parent
from stillhouse.protocol.messages import WeightVersion
from stillhouse.protocol.processors import usable_cores

LAST_LINES: Final = 20
"""Lines of a failed evaluation's output that the error shows."""
UNMEASURED: Final = (
    "step",
    "name",
    "samples",
    "tags",
    "environments",
    "reverse_kl",
    "version_min",
    "version_mean_step",
)
"""Parts of a result that are not figures, or that need a teacher or a run."""


class EvaluationFailed(LaunchError):
    """The evaluation ended without figures."""


def evaluate_checkpoint(run: Path, checkpoint: str | Path | None, flags: Mapping[str, str]) -> dict[str, Any]:
    """Figures of a checkpoint, the newest one without `checkpoint`: a folder, or the name of one of the run. `flags`
    are laid over the run's configuration. Raises LaunchError."""
    folder = newest(run / CHECKPOINTS) if checkpoint is None else Path(checkpoint).expanduser()
    if folder is not None and not folder.is_dir():
        folder = run / CHECKPOINTS / folder
    if folder is None or not folder.is_dir():
        raise LaunchError(f"no checkpoint to evaluate: got {folder or run / CHECKPOINTS}, expected a checkpoint folder")
    process = subprocess.run(
        [
            *(
                sys.executable,
                "-P",
                "-m",
                "stillhouse.tools.checkpoint_accuracy",
                str(os.getpid()),
                str(folder.resolve()),
            ),
            f"--config={run / 'config.yaml'}",
            *(f"--{key}={text}" for key, text in flags.items()),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=worker_environment(max(1, int(usable_cores()))),
        start_new_session=True,
        check=False,
    )
    lines = process.stdout.decode(errors="replace").splitlines()
    if process.returncode != 0 or not lines:
        said = "\n".join(line.removeprefix("stillhouse: ") for line in lines[-LAST_LINES:])
        raise EvaluationFailed(f"the evaluation of {folder} ended with code {process.returncode}:\n{said}")
    return msgspec.json.decode(lines[-1], type=dict[str, Any])


def measure(config: RunConfig, checkpoint: Path) -> dict[str, Any]:
    """Figures of a checkpoint, by the names of an evaluation's metrics."""
    # Imported here because they import torch, which mistakes of the command line need not wait for.
    from stillhouse.launch.report.local_evaluation import LocalEvaluator
    from stillhouse.learner.evaluation.evaluation import EvaluationRun, render_eval_set
    from stillhouse.learner.prompts.tasks import load_prompts
    from stillhouse.models.tokenizer import load_tokenizer

    with tempfile.TemporaryDirectory() as merged:
        student = _whole_model(config, checkpoint, Path(merged))
        models = msgspec.structs.replace(config.models, student=str(student))
        config = msgspec.structs.replace(config, models=models)
        tokenizer, tasks = load_tokenizer(str(student)), config.learner.tasks
        prompts = render_eval_set(load_prompts(tasks, config.environments).evaluation, tokenizer, tasks).prompts
        unscored = msgspec.structs.replace(tasks, routes={})
        evaluator = LocalEvaluator(config, check=lambda: None, scores=False)
        try:
            evaluation = EvaluationRun(unscored, prompts, tokenizer, version=_version(checkpoint), seed=config.seed)
            # The engine has loaded the weights, and takes them for the first version.
            result = evaluator.run(evaluation, WeightVersion(0, 0), None)
        finally:
            evaluator.close()
    figures: dict[str, Any] = msgspec.to_builtins(result)
    return {name: value for name, value in figures.items() if name not in (*UNMEASURED, "at_k")} | figures["at_k"]


def _version(checkpoint: Path) -> WeightVersion:
    """Version of a checkpoint of a run, on which the seeds depend; the first one for another model."""
    return read_manifest(checkpoint).version if (checkpoint / MANIFEST).is_file() else WeightVersion(0, 0)


def _whole_model(config: RunConfig, checkpoint: Path, merged: Path) -> Path:
    """The checkpoint, or, if it holds adapters, the student with them, written into `merged`."""
    if not (checkpoint / ADAPTER_CONFIG).is_file():
        return checkpoint
    from stillhouse.learner.export import from_checkpoint

    return from_checkpoint(checkpoint, merged, config.models.student).merged


def main() -> int:
    """Entry of the measuring process."""
    die_with_parent(int(sys.argv[1]))  # before torch is imported: for seconds nothing else would end this process
    try:
        config = resolve_config(parse_arguments(sys.argv[3:]))
    except LaunchError as error:
        return refuse(error)
    print(msgspec.json.encode(measure(config, Path(sys.argv[2]))).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
