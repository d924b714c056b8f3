"""The command line: flags, `--config FILE` and dotted overrides, in that order of rising weight, into a RunConfig.

    cluster.py [--config FILE] [--run-dir DIR | --name NAME] [--resume] [--KEY VALUE | --KEY=VALUE]...

Every key of the tree is a flag; `-` and `_` mean the same in it. With --resume, the run folder's own configuration is
what the rest is laid over.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import msgspec

from launch.config.files import read_plain, read_resolved
from launch.config.run import ALIASES, BUILTIN, BUILTIN_RECIPE, RunConfig
from launch.config.tree import Key, Plain, build, choose, get, keys_of, merge, parse_text, put, type_name
from launch.config.words import split_words
from launch.errors import ConfigError
from launch.runfolder import choose_path
from learner.checkpoints.files import CHECKPOINTS
from protocol.settings import Member

OWN_FLAGS: Final = ("config", "run_dir", "name", "gpus")
SWITCHES: Final = ("resume", "check", "help")
USAGE: Final = """\
usage: cluster.py [--config FILE] [--run-dir DIR] [--resume] [--KEY VALUE ...]
       cluster.py join RUN [--actors N] [--teachers M] ...     more workers for a run that goes on (join --help)
       cluster.py export RUN FOLDER                            what another machine needs to join (export --help)

Runs on-policy distillation: a buffer, a learner, and as many actors and teachers as asked for, each a process.
Without arguments: the built-in task, a few minutes on two cores.

  --config FILE    TOML or YAML with any of the keys below; flags win over it
  --run-dir DIR    folder of the run; runs/<name> without it
  --name NAME      name of the run; the time without it
  --resume         go on in that folder (without --run-dir: the newest run) from its last checkpoint
  --check          check the configuration, models and prompts, and stop
  --gpus N         with --check: as if this machine had N GPUs of 80 GiB (8x40: of 40 GiB each)
  --help           this text
"""


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
    overrides: tuple[tuple[Key, str], ...] = ()
    """(key, text), aliases replaced, in order."""


def parse_arguments(arguments: Sequence[str]) -> CommandLine:
    """Split the words; values are not looked at yet. Raises ConfigError for unknown flags and missing values."""
    own, switches, _, overrides = split_words(arguments, own=OWN_FLAGS, switches=SWITCHES)
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


def help_text() -> str:
    """Every key with its type, default and docstring, and the short flags."""
    short = {key: alias for alias, key in ALIASES.items()}
    lines = [USAGE]
    section = None
    for key in keys_of(RunConfig):
        branch = key.name.rpartition(".")[0]
        if branch != section:
            lines.append(f"\n{branch or 'run'}:" if lines[1:] else "run:")
            section = branch
        lines += _help_lines(key, short.get(key.name))
    return "\n".join(lines)


def _help_lines(key: Key, alias: str | None) -> list[str]:
    default = "" if key.default is msgspec.NODEFAULT else f"  [{_shown(key.default)}]"
    also = f", --{alias.replace('_', '-')}" if alias else ""
    doc = textwrap.fill(key.doc, width=110, initial_indent=" " * 8, subsequent_indent=" " * 8)
    lines = [f"  --{key.name}{also}  {type_name(key.type)}{default}", doc]
    return lines if key.members is None else [*lines, *_member_lines(key)]


def _member_lines(key: Key) -> Iterator[str]:
    """The options of each member that has some, under its name."""
    for name, section in key.members.known().items() if key.members is not None else ():
        options = [option for option in keys_of(section) if option.name != "name"]
        if not options:
            continue
        yield f"      {name}:"
        for option in options:
            yield f"        --{key.name}.{option.name}  {type_name(option.type)}  [{_shown(option.default)}]"
            yield textwrap.fill(option.doc, width=110, initial_indent=" " * 14, subsequent_indent=" " * 14)


def _shown(value: object) -> str:
    if isinstance(value, Member):
        return value.name
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return value or '""' if isinstance(value, str) else str(msgspec.to_builtins(value))
