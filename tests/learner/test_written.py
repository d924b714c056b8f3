"""What a teacher wrote after a text that the student does not read, recorded after the prompt that it does read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from stillhouse.learner.prompts.config import TaskConfig
from stillhouse.learner.prompts.sample_book import TrainedSample
from stillhouse.learner.prompts.tasks import load_prompts
from stillhouse.learner.written import WrittenStream, with_prompt
from stillhouse.protocol.branches import path_to
from stillhouse.protocol.messages import BatchItem, Branch, TopKPiece, TurnReward, VersionSpan, WeightVersion
from stillhouse.recording.append_file import Unwritten
from stillhouse.recording.format import RecordedRollout
from stillhouse.recording.reader import Recording
from stillhouse.recording.writer import BatchRecorder
from tests.learner.records import add, batch, header, rollout

V = WeightVersion(0, 1)


def written(random: np.random.Generator, old: np.ndarray[Any, Any], **changes: Any) -> RecordedRollout:
    """12 tokens after the prompt: three sampled, environment's text, three sampled, and a branch with two sampled."""
    n, m = len(old), 2
    end = n + 12
    mask = np.zeros(end, np.uint8)
    for begin, stop in ((n, n + 3), (n + 5, n + 8), (n + 10, n + 12)):
        mask[begin:stop] = 1
    item = msgspec.structs.replace(
        BatchItem(
            rollout_id="r", task_id=0, sample_index=0, group_size=1, tag="", teachers=("a", "b"), end=end,
            spans=(VersionSpan(V, 0, n + 4), VersionSpan(V, n + 5, end)), final=True, finish_reason="stop",
            reward=1.0, n_turns=3, branches=(Branch(n + 9, n + 5),), top_k=(TopKPiece(1, n, n + 3, 7),),
            turn_rewards=(TurnReward(n + 3, 0.5), TurnReward(end, 0.5)),
        ),
        **changes,
    )  # fmt: skip
    ids = np.concatenate([old, random.integers(100, 200, 12)]).astype(np.int32)
    behaviour = np.where(mask, -random.exponential(1.0, end), 0.0).astype(np.float32)
    teacher = -random.exponential(1.0, (m, end)).astype(np.float32)
    return RecordedRollout(item, (ids, behaviour, mask, teacher, np.arange(7, dtype=np.uint8)))


@pytest.mark.parametrize(("n_old", "n_new"), [(5, 2), (2, 5), (4, 4)])
def test_every_token_after_the_prompt_keeps_its_numbers(n_old: int, n_new: int) -> None:
    """Token by token, by its distance from the end, which no prompt changes."""
    random = np.random.default_rng(n_old)
    old, new = np.arange(n_old, dtype=np.int32), np.arange(50, 50 + n_new, dtype=np.int32)
    before = written(random, old)
    after = with_prompt(before, old, new)
    assert after is not None
    item, was = after.item, before.item
    ids, mu, mask, q, payload = after.arrays
    assert item.end == len(ids) == len(mu) == len(mask) == q.shape[1] == n_new + 12
    assert ids[:n_new].tolist() == new.tolist() and not mask[:n_new].any() and not q[:, :n_new].any()
    assert [a.dtype for a in after.arrays] == [a.dtype for a in before.arrays]
    for back in range(1, 13):
        for one, other in zip((ids, mu, mask), before.arrays[:3], strict=True):
            assert one[-back] == other[-back]
        assert q[:, -back].tolist() == before.arrays[3][:, -back].tolist()
    assert payload.tolist() == list(range(7))

    def read(one: RecordedRollout, back: int, n_prompt: int) -> list[int]:
        """The tokens after the prompt that are read up to the one `back` from the end."""
        ranges = path_to(one.item.branches, one.item.end - back)
        return [int(one.arrays[0][i]) for begin, stop in ranges for i in range(begin, stop) if i >= n_prompt]

    for back in range(12):
        assert read(after, back, n_new) == read(before, back, n_old)

    def sampled_by(of: BatchItem) -> list[int]:
        """Distances from the end that a span covers, where a token was sampled."""
        covered = {of.end - i for span in of.spans for i in range(span.start, span.end)}
        return sorted(covered & {12 - i for i in (0, 1, 2, 5, 6, 7, 10, 11)})

    assert sampled_by(item) == sampled_by(was) and item.spans[0].start == 0
    assert [(p.teacher, item.end - p.start, item.end - p.end) for p in item.top_k] == [(1, 12, 9)]
    assert [item.end - one.end for one in item.turn_rewards] == [9, 0]
    same = ("rollout_id", "task_id", "teachers", "reward", "n_turns", "finish_reason", "final")
    assert all(getattr(item, name) == getattr(was, name) for name in same)


