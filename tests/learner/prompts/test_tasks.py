"""The task stream: order, sampling fields, drops, and that a run killed anywhere goes on exactly where it stood."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from stillhouse.learner.prompts.config import TaskConfig
from stillhouse.learner.prompts.data import CACHED_BLOCKS, open_prompts
from stillhouse.learner.prompts.order import held_out_rows, shuffled_rows
from stillhouse.learner.prompts.records import DataError
from stillhouse.learner.prompts.tasks import TaskStream, derive_seed, in_messages, load_prompts
from stillhouse.models.tokenizer import TokenizerError, render_prompt
from stillhouse.protocol.codec import encode
from stillhouse.protocol.messages import MAX_ROW_BYTES, Settled, Task

WriteRows = Callable[[Sequence[dict[str, Any]]], Path]
ROWS = [{"prompt": f"p{i}", "tag": "ab"[i % 2], "ground_truth": str(i)} for i in range(11)]


def make_config(path: Path, **fields: Any) -> TaskConfig:
    fields.setdefault("eval_share", 0.0)
    return TaskConfig(prompts=str(path), **fields)


def make_stream(config: TaskConfig, tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> TaskStream:
    return TaskStream(config, tokenizer, load_prompts(config), seed=seed)


def resume(config: TaskConfig, tokenizer: PreTrainedTokenizerFast, state: dict[str, Any], seed: int = 0) -> TaskStream:
    """As after a checkpoint: what is not JSON does not survive."""
    return TaskStream.from_state(
        config, tokenizer, load_prompts(config), seed=seed, state=json.loads(json.dumps(state))
    )


def rows_of(offers: Sequence[Any]) -> list[int]:
    return [int(offer.task.ground_truth) for offer in offers]


# ------------------------------------------------------------------------------------------------ tasks


def test_a_task_carries_what_the_config_says(write_rows: WriteRows, small_tokenizer: PreTrainedTokenizerFast) -> None:
    config = make_config(
        write_rows(ROWS),
        group_size=3,
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        max_new_tokens=17,
        env="calculator",
        routes={"general": (), "only_b": ("b",)},
        system_prompt="sys",
    )
    for n, offer in enumerate(make_stream(config, small_tokenizer, seed=5).next(11)):
        row = ROWS[int(offer.task.ground_truth or "")]
        assert offer.task == Task(
            task_id=n,
            kind="train",
            group_size=3,
            sampling=msgspec.structs.replace(
                offer.task.sampling, temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=17
            ),
            env="calculator",
            tag=row["tag"],
            teachers=("general", "only_b") if row["tag"] == "b" else ("general",),
            ground_truth=row["ground_truth"],
            row=offer.task.row,
        )
        assert json.loads(offer.task.row) == row
        assert offer.task.sampling.seed == derive_seed(5, "train", n)
        record = open_prompts(config.prompts).read(int(row["ground_truth"]))
        np.testing.assert_array_equal(offer.prompt_ids, render_prompt(small_tokenizer, record, "sys"))


def test_rows_whose_columns_an_environment_cannot_read_are_dropped_and_counted(
    tmp_path: Path, small_tokenizer: PreTrainedTokenizerFast
) -> None:
    lines = [b'{"prompt":"a"}', b'{"prompt":"b","x":"\xff"}', b'{"prompt":"c","x":"' + b"x" * MAX_ROW_BYTES + b'"}']
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"\n".join(lines))
    stream = make_stream(make_config(path, shuffle=False), small_tokenizer)
    assert [json.loads(offer.task.row) for offer in stream.next(2)] == [{"prompt": "a"}] * 2
    assert stream.dropped == {"bad_row": 1, "row_too_large": 1}


def test_a_row_s_environment_stands_in_place_of_the_configured_one_and_has_its_share(
    write_rows: WriteRows, small_tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [{"prompt": f"p{i}", **({"env": "game"} if i < 4 else {"env": "quiz", "tag": "hard"})} for i in range(8)]
    stream = make_stream(make_config(write_rows([*rows, {"prompt": "q"}]), shuffle=False), small_tokenizer)
    expected = [("game", "game")] * 4 + [("quiz", "hard")] * 4 + [("single_turn", "")]
    assert [(offer.task.env, offer.task.tag) for offer in stream.next(9)] == expected
    mixed = make_stream(make_config(write_rows(rows), mix={"game": 1, "hard": 3}), small_tokenizer).next(400)
    share = sum(offer.task.env == "quiz" for offer in mixed) / 400
    assert 0.65 < share < 0.85


def test_tasks_with_large_rows_go_in_messages_that_can_be_sent(
    write_rows: WriteRows, small_tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [{"prompt": f"p{i}", "ground_truth": "x" * 900_000} for i in range(12)]
    offers = make_stream(make_config(write_rows(rows), shuffle=False), small_tokenizer).next(12)
    messages = list(in_messages(offers))
    for message, frames in messages:
        encode(message, frames)
    assert [task.task_id for message, _ in messages for task in message.tasks] == list(range(12))
    assert [len(message.tasks) for message, _ in messages] == [2] * 6


def test_seeds_of_tasks_runs_and_kinds_differ_and_fit_into_63_bits() -> None:
    seeds = {derive_seed(run, kind, n) for run in range(5) for kind in ("train", "eval") for n in range(200)}
    assert len(seeds) == 2000
    assert min(seeds) >= 0 and max(seeds) < 2**63
    assert max(seeds) > 2**62


def test_every_pass_has_every_prompt_once_in_a_new_order(
    write_rows: WriteRows, small_tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = rows_of(make_stream(make_config(write_rows(ROWS)), small_tokenizer).next(33))
    passes = [rows[at : at + 11] for at in (0, 11, 22)]
    assert [sorted(one) for one in passes] == [list(range(11))] * 3
    assert len({tuple(one) for one in [*passes, list(range(11))]}) == 4


def test_without_shuffle_the_order_is_that_of_the_file(
    write_rows: WriteRows, small_tokenizer: PreTrainedTokenizerFast
) -> None:
    stream = make_stream(make_config(write_rows(ROWS), shuffle=False), small_tokenizer)
    assert rows_of(stream.next(25)) == [*range(11), *range(11), 0, 1, 2]


def test_the_stream_leaves_torchs_random_numbers_alone(
    write_rows: WriteRows, small_tokenizer: PreTrainedTokenizerFast
) -> None:
    config = make_config(write_rows(ROWS))
    before = torch.random.get_rng_state()
    resume(config, small_tokenizer, make_stream(config, small_tokenizer).state()).next(13)
    assert torch.equal(torch.random.get_rng_state(), before)


# ------------------------------------------------------------------------------------------------ drops


def test_long_prompts_are_dropped_and_counted(write_rows: WriteRows, small_tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": "x" * 100 if i % 4 == 0 else "y", "ground_truth": str(i)} for i in range(8)]
    limit = len(render_prompt(small_tokenizer, open_prompts(str(write_rows(rows))).read(1)))
    stream = make_stream(make_config(write_rows(rows), max_prompt_tokens=limit), small_tokenizer)
    offers = stream.next(12)
    assert set(rows_of(offers)) == {1, 2, 3, 5, 6, 7}
    assert [offer.task.task_id for offer in offers] == list(range(12))
    assert stream.dropped["prompt_too_long"] in (2, 3, 4)  # by where in the second pass the twelfth task stood
    resumed = resume(make_config(write_rows(rows), max_prompt_tokens=limit), small_tokenizer, stream.state())
    assert resumed.dropped == stream.dropped


def test_a_pass_that_gives_no_task_stops_the_run(
    write_rows: WriteRows, small_tokenizer: PreTrainedTokenizerFast
) -> None:
    stream = make_stream(make_config(write_rows(ROWS), max_prompt_tokens=3), small_tokenizer)
    with pytest.raises(DataError, match=r"11 prompts gave no task; dropped so far: \{'prompt_too_long': 11\}"):
        stream.next(1)


def test_a_bad_row_beyond_the_checked_ones_is_dropped_and_counted(
    tmp_path: Path, small_tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": None if i == 1500 else "p", "ground_truth": str(i)} for i in range(1502)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    stream = make_stream(make_config(tmp_path / "p.parquet", shuffle=False), small_tokenizer)
    assert rows_of(stream.next(1501))[-1] == 1501
    assert stream.dropped == {"bad_row": 1}
    assert any("row 1500" in message for message in caplog.messages)


def test_prompts_that_cannot_be_rendered_stop_the_run_at_once(
    write_rows: WriteRows, small_tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write_rows([{"messages": [{"role": "user", "content": "a"}]}])
    with pytest.raises(TokenizerError, match=r"prompts\.jsonl, line 1: messages need a chat template"):
        make_stream(make_config(path, chat_template="off"), small_tokenizer)


def test_a_tag_without_teacher_is_warned_of_once(
    write_rows: WriteRows, small_tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    offers = make_stream(make_config(write_rows(ROWS), routes={"only_b": ("b",)}), small_tokenizer).next(11)
    assert {offer.task.tag: offer.task.teachers for offer in offers} == {"a": (), "b": ("only_b",)}
    assert sum("no teacher is routed to tag 'a'" in message for message in caplog.messages) == 1


# ------------------------------------------------------------------------------------------------ evaluation split


def test_held_out_rows_are_never_trained_and_are_the_same_for_every_seed(
    write_rows: WriteRows, small_tokenizer: PreTrainedTokenizerFast
) -> None:
    config = make_config(write_rows(ROWS), eval_share=0.3, eval_greedy=64, eval_sampled=2)
    prompts = load_prompts(config)
    held_out = {int(record.ground_truth or "") for record in prompts.evaluation}
    assert len(held_out) == 4  # 0.3 * 11, rounded up
    for seed in (0, 1):
        trained = rows_of(make_stream(config, small_tokenizer, seed).next(21))
        assert set(trained) == set(range(11)) - held_out
    fewer = load_prompts(make_config(write_rows(ROWS), eval_share=0.3, eval_greedy=2, eval_sampled=0))
    assert fewer.evaluation == prompts.evaluation[:2]


def test_a_single_prompt_is_kept_for_training(write_rows: WriteRows) -> None:
    source = open_prompts(str(write_rows(ROWS[:1])))
    assert len(held_out_rows(source, 0.5, 10)) == 0


def test_an_evaluation_file_is_used_as_it_is(tmp_path: Path, write_rows: WriteRows) -> None:
    other = tmp_path / "eval.jsonl"
    other.write_text("".join(json.dumps({"prompt": f"e{i}"}) + "\n" for i in range(9)))
    config = make_config(write_rows(ROWS), eval_prompts=str(other), eval_share=0.5, eval_greedy=5, eval_sampled=3)
    prompts = load_prompts(config)
    assert [record.prompt for record in prompts.evaluation] == ["e0", "e1", "e2", "e3", "e4"]
    assert len(prompts.held_out) == 0


# ------------------------------------------------------------------------------------------------ order


@given(
    blocks=st.lists(st.integers(0, 5), min_size=0, max_size=40).filter(lambda blocks: sum(blocks) > 0),
    key=st.tuples(st.integers(0, 2**40), st.integers(0, 100)),
)
def test_a_shuffle_is_a_permutation_that_reads_few_blocks_at_a_time(blocks: list[int], key: tuple[int, int]) -> None:
    rows = shuffled_rows(sum(blocks), blocks, key)
    assert sorted(rows.tolist()) == list(range(sum(blocks)))
    np.testing.assert_array_equal(rows, shuffled_rows(sum(blocks), blocks, key))
    block_of = np.repeat(np.arange(len(blocks)), blocks)
    in_reading_order = block_of[rows].tolist()
    span = {b: in_reading_order[in_reading_order.index(b) :] for b in set(in_reading_order)}
    for later in span.values():  # from the first to the last row of a block only CACHED_BLOCKS are met
        last = len(later) - 1 - later[::-1].index(later[0])
        assert len(set(later[: last + 1])) <= CACHED_BLOCKS


def test_the_shuffle_of_a_given_seed_is_what_it_always_was() -> None:
    """A run must go on in the same order under a newer numpy."""
    assert shuffled_rows(10, (), (3, 1)).tolist() == [3, 0, 4, 8, 2, 7, 9, 6, 1, 5]


# ------------------------------------------------------------------------------------------------ outstanding, resume


def test_other_prompts_seed_or_order_cannot_be_resumed(
    write_rows: WriteRows, small_tokenizer: PreTrainedTokenizerFast
) -> None:
    config = make_config(write_rows(ROWS))
    state = make_stream(config, small_tokenizer).state()
    with pytest.raises(DataError, match="seed: was 0, is 1"):
        resume(config, small_tokenizer, state, seed=1)
    with pytest.raises(DataError, match="shuffle: was True, is False"):
        resume(make_config(write_rows(ROWS), shuffle=False), small_tokenizer, state)
    with pytest.raises(DataError, match="rows: was 11, is 10"):
        resume(make_config(write_rows(ROWS[1:])), small_tokenizer, state)
    with pytest.raises(DataError, match="format 99, expected 2"):
        resume(make_config(write_rows(ROWS)), small_tokenizer, {**state, "format": 99})


def test_a_resumed_stream_offers_the_same_tasks_even_if_sampling_was_changed_meanwhile(
    write_rows: WriteRows, small_tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write_rows(ROWS)
    stream = make_stream(make_config(path), small_tokenizer)
    offers = stream.next(4)
    settle(stream, 0, 2)
    resumed = resume(make_config(path, max_new_tokens=5), small_tokenizer, stream.state())
    again = resumed.next(3)
    assert [offer.task for offer in again[:2]] == [offers[1].task, offers[3].task]
    for before, after in zip((offers[1], offers[3]), again, strict=False):
        np.testing.assert_array_equal(before.prompt_ids, after.prompt_ids)
        assert after.prompt_ids.dtype == np.int32
    assert again[2].task.task_id == 4
    assert again[2].task.sampling.max_new_tokens == 5


def settle(stream: TaskStream, *task_ids: int) -> None:
    """All samples of each task."""
    stream.step((), [Settled(task_id, i, "trained") for task_id in task_ids for i in range(8)])


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int]]:
    """offer n | settle the k-th outstanding | checkpoint | kill (back to the last checkpoint)."""
    action = st.one_of(
        st.tuples(st.just("offer"), st.integers(1, 7)),
        st.tuples(st.just("settle"), st.integers(0, 30)),
        st.tuples(st.sampled_from(["checkpoint", "kill"]), st.just(0)),
    )
    return draw(st.lists(action, max_size=40))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=histories(), shuffle=st.booleans())
def test_a_run_killed_anywhere_settles_every_task_once_and_keeps_the_order(
    write_rows: WriteRows, small_tokenizer: PreTrainedTokenizerFast, history: list[tuple[str, int]], shuffle: bool
) -> None:
    # Two of the eleven prompts are too long, so that drops lie between the tasks.
    rows = [{"prompt": "x" * 80 if i in (2, 9) else f"p{i}", "ground_truth": str(i)} for i in range(11)]
    config = make_config(write_rows(rows), shuffle=shuffle, max_prompt_tokens=60)
    stream = make_stream(config, small_tokenizer)
    offered: dict[int, int] = {}  # task id -> row
    settled: Counter[int] = Counter()
    may_ask: list[int] = []  # offered by this incarnation and not settled
    checkpoint = (stream.state(), Counter[int]())
    for action, n in [*history, ("kill", 0), ("offer", 40)]:
        if action == "offer":
            must_come_first = [task_id for task_id in stream.outstanding if task_id not in may_ask]
            offers = stream.next(n)
            ids = [offer.task.task_id for offer in offers]
            assert ids[: len(must_come_first)] == must_come_first[:n]
            assert all(before < after for before, after in pairwise(ids))
            for offer in offers:
                row = int(offer.task.ground_truth or "")
                assert offered.setdefault(offer.task.task_id, row) == row
            may_ask += ids
        elif action == "settle" and may_ask:
            task_id = may_ask.pop(n % len(may_ask))
            settle(stream, task_id)
            settled[task_id] += 1
        elif action == "checkpoint":
            checkpoint = (stream.state(), settled.copy())
        elif action == "kill":
            stream = resume(config, small_tokenizer, checkpoint[0])
            settled = checkpoint[1].copy()  # what was trained after the checkpoint is lost with its weights
            may_ask = []
    last = list(stream.outstanding)
    while pending := [task_id for task_id in stream.outstanding if task_id not in may_ask]:
        may_ask += [offer.task.task_id for offer in stream.next(len(pending))]
    settle(stream, *last)
    settled.update(last)
    undisturbed = rows_of(make_stream(config, small_tokenizer).next(len(settled)))
    assert settled == Counter(range(len(settled)))
    assert [offered[task_id] for task_id in range(len(settled))] == undisturbed
