"""Reads a file with `[[stage]]` tables. Its other keys hold for all stages; a stage's table lies over them.

A stage with `text` trains on text that is not the student's, and knows nothing of the common objective: cross-entropy
on one process, unless its own table says otherwise."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, cast

import msgspec

from stillhouse.launch.checks.prompt_files import absolute_prompts
from stillhouse.launch.config.command_line import CommandLine, finish_config
from stillhouse.launch.config.files import read_plain
from stillhouse.launch.config.keys import keys_of
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import Plain, build, get, has, merge, put
from stillhouse.launch.errors import ConfigError
from stillhouse.launch.stages.state import StageState
from stillhouse.learner.config import RUN_FOLDER

TABLES: Final = "stage"
"""Key of the tables."""
OF_STAGE: Final = "stage:"
"""Before the name of an earlier stage, in the place of a model: the student that it ended with."""
TEACHER: Final = "teacher"
"""Value of `text`: the stage's teacher writes it."""
NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
TEXT_LAYER: Final[Plain] = {
    "learner": {
        "objective": {"divergence": {"name": "seq_kd"}, "importance": {"name": "none"}},
        **dict.fromkeys(("ranks", "hosts", "replicas", "context_parallel"), 1),
    }
}


class Own(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a stage's table has beside keys of a run."""

    name: str
    text: str = ""
    """Rows with answers, or `teacher`. Empty: the student writes, as in any run."""
    epochs: int = 1
    """Times that the text is trained."""


class Stage(NamedTuple):
    """One stage, with all keys resolved."""

    own: Own
    config: RunConfig
    """Models that an earlier stage makes are replaced by those that it begins with, so that it can be checked."""
    models_from: Mapping[str, str]
    """Key of a model -> the earlier stage whose student it is."""
    steps_given: bool
    """Whether the table or a flag has `steps`, which a stage on rows needs not."""
    flags: tuple[str, ...]
    """Keys that flags have set."""


def has_stages(line: CommandLine) -> bool:
    """Whether the file of the command line has stages."""
    return line.config is not None and TABLES in read_plain(line.config)


def read_stages(line: CommandLine, former: Sequence[StageState] = ()) -> list[Stage]:
    """The stages of the file, or, on resume without one, those of `former`. On resume the file and the flags lie over
    the former configuration of stages that are not done. Raises ConfigError with the mistakes of all stages, also if
    one that is done has changed."""
    tables = list(_tables(line.config) if line.config is not None else _stored(former))
    mistakes = list(_order(tables, former))
    stages: list[Stage] = []
    for n, (own, plain, table) in enumerate(tables):
        state = next((one for one in former if one.name == own.name), None)
        try:
            stages.append(_stage(line, own, plain, table, stages, state))
        except ConfigError as error:
            mistakes += [f"stage {own.name}: {mistake}" for mistake in error.mistakes]
            if n == 0:
                break  # others begin with its student
    mistakes += _one_file_each(stages)
    if mistakes:
        raise ConfigError(*mistakes)
    return stages


def _tables(file: Path) -> Iterator[tuple[Own, Plain, Plain]]:
    """For each stage its own keys, the shared ones below its table, and its table."""
    shared = read_plain(file)
    tables = shared.pop(TABLES, None)
    if not isinstance(tables, list) or not tables:
        raise ConfigError(f"{TABLES}: got {tables!r}, expected tables [[{TABLES}]], each with a name")
    for n, given in enumerate(cast(list[object], tables), start=1):
        if not isinstance(given, dict):
            raise ConfigError(f"{TABLES} {n}: got {given!r}, expected a table of keys")
        table = cast(Plain, given)
        try:
            own = msgspec.convert({k: table[k] for k in Own.__struct_fields__ if k in table}, Own)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{TABLES} {n}: {error}") from error
        if not NAME.fullmatch(own.name) or own.epochs < 1 or (own.epochs > 1 and not own.text):
            raise ConfigError(
                f"{TABLES} {n}: got the name {own.name!r} and epochs = {own.epochs}, expected a name of small letters, "
                "digits, - and _, and epochs of at least 1, above 1 only with text"
            )
        plain = copy.deepcopy(shared)
        if own.text:
            own = own if own.text == TEACHER else msgspec.structs.replace(own, text=absolute_prompts(own.text))
            for section in ("objective", "offline", "ema"):
                cast(Plain, plain.get("learner", {})).pop(section, None)
            plain = merge(plain, TEXT_LAYER)
        yield own, plain, {name: value for name, value in table.items() if name not in Own.__struct_fields__}


def _stored(former: Sequence[StageState]) -> Iterator[tuple[Own, Plain, Plain]]:
    for one in former:
        table: Plain = {"steps": one.config["steps"]} if one.steps_given else {}
        for key, name in one.models_from.items():
            put(table, key, f"{OF_STAGE}{name}")
        yield Own(name=one.name, text=one.text, epochs=one.epochs), {}, table


def _order(tables: Sequence[tuple[Own, Plain, Plain]], former: Sequence[StageState]) -> Iterator[str]:
    names = [own.name for own, _, _ in tables]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield f"{TABLES}: got several with the name {twice[0]!r}, expected another name for each"
    begun = [one for one in former if one.begun]
    for n, one in enumerate(begun):
        own = tables[n][0] if n < len(tables) else None
        was = Own(name=one.name, text=one.text, epochs=one.epochs)
        if own != was:
            yield (
                f"--resume: stage {n + 1} has begun as {was}, and is now {own}; expected the stages that have begun as "
                "they were. Later ones may change"
            )


def _stage(
    line: CommandLine, own: Own, plain: Plain, table: Plain, earlier: Sequence[Stage], state: StageState | None
) -> Stage:
    fixed = state is not None and (state.done or (state.begun and bool(own.text)))
    table, models_from = _models(table, earlier)
    given = merge(plain, table, RunConfig)
    if state is not None:
        stored = cast(Plain, copy.deepcopy(state.config))
        if stored.get("pools"):
            stored.pop("teachers", None)  # derived from the pools
        given = merge(stored, given, RunConfig)
    overrides = () if fixed else line.overrides
    config = finish_config(given, overrides)
    if state is not None and fixed:
        if changed := _changed(config, state):
            raise ConfigError(*changed, "--resume: a stage that is done, or has begun on text, stays as it was")
        return Stage(own, build(RunConfig, state.config), state.models_from, state.steps_given, state.flags)
    flags = tuple(key.name for key, _ in overrides)
    return Stage(own, config, models_from, "steps" in table or "steps" in flags, flags)


def _models(table: Plain, earlier: Sequence[Stage]) -> tuple[Plain, dict[str, str]]:
    """The table with stand-ins for the students of earlier stages, and the keys that have one. A stage whose table
    names no student goes on with that of the stage before."""
    table, found = copy.deepcopy(table), dict[str, str]()
    if earlier and not has(table, "models.student"):
        put(table, "models.student", f"{OF_STAGE}{earlier[-1].own.name}")
    pools = table.get("pools")
    keys = ["models.student", "models.teacher"]
    keys += [f"pools.{name}.model" for name in cast(Plain, pools)] if isinstance(pools, dict) else []
    for key in keys:
        named = get(table, key)
        if not isinstance(named, str) or not named.startswith(OF_STAGE):
            continue
        name = named.removeprefix(OF_STAGE)
        stage = next((one for one in earlier if one.own.name == name), None)
        if stage is None:
            names = ", ".join(one.own.name for one in earlier) or "none"
            raise ConfigError(f"{key}: got {named!r}, expected the name of an earlier stage: {names}")
        put(table, key, stage.config.models.student)
        found[key] = name
    return table, found


def _changed(config: RunConfig, state: StageState) -> list[str]:
    """The keys that the file has changed; it knows nothing of the flags of the first start."""
    now, names = msgspec.json.decode(msgspec.json.encode(config)), (key.name for key in keys_of(RunConfig))
    pairs = ((name, get(now, name), get(state.config, name)) for name in names if name not in state.flags)
    return [f"{name}: got {got!r}, expected {was!r}, as it was" for name, got, was in pairs if got != was]


def _one_file_each(stages: Sequence[Stage]) -> Iterator[str]:
    files = [stage.config.learner.record for stage in stages if not stage.own.text]
    for file in sorted({one for one in files if one and not one.startswith(RUN_FOLDER) and files.count(one) > 1}):
        yield f"learner.record: got {file} for several stages, expected {RUN_FOLDER}, the folder of each"
