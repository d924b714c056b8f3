"""A few answers of the student, written by the actor's own engine at several temperatures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np

from stillhouse.engines.base import Float32s, GenerationEngine, GenerationRequest, Int32s
from stillhouse.launch.checks.finding import Impossible
from stillhouse.launch.checks.model_files import check_weights
from stillhouse.learner.prompts.tasks import Rendered
from stillhouse.protocol.messages import Sampling
from stillhouse.tools.doctor import engines, reference
from stillhouse.tools.doctor.case import ModelCase
from stillhouse.tools.doctor.chat_template import rows_of
from stillhouse.tools.doctor.tokenizers import tokenizer_of

PROMPTS: Final = 4
PROMPT_TOKENS: Final = 1024
"""Longer prompts are taken only where there are no shorter ones."""
ANSWER_TOKENS: Final = 32
GREEDY: Final = 0.0
PROBE: Final = 1.5
"""Temperature that shows what reported log-probs mean: the student writes unlikely tokens there, whose log-probs are
far from those at temperature 1."""
POLL_S: Final = 0.05
replace = msgspec.structs.replace


class WrittenAnswer(NamedTuple):
    """One answer."""

    row: Rendered
    prompt_ids: Int32s
    read_ids: Int32s
    """What teachers read in place of the prompt; the prompt itself without a privileged context."""
    ids: Int32s
    logprobs: Float32s
    """As the engine reported them."""
    temperature: float

    @property
    def of_student(self) -> Int32s:
        return np.concatenate([self.prompt_ids, self.ids])

    @property
    def of_teacher(self) -> Int32s:
        return np.concatenate([self.read_ids, self.ids])


class WrittenAnswers(NamedTuple):
    """What the student wrote."""

    answers: list[WrittenAnswer]
    refused: str
    """Why the engine refuses `PROBE`; empty: it does not."""


def answers(case: ModelCase) -> list[WrittenAnswer]:
    """Answers to a few prompts, at temperature 0, 1 and `PROBE`."""
    return written(case).answers


def written(case: ModelCase) -> WrittenAnswers:
    """See `answers`."""
    return case.once("writing answers with the actor's engine", lambda: _write(case))


def _write(case: ModelCase) -> WrittenAnswers:
    rows = sorted(rows_of(case), key=lambda row: len(_ids(row)) > PROMPT_TOKENS)[:PROMPTS]
    if not rows:
        raise Impossible("no prompt can be used")
    length = min(ANSWER_TOKENS, case.config.learner.tasks.max_new_tokens)
    with engines.student(case) as (source, student):
        rows = [row for row in rows if len(_ids(row)) + length <= student.max_context]
        if not rows:
            raise Impossible(f"no prompt leaves room for an answer in {student.max_context} tokens")
        found: list[WrittenAnswer] = []
        for temperature in (GREEDY, 1.0):
            found += _at(student.engine, rows, temperature, length, source.stop_token_ids)
        try:
            return WrittenAnswers([*found, *_at(student.engine, rows, PROBE, length, source.stop_token_ids)], "")
        except ValueError as error:  # where it could not say what was sampled at another temperature
            return WrittenAnswers(found, str(error))


def _at(
    engine: GenerationEngine, rows: Sequence[Rendered], temperature: float, length: int, stops: tuple[int, ...]
) -> Iterator[WrittenAnswer]:
    sampling = Sampling(temperature=temperature, max_new_tokens=length)
    requests = [
        GenerationRequest(f"doctor-{temperature}-{i}", _ids(row), replace(sampling, seed=i), length, stops)
        for i, row in enumerate(rows)
    ]
    for row, (ids, logprobs) in zip(rows, write(engine, requests), strict=True):
        read = row.teacher_ids if len(row.teacher_ids) else _ids(row)
        yield WrittenAnswer(row, _ids(row), read, ids, logprobs, temperature)


def write(engine: GenerationEngine, requests: Sequence[GenerationRequest]) -> list[tuple[Int32s, Float32s]]:
    """(ids, log-probs) of each request. Whoever examines has a deadline. Raises RuntimeError for a request that
    fails."""
    parts: dict[str, list[tuple[Int32s, Float32s]]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.submit(request)
    running = set(parts)
    while running:
        for delta in engine.poll(POLL_S):
            parts[delta.request_id].append((delta.token_ids, delta.logprobs))
            if delta.finish_reason in ("aborted", "error"):
                raise RuntimeError(f"a request of the actor's engine was {delta.finish_reason}: {delta.error}")
            if delta.finish_reason is not None:
                running.discard(delta.request_id)
    return [
        (np.concatenate([ids for ids, _ in got]), np.concatenate([logprobs for _, logprobs in got]))
        for got in parts.values()
    ]


def _ids(row: Rendered) -> Int32s:
    assert row.ids is not None
    return row.ids


def reference_logprobs(
    case: ModelCase, model: str, texts: Sequence[Int32s], temperatures: Sequence[float]
) -> list[reference.Float64s]:
    """By tools.doctor.reference. Raises Impossible for a model that is too large for this machine."""
    try:
        return reference.logprobs(model, check_weights("", Path(model)).parameters, texts, temperatures)
    except reference.TooLarge as error:
        raise Impossible(str(error)) from error


def of_student(case: ModelCase) -> list[reference.Float64s]:
    """The reference's log-probs of all `answers`, [2, tokens of the answer]: at temperature 1, and at that of the
    answer."""

    def compute() -> list[reference.Float64s]:
        all_answers = answers(case)
        temperatures = list(dict.fromkeys([1.0, *(one.temperature for one in all_answers if one.temperature)]))
        found = reference_logprobs(case, case.config.models.student, [a.of_student for a in all_answers], temperatures)
        return [
            table[[0, temperatures.index(one.temperature or 1.0)], len(one.prompt_ids) - 1 :]
            for one, table in zip(all_answers, found, strict=True)
        ]

    return case.once("our own forward pass of the student", compute)


def ground_truths(case: ModelCase) -> list[Int32s]:
    """The rows' own answers as ids; none for rows without."""
    tokenizer = tokenizer_of(case, case.config.models.student)
    found: list[Int32s] = []
    for row in {id(one.row): one.row for one in answers(case)}.values():
        text = row.record.ground_truth if row.record is not None else None
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"] if text else []  # pyright: ignore
        found.append(np.array(ids[:ANSWER_TOKENS], np.int32))
    return found
