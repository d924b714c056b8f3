"""The rollouts of a recorded run as a table of Hugging Face `datasets`: a row per rollout, with text and tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from stillhouse.launch.config.tree import get
from stillhouse.launch.errors import ConfigError, LaunchError
from stillhouse.models.files import TokenizerError
from stillhouse.recording.reader import Recording
from stillhouse.tools.view.command import find_record
from stillhouse.tools.view.rollouts import Read, find_rollouts, read
from stillhouse.tools.view.vocabulary import TextDecoder, open_decoder

if TYPE_CHECKING:
    from datasets import Dataset

ROWS_AT_ONCE: Final = 500
"""Rows that are Python objects at one time; the others are in Arrow's memory, which is a tenth of that."""


def rollout_table(run: Path) -> Dataset:
    """The table. Raises LaunchError if the run has no record, or `datasets` is not installed; RecordError for a record
    that cannot be read."""
    try:
        import pyarrow
        from datasets import Dataset
    except ImportError as error:
        raise LaunchError(f"a table of rollouts needs the package {error.name}: pip install -e '.[data]'") from None
    try:
        file = find_record(run)
    except ConfigError as error:
        raise LaunchError(str(error).removeprefix("view: ")) from None
    with Recording(file) as recording:
        decoder = _decoder(recording)
        parts: list[Any] = []
        rows: list[dict[str, Any]] = []
        found = find_rollouts(recording)
        for number, one in enumerate(found, start=1):
            rows.append(_row(read(recording, one), decoder))
            if len(rows) == ROWS_AT_ONCE or number == len(found):
                parts.append(pyarrow.Table.from_pylist(rows, schema=_schema(pyarrow)))
                rows = []
    return Dataset(pyarrow.concat_tables(parts))


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


def _schema(pyarrow: Any) -> Any:
    """Written out, because a column without any value has no type of its own."""
    text, whole, yes = pyarrow.string(), pyarrow.int64(), pyarrow.bool_()
    logprobs = pyarrow.list_(pyarrow.float32())
    span = pyarrow.struct([("start", whole), ("end", whole), ("step", whole)])
    return pyarrow.schema(
        {
            "step": whole,
            "rollout_id": text,
            "task_id": whole,
            "sample": whole,
            "tag": text,
            "prompt": text,
            "response": text,
            "reward": pyarrow.float64(),
            "finish_reason": text,
            "turns": whole,
            "sampled_tokens": whole,
            "trained_tokens": whole,
            "staleness_max": whole,
            "left_out": yes,
            "offline": yes,
            "token_ids": pyarrow.list_(pyarrow.int32()),
            "sampled": pyarrow.list_(yes),
            "versions": pyarrow.list_(span),
            "student_logprobs": logprobs,
            "teachers": pyarrow.list_(text),
            "teacher_logprobs": pyarrow.list_(logprobs),
        }
    )
