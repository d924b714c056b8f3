"""The command line of `stillhouse view`: finds the record of a run, writes the page, and opens it."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from stillhouse.launch.config.tree import get
from stillhouse.launch.errors import INTERRUPTED_EXIT_CODE, ConfigError, LaunchError, refuse
from stillhouse.launch.runfolder import find_run
from stillhouse.learner.config import record_path
from stillhouse.models.files import TokenizerError
from stillhouse.protocol.atomic_file import write_atomic
from stillhouse.recording.format import RecordError, RecordHeader
from stillhouse.recording.reader import Recording
from stillhouse.tools.view.heads import Heads
from stillhouse.tools.view.page import Facts, Page
from stillhouse.tools.view.rollouts import FoundRollout, choose, find_rollouts, read
from stillhouse.tools.view.vocabulary import TextDecoder, TokenTexts, open_decoder

FILE: Final = "view.html"
MAX_MB: Final = 128
USAGE: Final = f"""\
usage: stillhouse view RUN [--no-open] [--record FILE] [--tokenizer DIR] [--max-mb N]

Writes RUN/{FILE}, one file that shows the rollouts of a recorded run (start the run with --record FILE) token by token,
and opens it in a browser. It works while the run goes on, and shows what was recorded until then.

  RUN              folder of a run, or its name in runs/
  --no-open        open no browser
  --record FILE    path of the record [that in the run's config.yaml]
  --tokenizer DIR  folder with the student's tokenizer [that of the recorded run]
  --max-mb N       size of the file, about, in MB. A larger record is shown in part: whole groups of rollouts, evenly
                   spaced over the run [{MAX_MB}]
"""


class ViewOptions(NamedTuple):
    """The parsed command line."""

    run: Path
    record: Path | None
    tokenizer: str
    max_mb: int
    opens: bool


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    if "--help" in arguments or "-h" in arguments:
        print(USAGE, end="")
        return 0
    try:
        asked = parse(arguments)
        file = write_view(asked)
    except (LaunchError, RecordError, OSError) as error:
        return refuse(error)
    except KeyboardInterrupt:
        print("stillhouse: stopped; no page was written", file=sys.stderr)
        return INTERRUPTED_EXIT_CODE
    if asked.opens:
        _open(file.absolute().as_uri())
    return 0


def parse(arguments: Sequence[str]) -> ViewOptions:
    """Parse the command line. Raises ConfigError with all mistakes."""
    words, values, positional, opens = list(arguments), dict[str, str](), list[str](), True
    mistakes: list[str] = []
    while words:
        word = words.pop(0)
        name, equals, text = word.partition("=")
        if word == "--no-open":
            opens = False
        elif name in ("--record", "--tokenizer", "--max-mb"):
            values[name] = text if equals else words.pop(0) if words and not words[0].startswith("--") else ""
            if not values[name]:
                mistakes.append(f"{name}: got nothing, expected a value; --help shows how")
        elif word.startswith("-"):
            mistakes.append(f"unknown flag {word}; --help shows those of view")
        else:
            positional.append(word)
    max_mb = values.get("--max-mb", str(MAX_MB))
    if "--max-mb" in values and values["--max-mb"] and not (max_mb.isdecimal() and int(max_mb) > 0):
        mistakes.append(f"--max-mb: got {max_mb!r}, expected a whole number of at least 1")
    if len(positional) != 1:
        mistakes.append(f"got {' '.join(positional) or 'nothing'}, expected RUN, the folder of a run; --help shows how")
    if mistakes:
        raise ConfigError(*(f"view: {mistake}" for mistake in mistakes))
    record = Path(values["--record"]).expanduser() if "--record" in values else None
    run = find_run(positional[0], "view")
    return ViewOptions(run, record, values.get("--tokenizer", ""), int(max_mb), opens)


def find_record(run: Path) -> Path:
    """The record that the run's config.yaml names. Raises ConfigError."""
    file = run / "config.yaml"
    try:
        plain: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"view: {file} cannot be read: {error}; name the record with --record FILE") from error
    named = get(plain, "learner.record") if isinstance(plain, dict) else None
    if not named:
        raise ConfigError(f"view: {run} was not recorded (learner.record is empty); start a run with --record FILE")
    return record_path(str(named), run)


