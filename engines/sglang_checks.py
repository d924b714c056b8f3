"""Checksums of a server's weights: what it says, and whether that is what it should say. Pure: no I/O, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

Checksums: TypeAlias = list[dict[str, str]]
"""Per tensor-parallel rank: the server's names of its tensors, with their checksums in hexadecimal."""


class _Rank(msgspec.Struct, frozen=True):
    checksums: dict[str, str]


class _Said(msgspec.Struct, frozen=True):
    ranks: list[_Rank]


@dataclass(frozen=True, slots=True)
class Compared:
    wrong: list[str]
    unchecked: list[str]
    """Tensors of the server that nobody said anything about."""


def parse_checksums(text: bytes) -> Checksums | None:
    """Of a reply of /weights_checker; None for one without checksums."""
    try:
        said = msgspec.json.decode(text, type=_Said)
    except msgspec.DecodeError:
        return None
    return [rank.checksums for rank in said.ranks]


def compare(said: Checksums, expected: Mapping[str, Sequence[str]]) -> Compared:
    """`expected`: for each name all that are right (one per dtype that the server may hold the tensor in)."""
    wrong: list[str] = []
    unchecked: list[str] = []
    for rank in said:
        for name, checksum in rank.items():
            if name not in expected:
                unchecked.append(name)
            elif checksum not in expected[name]:
                wrong.append(name)
    return Compared(wrong, unchecked)


def differences(before: Checksums, after: Checksums) -> list[str]:
    """Names whose checksums are not the same, rank by rank."""
    if len(before) != len(after):
        return [f"{len(before)} ranks, then {len(after)}"]
    return [
        name
        for first, second in zip(before, after, strict=True)
        for name in sorted(first.keys() | second.keys())
        if first.get(name) != second.get(name)
    ]
