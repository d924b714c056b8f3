"""A user's own arguments for a server (`server.args`), searched for its options. argparse takes `--name value`,
`--name=value` and any abbreviation that fits one name only (`--tp 2`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Option(NamedTuple):
    """One option of a server's command."""

    names: tuple[str, ...]
    shortest: tuple[str, ...]
    """For each name, the shortest abbreviation that it accepts."""


def value_of(args: Sequence[str], option: Option) -> str | None:
    """The option's last value, which wins; None when it is not among the arguments, or has no value."""
    found: str | None = None
    for index, word in enumerate(args):
        name, equals, value = word.partition("=")
        pairs = zip(option.names, option.shortest, strict=True)
        if any(full.startswith(name) and name.startswith(short) for full, short in pairs):
            found = value if equals else next(iter(args[index + 1 : index + 2]), None)
    return found


def has(args: Sequence[str], option: Option) -> bool:
    """True when the arguments contain this option, a switch without a value."""
    return any(option.names[0].startswith(word) and word.startswith(option.shortest[0]) for word in args)
