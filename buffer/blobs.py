"""Blobs: the arrays that come with messages. The journal writes each once, and its images refer to it by number.

A blob is what lives and dies together: the arrays of one segment, of one lease's scores, or of one task's prompt. The
state numbers them from 1 on, in the order in which they come, so that replaying the turns gives the same numbers.
Arrays of fewer than BLOB_BYTES are no blob (number 0): they stay in their turn, and images contain them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

from stillhouse.protocol.codec import Array
from stillhouse.protocol.messages import Message, Scores, TasksOffered

BLOB_BYTES: Final = 512
"""Smaller arrays are not worth a record of their own: the record of their segment is as large."""

Load: TypeAlias = Callable[[int], Sequence[bytes]]
"""Reads a blob by its number: the bytes of its arrays."""


class KeptArrays(NamedTuple):
    """Stands for a blob in an image. `arrays`: their bytes, after reading."""

    number: int
    arrays: Sequence[bytes] = ()


class KeptBytes(bytes):
    """The bytes of one array of a blob, and where they are in it."""

    number: int
    place: int

    @classmethod
    def of(cls, content: bytes, number: int, place: int) -> bytes:
        """Plain bytes if there is no blob (number 0)."""
        if number == 0:
            return content
        kept = cls(content)
        kept.number, kept.place = number, place
        return kept


class Arrays(tuple[Array, ...]):
    """The arrays of a message, and the numbers of its blobs, each of as many arrays as the others."""

    numbers: tuple[int, ...]

    @classmethod
    def of(cls, arrays: Sequence[Array], numbers: tuple[int, ...]) -> Arrays:
        made = cls(arrays)
        made.numbers = numbers
        return made


def number_of(arrays: Sequence[Array], index: int = 0) -> int:
    """Number of a message's blob `index`; 0 if there is none."""
    return arrays.numbers[index] if isinstance(arrays, Arrays) and arrays.numbers else 0


def numbered(message: Message, arrays: Sequence[Array], total: int) -> Arrays:
    """Number the blobs of a message, of which `total` came before."""
    numbers: list[int] = []
    for group in groups_of(message, arrays):
        total += (is_blob := sum(array.nbytes for array in group) >= BLOB_BYTES)
        numbers.append(total if is_blob else 0)
    return Arrays.of(arrays, tuple(numbers))


def groups_of(message: Message, arrays: Sequence[Array]) -> list[Sequence[Array]]:
    """The arrays of a message in the groups that live and die together. None if they are not as many as it says."""
    match message:
        case Scores(leases=items, top_k=top_k):
            each = 2 if top_k else 1
        case TasksOffered(tasks=items):
            each = 1
        case _:
            return [arrays] if arrays else []
    if len(arrays) != each * len(items):
        return []
    return [arrays[i : i + each] for i in range(0, len(arrays), each)]
