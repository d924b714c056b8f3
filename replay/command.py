"""Train from a file of recorded batches, with no actors, no teachers and no buffer:

    stillhouse replay FILE [--epochs N] [--order recorded|shuffled] [--KEY VALUE ...]
    stillhouse replay FILE --resume [--run-dir DIR]

The configuration is that of the recorded run, with the keys given here laid over it. Exit codes are those of
launch.run. Ctrl-C ends after the step under way and its checkpoint; a second one ends at once."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from stillhouse.engines.registry import EMBEDDED
from stillhouse.launch.checks import preflight
from stillhouse.launch.checks.preflight import replace
from stillhouse.launch.config.command_line import CommandLine, parse_arguments, resolve_config
from stillhouse.launch.config.keys import is_table, struct_type
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import Plain, build, get, merge
from stillhouse.launch.errors import INTERRUPTED_EXIT_CODE, ConfigError, LaunchError, refuse
from stillhouse.launch.runfolder import choose_path
from stillhouse.launch.terminal import lasting_output
from stillhouse.learner.objectives.config import check_given
from stillhouse.learner.run_config import pools_with_heads
from stillhouse.protocol.settings import members_of
from stillhouse.recording.format import RecordError, RecordHeader
from stillhouse.recording.reader import Recording
from stillhouse.replay.plan import ORDERS, Order, ReplayPlan, check_asked, check_config, check_file, read_plan

USAGE: Final = """\
usage: stillhouse replay FILE [--objective NAME] [--epochs N] [--order recorded|shuffled] [--run-dir DIR]
                                    [--KEY VALUE ...]
       stillhouse replay FILE --resume [--run-dir DIR]

Trains a student on the batches that a run recorded (learner.record), or that a teacher wrote (stillhouse write).
Keys are those of a run. Their defaults are the values of the recorded run; for a file that the teacher
wrote, learner.objective.divergence is seq_kd and .importance is none. Evaluations run in this process;
--learner.eval_every 0 turns them off.

  --epochs N        number of times that every batch is trained [1]
  --order ORDER     order of the batches: recorded, or shuffled by --seed [recorded]
  --resume          continue from the last checkpoint in DIR [runs/latest]; the outcome is that of an undisturbed replay
  --objective NAME  short for --learner.objective.divergence NAME
