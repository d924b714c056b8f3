"""Domains in given shares: the shares hold, each tag's rows come pass after pass, a resumed run goes on exactly."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from stillhouse.learner.evaluation.evaluation import render_eval_set
from stillhouse.learner.prompts.config import TaskConfig
from stillhouse.learner.prompts.records import DataError, PromptRecord
from stillhouse.learner.prompts.tasks import TaskOffer, TaskStream, load_prompts
from stillhouse.models.tokenizer import TokenizerError, render_prompt
from stillhouse.protocol.messages import Settled

WriteRows = Callable[[Sequence[dict[str, Any]]], Path]
ROWS = [{"prompt": f"p{i}", "tag": "abc"[min(i % 5, 2)], "ground_truth": str(i)} for i in range(40)]
"""8 of a, 8 of b, 24 of c."""
MIX = {"a": 3.0, "b": 1.0}


def make_stream(path: Path, tokenizer: PreTrainedTokenizerFast, seed: int = 0, **fields: Any) -> TaskStream:
    settings: dict[str, Any] = {"eval_share": 0.0, "mix": MIX, **fields}
    config = TaskConfig(prompts=str(path), **settings)
    return TaskStream(config, tokenizer, load_prompts(config), seed=seed)


def rows_of(offers: Sequence[TaskOffer]) -> list[int]:
    return [int(offer.task.ground_truth or "") for offer in offers]


def test_tags_come_in_their_shares_and_others_are_left_out(
    write_rows: WriteRows, small_tokenizer: PreTrainedTokenizerFast
) -> None:
    n = 800
    counts = Counter(offer.task.tag for offer in make_stream(write_rows(ROWS), small_tokenizer).next(n))
    assert set(counts) == {"a", "b"}
    assert abs(counts["a"] - 0.75 * n) < 4 * math.sqrt(n * 0.75 * 0.25)


def test_each_tag_goes_through_all_its_rows_before_any_comes_again(
    write_rows: WriteRows, small_tokenizer: PreTrainedTokenizerFast
) -> None:
    offers = make_stream(write_rows(ROWS), small_tokenizer).next(200)
    for tag in MIX:
        rows = rows_of([offer for offer in offers if offer.task.tag == tag])
        passes = [rows[at : at + 8] for at in range(0, len(rows) - 7, 8)]
        own = {i for i, row in enumerate(ROWS) if row["tag"] == tag}
        assert len(passes) >= 2 and all(set(one) == own for one in passes) and passes[0] != passes[1]


def test_the_order_is_the_seeds_and_a_resumed_stream_goes_on_in_it(
    write_rows: WriteRows, small_tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write_rows(ROWS)
    whole = rows_of(make_stream(path, small_tokenizer).next(60))
    assert rows_of(make_stream(path, small_tokenizer).next(60)) == whole
    assert rows_of(make_stream(path, small_tokenizer, seed=1).next(60)) != whole
    first = make_stream(path, small_tokenizer)
    first.step((), [Settled(o.task.task_id, i, "trained") for o in first.next(23) for i in range(8)])
    state = json.loads(json.dumps(first.state()))
    config = TaskConfig(prompts=str(path), eval_share=0.0, mix=MIX)
    second = TaskStream.from_state(config, small_tokenizer, load_prompts(config), seed=0, state=state)
    assert rows_of(second.next(37)) == whole[23:]


def test_a_run_does_not_go_on_with_another_mix(write_rows: WriteRows, small_tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_rows(ROWS)
    state = make_stream(path, small_tokenizer).state()
    config = TaskConfig(prompts=str(path), eval_share=0.0, mix={"a": 1.0, "b": 1.0})
    with pytest.raises(DataError, match="mix: was"):
        TaskStream.from_state(config, small_tokenizer, load_prompts(config), seed=0, state=state)


def test_rows_held_out_for_evaluation_are_in_no_mix(
    write_rows: WriteRows, small_tokenizer: PreTrainedTokenizerFast
) -> None:
    config = TaskConfig(prompts=str(write_rows(ROWS)), eval_share=0.3, mix=MIX)
    prompts = load_prompts(config)
    rows = rows_of(TaskStream(config, small_tokenizer, prompts, seed=0).next(100))
    assert len(prompts.held_out) and not set(rows) & set(prompts.held_out.tolist())


@pytest.mark.parametrize("key", ["mix", "templates"])
def test_a_tag_that_no_row_has_is_told(
    write_rows: WriteRows, small_tokenizer: PreTrainedTokenizerFast, key: str
) -> None:
    rows = [{**row, "tag": "sums"} for row in ROWS]
    fields: dict[str, Any] = {"mix": {}, key: {"sum": 1.0 if key == "mix" else "{prompt}"}}
    with pytest.raises(DataError, match=rf"tasks\.{key}: no row of .* has the tag 'sum'; did you mean 'sums'"):
        make_stream(write_rows(rows), small_tokenizer, **fields)


# ------------------------------------------------------------------------------------------------ templates


def test_a_template_surrounds_the_prompts_of_its_tag_in_training_and_evaluation(
    write_rows: WriteRows, small_tokenizer: PreTrainedTokenizerFast
) -> None:
    template = "Think of {prompt}. Then {prompt}, {other}!"
    for offer in make_stream(write_rows(ROWS), small_tokenizer, templates={"b": template}).next(40):
        prompt = f"p{offer.task.ground_truth}"
        text = f"Think of {prompt}. Then {prompt}, {{other}}!" if offer.task.tag == "b" else prompt
        assert offer.prompt_ids.tolist() == render_prompt(small_tokenizer, PromptRecord(0, text, None)).tolist()
    records = [PromptRecord(0, "x", None, "b"), PromptRecord(1, "x", None, "a")]
    rendered = render_eval_set(records, small_tokenizer, TaskConfig(templates={"b": "<{prompt}>"})).prompts
    assert len(rendered[0].ids) == len(rendered[1].ids) + 2


def test_a_template_that_cannot_be_rendered_is_found_at_the_start_wherever_its_tag_is(
    write_rows: WriteRows, small_tokenizer: PreTrainedTokenizerFast
) -> None:
    turns = {"messages": [{"role": "user", "content": "x"}], "tag": "late"}
    path = write_rows([*ROWS, turns])
    with pytest.raises(TokenizerError, match=r"line 41: .*templates\.late is for rows with 'prompt'"):
        make_stream(path, small_tokenizer, mix={}, templates={"late": "<{prompt}>"})
