"""Text of token ids, with the tokenizer of the recorded run's student."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from stillhouse import builtin
from stillhouse.launch.config.run import BUILTIN
from stillhouse.models.files import TokenizerError
from stillhouse.models.tokenizer_file import FileTokenizer
from stillhouse.protocol.handshake import vocab_fingerprint

_WORD_START: Final = "\u2581"
"""Stands for a space in vocabularies of sentencepiece, which decoding a single token would lose."""


class TextDecoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def get_vocab(self) -> dict[str, int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


def open_decoder(student: str, fingerprint: str) -> TextDecoder:
    """The tokenizer of a model folder or hub name. Raises TokenizerError if there is none, or if its vocabulary is not
    the one with this fingerprint."""
    name = str(builtin.STUDENT_DIR) if student == BUILTIN else str(Path(student).expanduser())
    try:
        decoder: TextDecoder = FileTokenizer(name)
    except TokenizerError:
        from stillhouse.models.tokenizer import (
            load_tokenizer,  # imports torch, for the few models without tokenizer.json
        )

        decoder = load_tokenizer(name)  # pyright: ignore[reportAssignmentType] - its decode may take batches too
    if (got := vocab_fingerprint(decoder.get_vocab())) != fingerprint:
        raise TokenizerError(
            f"the vocabulary of {name} has the fingerprint {got[:12]}, that of the record is {fingerprint[:12]}"
        )
    return decoder


class TokenTexts:
    """Numbers the token ids that a page uses from 0 on, and gives the text of each."""

    def __init__(self, decoder: TextDecoder | None) -> None:
        """`decoder`: None if there is no tokenizer; a token's text is then its id."""
        self._decoder = decoder
        self._raw = {i: text for text, i in decoder.get_vocab().items()} if decoder is not None else {}
        self._number_V = np.full(1 << 10, -1, np.int64)
        self.ids: list[int] = []
        """Token id by number."""

    def numbers(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.uint32]:
        """The numbers of these ids, which are at least 0."""
        if len(ids) == 0:
            return np.zeros(0, np.uint32)
        if (highest := int(ids.max())) >= len(self._number_V):
            longer = np.full(max(highest + 1, 2 * len(self._number_V)), -1, np.int64)
            longer[: len(self._number_V)] = self._number_V
            self._number_V = longer
        for new in np.unique(ids[self._number_V[ids] < 0]).tolist():
            self._number_V[new] = len(self.ids)
            self.ids.append(new)
        return self._number_V[ids].astype(np.uint32)

    def text(self, ids: Sequence[int]) -> str:
        """The text of a sequence, without special tokens: what a person wrote and reads."""
        if self._decoder is None:
            return " ".join(f"<{i}>" for i in ids)
        return self._decoder.decode(ids, skip_special_tokens=True)

    @property
    def texts(self) -> list[str]:
        """Text by number. A token that is a part of a character gives U+FFFD."""
        return [self._one(i) for i in self.ids]

    def _one(self, token_id: int) -> str:
        raw = self._raw.get(token_id)
        if self._decoder is None or raw is None:  # some models have more ids than tokens
            return f"<{token_id}>"
        return (
            raw.replace(_WORD_START, " ")
            if _WORD_START in raw
            else self._decoder.decode([token_id], skip_special_tokens=False)
        )
