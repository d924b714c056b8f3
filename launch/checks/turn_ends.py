"""Whether answers end: the ids at which the student stops, and those with which chat templates close a turn. From files
alone, so that every start can say it. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from stillhouse.models.chat_text import ChatTokenizer, closing_id
from stillhouse.models.files import TokenizerError
from stillhouse.models.tokenizer_file import FileTokenizer


def ends_of(tokenizer: ChatTokenizer, stops: tuple[int, ...]) -> set[int]:
    """Ids with which a model ends its turns, by its files: that of its template, else those where it stops."""
    closing = closing_id(tokenizer)
    return set(stops) if closing is None else {closing}


def turn_end_warnings(student: Path, teachers: Mapping[str, Path]) -> Iterator[str]:
    """Warnings for a student whose answers do not end. `teachers`: by the key that names each. Folders whose tokenizer
    cannot be read here are left to those that load them."""
    try:
        ours = FileTokenizer(student)
        stops = ours.stop_token_ids
    except (TokenizerError, OSError):
        return
    where = f"the student stops only at {_named(ours, stops)}"
    if not ends_of(ours, stops) & set(stops):
        yield (
            f"models.student: its chat template closes a turn with {_named(ours, ends_of(ours, stops))}, but {where}: "
            "answers that end as the template shows do not stop there, and run to their limit (truncated); add that "
            f"id to eos_token_id in {student / 'generation_config.json'}"
        )
    for key, folder in teachers.items():
        try:
            theirs = FileTokenizer(folder)
            ends = ends_of(theirs, theirs.stop_token_ids)
        except (TokenizerError, OSError):
            continue
        if not ends & set(stops):
            yield (
                f"{key}: it ends a turn with {_named(theirs, ends)}, but {where}: the student is taught an end where "
                "its answers do not stop; add that id to eos_token_id in the student's generation_config.json, or take "
                "a teacher of the same family"
            )


def _named(tokenizer: FileTokenizer, ids: set[int] | tuple[int, ...]) -> str:
    return ", ".join(f"{tokenizer.backend_tokenizer.id_to_token(i)!r} ({i})" for i in sorted(ids))
