"""The scores that each teacher gives to the student's answers, asked in every way in which a run asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from stillhouse.engines.base import Float32s, Int32s, ScoreRequest, ScoringEngine
from stillhouse.launch.checks.finding import Impossible
from stillhouse.launch.config.pools import TeacherPool
from stillhouse.tools.doctor import engines, reference
from stillhouse.tools.doctor.case import ModelCase
from stillhouse.tools.doctor.written import answers, ground_truths, reference_logprobs

TEMPERATURES: Final = (1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0)
"""At which the reference scores, 1 first, to recognise a teacher that scores at another one."""


class Text(NamedTuple):
    """Ids that a teacher scores from `start` on."""

    ids: Int32s
    start: int


class TextScores(NamedTuple):
    """The scores of one teacher, a list entry per text."""

    alone: list[Float32s]
    """From the second token on, each text by itself."""
    among: list[Float32s]
    """From `start` on, all texts in one call, in reverse order."""
    grown: list[Float32s]
    """From `start` on, in two requests of one rollout, as segments arrive."""
    of_nothing: int
    """Number of log-probs of a request for no token."""
    vocab_tokens: int


def texts(case: ModelCase) -> list[Text]:
    """All answers as teachers read them, then the rows' own answers to the same prompts."""
    written = answers(case)
    found = [Text(one.of_teacher, len(one.read_ids)) for one in written]
    prompts = {id(one.row): one.read_ids for one in written}.values()
    for prompt_ids, ids in zip(prompts, ground_truths(case), strict=True):
        if len(ids):
            found.append(Text(np.concatenate([prompt_ids, ids]), len(prompt_ids)))
    return found


def scores(case: ModelCase, pool: TeacherPool, offset: int = 0) -> TextScores:
    """By the pool's teacher number `offset`."""
    what = f"scoring by the teacher-{pool.first + offset} of pool {pool.name}"

    def ask() -> TextScores:
        asked = texts(case)
        with engines.scorer(case, pool, offset) as engine:
            longest = max(len(text.ids) for text in asked)
            if longest > engine.max_context:
                raise Impossible(f"a text has {longest} tokens, the teacher takes {engine.max_context}")
            return score(engine, asked)

    return case.once(what, ask)


def score(engine: ScoringEngine, asked: Sequence[Text]) -> TextScores:
    """Ask in each way."""
    alone = [engine.score([ScoreRequest(text.ids, 1)])[0].logprobs for text in asked]
    nothing = ScoreRequest(asked[0].ids, len(asked[0].ids))
    *among, of_nothing = engine.score([*(ScoreRequest(text.ids, text.start) for text in reversed(asked)), nothing])
    return TextScores(
        alone,
        [result.logprobs for result in reversed(among)],
        [_grown(engine, text, f"doctor-{i}") for i, text in enumerate(asked)],
        len(of_nothing.logprobs),
        engine.vocab_size,
    )


def _grown(engine: ScoringEngine, text: Text, rollout_id: str) -> Float32s:
    middle = max(text.start + 1, (text.start + len(text.ids)) // 2)
    first = engine.score([ScoreRequest(text.ids[:middle], text.start, rollout_id=rollout_id)])[0]
    second = engine.score([ScoreRequest(text.ids, middle, rollout_id=rollout_id, last=True)])[0]
    return np.concatenate([first.logprobs, second.logprobs])


def reference_scores(case: ModelCase, pool: TeacherPool) -> list[reference.Float64s]:
    """The reference's log-probs of all texts, [len(TEMPERATURES), tokens after the first]."""
    model = pool.config.models.teacher

    def compute() -> list[reference.Float64s]:
        return reference_logprobs(case, model, [text.ids for text in texts(case)], TEMPERATURES)

    return case.once(f"our own forward pass of the teacher {model}", compute)
