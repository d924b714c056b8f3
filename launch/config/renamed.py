"""Keys that are gone: each is refused by its name, with what is to be used in its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, cast

RENAMED: Final[Mapping[str, str]] = {"learner.publish": "weights.*"}
"""Old key, or old section -> the new key, or what to do. `.*` at its end: the keys below keep their names."""


def new_name(key: str) -> str | None:
    """What a key that is gone is now; of a key below a section that is gone, what the section is."""
    section = key
    while section and section not in RENAMED:
        section = section.rpartition(".")[0]
    now = RENAMED.get(section)
    if now is not None and now.endswith(".*") and section != key:
        return now.removesuffix(".*") + key.removeprefix(section)
    return now


def gone(plain: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    """A line for each key in nested dicts that is gone."""
    for name, value in plain.items():
        key = prefix + name
        if (now := RENAMED.get(key)) is not None:
            yield f"{key}: is {now} now"
        elif isinstance(value, Mapping):
            yield from gone(cast(Mapping[str, object], value), f"{key}.")
