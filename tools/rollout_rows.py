"""The rollouts of a recorded run as rows with text and tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from stillhouse.launch.config.tree import get
from stillhouse.launch.errors import ConfigError, LaunchError
from stillhouse.models.files import TokenizerError
from stillhouse.recording.reader import Recording
from stillhouse.tools.view.command import find_record
from stillhouse.tools.view.rollouts import Read, find_rollouts, read
from stillhouse.tools.view.vocabulary import TextDecoder, open_decoder


def rollout_rows(run: Path) -> Iterator[dict[str, Any]]:
    """The rows. Raises LaunchError if the run has no record, RecordError for a record that cannot be read."""
    try:
        file = find_record(run)
    except ConfigError as error:
        raise LaunchError(str(error).removeprefix("view: ")) from None
    with Recording(file) as recording:
        decoder = _decoder(recording)
        for one in find_rollouts(recording):
            yield _row(read(recording, one), decoder)


def _decoder(recording: Recording) -> TextDecoder | None:
    """None: the student's tokenizer is not there, and the texts are empty."""
    try:
        return open_decoder(
            str(get(recording.header.config, "models.student") or ""), recording.header.vocab_fingerprint
        )
    except TokenizerError:
        return None


def _row(one: Read, decoder: TextDecoder | None) -> dict[str, Any]:
    item, ids = one.item, one.ids_L.tolist()

    def text(some: list[int]) -> str | None:
        return decoder.decode(some, skip_special_tokens=False) if decoder is not None else None

    return {
        "step": one.version.step + 1,
        "rollout_id": item.rollout_id,
        "task_id": item.task_id,
        "sample": item.sample_index,
        "tag": item.tag,
        "prompt": text(ids[: one.n_prompt]),
        "response": text(ids[one.n_prompt :]),
        "reward": item.reward,
        "finish_reason": item.finish_reason,
        "turns": item.n_turns,
        "sampled_tokens": int(one.sampled_L.sum()),
        "trained_tokens": sum(part.end - part.start for part in one.trained),
        "staleness_max": one.staleness,
        "left_out": one.left_out,
        "offline": one.offline,
        "token_ids": ids,
        "sampled": one.sampled_L.tolist(),
        "versions": [{"start": span.start, "end": span.end, "step": span.version.step} for span in item.spans],
        "student_logprobs": _known(one.behaviour_L, one.sampled_L & one.behaviour_known),
        "teachers": list(item.teachers),
        "teacher_logprobs": [
            _known(q_L, scored_L) for q_L, scored_L in zip(one.teacher_ML, one.scored_ML, strict=True)
        ],
    }


def _known(logprobs_L: np.ndarray[Any, Any], known_L: np.ndarray[Any, Any]) -> list[float | None]:
    return [value if known else None for value, known in zip(logprobs_L.tolist(), known_L.tolist(), strict=True)]