def test_what_is_behind_another_prompt_is_not_changed_but_left_out() -> None:
    random, old, new = np.random.default_rng(0), np.arange(4, dtype=np.int32), np.arange(2, dtype=np.int32)
    whole = written(random, old)
    assert with_prompt(whole, old, new) is not None
    assert with_prompt(whole, old + 1, new) is None
    for follows in (0, 3):  # a prompt of its own, or one that goes on from inside this one
        branched = written(random, old, branches=(Branch(13, follows),))
        assert with_prompt(branched, old, new) is None
    trained = written(random, old)
    trained.arrays[2][3] = 1
    assert with_prompt(trained, old, new) is None


def test_the_writer_reads_the_teachers_prompt_and_the_file_has_the_students(
    small_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    rows = [{"prompt": "1+1=", "ground_truth": 2}, {"prompt": "1+2=", "tag": "plain"}, {"prompt": "1+3="}]
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\n".join(map(msgspec.json.encode, rows)))
    config = TaskConfig(
        prompts=str(file), privileged="Add. ", privileged_tags={"plain": ""}, chat_template="off", shuffle=False,
        eval_share=0.0, group_size=1,
    )  # fmt: skip
    stream = WrittenStream(config, small_tokenizer, load_prompts(config), seed=0)
    offers = stream.next(3)

    def text(ids: np.ndarray[Any, Any]) -> str:
        return "".join(small_tokenizer.convert_ids_to_tokens(ids.tolist())).replace("Ġ", " ")

    assert [text(offer.frame) for offer in offers] == ["Add. 1+1=", "1+2=", "Add. 1+3="]
    assert [offer.task.teacher_prompt_tokens for offer in offers] == [0, 0, 0]
    again = WrittenStream.from_state(config, small_tokenizer, load_prompts(config), seed=0, state=stream.state())
    assert [text(offer.frame) for offer in again.next(3)] == ["Add. 1+1=", "1+2=", "Add. 1+3="]

    random = np.random.default_rng(1)
    rollouts = [written(random, offer.frame, task_id=offer.task.task_id) for offer in offers]
    rollouts.append(rollout("of another prompt", 3, teachers=("a", "b")))  # task 7, which was never offered
    recorder = BatchRecorder(tmp_path / "r", header(writer="teacher"), Unwritten(), as_read=stream.as_read)
    for step, those in enumerate((rollouts, rollouts[3:])):
        stream.step(
            [TrainedSample(one.item.task_id, 0, one.item.rollout_id, 8) for one in those if one.item.task_id < 3], ()
        )
        add(recorder, *batch(step, those))
    recorder.close()
    with Recording(tmp_path / "r") as recording:
        (kept,) = recording.batches
        texts = [text(one.arrays[0][:-12]) for one in recording.rollouts(kept)]
    assert texts == ["1+1=", "1+2=", "1+3="]
    assert recorder.figures == {
        "record/batches_total": 1.0,
        "record/rollouts_left_out_total": 2.0,
        "record/skipped_nothing_left_total": 1.0,
    }
