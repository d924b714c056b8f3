"""One rollout of the newest step as text: what was asked, what the student wrote, and the token that its teachers would
have written least. For learner.json, from which the launcher shows it. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np

from stillhouse.learner.reports.figures import with_frames
from stillhouse.protocol.codec import Array
from stillhouse.protocol.messages import BatchItem
from stillhouse.protocol.printable import printable

READ: Final = 400
"""Tokens of the prompt's end and of the answer's beginning that are read."""
PROMPT, ANSWER = 60, 120
"""Characters that are shown of them."""
Decode = Callable[[list[int], bool], str]
"""(token ids, whether special tokens are shown) -> text."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout; the texts are safe to show."""

    step: int
    prompt: str
    """Its end."""
    answer: str
    """Its beginning."""
    reward: float | None = None
    worst: str | None = None
    """The token at which student minus teachers is largest; None without teachers."""
    student: float = 0.0
    """The student's log-prob of it when it was sampled, nats."""
    teacher: float = 0.0
    """Mean of its teachers' log-probs."""

    def __str__(self) -> str:
        prompt = self.prompt if len(self.prompt) <= PROMPT else f"... {self.prompt[-PROMPT:]}"
        answer = self.answer if len(self.answer) <= ANSWER else f"{self.answer[:ANSWER]} ..."
        text = f'step {self.step}: prompt "{prompt}" -> "{answer}"'
        text += "" if self.reward is None else f", reward {self.reward:g}"
        if self.worst is not None:
            text += f'; worst token "{self.worst}": student {self.student:.2f}, teacher {self.teacher:.2f} nats'
        return text


def sample_of(step: int, items: Sequence[BatchItem], arrays: Sequence[Array], decode: Decode) -> Sample | None:
    """The first rollout of the batch that ended in it; None without one. `items`, `arrays`: see
    `protocol.messages.Batch`."""
    for item, (ids_T, mu_T, trained_T, q_PT) in with_frames(items, arrays):
        trained = np.flatnonzero(trained_T)
        if not item.final or not item.spans or not len(trained):
            continue
        start = item.spans[0].start
        texts = [decode(ids.tolist(), False) for ids in (ids_T[:start][-READ:], ids_T[start:][:READ])]
        prompt, answer = (printable(text.strip()) for text in texts)
        sample = Sample(step=step, prompt=prompt, answer=answer, reward=item.reward)
        if not item.teachers:
            return sample
        q_T = q_PT.mean(axis=0)
        worst = int(trained[np.argmax(mu_T[trained] - q_T[trained])])
        return msgspec.structs.replace(
            sample,
            worst=printable(decode([int(ids_T[worst])], True)),
            student=round(float(mu_T[worst]), 3),
            teacher=round(float(q_T[worst]), 3),
        )
    return None
