"""The task stream: turns prompts into numbered Tasks, and remembers which of their samples are not settled yet.

    source -> EndlessSampler -> StatefulDataLoader (reads and renders) -> TaskStream -> Task + prompt ids

A task is outstanding from the call of `next` that returns it until `step` reports all its samples as trained, masked or
dropped. `state` holds the loader's position, the outstanding tasks, and which of their samples are settled
(`learner.prompts.sample_book`). A stream restored from it first offers exactly those tasks again, and then continues at
that position. So each sample is settled once, and fresh tasks come in the order of an undisturbed run.
"""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

import msgspec
import numpy as np
import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import PreTrainedTokenizerBase

from stillhouse.engines.base import Int32s
from stillhouse.learner.prompts.config import TaskConfig
from stillhouse.learner.prompts.data import PromptSource, open_prompts
from stillhouse.learner.prompts.order import EndlessSampler, MixedSampler, Rows, check_tags, held_out_rows, row_tags
from stillhouse.learner.prompts.records import ColumnsFault, DataError, PromptRecord, RowError
from stillhouse.learner.prompts.rendering import NO_READERS, NONE, Readers, for_actors, render, teacher_prompt
from stillhouse.learner.prompts.sample_book import Account, SampleBook, TrainedSample
from stillhouse.models.tokenizer import TokenizerError
from stillhouse.protocol.codec import MAX_HEADER_BYTES
from stillhouse.protocol.messages import (
    ExpertShape,
    OpenTask,
    Sampling,
    Settled,
    Task,
    TaskKind,
    TasksOffered,
    TopIdsWanted,
)

STATE_FORMAT = 2
_PROBED_PROMPTS = 32
_DROPS_LOGGED = 5
TASKS_PER_MESSAGE: Final = 256
ROW_BYTES_PER_MESSAGE: Final = MAX_HEADER_BYTES // 4
"""As much again may be the ground truths, which are columns of the rows; the rest is for the other fields."""

_log = logging.getLogger(__name__)


