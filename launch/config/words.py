"""Splits a command line into own flags, switches, positional words and keys of the configuration; reads no value."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from launch.config.run import ALIASES, RunConfig
from launch.config.tree import Key, find_key, keys_of, type_name, unknown_key
from launch.errors import ConfigError


class Words(NamedTuple):
    """What was asked for, as words."""

    own: dict[str, str]
    """Flags of the command itself, by name, `-` as `_`."""
    switches: frozenset[str]
    positional: tuple[str, ...]
    overrides: tuple[tuple[Key, str], ...]
    """(key, text), aliases replaced, in order."""


def split_words(
    arguments: Sequence[str],
    *,
    own: Collection[str],
    switches: Collection[str],
    positional: int = 0,
    aliases: Mapping[str, str] = ALIASES,
) -> Words:
    """Raises ConfigError for unknown flags, missing values, and more than `positional` words without a flag; but with
    --help nothing is wrong."""
    found: dict[str, str] = {}
    switched: set[str] = set()
    loose: list[str] = []
    overrides: list[tuple[Key, str]] = []
    mistakes: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if word == "-h":
            word = "--help"
        if not word.startswith("--"):
            loose.append(word)
            if len(loose) > positional:
                mistakes.append(f"{word!r}: unexpected; flags look like --key value")
            continue
        name, equals, text = word[2:].partition("=")
        name = name.replace("-", "_")
        if name in switches and not equals:
            switched.add(name)
            continue
        key = find_key(RunConfig, aliases.get(name, name)) if name not in own else None
        if key is None and name not in own:
            valid = [*(k.name for k in keys_of(RunConfig)), *aliases, *own, *switches]
            mistakes.append("--" + unknown_key(name, valid))
            if not equals and words and not words[0].startswith("--"):
                words.pop(0)
            continue
        if not equals:
            if words and not words[0].startswith("--"):
                text = words.pop(0)
            elif key is not None and key.type is bool:
                text = "true"
            else:
                mistakes.append(f"--{name}: needs a value" + (f" ({type_name(key.type)})" if key is not None else ""))
                continue
        if key is not None:
            overrides.append((key, text))
        else:
            found[name] = text
    if mistakes and "help" not in switched:
        raise ConfigError(*mistakes)
    return Words(found, frozenset(switched), tuple(loose), tuple(overrides))
