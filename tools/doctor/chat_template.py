"""Check of the chat template: what the student reads is all of the prompt, and it survives the way to ids and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.engines.base import Int32s
from stillhouse.launch.checks.finding import Finding
from stillhouse.learner.prompts.config import TaskConfig
from stillhouse.learner.prompts.data import open_prompts
from stillhouse.learner.prompts.records import PromptRecord
from stillhouse.learner.prompts.rendering import render, with_template
from stillhouse.learner.prompts.tasks import Rendered, RenderedPrompts
from stillhouse.models.files import TokenizerError
from stillhouse.models.tokenizer import render_text
from stillhouse.tools.doctor.case import ModelCase
from stillhouse.tools.doctor.tokenizers import tokenizer_of

ROWS: Final = 8
SHOWN_CHARS: Final = 160
WRITTEN_BY_OTHERS: Final = ("system", "user", "tool")
"""Roles whose text must reach the student. Of former answers, templates may leave the reasoning out."""


def rows_of(case: ModelCase) -> list[Rendered]:
    """Rows of the training prompts, rendered as the learner does; unusable ones are left out."""
    found = [row for row in _tried(case) if row.ids is not None]
    return found[:: max(1, len(found) // ROWS)][:ROWS]


def _tried(case: ModelCase) -> list[Rendered]:
    """Rows at equal distances."""

    def read() -> list[Rendered]:
        tasks = case.checked.config.learner.tasks
        source = open_prompts(tasks.prompts, case.checked.config.environments, tasks.columns)
        rendered = RenderedPrompts(source, tokenizer_of(case, case.config.models.student), tasks)
        chosen = np.unique(np.linspace(0, len(source) - 1, min(len(source), 4 * ROWS), dtype=np.int64)).tolist()
        return [rendered[row] for row in chosen]

    return case.once("reading prompts", read)


class Trip(NamedTuple):
    """One prompt on its way: text of the template, ids, text of the ids, ids of that text."""

    turns: Sequence[Mapping[str, Any]]
    written: str
    ids: list[int]
    read: str
    again: list[int]


def chat_template(case: ModelCase) -> Iterator[Finding]:
    """Over a few rows of the training prompts."""
    tokenizer, tasks = tokenizer_of(case, case.config.models.student), case.config.learner.tasks
    rows = rows_of(case)
    if not rows:
        why = next((row.detail for row in _tried(case)), "")
        measured = f"no prompt of those tried can be used: {why}"
        yield Finding(check="chat template", subject="content", status="failed", measured=measured)
        return
    trips = [_trip(row, tokenizer, tasks) for row in rows]
    yield _content(trips, tokenizer)
    yield _way_back(trips, tokenizer)
    if trips[0].turns:
        yield _opening(trips[0], tokenizer, tasks, rows[0])
    for pool in case.pools:
        yield _of_teacher(pool.name, rows, tokenizer_of(case, pool.config.models.teacher), tasks)


def _trip(row: Rendered, tokenizer: PreTrainedTokenizerBase, tasks: TaskConfig) -> Trip:
    assert row.record is not None and row.ids is not None
    record = with_template(row.record, tasks)
    turns = turns_of(record, tokenizer, tasks)
    written = record.prompt or ""
    if turns:
        kwargs = tasks.template_kwargs_for(record.tag, record.chat_template_kwargs)
        written = render_text(tokenizer, turns, tasks.chat_template, record.tools, kwargs, opened=True)
    ids = row.ids.tolist()
    read: Any = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    again: Any = tokenizer(read, add_special_tokens=False)["input_ids"]
    return Trip(turns, written, ids, read, again)


def turns_of(
    record: PromptRecord, tokenizer: PreTrainedTokenizerBase, tasks: TaskConfig
) -> Sequence[Mapping[str, Any]]:
    """The turns that the template gets; none for a prompt that is tokenised as it is."""
    if record.messages is None and (tasks.chat_template == "off" or tokenizer.chat_template is None):
        return ()
    turns = [dict(turn) for turn in record.messages or ({"role": "user", "content": record.prompt},)]
    if tasks.system_prompt is not None and turns[0].get("role") != "system":
        turns = [{"role": "system", "content": tasks.system_prompt}, *turns]
    return turns


def _texts(turns: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The text of each turn that others than the student wrote."""
    for turn in turns:
        content = turn.get("content")
        if turn.get("role") not in WRITTEN_BY_OTHERS:
            continue
        parts = cast(list[Mapping[str, Any]], content) if isinstance(content, list) else [{"text": content}]
        yield from (str(part["text"]).strip() for part in parts if part.get("text"))