class TaskOffer(NamedTuple):
    """One task and its prompt, int32 [n_prompt]."""

    task: Task
    prompt_ids: Int32s
    teacher_prompt_ids: Int32s = NONE
    """Prompt for the teachers; empty: the same as the student's."""

    @property
    def frame(self) -> Int32s:
        """Frame of the task (`protocol.messages.Task`)."""
        return np.concatenate([self.prompt_ids, self.teacher_prompt_ids])


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts of a run: the training source without `held_out`, and the evaluation set."""

    source: PromptSource
    held_out: Rows
    evaluation: tuple[PromptRecord, ...]
    """Rows for the evaluations, in order; no more than they use."""


def load_prompts(config: TaskConfig, environments: Collection[str] | None = None) -> Prompts:
    """Open the files named in the config. `environments`: those that rows may name; None: any. Raises DataError (see
    `learner.prompts.data`); needs no tokenizer."""
    source = open_prompts(config.prompts, environments, config.columns)
    if config.eval_prompts:
        return Prompts(source, np.empty(0, dtype=np.int64), separate_eval_prompts(config, environments))
    held_out = held_out_rows(source, config.eval_share, config.eval_prompts_needed)
    in_file_order = {int(row): source.read(int(row)) for row in np.sort(held_out)}  # each block is read once
    return Prompts(source, held_out, tuple(in_file_order[int(row)] for row in held_out))


def separate_eval_prompts(config: TaskConfig, environments: Collection[str] | None = None) -> tuple[PromptRecord, ...]:
    """The rows of `eval_prompts` that evaluations use. Raises DataError."""
    source = open_prompts(config.eval_prompts, environments, config.columns)
    return tuple(source.read(row) for row in range(min(len(source), config.eval_prompts_needed)))


def derive_seed(run_seed: int, kind: TaskKind, number: int) -> int:
    """Seed in [0, 2**63) of one task; neighbouring numbers give unrelated seeds."""
    digest = hashlib.blake2b(f"{run_seed}/{kind}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class TaskStream:
    """Endless train tasks with rising ids. Owned by one thread of the learner."""

    def __init__(
        self,
        config: TaskConfig,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Prompts,
        *,
        seed: int,
        top_ids: TopIdsWanted | None = None,
        experts: ExpertShape | None = None,
        readers: Readers = NO_READERS,
    ) -> None:
        """`top_ids`: for tasks that teachers score. `experts`: see `Sampling`. `readers`: see `teacher_prompt`. Renders
        some prompts at once. Raises TokenizerError or DataError if they cannot be rendered."""
        self._config = config
        self._top_ids, self._experts = top_ids, experts
        self._identity = {
            "prompts": prompts.source.fingerprint,
            "rows": len(prompts.source),
            "held_out": len(prompts.held_out),
            "shuffle": config.shuffle,
            "mix": dict(config.mix),
            "seed": seed,
        }
        self._seed = seed
        self._path = prompts.source.path
        tags = row_tags(prompts.source) if config.mix or config.tags_named else []
        sampler = _sampler(config, prompts, tags, seed)
        self._rows_per_pass = sampler.rows_per_pass
        dataset = RenderedPrompts(prompts.source, tokenizer, config, readers)
        dataset.probe(tags)
        self._loader = _loader(dataset, sampler, seed)
        self._rendered: Iterator[Rendered] = iter(self._loader)
        self._book = SampleBook()
        self._outstanding: dict[int, TaskOffer] = {}
        self._to_offer_again: deque[int] = deque()
        self._dropped: Counter[str] = Counter()
        self._unrouted_tags: set[str] = set()

    @classmethod
    def from_state(
        cls,
        config: TaskConfig,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Prompts,
        *,
        seed: int,
        state: dict[str, Any],
        top_ids: TopIdsWanted | None = None,
        experts: ExpertShape | None = None,
        readers: Readers = NO_READERS,
    ) -> Self:
        """Resume from a `state()`. Raises DataError if prompts, seed or order differ from it."""
        stream = cls(config, tokenizer, prompts, seed=seed, top_ids=top_ids, experts=experts, readers=readers)
        stream._restore(state)
        return stream

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Ids of tasks that were offered (by this stream or its predecessor) and are not settled, ascending."""
        return tuple(self._outstanding)

    @property
    def next_task_id(self) -> int:
        """Id of the next fresh task."""
        return self._book.next_task_id

    @property
    def progress(self) -> tuple[OpenTask, ...]:
        """Unsettled tasks and their progress (`SampleBook.progress`)."""
        return self._book.progress

    @property
    def dropped(self) -> dict[str, int]:
        """Prompts dropped, by reason: prompt_too_long, bad_row, row_too_large, unrenderable, no_privileged,
        teacher_prompt_too_long. A prompt counts again in each pass."""
        return dict(self._dropped)

    def offer(self, task_id: int) -> TaskOffer | None:
        """An outstanding task; None for any other."""
        return self._outstanding.get(task_id)

    def row(self, task_id: int) -> bytes | None:
        """All columns of an outstanding task's row, as one JSON object; None for any other task."""
        offer = self.offer(task_id)
        return None if offer is None else offer.task.row

    def next(self, n: int) -> list[TaskOffer]:
        """The next `n` tasks: those to be offered again first, then fresh ones.

        Raises DataError when a whole pass over the prompts gave no task, or the files changed."""
        offers: list[TaskOffer] = []
        for _ in range(n):
            if self._to_offer_again:
                offers.append(self._outstanding[self._to_offer_again.popleft()])
            else:
                offer = self._fresh()
                self._outstanding[offer.task.task_id] = offer
                offers.append(offer)
        return offers

    def step(
        self, trained: Iterable[TrainedSample], settled: Sequence[Settled], left_out: Collection[tuple[int, int]] = ()
    ) -> Account:
        """Record one optimizer step (`SampleBook.step`). Raises SettledTwice, changing nothing."""
        account = self._book.step(trained, settled, left_out)
        for task_id in account.tasks_done:
            del self._outstanding[task_id]
        if account.tasks_done and self._to_offer_again:  # some were settled before they were offered again
            self._to_offer_again = deque(task_id for task_id in self._to_offer_again if task_id in self._outstanding)
        return account

    def state(self) -> dict[str, Any]:
        """State for `from_state`, as JSON types."""
        return {
            "format": STATE_FORMAT,
            "identity": dict(self._identity),
            "next_task_id": self._book.next_task_id,
            "dropped": dict(self._dropped),
            "loader": self._loader.state_dict(),
            "outstanding": [
                {
                    "task": msgspec.to_builtins(offer.task),
                    "prompt_ids": offer.prompt_ids.tolist(),
                    "teacher_prompt_ids": offer.teacher_prompt_ids.tolist(),
                }
                for offer in self._outstanding.values()
            ],
            "progress": msgspec.to_builtins(self._book.progress),
        }

    def _restore(self, state: dict[str, Any]) -> None:
        if state.get("format") != STATE_FORMAT:
            raise DataError(
                f"the checkpoint's task stream has format {state.get('format')!r}, expected {STATE_FORMAT}: another "
                "version of this program wrote it; resume with that version, or start a new run"
            )
        saved: dict[str, Any] = state["identity"]
        if differing := [name for name, value in self._identity.items() if saved.get(name) != value]:
            changes = ", ".join(f"{name}: was {saved.get(name)!r}, is {self._identity[name]!r}" for name in differing)
            raise DataError(
                f"the run cannot resume with other prompts or another order ({changes}; prompts: {self._path}); "
                "resume with what it was started with, or start a new run"
            )
        self._dropped = Counter(state["dropped"])
        self._loader.load_state_dict(state["loader"])
        self._rendered = iter(self._loader)
        for item in state["outstanding"]:
            task = msgspec.convert(item["task"], Task)
            # Teachers now want these sets, whatever they wanted when the task was first offered.
            wanted = self._top_ids if task.teachers else None
            sampling = msgspec.structs.replace(task.sampling, top_ids=wanted, experts=self._experts)
            task = msgspec.structs.replace(task, sampling=sampling)
            self._outstanding[task.task_id] = TaskOffer(
                task,
                np.asarray(item["prompt_ids"], dtype=np.int32),
                np.asarray(item.get("teacher_prompt_ids", ()), dtype=np.int32),
            )
        self._to_offer_again.extend(self._outstanding)
        group_sizes = {task_id: offer.task.group_size for task_id, offer in self._outstanding.items()}
        progress = msgspec.convert(state["progress"], tuple[OpenTask, ...])
        self._book = SampleBook.restored(int(state["next_task_id"]), group_sizes, progress)

    def _fresh(self) -> TaskOffer:
        dropped_in_a_row = 0
        while dropped_in_a_row < self._rows_per_pass:
            rendered = next(self._rendered)
            if rendered.ids is not None:
                assert rendered.record is not None
                dropped_in_a_row = 0
                task_id = self._book.begin(self._config.group_size)
                if task_id is None:
                    continue  # all its samples were trained from what the buffer still held
                return TaskOffer(
                    self._task(task_id, rendered.record, len(rendered.teacher_ids)), rendered.ids, rendered.teacher_ids
                )
            dropped_in_a_row += 1
            self._dropped[rendered.drop_reason] += 1
            if self._dropped[rendered.drop_reason] <= _DROPS_LOGGED:
                _log.warning("prompt dropped (%s): %s", rendered.drop_reason, rendered.detail)
        raise DataError(
            f"{self._path}: a whole pass over {self._rows_per_pass} prompts gave no task; dropped so far: "
            f"{dict(self._dropped)} (max_prompt_tokens is {self._config.max_prompt_tokens})"
        )

    def _task(self, task_id: int, record: PromptRecord, teacher_prompt_tokens: int) -> Task:
        config = self._config
        teachers = config.teachers_for(record.tag)
        if not teachers and config.routes and record.tag not in self._unrouted_tags:
            self._unrouted_tags.add(record.tag)
            _log.warning(
                "no teacher is routed to tag %r (routes: %s): such tasks get no scores", record.tag, config.routes
            )
        return Task(
            task_id=task_id,
            kind="train",
            group_size=config.group_size,
            sampling=Sampling(
                temperature=config.temperature,
                top_p=config.top_p,
                top_k=config.top_k,
                min_p=config.min_p,
                teacher_share=config.teacher_share,
                kept=config.truncated,
                max_new_tokens=config.max_new_tokens,
                seed=derive_seed(self._seed, "train", task_id),
                top_ids=self._top_ids if teachers else None,
                experts=self._experts,
            ),
            env=record.env or config.env,
            tag=record.tag,
            teachers=teachers,
            ground_truth=record.ground_truth,
            teacher_prompt_tokens=teacher_prompt_tokens,
            row=record.columns,
        )


