"""Checks of recorded batches before a run starts: the file it would write, and the one it would mix in. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from launch.checks.vocabularies import read_vocabulary
from launch.config.run import RunConfig
from launch.errors import ConfigError
from protocol.handshake import vocab_fingerprint
from recording.format import RecordError
from recording.reader import read_header
from recording.writer import record_path


def check_recorded(config: RunConfig, *, resume: bool) -> None:
    """`config`: with models and paths resolved. Raises ConfigError with all that is wrong."""
    mistakes = [*_objective(config), *_written(config, resume=resume), *_mixed_in(config)]
    if mistakes:
        raise ConfigError(*mistakes)


def _objective(config: RunConfig) -> Iterator[str]:
    """Off-policy objectives on the student's own tokens."""
    learner = config.learner
    if learner.objective.divergence.name == "seq_kd":
        yield (
            "learner.objective.divergence: got seq_kd, which teaches nothing on the student's own tokens (the mean of "
            "its gradient is 0); expected another one; seq_kd is for learner.offline.divergence and python -m replay"
        )
    if learner.offline.student_fraction == 0.0:
        yield (
            "learner.offline.student_fraction: got 0, which leaves the actors nothing to do; expected more than 0, or "
            f"python -m replay {learner.offline.file}, which trains on the file alone"
        )


def _written(config: RunConfig, *, resume: bool) -> Iterator[str]:
    if not config.learner.record or resume:
        return
    path = record_path(Path(config.learner.record))
    if path.exists() and path.stat().st_size:
        yield f"learner.record: {path} holds another run's batches; expected a file that is not there yet"


def _mixed_in(config: RunConfig) -> Iterator[str]:
    file = config.learner.offline.file
    if not file:
        return
    try:
        header = read_header(Path(file))
    except (RecordError, OSError) as error:
        yield f"learner.offline.file: {error}"
        return
    if header.writer != "teacher":
        yield (
            f"learner.offline.file: {file} was written by the student of the run {header.run!r}; expected a file that "
            "the teacher wrote (python -m launch.write)"
        )
    vocabulary = read_vocabulary(Path(config.models.student) / "tokenizer.json")
    if vocabulary is not None and vocab_fingerprint(vocabulary) != header.vocab_fingerprint:
        yield (
            f"learner.offline.file: the token ids of {file} are of another vocabulary than those of "
            f"{config.models.student}; expected one token-to-id map"
        )
