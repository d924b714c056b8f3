"""Parses the command line and builds the RunConfig from flags, `--config FILE` and dotted overrides; later ones win.

    stillhouse [--config FILE] [--run-dir DIR | --name NAME] [--resume | --resume-or-start] [--KEY VALUE]...

Every key of the tree is a flag, in which `-` and `_` mean the same. With --resume, the configuration in the run folder
is the base, and everything else is laid over it."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, cast

from stillhouse.launch.config.credentials import urls_with_credentials
from stillhouse.launch.config.files import read_plain, read_resolved
from stillhouse.launch.config.keys import Key, find_key, keys_of, parse_text, type_name, unknown_key
from stillhouse.launch.config.run import ALIASES, BUILTIN, BUILTIN_RECIPE, RunConfig
from stillhouse.launch.config.tree import Plain, build, choose, get, merge, put
from stillhouse.launch.errors import ConfigError
from stillhouse.launch.runfolder import choose_path
from stillhouse.learner.checkpoints.files import CHECKPOINTS

OWN_FLAGS: Final = ("config", "run_dir", "name", "gpus")
SWITCHES: Final = ("resume", "resume_or_start", "check", "help", "version")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """A parsed command line; the values of keys are still text."""

    config: Path | None = None
    run_dir: Path | None = None
    name: str = ""
    resume: bool = False
    resume_or_start: bool = False
    """`resume` if the run is there."""
    check: bool = False
    gpus: str = ""
    """GPUs to pretend, with --check; empty: those of this machine."""
    help: bool = False
    topics: tuple[str, ...] = ()
    """Sections and keys after --help; empty: an overview."""
    version: bool = False
    overrides: tuple[tuple[Key, str], ...] = ()
    """(key, text), aliases replaced, in order."""


class Words(NamedTuple):
    """The words of a command line, sorted by kind."""

    own: dict[str, str]
    """Flags of the command itself, with `_` for `-`."""
    switches: frozenset[str]
    positional: tuple[str, ...]
    overrides: tuple[tuple[Key, str], ...]
    """(key, text), aliases replaced, in order."""


def parse_arguments(arguments: Sequence[str]) -> CommandLine:
    """Split the words without reading values. Raises ConfigError for unknown flags and missing values."""
    own, switches, topics, overrides = split_words(arguments, own=OWN_FLAGS, switches=SWITCHES)
    if "gpus" in own and "check" not in switches:
        raise ConfigError("--gpus: pretends GPUs, so it works only with --check; a run uses the GPUs of this machine")
    return CommandLine(
        config=Path(own["config"]) if "config" in own else None,
        run_dir=Path(own["run_dir"]) if "run_dir" in own else None,
        name=own.get("name", ""),
        resume="resume" in switches,
        resume_or_start="resume_or_start" in switches,
        check="check" in switches,
        gpus=own.get("gpus", ""),
        help="help" in switches,
        topics=topics,
        version="version" in switches,
        overrides=overrides,
    )


def split_words(
    arguments: Sequence[str],
    *,
    own: Collection[str],
    switches: Collection[str],
    positional: int = 0,
    aliases: Mapping[str, str] = ALIASES,
) -> Words:
    """Split into flags of the command (`own`), `switches`, positional words and keys. Raises ConfigError for unknown
    flags, missing values, and more than `positional` words without a flag, except with --help."""
    found: dict[str, str] = {}
    switched: set[str] = set()
    loose: list[str] = []
    overrides: list[tuple[Key, str]] = []
    words = list(arguments)
    encoding = sys.getfilesystemencoding()
    mistakes = [
        f"{word!r}: its bytes are no text in {encoding}, the locale's encoding; type UTF-8 under LC_ALL=C.UTF-8"
        for word in words
        if any("\ud800" <= character <= "\udfff" for character in word)  # so Python keeps bytes that it cannot decode
    ]
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
        if name in switches:
            switched.add(name)
            if equals:
                mistakes.append(f"--{name.replace('_', '-')}: takes no value, got {text!r}")
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


def resolve_config(line: CommandLine, base: Plain | None = None) -> RunConfig:
    """Build the configuration. From weakest to strongest: defaults, the built-in recipe (built-in student only),
    `base`, the resumed run's configuration (which must be complete), the file, the flags. Raises ConfigError with all
    mistakes."""
    plain: Plain = base or {}
    if line.resume:
        folder = choose_path(line.run_dir, resume=True, name=line.name)
        former = folder / "config.yaml"
        if former.is_file():
            plain = merge(plain, read_resolved(former), RunConfig)
        elif (folder / CHECKPOINTS).is_dir():
            raise ConfigError(f"--resume: {former} is missing, but the run has checkpoints; put it back from a copy")
        if plain.get("pools"):
            plain.pop("teachers", None)  # derived from the pools, and derived again below
    if line.config is not None:
        given = read_plain(line.config)
        if "stage" in given:
            raise ConfigError(
                f"stage: {line.config} has stages, which `stillhouse --config` runs; this command is about one run: "
                "expected a file of one, as the run's folder has in stages/ (docs/stages.md)"
            )
        plain = merge(plain, given, RunConfig)
    return finish_config(plain, line.overrides)


def finish_config(plain: Plain, overrides: Sequence[tuple[Key, str]]) -> RunConfig:
    """The configuration of what files say and of flags, which lie over it. Raises ConfigError with all mistakes."""
    mistakes = put_overrides(plain, overrides)
    _count_pools(plain)
    if get(plain, "models.student") in (None, BUILTIN):
        plain = merge(BUILTIN_RECIPE, plain, RunConfig)
    for number, urls in (("actors", get(plain, "actor.urls")), ("teachers", get(plain, "teacher.urls"))):
        if get(plain, number) is None and isinstance(urls, list) and urls:
            put(plain, number, len(cast(list[object], urls)))
    return build_run(plain, mistakes)


def put_overrides(plain: Plain, overrides: Sequence[tuple[Key, str]]) -> list[str]:
    """Lay the overrides over `plain` and return the mistakes. Names of sections with several shapes go first, because
    choosing another shape drops the options of the former one."""
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
    """Build the configuration. Raises ConfigError with the given `mistakes` and all further ones. Secrets in URLs come
    alone, because other messages quote what they refuse."""
    if secrets := list(urls_with_credentials(plain)):
        raise ConfigError(*secrets)
    try:
        config = build(RunConfig, plain)
    except ConfigError as error:
        raise ConfigError(*mistakes, *error.mistakes) from None
    if mistakes:
        raise ConfigError(*mistakes)
    return config


def _count_pools(plain: Plain) -> None:
    """Fill in missing counts: a pool's `count` from its urls, and `teachers` from the counts of the pools."""
    pools = plain.get("pools")
    if not isinstance(pools, dict) or not pools:
        return
    counts: list[object] = []
    for pool in cast(dict[str, object], pools).values():
        if not isinstance(pool, dict):
            return  # `build` refuses it
        settings = cast(Plain, pool)
        urls = settings.get("urls")
        if isinstance(urls, list) and urls:
            settings.setdefault("count", len(cast(list[object], urls)))
        counts.append(settings.get("count", 1))
    if "teachers" not in plain and all(isinstance(count, int) for count in counts):
        plain["teachers"] = sum(cast(list[int], counts))
