"""The bytes of text that each token of a tokenizer stands for. No torch.

Tokens of byte-level BPE stand for bytes, not characters, so one character may be in several tokens. SentencePiece-like
tokenizers write a space as "▁", and have a token such as <0xC3> for a byte that is in no other token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final, cast

from tokenizers import Tokenizer

from stillhouse.models.files import TokenizerError

_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE: Final = "▁"


def token_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Id -> bytes, for all tokens, added ones included. Spaces that a decoder strips at the beginning of a text are
    there. Raises TokenizerError for a tokenizer whose tokens do not stand for bytes one by one."""
    steps = _decoder(tokenizer)
    kinds = {step["type"] for step in steps}
    added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
    table: dict[int, bytes] = {i: text.encode() for i, text in added.items()}
    if kinds == {"ByteLevel"}:
        letters = {letter: byte for byte, letter in byte_letters().items()}
    elif kinds and kinds <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"} and _spaces(steps):
        letters = None
    else:
        raise TokenizerError(
            f"its decoder is {', '.join(sorted(kinds)) or 'missing'}; expected ByteLevel (byte-level BPE) or Metaspace "
            "(SentencePiece): only with these it is known which bytes a token stands for"
        )
    for text, i in tokenizer.get_vocab(with_added_tokens=False).items():
        if i in table:
            continue
        if letters is not None:
            # a character that is no letter of the alphabet, as some vocabularies hold, stands for nothing that is sure
            table[i] = bytes(letters[c] for c in text) if all(c in letters for c in text) else b""
        elif "ByteFallback" in kinds and (byte := _BYTE.fullmatch(text)):
            table[i] = bytes([int(byte[1], 16)])
        else:
            table[i] = text.replace(_SPACE, " ").encode()
    return table


def is_byte(name: str) -> bool:
    """Whether a token is SentencePiece's for one byte, such as <0xC3>."""
    return _BYTE.fullmatch(name) is not None


def byte_letters() -> dict[int, str]:
    """Byte -> the letter by which byte-level BPE writes it (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def _decoder(tokenizer: Tokenizer) -> list[Mapping[str, Any]]:
    decoder = cast("dict[str, Any] | None", json.loads(tokenizer.to_str())["decoder"])
    if decoder is None:
        return []
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _spaces(steps: list[Mapping[str, Any]]) -> bool:
    """Whether the decoder turns "▁" into a space, and nothing else into anything."""
    changes = [step for step in steps if step["type"] in ("Metaspace", "Replace")]
    return [
        step.get("replacement") == _SPACE
        if step["type"] == "Metaspace"
        else (step.get("pattern"), step.get("content")) == ({"String": _SPACE}, " ")
        for step in changes
    ] == [True]
