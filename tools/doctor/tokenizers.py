"""Check of tokenizers: token-to-id maps and embedding rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from stillhouse.launch.checks.finding import Finding, Impossible
from stillhouse.launch.checks.model_files import differences
from stillhouse.models.description import known_vocabulary_size
from stillhouse.models.tokenizer import load_tokenizer
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
