"""The command line: flags, `--config FILE` and dotted overrides, in that order of rising weight, into a RunConfig.

    cluster.py [--config FILE] [--run-dir DIR | --name NAME] [--resume] [--KEY VALUE | --KEY=VALUE]...

Every key of the tree is a flag; `-` and `_` mean the same in it. With --resume, the run folder's own configuration is
what the rest is laid over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from launch.config.files import read_plain, read_resolved
from launch.config.run import BUILTIN, BUILTIN_RECIPE, RunConfig
from launch.config.tree import Key, Plain, build, choose, get, merge, parse_text, put
from launch.config.words import split_words
from launch.errors import ConfigError
from launch.runfolder import choose_path
from learner.checkpoints.files import CHECKPOINTS

OWN_FLAGS: Final = ("config", "run_dir", "name", "gpus")
SWITCHES: Final = ("resume", "check", "help", "version")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """What was asked for, as words."""

    config: Path | None = None
    run_dir: Path | None = None
    name: str = ""
    resume: bool = False
    check: bool = False
    gpus: str = ""
    """A layout to pretend, with --check; empty: this machine's."""
    help: bool = False
    topics: tuple[str, ...] = ()
    """Sections and keys that help is wanted on; empty: an overview."""
    version: bool = False
    overrides: tuple[tuple[Key, str], ...] = ()
    """(key, text), aliases replaced, in order."""


def parse_arguments(arguments: Sequence[str]) -> CommandLine:
    """Split the words; values are not looked at yet. Raises ConfigError for unknown flags and missing values."""
    own, switches, topics, overrides = split_words(arguments, own=OWN_FLAGS, switches=SWITCHES)
    if "gpus" in own and "check" not in switches:
        raise ConfigError("--gpus: pretends GPUs, and so goes with --check only; a run uses those that are there")
    return CommandLine(
        config=Path(own["config"]) if "config" in own else None,
        run_dir=Path(own["run_dir"]) if "run_dir" in own else None,
        name=own.get("name", ""),
        resume="resume" in switches,
        check="check" in switches,
        gpus=own.get("gpus", ""),
        help="help" in switches,
        topics=topics,
        version="version" in switches,
        overrides=overrides,
    )


def resolve_config(line: CommandLine, base: Plain | None = None) -> RunConfig:
    """The tree: defaults, under the built-in recipe where the student is the built-in one, under `base`, under the
    resumed run's configuration (which must be whole), under the file, under the flags. Raises ConfigError with every
    mistake there is."""
    plain: Plain = base or {}
    if line.resume:
        folder = choose_path(line.run_dir, resume=True, name=line.name)
        former = folder / "config.yaml"
        if former.is_file():
            plain = merge(plain, read_resolved(former), RunConfig)
        elif (folder / CHECKPOINTS).is_dir():
            raise ConfigError(f"--resume: {former} is not there, and the run has checkpoints; put it back from a copy")
        if plain.get("pools"):
            plain.pop("teachers", None)  # it was counted, and is counted again
    if line.config is not None:
        plain = merge(plain, read_plain(line.config), RunConfig)
    mistakes = put_overrides(plain, line.overrides)
    _count_pools(plain)
    if get(plain, "models.student") in (None, BUILTIN):
        plain = merge(BUILTIN_RECIPE, plain, RunConfig)
    for number, urls in (("actors", get(plain, "actor.urls")), ("teachers", get(plain, "teacher.urls"))):
        if get(plain, number) is None and isinstance(urls, list) and urls:
            put(plain, number, len(cast(list[object], urls)))
    return build_run(plain, mistakes)


def put_overrides(plain: Plain, overrides: Sequence[tuple[Key, str]]) -> list[str]:
    """Lay them over `plain`; names of sections with several shapes first, as the options given beside one are its own.
    Returns what is wrong with those that cannot be."""
    mistakes: list[str] = []
    for key, text in sorted(overrides, key=lambda override: override[0].members is None):
        try:
            value = parse_text(key, text)
            if key.members is None:
                put(plain, key.name, value)
            else:
                choose(plain, key, value)
        except ConfigError as error:
            mistakes += error.mistakes
    return mistakes


def build_run(plain: Plain, mistakes: Sequence[str]) -> RunConfig:
    """Raises ConfigError with the `mistakes` found before and those found now."""
    try:
        config = build(RunConfig, plain)
    except ConfigError as error:
        raise ConfigError(*mistakes, *error.mistakes) from None
    if mistakes:
        raise ConfigError(*mistakes)
    return config


def _count_pools(plain: Plain) -> None:
    """Pools say how many teachers there are, and urls how many a pool has, where the user does not."""
    pools = plain.get("pools")
    if not isinstance(pools, dict) or not pools:
        return
    counts: list[object] = []
    for pool in cast(dict[str, object], pools).values():
        if not isinstance(pool, dict):
            return  # which is refused
        told = cast(Plain, pool)
        urls = told.get("urls")
        if isinstance(urls, list) and urls:
            told.setdefault("count", len(cast(list[object], urls)))
        counts.append(told.get("count", 1))
    if "teachers" not in plain and all(isinstance(count, int) for count in counts):
        plain["teachers"] = sum(cast(list[int], counts))
