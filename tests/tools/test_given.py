"""Text that is there as a recording: which tokens are trained, what the teacher says of them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from stillhouse.builtin import STUDENT_DIR, TEACHER_DIR
from stillhouse.launch.errors import WRONG_CONFIG_EXIT_CODE
from stillhouse.learner.objectives.config import ObjectiveConfig, OfflineConfig
from stillhouse.learner.objectives.registry import DIVERGENCE
from stillhouse.learner.offline import OfflineMixer, offline_item
from stillhouse.models.head_file import load_head
from stillhouse.models.loading import load_causal_lm
from stillhouse.models.tokenizer import load_tokenizer
from stillhouse.protocol.payloads.hidden import decode_hidden
from stillhouse.protocol.topk_codec import decode_top_k
from stillhouse.recording.format import RecordError
from stillhouse.recording.reader import Recording
from stillhouse.replay.command import main as replay
from stillhouse.tools.write import command as write

ROWS = [
    {"prompt": "1+2=", "response": "3"},
    {"messages": [
        {"role": "user", "content": "1+2="}, {"role": "assistant", "content": "33"},
        {"role": "user", "content": "2+5="}, {"role": "assistant", "content": "7"},
    ]},
    {"prompt": "4+5=", "response": "9" * 40},
    {"prompt": "4+6=", "response": "10", "tag": "sum"},
]  # fmt: skip


def written(folder: Path, *keys: str) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    fixed = ("--buffer.batch_rollouts=2", "--learner.tasks.max_new_tokens=20", "--learner.tasks.shuffle=false")
    assert write.main([str(folder / "f"), "--from", str(folder / "rows.jsonl"), *fixed, *keys]) == 0
    return folder / "f"


def test_the_answers_are_trained_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = load_tokenizer(STUDENT_DIR)
    with Recording(written(tmp_path)) as recording:
        assert (
            "3 sequences of 4 rows in 2 batches, 10 tokens to train, not scored; rows dropped: 1, 1 answer_too_long"
            in (capsys.readouterr().out)
        )
        assert recording.header.writer == "data" and len(recording.batches) == 2
        items = [offline_item(one) for batch in recording.batches for one in recording.rollouts(batch)]
        shown = [tokenizer.decode(item.tokens_L[item.train_mask_L].tolist()) for item in items]
        assert shown == ["3<|im_end|>", "33<|im_end|>7<|im_end|>", "10<|im_end|>"]
        assert [item.item.tag for item in items] == ["", "", "sum"]
        assert not any(item.behaviour_L.any() or item.teacher_ML.any() for item in items)
        taken = OfflineMixer(recording, OfflineConfig(file="f", student_fraction=0.5), seed=0).take(10)
        assert sum(item.n_trained for _, item in taken) == 10
        for name in ("k1", "forward_kl"):
            config = OfflineConfig(file="f", student_fraction=0.5, divergence=DIVERGENCE.make(name))
            with pytest.raises(RecordError, match=r"is not known: got divergence = 'k1'|no top-k sets"):
                OfflineMixer(recording, config, seed=0)


def test_the_teacher_s_distributions_are_those_of_its_model(tmp_path: Path) -> None:
    model = load_causal_lm(TEACHER_DIR, device="cpu", dtype="float32", attention="sdpa")
    with Recording(written(tmp_path, f"--teacher={TEACHER_DIR}", "--teacher.top_k=8")) as recording:
        for batch in recording.batches:
            for rollout in recording.rollouts(batch):
                item = offline_item(rollout)
                ids = torch.tensor(item.tokens_L.astype(np.int64))[None]
                with torch.no_grad():
                    logprobs_LV = torch.log_softmax(model(ids).logits[0].double(), -1).numpy()
                at = 0
                for piece in item.item.top_k:
                    top_ids_TK, top_TK = decode_top_k(item.payloads[at : at + piece.n_bytes].tobytes()).padded()
                    at += piece.n_bytes
                    for row, place in enumerate(range(piece.start, piece.end)):
                        assert item.train_mask_L[place]
                        expected = logprobs_LV[place - 1]
                        np.testing.assert_allclose(item.teacher_ML[0, place], expected[item.tokens_L[place]], atol=1e-4)
                        assert top_ids_TK[row, top_TK[row].argmax()] == expected.argmax()
                        np.testing.assert_allclose(top_TK[row].max(), expected.max(), atol=5e-3)
                assert sum(piece.end - piece.start for piece in item.item.top_k) == item.n_trained
        OfflineMixer(
            recording,
            OfflineConfig(file="f", student_fraction=0.5, divergence=DIVERGENCE.make("forward_kl")),
            seed=0,
        )


def test_hidden_states_can_be_written_and_sets_of_a_student_that_samples_nothing_cannot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = load_head(TEACHER_DIR, device="cpu", dtype="float32")
    with Recording(written(tmp_path, f"--teacher={TEACHER_DIR}", "--teacher.payload=hidden")) as recording:
        item = offline_item(next(iter(recording.rollouts(recording.batches[0]))))
    (piece,) = item.item.top_k
    bits_TH = decode_hidden(item.payloads.tobytes())
    states_TH = torch.from_numpy(bits_TH.view(np.int16).copy()).view(torch.bfloat16).float()
    logprobs_TV = torch.log_softmax(head.logits(states_TH), dim=1)
    sampled_T = torch.from_numpy(item.tokens_L[piece.start : piece.end].astype(np.int64))
    got_T = logprobs_TV.gather(1, sampled_T[:, None])[:, 0]
    np.testing.assert_allclose(item.teacher_ML[0, piece.start : piece.end], got_T, atol=0.02)
    students = ["--teacher.top_k=8", "--teacher.top_k_of=student"]
    assert (
        write.main([str(tmp_path / "g"), "--from", str(tmp_path / "rows.jsonl"), *students]) == WRONG_CONFIG_EXIT_CODE
    )
    assert "teacher.top_k_of: got student, but --from samples nothing" in capsys.readouterr().err


def test_a_replay_of_text_that_is_there_takes_cross_entropy_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(written(tmp_path))
    assert ObjectiveConfig().divergence.name == "k1"
    assert replay([file, "--objective", "k1", "--learner.eval_every=0"]) == WRONG_CONFIG_EXIT_CODE
    assert "got divergence = 'k1' with importance = 'none', expected seq_kd" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--from"], ["--from", "nowhere.jsonl"]])
def test_rows_that_are_not_there_are_refused(tmp_path: Path, words: list[str]) -> None:
    assert write.main([str(tmp_path / "f"), *words]) == WRONG_CONFIG_EXIT_CODE
    assert not (tmp_path / "f").exists()


def test_a_text_that_only_teachers_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    words = [str(tmp_path / "f"), "--from", str(tmp_path / "rows.jsonl"), "--learner.tasks.privileged=Be short. "]
    assert write.main(words) == WRONG_CONFIG_EXIT_CODE
    assert "learner.tasks.privileged: got a text that only teachers read" in capsys.readouterr().err
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize("kind", ["jsonl", "txt", "parquet"])
def test_documents_are_trained_as_a_whole_each_token_once(tmp_path: Path, kind: str) -> None:
    """In pieces of at most max_new_tokens, with the end of the text. The built-in tokenizer puts nothing before a text,
    so nothing predicts its first token."""
    texts = ["1+2=3;4+5=9;" * 9, "7"] if kind != "txt" else ["1+2=3;4+5=9;" * 9]
    file = tmp_path / f"documents.{kind}"
    if kind == "txt":
        file.write_text(texts[0])
    elif kind == "jsonl":
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    else:
        pyarrow = pytest.importorskip("pyarrow", reason="extra data")
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"text": texts}), file)
    keys = ("--buffer.batch_rollouts=2", "--learner.tasks.max_new_tokens=20", "--learner.tasks.shuffle=false")
    record = tmp_path / "documents.record"
    assert write.main([str(record), "--from", str(file), *keys]) == 0
    tokenizer = load_tokenizer(STUDENT_DIR)
    whole = [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in texts]
    with Recording(record) as recording:
        items = [offline_item(one) for batch in recording.batches for one in recording.rollouts(batch)]
        for row, ids in enumerate(whole):
            own = [item for item in items if item.item.task_id == row]
            assert [token for item in own for token in item.tokens_L[item.train_mask_L].tolist()] == ids[1:]
            assert all(item.n_trained <= 20 and item.train_mask_L[1:].all() for item in own)
            before = [ids[0], *(int(item.tokens_L[-1]) for item in own)]
            assert [int(item.tokens_L[0]) for item in own] == before[:-1]
    if kind == "jsonl":
        assert replay([str(record), f"--run-dir={tmp_path / 'run'}", "--learner.eval_every=0"]) == 0


def test_rows_without_any_text_say_what_was_expected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"content": "1"}) + "\n")
    assert write.main([str(tmp_path / "f"), "--from", str(tmp_path / "rows.jsonl")]) == WRONG_CONFIG_EXIT_CODE
    assert "turns of the assistant, or 'text' (a document)" in capsys.readouterr().err
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": " "}) + "\n")
    assert write.main([str(tmp_path / "f"), "--from", str(tmp_path / "rows.jsonl")]) == WRONG_CONFIG_EXIT_CODE
    assert "'text' is blank" in capsys.readouterr().err
