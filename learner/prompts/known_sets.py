"""Data sets of the Hugging Face hub that are known by name (known_sets.toml): their columns, the text around their
prompts, and the reward that judges answers. No torch.

The columns hold where rows are read (`learner.prompts.data`). Template and reward go by the tag that the rows get; the
launcher writes them into the run's configuration (`launch.config.known_sets`)."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

import msgspec

HUB: Final = "hf:"
"""Begins a path that `datasets.load_dataset` reads: hf:NAME[:CONFIG][:SPLIT]."""


class KnownSet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known about a data set."""

    tag: str
    """Tag of rows that name none."""
    reward: str
    """What judges answers (docs/rewards.md)."""
    columns: dict[str, str] = {}
    """Field -> the column that has it."""
    template: str = ""
    """Text around a prompt, as in learner.tasks.templates; empty: none."""
    config: str | None = None
    split: str = "train"
    """What is read where the name says no other."""

    def columns_for(self, given: Mapping[str, str], found: Collection[str]) -> dict[str, str]:
        """With the configured columns in place of these, where the data set has them. It is the other files' matter
        that they have other columns."""
        return {**self.columns, **{f: c for f, c in given.items() if c in found or f not in self.columns}}


class NamedSet(NamedTuple):
    """hf:NAME[:CONFIG][:SPLIT]."""

    name: str
    config: str | None
    split: str
    known: KnownSet | None


def _read() -> dict[str, KnownSet]:
    tables: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    sets = msgspec.convert(tables["sets"], dict[str, KnownSet])
    texts = {"": ""} | tables["templates"]
    return {name: msgspec.structs.replace(one, template=texts[one.template]) for name, one in sets.items()}


KNOWN_SETS: Final = _read()
"""By name."""
KNOWN_TAGS: Final = frozenset(one.tag for one in KNOWN_SETS.values())


def named_set(path: str) -> NamedSet | None:
    """What `hf:...` names; None for another path or a malformed one. A folder is known by its last two names, so that a
    copy on disk is too."""
    name, *rest = path.removeprefix(HUB).split(":")
    if not path.startswith(HUB) or not name or len(rest) > 2:
        return None
    known = KNOWN_SETS.get("/".join(PurePosixPath(name).parts[-2:]))
    split = rest[-1] if rest else known.split if known else "train"
    return NamedSet(name, rest[0] if len(rest) == 2 else known.config if known else None, split, known)
