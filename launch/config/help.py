"""Text of `--help`: the keys that most people set, one section, one key, or everything."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from stillhouse.launch.config.keys import Key, find_key, keys_of, sections_of, struct_of_items, type_name, unknown_key
from stillhouse.launch.config.run import ALIASES, SHORT_FLAGS, RunConfig
from stillhouse.launch.errors import ConfigError
from stillhouse.protocol.settings import Member

USAGE: Final = """\
usage: stillhouse [--config FILE] [--run-dir DIR] [--resume] [--KEY VALUE ...]
       stillhouse join RUN [--actors N] [--teachers M] ...     add workers to a running run
       stillhouse invite RUN FOLDER                            write the files that another machine needs to join
       stillhouse doctor [--KEY VALUE ...]                     examine, before a run, what would ruin it in silence
       stillhouse audit RUN                                    recount what a recorded run trained
       stillhouse view RUN                                     show its rollouts token by token, in a browser
       stillhouse trace RUN [FILE]                             write the trace of a run with --trace, for Perfetto
       stillhouse try ENV [--n N] [--model DIR]                run a few episodes of an environment and print them
       stillhouse render SCHEDULER ...                         write a job for Slurm or Kubernetes
       stillhouse write FILE ...                               record what a teacher writes, for off-policy training
       stillhouse replay FILE ...                              train on a recording, without actors and teachers
       stillhouse export RUN --to FOLDER|hub:NAME              write the student as a Hugging Face folder
       stillhouse builtin build|measure|specialists            make or measure the built-in task and models
       stillhouse sglang-server MODEL ...                      SGLang servers on a CPU, to try things out

Runs on-policy distillation: a buffer, a learner, and any number of actors and teachers, one process each.
Without arguments: the built-in task, a few minutes on two cores.

  --config FILE    TOML or YAML with any of the keys below; flags override it. With [[stage]] tables, several runs,
                   one after the other (docs/stages.md)
  --run-dir DIR    folder of the run (default: runs/<name>)
  --name NAME      name of the run (default: the time)
  --resume         continue from the last checkpoint in that folder (without --run-dir: in the newest run)
  --resume-or-start   the same if that folder holds a run; else start one. For jobs that are started
                   again by a scheduler
  --check          check the configuration, models and prompts, then stop
  --gpus N         with --check: pretend that this machine has N GPUs of 80 GiB (8x40: 8 GPUs of 40 GiB)
  --version        print the version
  --help [WHAT]    this text; or a section (--help buffer), a key (--help learner.lr), or all keys (--help all)