def write_view(asked: ViewOptions) -> Path:
    """Write the page of a run and print what it holds. Returns its path. Raises LaunchError and RecordError."""
    with Recording(asked.record or find_record(asked.run)) as recording:
        decoder, notes = _decoder(recording.header, asked.tokenizer)
        found = find_rollouts(recording)
        chosen = choose(found, asked.max_mb * 1_000_000)
        page = Page(TokenTexts(decoder), Heads(recording.header.config))
        for one in chosen:
            page.add(read(recording, one))
        notes = (*_sampled(found, chosen, asked.max_mb), *notes, *_about(recording))
        facts = _facts(recording.header, recording.path, len(found), notes)
    content = page.html(facts).encode()
    file = asked.run / FILE
    write_atomic(file, content)
    print(f"{file}: {page.n_rollouts:,} of {len(found):,} rollouts, {len(content) / 1e6:.1f} MB")
    for note in notes:
        print(f"note: {note}")
    return file


def _facts(header: RecordHeader, record: Path, n_rollouts: int, notes: tuple[str, ...]) -> Facts:
    return Facts(
        run=header.run,
        record=str(record),
        writer=header.writer,
        n_rollouts=n_rollouts,
        alternatives_of=str(get(header.config, "teacher.top_k_of") or "teacher"),
        notes=notes,
    )


def _decoder(header: RecordHeader, given: str) -> tuple[TextDecoder | None, tuple[str, ...]]:
    """The tokenizer, or None and a note. `given`: folder that was asked for. Raises ConfigError if that one does not
    fit."""
    student = given or str(get(header.config, "models.student") or "")
    try:
        return open_decoder(student, header.vocab_fingerprint), ()
    except TokenizerError as error:
        if given:
            raise ConfigError(f"view: --tokenizer: {error}") from error
        return None, (f"tokens are shown as ids: {error}; name the student's tokenizer with --tokenizer DIR",)


def _sampled(found: Sequence[FoundRollout], chosen: Sequence[FoundRollout], max_mb: int) -> Iterator[str]:
    if len(chosen) < len(found):
        n_tasks, n_shown = (len({(one.offline, one.item.task_id) for one in some}) for some in (found, chosen))
        yield (
            f"this page shows {len(chosen):,} of {len(found):,} rollouts ({n_shown:,} of {n_tasks:,} tasks, evenly "
            f"spaced over the run): all of them would take more than {max_mb} MB; --max-mb N changes that"
        )


def _about(recording: Recording) -> Iterator[str]:
    """What a reader of the page should know of the record."""
    if recording.torn_bytes:
        yield f"left out: {_number(recording.torn_bytes, 'byte')} of an unfinished batch at the record's end"
    if recording.abandoned:
        yield f"left out: {_number(recording.abandoned, 'batch', 'batches')} on a branch of weights that was abandoned"
    if recording.missing:
        yield f"missing in the record: {_number(recording.missing, 'step')}"
    if recording.header.writer == "teacher":
        yield "the teacher wrote these rollouts; 'student' is the teacher's own log-prob when it wrote"
    if recording.header.writer == "data":
        yield "this text was there before; nobody's log-probs of it are known but the teacher's"


def _number(n: int, one: str, more: str = "") -> str:
    return f"{n:,} {one if n == 1 else more or one + 's'}"


def _open(address: str) -> None:
    if not (_has_screen() and webbrowser.open(address)):
        print("stillhouse: no browser was found here; open the file in one", file=sys.stderr)


def _has_screen() -> bool:
    """Without a screen, `webbrowser` may start a browser in the terminal."""
    return sys.platform != "linux" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
