"""The tokenizer contract: student and teachers mean the same text by the same ids. No torch.

Token-to-id maps must be equal. Sizes say nothing: models pad their embedding rows past the vocabulary, and two
vocabularies of one size may order their tokens differently. tokenizer.json is read here; where a model has none, the
handshake with the buffer compares fingerprints (protocol.handshake).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, cast

from launch.errors import ConfigError
from models.description import known_vocabulary_size
from protocol.handshake import vocab_fingerprint, vocab_tokens

NAMED: Final = 3
"""Differing tokens that a message names."""
Json = Mapping[str, object]
Vocabulary = Mapping[str, int]


def check_teachers(student: Path, teachers: Mapping[str, Path]) -> list[str]:
    """Mistakes. `teachers`: key of the configuration -> model folder."""
    ours = read_vocabulary(student / "tokenizer.json")
    return [told for key, folder in teachers.items() for told in _check(key, student, ours, folder)]


def _check(key: str, student: Path, ours: Vocabulary | None, teacher: Path) -> Iterator[str]:
    theirs = read_vocabulary(teacher / "tokenizer.json")
    if ours is None or theirs is None:
        return
    if vocab_fingerprint(ours) != vocab_fingerprint(theirs):
        yield (
            f"{key}: its tokenizer differs from the student's ({len(ours)} tokens in {student}, {len(theirs)} in "
            f"{teacher}): {differences(ours, theirs)}; a teacher grades the student's token ids, so it needs the same "
            "token-to-id map"
        )
        return
    rows, student_rows = known_vocabulary_size(teacher), known_vocabulary_size(student)
    # The rows past the vocabulary are padding, of which each model may have its own number.
    if rows is not None and student_rows is not None and rows < min(student_rows, vocab_tokens(ours)):
        yield (
            f"{key}: got {rows} embedding rows (vocab_size in {teacher / 'config.json'}), expected at least "
            f"{min(student_rows, vocab_tokens(ours))}, the ids that the student can sample; it could not grade the rest"
        )


def differences(ours: Vocabulary, theirs: Vocabulary) -> str:
    """For people: how many tokens differ, and the first ones by id."""
    other_id = sorted((i, token) for token, i in ours.items() if token in theirs and theirs[token] != i)
    only_ours = sorted((i, token) for token, i in ours.items() if token not in theirs)
    only_theirs = sorted((i, token) for token, i in theirs.items() if token not in ours)
    parts: list[str] = []
    if other_id:
        named = ", ".join(
            f"{token!r} is {i} for the student and {theirs[token]} for the teacher" for i, token in other_id[:NAMED]
        )
        parts.append(f"{len(other_id)} with another id, first {named}")
    for whose, tokens in (("the student's", only_ours), ("the teacher's", only_theirs)):
        if tokens:
            named = ", ".join(f"{token!r} ({i})" for i, token in tokens[:NAMED])
            parts.append(f"{len(tokens)} in {whose} only, first {named}")
    return "; ".join(parts)


def read_vocabulary(file: Path) -> dict[str, int] | None:
    """Token -> id, added tokens included, or None if the file is not there or of a kind without a readable map."""
    if not file.is_file():
        return None
    try:
        content = cast(Json, json.loads(file.read_text(encoding="utf-8")))
        told = cast(Json, content["model"])["vocab"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not a tokenizer: {error!r}") from error
    if isinstance(told, Mapping):
        vocab = dict(cast(Mapping[str, int], told))
    else:  # Unigram: [[token, score], ...], the id is the position
        vocab = {token: i for i, (token, _) in enumerate(cast(list[tuple[str, float]], told))}
    for added in cast(list[dict[str, object]], content.get("added_tokens") or []):
        vocab[str(added["content"])] = int(str(added["id"]))
    return vocab