def _content(trips: Sequence[Trip], tokenizer: PreTrainedTokenizerBase) -> Finding:
    lost = [text for trip in trips for text in _texts(trip.turns) if text not in trip.written]
    unknown_id: Any = tokenizer.unk_token_id
    unknown = sum(trip.ids.count(unknown_id) for trip in trips)
    shown = _short(trips[0].read)
    if lost:
        measured = f"the template drops {_short(lost[0])}" + (f" and {len(lost) - 1} more" if len(lost) > 1 else "")
    elif unknown:
        measured = f"{unknown} tokens of {len(trips)} prompts are unknown to the tokenizer ({tokenizer.unk_token})"
    else:
        measured = f"{len(trips)} prompts reach the student with all of their text"
    return Finding(
        check="chat template",
        subject="content",
        status="failed" if lost or unknown else "ok",
        measured=f"{measured}; the first one reads {shown}",
        normal="everything that system, user and tools say is in what the student reads",
        advice="correct the template (chat_template.jinja in the student's folder), or write the prompts out and set "
        "learner.tasks.chat_template = off",
    )


def _way_back(trips: Sequence[Trip], tokenizer: PreTrainedTokenizerBase) -> Finding:
    apart = [trip for trip in trips if trip.again != trip.ids]
    same = f"all {len(trips)} prompts give the same {sum(len(trip.ids) for trip in trips)} ids again"
    return Finding(
        check="chat template",
        subject="round trip",
        status="warning" if apart else "ok",
        measured=f"{len(apart)} of {len(trips)} prompts change on the way ids -> text -> ids, first: "
        f"{_first_difference(apart[0].ids, apart[0].again, tokenizer)}"
        if apart
        else same,
        normal="the same ids",
        advice="nothing if the text is the same to you; agents and judges that work on text then see other tokens",
    )


def _opening(trip: Trip, tokenizer: PreTrainedTokenizerBase, tasks: TaskConfig, row: Rendered) -> Finding:
    """What the template writes before the answer."""
    assert row.record is not None
    kwargs = tasks.template_kwargs_for(row.record.tag, row.record.chat_template_kwargs)
    closed = render_text(tokenizer, trip.turns, tasks.chat_template, row.record.tools, kwargs, opened=False)
    opening = trip.written[len(closed) :] if trip.written.startswith(closed) else ""
    return Finding(
        check="chat template",
        subject="opening",
        status="ok" if opening else "warning",
        measured=f"the answer is opened with {opening!r}" if opening else "it does not open the answer",
        normal="add_generation_prompt adds what comes before an answer",
        advice="without it the student has to write the opening of its own turn: correct the template",
    )


def _of_teacher(pool: str, rows: Sequence[Rendered], theirs: PreTrainedTokenizerBase, tasks: TaskConfig) -> Finding:
    """Teachers read the student's ids. Their own template says what they were trained to read."""
    apart: list[tuple[Int32s, Int32s]] = []
    try:
        for row in rows:
            assert row.record is not None and row.ids is not None
            if not np.array_equal(own := render(row.record, theirs, tasks), row.ids):
                apart.append((row.ids, own))
    except TokenizerError as error:
        measured, status = f"its own template does not render the prompts: {error}", "warning"
    else:
        status = "warning" if apart else "ok"
        measured = f"its own template renders all {len(rows)} prompts to the ids that it is sent"
        if apart:
            first = _first_difference(apart[0][0].tolist(), apart[0][1].tolist(), theirs)
            measured = f"its own template renders {len(apart)} of {len(rows)} prompts differently, first: {first}"
    return Finding(
        check="chat template",
        subject=f"pool {pool}",
        status=status,
        measured=measured,
        normal="the ids that student and teacher would render are the same",
        advice="teachers read the student's ids: give the student the teacher's template if the teacher was trained "
        "with it, or accept that it scores an unfamiliar format",
    )


def _first_difference(ours: list[int], theirs: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    a, b = (_short(str(tokenizer.decode(ids[at : at + 8]))) for ids in (ours, theirs))
    return f"at token {at} of {len(ours)}, {a} against {b}"


def _short(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS // 2] + " ... " + text[-SHOWN_CHARS // 2 :])