"""
MAIN_KEYS: Final = (
    *("models.student", "models.teacher", "learner.tasks.prompts", "learner.tasks.eval_prompts", "learner.tasks.env"),
    *("actors", "teachers", "device", "actor.engine", "teacher.engine", "steps", "buffer.batch_rollouts"),
    *("learner.tasks.group_size", "learner.tasks.max_new_tokens", "learner.lr", "learner.objective.divergence"),
    *("teacher.top_k", "buffer.max_staleness", "learner.lora.rank", "learner.eval_every", "learner.checkpoint_every"),
)
WIDTH: Final = 110
EVERYTHING: Final = "all"


def help_text(topics: Sequence[str] = ()) -> str:
    """Text for `--help` and the words after it. Raises ConfigError for a word that is neither a section nor a key."""
    if not topics:
        return _overview()
    mistakes: list[str] = []
    parts: list[str] = []
    for topic in topics:
        try:
            parts.append("\n".join(_about(topic.removeprefix("--").replace("-", "_"))))
        except ConfigError as error:
            mistakes += error.mistakes
    if mistakes:
        raise ConfigError(*mistakes)
    return "\n".join(parts)


def _overview() -> str:
    lines = [USAGE, "The keys that most people set:"]
    for name in MAIN_KEYS:
        key = find_key(RunConfig, name)
        assert key is not None, name
        lines.append(_heading(key))
        lines.append(_wrapped(_first_sentence(key.doc), 8))
    sections = list(sections_of(RunConfig))
    width = max(len(name) for name, _ in sections)
    lines.append("\nSections (--help SECTION):")
    for name, section in sections:
        purpose = f"  {name:{width}}  {_first_sentence(inspect.getdoc(section) or '')}"
        lines.append(textwrap.fill(purpose, WIDTH, subsequent_indent=" " * (width + 4)))
    return "\n".join(lines)


def _about(topic: str) -> Iterator[str]:
    """Lines about one section with everything below it, one key, or everything."""
    if topic == EVERYTHING:
        yield USAGE
    asked = (f"{topic}.", f"{ALIASES.get(topic, topic)}.")  # --teacher is a model, and `teacher` a section
    topic = ALIASES.get(topic, topic)
    keys = [key for key in keys_of(RunConfig) if topic == EVERYTHING or f"{key.name}.".startswith(asked)]
    if topic == "run":
        keys = [key for key in keys_of(RunConfig) if "." not in key.name]
    if not keys:
        key = find_key(RunConfig, topic)
        if key is None:
            names = [*(key.name for key in keys_of(RunConfig)), *(name for name, _ in sections_of(RunConfig))]
            raise ConfigError(f"--help {unknown_key(topic, names)}")
        keys = [key]
    documents = dict(sections_of(RunConfig))
    section = None
    listed: dict[int, str] = {}
    for key in keys:
        branch = key.name.rpartition(".")[0] or "run"
        if branch != section:
            yield f"{'' if section is None else chr(10)}{branch}:"
            if branch in documents and branch != "run":
                yield _wrapped(inspect.getdoc(documents[branch]) or "", 2)
            section = branch
        first = key.name if key.members is None else listed.setdefault(id(key.members), key.name)
        yield from _key_lines(key, options_of=first)


def _key_lines(key: Key, options_of: str | None = None) -> Iterator[str]:
    """`options_of`: the key under which this output already lists the same members and their options."""
    yield _heading(key)
    if key.doc:
        yield _wrapped(key.doc, 8)
    if options_of in (None, key.name):
        yield from _member_lines(key)
    else:
        yield _wrapped(f"Its options are those of {options_of}.", 8)
    if (item := struct_of_items(key.type)) is not None:
        for option in keys_of(item, f"{key.name}.NAME."):
            yield from _key_lines(option)


def _member_lines(key: Key) -> Iterator[str]:
    """The options of a section with several shapes, under the names of the members that have them."""
    if key.members is not None and key.members.beside:
        for name, section in key.members.known().items():
            for option in keys_of(section, f"{key.name.rpartition('.')[0]}.{name}."):
                yield from _key_lines(option)
        return
    readers: dict[str, list[str]] = {}
    for name, section in key.members.known().items() if key.members is not None else ():
        for option in keys_of(section):
            if option.name != "name":
                heading = f"        --{key.name}.{option.name}  {type_name(option.type)}  [{_shown(option.default)}]"
                readers.setdefault(f"{heading}\n{_wrapped(option.doc, 14)}", []).append(name)
    last = ""
    for option, names in readers.items():
        if (heading := ", ".join(names)) != last:
            yield f"      {heading}:"
        last = heading
        yield option


def _heading(key: Key) -> str:
    also = f", --{SHORT_FLAGS[key.name]}" if key.name in SHORT_FLAGS else ""
    default = "" if key.default is msgspec.NODEFAULT else f"  [{_shown(key.default)}]"
    return f"  --{key.name}{also}  {type_name(key.type)}{default}"


def _wrapped(text: str, indent: int) -> str:
    margin = " " * indent
    return textwrap.fill(text, WIDTH, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False)


def _first_sentence(text: str) -> str:
    """Up to the first full stop that ends a sentence."""
    return " ".join(text.split()).partition(". ")[0].rstrip(".") + "."


def _shown(value: object) -> str:
    if isinstance(value, Member):
        return value.name
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return value or '""' if isinstance(value, str) else str(msgspec.to_builtins(value))
