"""The likeliest tokens of a teacher with another tokenizer, as the student's. No torch.

A token of the teacher counts for the token with which the student would begin the same text: the one of the same bytes,
or the longest one that they begin with. So `ing` counts for `in` where the student writes `in`, `g`. Special tokens
count for none, but for the end of a turn. What counts for no token is part of the tail.

Legend: U tokens of the teacher's vocabulary, V of the student's, S positions, K columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stillhouse.engines.base import Float32s, Int32s

NONE = -1


@dataclass(frozen=True)
class FirstTokens:
    of_U: Int32s
    """The student's token that each of the teacher's counts for; NONE: no one."""
    alone_V: npt.NDArray[np.bool_]
    """One token of the teacher counts for it, and no more."""
    end: int
    """The teacher's end of a turn."""

    @classmethod
    def of(
        cls,
        student: Mapping[int, bytes],
        teacher: Mapping[int, bytes],
        same: Mapping[int, int],
        *,
        end: int,
        n_student: int,
    ) -> FirstTokens:
        """`student`, `teacher`: the tokens that are text, by their bytes. `same`: tokens of the teacher that are known
        to be one of the student's; `end` is among them."""
        by_bytes = {text: i for i, text in student.items() if text}
        of_U = np.full(max((*teacher, *same), default=-1) + 1, NONE, np.int32)
        for i, text in teacher.items():
            ends = range(len(text), 0, -1)
            of_U[i] = next((by_bytes[text[:end]] for end in ends if text[:end] in by_bytes), NONE)
        for i, token in same.items():
            of_U[i] = token
        return cls(of_U, np.bincount(of_U[of_U != NONE], minlength=n_student) == 1, end)

    def is_same(self, student: int, teacher: int) -> bool:
        """Whether two tokens of the same text have the same probability in a set: nothing else counts for it."""
        return teacher == self.end or bool(self.of_U[teacher] == student and self.alone_V[student])

    def sets(self, ids_SK: Int32s, logprobs_SK: Float32s) -> tuple[Int32s, Float32s]:
        """(the student's tokens [S, K], log of the probability of all that count for each), likeliest first; -inf in
        columns that are left over."""
        n, k = ids_SK.shape
        inside_SK = (ids_SK >= 0) & (ids_SK < len(self.of_U))
        token_SK = np.where(inside_SK, self.of_U[np.where(inside_SK, ids_SK, 0)], NONE)
        row_E, column_E = np.nonzero(token_SK != NONE)
        keys_E = row_E * (len(self.alone_V) + 1) + token_SK[row_E, column_E]
        _, first_X, which_E, count_X = np.unique(keys_E, return_index=True, return_inverse=True, return_counts=True)
        logprob_E = logprobs_SK[row_E, column_E]
        mass_X = np.bincount(which_E, weights=np.exp(logprob_E.astype(np.float64)), minlength=len(first_X))
        of_one = count_X == 1  # bit for bit what the teacher gave
        logprob_X = np.where(of_one, logprob_E[first_X], np.log(np.where(of_one, 1.0, mass_X)).astype(np.float32))
        row_X = row_E[first_X]
        order_X = np.lexsort((column_E[first_X], -logprob_X, row_X))
        row_X, token_X, logprob_X = row_X[order_X], token_SK[row_E, column_E][first_X][order_X], logprob_X[order_X]
        column_X = np.arange(len(row_X)) - np.searchsorted(row_X, row_X)
        ids, logprobs = np.zeros((n, k), np.int32), np.full((n, k), -np.inf, np.float32)
        ids[row_X, column_X], logprobs[row_X, column_X] = token_X, logprob_X
        return ids, logprobs
