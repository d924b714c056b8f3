"""Writes text that is there, prompts with responses or whole documents, as a recording on which a student can be
trained off-policy:

    stillhouse write FILE --from ROWS --student DIR      (any key of a run)

Nothing is sampled. With `teacher.top_k` or `teacher.payload = hidden` the teacher scores the responses first, in this
process, so that divergences between distributions can be trained. Without, only cross-entropy (seq_kd) can: the text
counts as its own teacher, with probability 1 for each of its tokens, so behaviour and teacher log-probs are 0.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec
import numpy as np

from stillhouse.launch.checks.model_files import find_model
from stillhouse.launch.checks.preflight import replace
from stillhouse.launch.checks.prompt_files import absolute_prompts
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.errors import ConfigError
from stillhouse.learner.prompts.records import DataError
from stillhouse.protocol.atomic_file import not_a_link
from stillhouse.protocol.messages import BatchItem, TopKPiece, VersionSpan, WeightVersion
from stillhouse.recording.format import (
    FORMAT,
    RecordedRollout,
    RecordHeader,
    config_digest,
    encode_batch,
    encode_header,
)
from stillhouse.recording.writer import record_path

if TYPE_CHECKING:
    from collections.abc import Callable

    from stillhouse.learner.prompts.answers import Line

SAY_EVERY_S: Final = 10.0
"""Time between two lines about the progress."""
DATA: Final = "data"
"""Stands for a teacher where there is none."""


class RowScores(NamedTuple):
    """What a teacher says of one sequence of n tokens."""

    logprobs: np.ndarray[Any, Any]
    """[n], 0 where not scored"""
    payloads: tuple[bytes, ...] = ()
    """The payloads of each answer (protocol.payloads)."""


def write_given(file: str, rows: str, config: RunConfig) -> int:
    """Write the rows at `rows` (any path of prompts), in their order or shuffled by the seed. Returns the exit code.
    Raises ConfigError."""
    # Imported here because they import torch, which mistakes of the command line need not wait for.
    from stillhouse.learner.prompts.data import open_prompts
    from stillhouse.models.tokenizer import load_tokenizer, stop_token_ids, token_map_fingerprint

    path = record_path(Path(file).expanduser())
    if path.exists() and path.stat().st_size:
        raise ConfigError(f"{path} is there already; expected the name of a new file")
    config = _resolved(config, rows)
    tasks, models = config.learner.tasks, config.models
    try:
        source = open_prompts(tasks.prompts, columns=tasks.columns, answers=True)
    except (DataError, OSError) as error:
        raise ConfigError(f"--from: {error}") from error
    tokenizer = load_tokenizer(models.student)
    stops = stop_token_ids(models.student, tokenizer)
    dropped = Counter[str]()
    order = np.random.default_rng(config.seed).permutation(len(source)) if tasks.shuffle else np.arange(len(source))
    lines = _lines(source, order.tolist(), tokenizer, config, stops, dropped)
    items = _items(lines, _scorer(config, tokenizer), at_once=config.buffer.batch_rollouts)
    plain = cast(dict[str, Any], msgspec.to_builtins(config))
    header = RecordHeader(
        format=FORMAT,
        run=path.stem,
        vocab_fingerprint=token_map_fingerprint(tokenizer),
        writer="data",
        config_digest=config_digest(plain),
        config=plain,
    )
    n_rollouts = n_tokens = n_batches = 0
    unfinished, said_s = path.with_name(f"{path.name}.part"), time.monotonic()
    with open(unfinished, "wb", opener=not_a_link) as stream:
        stream.write(encode_header(header))
        while batch := list(islice(items, config.buffer.batch_rollouts)):
            version = WeightVersion(0, n_batches)
            stream.write(encode_batch(n_batches + 1, version, batch, staleness={}, tasks_done=()))
            n_batches, n_rollouts = n_batches + 1, n_rollouts + len(batch)
            n_tokens += sum(int(rollout.arrays[2].sum()) for rollout in batch)
            if time.monotonic() - said_s >= SAY_EVERY_S:
                said_s = time.monotonic()
                print(f"{n_rollouts:,} sequences of up to {len(source):,} rows, {n_tokens:,} tokens", flush=True)
    reasons = "".join(f", {n:,} {reason}" for reason, n in sorted(dropped.items()))
    if not n_rollouts:
        unfinished.unlink()
        raise ConfigError(f"--from: none of the {len(source):,} rows of {rows} can be used{reasons}")
    unfinished.replace(path)
    by = f"scored by {models.teacher}" if config.teacher.sends.distributions else "not scored"
    print(
        f"{path}: {n_rollouts:,} sequences of {len(source):,} rows in {n_batches:,} batches, {n_tokens:,} tokens to "
        f"train, {by}; rows dropped: {sum(dropped.values()):,}{reasons}"
    )
    return 0


def _resolved(config: RunConfig, rows: str) -> RunConfig:
    """The configuration with folders of models and the file of rows. Raises ConfigError for what --from cannot do."""
    sends, tasks = config.teacher.sends, config.learner.tasks
    if sends.top_ids is not None:
        raise ConfigError("teacher.top_k_of: got student, but --from samples nothing; expected teacher")
    if tasks.privileged:
        raise ConfigError(
            "learner.tasks.privileged: got a text that only teachers read, but --from scores responses after the "
            "prompts that the student reads; leave it empty, or let the teacher write (launch.write without --from)"
        )
    models = replace(config.models, student=str(find_model("models.student", config.models.student)))
    if sends.distributions:
        models = replace(models, teacher=str(find_model("models.teacher", config.models.teacher)))
    tasks = replace(tasks, prompts=absolute_prompts(rows))
    return replace(config, models=models, learner=replace(config.learner, tasks=tasks))


def _lines(
    source: Any, order: Sequence[int], tokenizer: Any, config: RunConfig, stops: Sequence[int], dropped: Counter[str]
) -> Iterator[tuple[str, str, Line]]:
    """Id, tag and tokens of each sequence. What is left out is counted; the first of each kind is shown."""
    from stillhouse.learner.prompts.answers import answer_lines
    from stillhouse.learner.prompts.records import RowError
    from stillhouse.models.tokenizer import TokenizerError

    tasks = config.learner.tasks

    def drop(row: int, reason: str, detail: str) -> None:
        dropped[reason] += 1
        if dropped[reason] == 1:
            print(f"{source.path}, row {row} is dropped ({reason}): {detail}")

    for row in order:
        try:
            record = source.read(row)
            lines = answer_lines(record, tokenizer, tasks, stops)
        except RowError as error:
            drop(row, "bad_row", str(error))
            continue
        except TokenizerError as error:
            drop(row, "unrenderable", str(error))
            continue
        n_prompt = max((line.answers[0][0] for line in lines), default=0)
        n_answer = sum(end - start for line in lines for start, end in line.answers)
        if n_prompt > tasks.max_prompt_tokens:
            drop(row, "prompt_too_long", f"{n_prompt} tokens, max_prompt_tokens is {tasks.max_prompt_tokens}")
        elif n_answer > tasks.max_new_tokens and not record.document:
            drop(row, "answer_too_long", f"{n_answer} tokens, max_new_tokens is {tasks.max_new_tokens}")
        else:
            for number, line in enumerate(lines):
                yield f"given-{row}-{number}", record.tag, line


def _items(
    lines: Iterator[tuple[str, str, Line]], score: Callable[[Sequence[Line]], list[RowScores]], *, at_once: int
) -> Iterator[RecordedRollout]:
    """`at_once`: lines to score together."""
    while some := list(islice(lines, at_once)):
        scored = score([line for _, _, line in some])
        yield from (_rollout(*named, scores) for named, scores in zip(some, scored, strict=True))


def _rollout(rollout_id: str, tag: str, line: Line, scores: RowScores) -> RecordedRollout:
    n = len(line.token_ids)
    mask = np.zeros(n, np.uint8)
    for start, end in line.answers:
        mask[start:end] = 1
    pieces = tuple(
        TopKPiece(0, start, end, len(payload))
        for (start, end), payload in zip(line.answers, scores.payloads, strict=bool(scores.payloads))
    )
    item = BatchItem(
        rollout_id=rollout_id,
        task_id=int(rollout_id.split("-")[1]),
        sample_index=0,
        group_size=1,
        tag=tag,
        teachers=("default",) if pieces else (DATA,),
        end=n,
        spans=tuple(VersionSpan(WeightVersion(0, 0), start, end) for start, end in line.answers),
        final=True,
        finish_reason="stop",
        reward=None,
        n_turns=len(line.answers),
        top_k=pieces,
    )
    arrays = [line.token_ids, np.zeros(n, np.float32), mask, scores.logprobs[None]]
    if pieces:
        arrays.append(np.frombuffer(b"".join(scores.payloads), np.uint8))
    return RecordedRollout(item, tuple(arrays))


def _scorer(config: RunConfig, tokenizer: Any) -> Callable[[Sequence[Line]], list[RowScores]]:
    if not config.teacher.sends.distributions:
        return lambda lines: [RowScores(np.zeros(len(line.token_ids), np.float32)) for line in lines]
    from stillhouse.engines.base import ScoreRequest
    from stillhouse.engines.torch.scorer import TorchScorer
    from stillhouse.protocol.handshake import vocab_tokens

    scorer = TorchScorer.load(config.models.teacher, config.teacher)
    encoder = config.teacher.sends.encoder(scorer, vocab_tokens(tokenizer.get_vocab()))
    assert encoder is not None

    def score(lines: Sequence[Line]) -> list[RowScores]:
        requests = [ScoreRequest(line.token_ids[:end], start) for line in lines for start, end in line.answers]
        results = iter(scorer.score(requests, encoder.options))
        scored: list[RowScores] = []
        for line in lines:
            logprobs = np.zeros(len(line.token_ids), np.float32)
            payloads = list[bytes]()
            for (start, end), result in zip(line.answers, results, strict=False):
                logprobs[start:end] = result.logprobs
                payloads.append(encoder.encode(result, slice(None), None))
            scored.append(RowScores(logprobs, tuple(payloads)))
        return scored

    return score
