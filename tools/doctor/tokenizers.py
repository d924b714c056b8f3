"""Checks of tokenizers: token-to-id maps, embedding rows, and the tokens that end a turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from stillhouse.launch.checks.finding import Finding, Impossible
from stillhouse.launch.checks.model_files import differences
from stillhouse.launch.checks.turn_ends import ends_of
from stillhouse.models.chat_text import closing_id
from stillhouse.models.description import known_vocabulary_size
from stillhouse.models.tokenizer import as_chat_tokenizer, load_tokenizer, stop_token_ids
from stillhouse.protocol.handshake import vocab_tokens
from stillhouse.tools.doctor.case import ModelCase


def tokenizer_of(case: ModelCase, model: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model's folder. Raises Impossible where the folder was not found."""
    if not Path(model).is_dir():
        raise Impossible(f"no folder {model!r}")
    return case.once(f"the tokenizer of {model}", lambda: load_tokenizer(model))


def tokenizer_maps(case: ModelCase) -> Iterator[Finding]:
    """As transformers loads them, added tokens included; the configuration's own check reads tokenizer.json alone."""
    ours = tokenizer_of(case, case.config.models.student).get_vocab()
    yield _rows("student", case.config.models.student, ours)
    for pool in case.pools:
        model = pool.config.models.teacher
        theirs = tokenizer_of(case, model).get_vocab()
        apart = differences(ours, theirs)
        yield Finding(
            check="tokenizer maps",
            subject=f"pool {pool.name}",
            status="failed" if apart else "ok",
            measured=apart or f"all {len(ours):,} tokens have the student's ids",
            normal="every token has the same id; teachers score the student's ids",
            advice="a teacher with the student's vocabulary: an id means another text to this one",
        )
        yield _rows(f"pool {pool.name}", model, ours)


def _rows(subject: str, model: str, vocabulary: Mapping[str, int]) -> Finding:
    """`vocabulary`: the student's, whose ids are sampled and scored."""
    ids, rows = vocab_tokens(vocabulary), known_vocabulary_size(model)
    if rows is None:
        return Finding(
            check="tokenizer maps", subject=subject, status="skipped", measured="config.json has no vocab_size"
        )
    padded = f", {rows - ids:,} of them padding" if rows > ids else ""
    return Finding(
        check="tokenizer maps",
        subject=subject,
        status="ok" if rows >= ids else "failed",
        measured=f"{rows:,} embedding rows for {ids:,} ids{padded}",
        normal="at least one row per id",
        advice="the tokenizer belongs to another model, or its embedding was not resized",
        figures={"rows": float(rows), "ids": float(ids)},
    )


def turn_ends(case: ModelCase) -> Iterator[Finding]:
    """The ids at which the student stops, those of the teachers, and the one that the chat template writes."""
    student = case.config.models.student
    tokenizer = tokenizer_of(case, student)
    stops = stop_token_ids(student, tokenizer)
    named = _named(tokenizer, stops)
    closing = closing_id(as_chat_tokenizer(tokenizer))
    if closing is None:
        closes, status = "it has no chat template that closes a turn", "ok"
    else:
        closes = f"its chat template closes a turn with {_named(tokenizer, (closing,))}"
        status = "ok" if closing in stops else "warning"
    yield Finding(
        check="turn ends",
        subject="student",
        status=status,
        measured=f"it stops at {named}; {closes}",
        normal="the template closes a turn with one of the ids at which the student stops",
        advice="add the id to eos_token_id in the student's generation_config.json, or answers run to their limit",
    )
    for pool in case.pools:
        model = pool.config.models.teacher
        theirs = tokenizer_of(case, model)
        yield _teacher_ends(pool.name, stops, named, theirs, stop_token_ids(model, theirs))


def _teacher_ends(
    pool: str, ours: tuple[int, ...], named: str, tokenizer: PreTrainedTokenizerBase, stops: tuple[int, ...]
) -> Finding:
    ends = ends_of(as_chat_tokenizer(tokenizer), stops)
    return Finding(
        check="turn ends",
        subject=f"pool {pool}",
        status="ok" if ends & set(ours) else "warning",
        measured=f"the teacher ends a turn with {_named(tokenizer, sorted(ends))}, the student stops at {named}",
        normal="the teacher ends turns with an id at which the student stops",
        advice="the student is taught to end with a token that does not end its answers: add it to eos_token_id in its "
        "generation_config.json, or take a teacher of the same family",
    )


def _named(tokenizer: PreTrainedTokenizerBase, ids: tuple[int, ...] | list[int]) -> str:
    tokens: Any = tokenizer.convert_ids_to_tokens(list(ids))
    return ", ".join(f"{token} ({i})" for i, token in zip(ids, tokens, strict=True))