def in_messages(offers: Sequence[TaskOffer]) -> Iterator[tuple[TasksOffered, list[Int32s]]]:
    """Distribute tasks, each with its frame, over messages that can be sent."""
    first, n_bytes = 0, 0
    for at, offer in enumerate(offers):
        n_bytes += len(offer.task.row)
        if at - first == TASKS_PER_MESSAGE or (n_bytes > ROW_BYTES_PER_MESSAGE and at > first):
            yield _message(offers[first:at])
            first, n_bytes = at, len(offer.task.row)
    if offers:
        yield _message(offers[first:])


def _message(offers: Sequence[TaskOffer]) -> tuple[TasksOffered, list[Int32s]]:
    return TasksOffered(tasks=tuple(offer.task for offer in offers)), [offer.frame for offer in offers]


class Rendered(NamedTuple):
    """A prompt as token ids, or the reason why it is dropped."""

    record: PromptRecord | None
    ids: Int32s | None
    drop_reason: str = ""
    detail: str = ""
    teacher_ids: Int32s = NONE


class RenderedPrompts(Dataset[Rendered]):
    """Map-style data set: row -> prompt ids. An unusable row gives a reason, which the stream counts."""

    def __init__(
        self,
        source: PromptSource,
        tokenizer: PreTrainedTokenizerBase,
        config: TaskConfig,
        readers: Readers = NO_READERS,
    ) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._config = config
        self._readers = readers

    def probe(self, tags: Sequence[str | None]) -> None:
        """Render the first rows, and the first row of each template. Raises TokenizerError, because if these rows fail,
        the others will too; DataError for a template without a row."""
        config = self._config
        check_tags("templates", [tag for tag in config.tags_named if tag in config.templates], tags, self._source.path)
        check_tags("chat_template_kwargs_tags", list(config.chat_template_kwargs_tags), tags, self._source.path)
        with_template = [tags.index(tag) for tag in config.tags_named]
        for row in [*range(min(len(self._source), _PROBED_PROMPTS)), *with_template]:
            record = self._source.read(row)
            try:
                self._render(record)
            except TokenizerError as error:
                raise TokenizerError(f"{self._source.where(row)}: {error}") from error

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, row: int) -> Rendered:
        try:
            record = self._source.read(row)
        except RowError as error:
            return Rendered(None, None, "bad_row", str(error))
        record = for_actors(record, self._config)
        if isinstance(record, ColumnsFault):
            return Rendered(None, None, record.reason, f"{self._source.where(row)}: {record.detail}")
        try:
            ids = self._render(record)
            teachers = teacher_prompt(record, self._tokenizer, self._config, self._readers)
        except TokenizerError as error:
            return Rendered(None, None, "unrenderable", f"{self._source.where(row)}: {error}")
        limit = self._config.max_prompt_tokens
        if len(ids) > limit:
            detail = f"{self._source.where(row)}: {len(ids)} tokens, max_prompt_tokens is {limit}"
            return Rendered(None, None, "prompt_too_long", detail)
        if teachers.drop_reason:
            return Rendered(None, None, teachers.drop_reason, f"{self._source.where(row)}: {teachers.detail}")
        return Rendered(record, ids, teacher_ids=teachers.ids)

    def _render(self, record: PromptRecord) -> Int32s:
        return render(record, self._tokenizer, self._config)


def _sampler(
    config: TaskConfig, prompts: Prompts, tags: Sequence[str | None], seed: int
) -> EndlessSampler | MixedSampler:
    if config.mix:
        return MixedSampler(prompts.source, prompts.held_out, tags, config.mix, seed=seed, shuffle=config.shuffle)
    return EndlessSampler(prompts.source, prompts.held_out, seed=seed, shuffle=config.shuffle)


def _loader(
    dataset: RenderedPrompts, sampler: EndlessSampler | MixedSampler, seed: int
) -> StatefulDataLoader[Rendered]:
    with warnings.catch_warnings():
        # torchdata 0.11 calls torch.set_vital, which torch 2.13 deprecates; the call does nothing for us.
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated", category=UserWarning)
        return StatefulDataLoader(
            dataset,
            batch_size=None,
            sampler=sampler,
            num_workers=0,  # read in this thread: the state is exact after each prompt, and there is nothing to stop
            collate_fn=_as_it_is,
            # Without one of its own the loader draws from torch's global generator.
            generator=torch.Generator().manual_seed(seed),
        )


def _as_it_is(item: Any) -> Any:
    """The loader's default collation would turn arrays into tensors."""
    return item