"""
_PROCESSES: Final = ("actor", "buffer", "cluster", "launch", "teacher", "weights")
"""Sections about processes that a replay does not have. Keys in them that only another release knows are left out."""
_OWN: Final = ("epochs", "order", "objective")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayArguments:
    """The parsed command line."""

    file: Path
    epochs: int | None
    order: Order | None
    """None: not given, as for `epochs`."""
    line: CommandLine


@lasting_output()
def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    if "--help" in arguments or "-h" in arguments:
        print(USAGE)
        return 0
    try:
        asked = parse(arguments)
        with Recording(asked.file) as recording:
            folder = choose_path(asked.line.run_dir, resume=True, name=asked.line.name) if asked.line.resume else None
            config, plan = prepare(asked, recording) if folder is None else prepare_resumed(asked, recording, folder)
            for note in notes(recording):
                print(f"stillhouse: {note}", file=sys.stderr)
            from stillhouse.replay import run as replaying  # imports torch: errors above are told without that delay

            resume, run_dir = folder is not None, folder or asked.line.run_dir
            return replaying.train(recording, config, plan, run_dir=run_dir, name=asked.line.name, resume=resume)
    except (LaunchError, RecordError) as error:
        return refuse(error)
    except KeyboardInterrupt:
        print("stillhouse: stopped", file=sys.stderr)
        return INTERRUPTED_EXIT_CODE


def parse(arguments: Sequence[str]) -> ReplayArguments:
    """Parse the command line. Raises ConfigError with all mistakes."""
    words, own, others, mistakes = list(arguments), dict[str, str](), list[str](), list[str]()
    file = words.pop(0) if words and not words[0].startswith("--") else None
    if file is None:
        mistakes.append("expected the file of recorded batches first; see --help")
    while words:
        word = words.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in _OWN:
            others.append(word)
            continue
        if not equals:
            text = words.pop(0) if words and not words[0].startswith("--") else ""
        own[name] = text
    if "objective" in own:
        others.append(f"--learner.objective.divergence={own['objective']}")
    try:
        line = parse_arguments(others)
    except ConfigError as error:
        line = CommandLine()
        mistakes += error.mistakes
    epochs = None
    if (text := own.get("epochs")) is not None:
        epochs = int(text) if text.isdecimal() else 0
        if not epochs:
            mistakes.append(f"--epochs: got {text!r}, expected a number of at least 1")
    order = own.get("order")
    if order not in (None, *ORDERS):
        mistakes.append(f"--order: got {order!r}, expected one of {', '.join(ORDERS)}")
    if mistakes:
        raise ConfigError(*mistakes)
    path = Path(cast(str, file)).expanduser()
    return ReplayArguments(file=path, epochs=epochs, order=cast(Order | None, order), line=line)


def prepare(asked: ReplayArguments, recording: Recording) -> tuple[RunConfig, ReplayPlan]:
    """Configuration and plan of a new replay: those of the recorded run, with the given keys on top. Raises
    ConfigError."""
    base = _base(recording.header)
    try:
        build(RunConfig, base)
    except ConfigError as error:
        where = f"{recording.path} was recorded by another release; replay it with that release, or record again"
        raise ConfigError(*error.mistakes, where) from None
    config = resolve_config(asked.line, base)
    plan = ReplayPlan.of(recording, epochs=asked.epochs or 1, order=asked.order or "recorded")
    as_recorded = plan.epochs == 1 and plan.order == "recorded" and recording.header.writer == "student"
    steps_given = any(key.name == "steps" for key, _ in asked.line.overrides)
    if not (as_recorded or steps_given):  # otherwise keep the recorded learning rate schedule
        config = replace(config, steps=plan.epochs * plan.batches)
    if not config.learner.eval_every:  # then neither prompts nor teacher need to be on this machine, but for its head
        tasks = replace(config.learner.tasks, prompts="", eval_prompts="", columns={})
        config = replace(config, learner=replace(config.learner, tasks=tasks, eval_sets={}))
        if not pools_with_heads(config, config.learner.objective):
            config = replace(config, models=replace(config.models, teacher=config.models.student))
    try:
        check_given(recording.header.writer, str(recording.path), config.learner.objective)
    except ValueError as error:
        raise ConfigError(f"learner.objective: {error}") from error
    return checked(config), plan


def prepare_resumed(asked: ReplayArguments, recording: Recording, folder: Path) -> tuple[RunConfig, ReplayPlan]:
    """Configuration and plan of the replay in `folder`. Raises ConfigError if other ones are asked for."""
    plan = read_plan(folder)
    check_file(plan, recording)
    check_asked(plan, epochs=asked.epochs, order=asked.order)
    config = checked(resolve_config(asked.line))
    check_config(config, folder)
    return config, plan


def checked(config: RunConfig) -> RunConfig:
    """The configuration with models and prompts as preflight resolves them. A recording has the rewards that were
    trained on, so nothing judges its groups again. Raises ConfigError."""
    tasks = replace(config.learner.tasks, group_reward="")
    result = preflight.check(replace(config, learner=replace(config.learner, tasks=tasks)))
    for warning in result.warnings:
        print(f"stillhouse: warning: {warning}", file=sys.stderr)
    return result.config


def notes(recording: Recording) -> list[str]:
    """Facts about a recording that a user should know before relying on its results."""
    texts: list[str] = []
    if former := list(former_keys(recording.header.config)):
        texts.append(f"keys of another release that change nothing here are left out: {', '.join(former)}")
    if recording.torn_bytes:
        texts.append(f"{recording.torn_bytes} bytes at its end belong to an unfinished record, and are left out")
    if recording.abandoned:
        texts.append(f"{recording.abandoned} batches are on a branch that the run abandoned, and are left out")
    if recording.missing:
        texts.append(f"{recording.missing} steps are missing: the disk was full or learner.record_max_bytes reached")
    if recording.first_step:
        texts.append(f"it begins at step {recording.first_step}; --student can name the checkpoint of that step")
    if get(recording.header.config, "learner.ema.decay"):
        texts.append("its teachers were the student's moving average; evaluations compare with their first model")
    return [f"{recording.path}: {text}" for text in texts]


def former_keys(recorded: Mapping[str, object]) -> list[str]:
    """Keys about processes that this release does not have."""
    processes = {name: recorded[name] for name in _PROCESSES if name in recorded}
    return list(_unknown(RunConfig, processes, ""))


def _unknown(struct: type[msgspec.Struct], plain: Mapping[str, object], prefix: str) -> Iterator[str]:
    types = {field.name: field.type for field in msgspec.structs.fields(struct)}
    for name, value in plain.items():
        if name not in types:
            yield prefix + name
        elif not isinstance(value, Mapping):
            continue
        elif (members := members_of(types[name])) is not None and is_table(types[name]):
            for own, options in cast(Mapping[str, Plain], value).items():
                section = members.section(own, with_options=True)
                yield from _unknown(section, options, f"{prefix}{name}.{own}.")
        elif (nested := struct_type(types[name])) is not None:
            yield from _unknown(nested, cast(Plain, value), f"{prefix}{name}.")


def _base(header: RecordHeader) -> Plain:
    """Configuration to start from. Engines are the embedded ones, and nothing is recorded again."""
    here: Plain = {
        "actors": 1,  # a run that workers joined may have none in its configuration
        "learner": {
            "record": "",
            "frozen": False,
            "ema": {"decay": 0.0},
            "eval_teacher": False,
            "until": {"plateau": 0, "gap": None},  # the batches that were recorded are its end
        },
        "weights": {"backend": "gloo"},
        "actor": {"engine": EMBEDDED, "urls": []},
        "teacher": {"engine": EMBEDDED, "urls": []},
    }
    recorded = copy.deepcopy(header.config)  # the overrides are merged into this copy
    for key in former_keys(recorded):
        section, _, leaf = key.rpartition(".")
        cast(Plain, get(recorded, section)).pop(leaf)
    pools = cast(dict[str, Any], recorded.get("pools") or {})
    if not pools:  # the teachers that evaluations need
        here["teachers"] = 0 if get(recorded, "learner.tasks.routes") == {} else 1
    here["pools"] = {name: {"engine": EMBEDDED, "urls": []} for name in pools}
    if pools:  # the number of teachers is derived from them
        recorded = {name: value for name, value in recorded.items() if name != "teachers"}
    if header.writer == "student":
        return merge(recorded, here)
    learner = cast(dict[str, Any], recorded.get("learner", {}))
    models = cast(dict[str, Any], recorded.get("models", {}))
    off_policy: Plain = {
        "seed": recorded.get("seed", 0),
        "models": {"teacher": models.get("teacher", "")},
        "learner": {
            "tasks": learner.get("tasks", {}),
            "objective": {"divergence": {"name": "seq_kd"}, "importance": {"name": "none"}},
        },
        "actor": recorded.get("actor", {}),
        "teacher": recorded.get("teacher", {}),
        "pools": pools,
    }
    return merge(off_policy, here)
