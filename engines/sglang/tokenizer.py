"""Compares a running SGLang server's tokenizer with the student's, by the text of single ids. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from stillhouse.engines.config import ServerLinkConfig
from stillhouse.engines.sglang.http import SGLangLink
from stillhouse.models.tokenizer_file import FileTokenizer, bare, spread

COMPARED: Final = 4096
"""Most ids to compare, at equal distances, and"""
COMPARED_LAST: Final = 256
"""number of last ids, where added tokens are."""
_PATH: Final = "/detokenize"


class Differing(NamedTuple):
    """One id with two different texts."""

    token_id: int
    ours: str
    theirs: str


class _Reply(msgspec.Struct, frozen=True):
    text: list[str]


def compare_tokenizers(
    url: str, config: ServerLinkConfig, student: str | Path, *, api_key: str = ""
) -> list[Differing] | None:
    """Ids whose text differs between the server and the folder `student`; None when the server cannot say (an older
    version, or no tokenizer). White space is not compared, because servers normalise it.

    Raises TokenizerError for `student`, RequestRefused, ServerUnavailable, msgspec.DecodeError."""
    tokenizer = FileTokenizer(student)
    ids = compared_ids(sorted(tokenizer.get_vocab().values()))
    ours = [tokenizer.decode([i], skip_special_tokens=False) for i in ids]
    link = SGLangLink(url, config, api_key=api_key)
    try:
        if not link.run(link.has_endpoint(_PATH), timeout_s=2 * config.control_timeout_s):
            return None
        body = {"tokens": [[i] for i in ids], "skip_special_tokens": False}
        reply = link.run(link.post(_PATH, body), timeout_s=2 * config.control_timeout_s)
    finally:
        link.close()
    theirs = msgspec.json.decode(reply, type=_Reply).text
    if len(theirs) != len(ids):
        raise msgspec.DecodeError(f"{url}{_PATH} gave {len(theirs)} texts for {len(ids)} ids")
    pairs = zip(ids, ours, theirs, strict=True)
    return [Differing(i, mine, other) for i, mine, other in pairs if bare(mine) != bare(other)]


def compared_ids(ids: Sequence[int]) -> list[int]:
    """The ids of an ascending list that are compared."""
    return sorted({*spread(ids, COMPARED), *ids[-COMPARED_LAST:]})
