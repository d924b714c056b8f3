"""Whole runs on divergences between distributions: top-k sets from teacher to gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from stillhouse.builtin import STUDENT_DIR, TEACHER_DIR
from stillhouse.protocol.topk_codec import decode_top_k
from stillhouse.recording.reader import Recording
from stillhouse.replay import command as replay
from tests.integration.conftest import Launched
from tests.integration.test_replay import lines
from tests.integration.test_whole_run import assert_balanced
from tests.teachers.tiny_tokenizers import far_model

Launch = Callable[..., Launched]
SETS = ("--teacher.top_k=64", "--actors=1", "--teachers=1", "--learner.eval_every=0")


def test_a_run_trains_on_hidden_states_of_parts_of_rollouts(launch: Launch) -> None:
    """Segments leave before their rollout is over. The learner's log-probs of the sampled tokens, from states and head,
    are the teacher's up to the rounding of bfloat16."""
    hidden = ("--teacher.payload=hidden", "--buffer.release=segment", "--max-staleness=2", "--actor.segment_tokens=16")
    run = launch(*SETS[1:], *hidden, "--divergence=jsd", "--steps=4")
    assert run.wait() == 0, run.text()
    assert_balanced(run.summary())
    rows = run.steps()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(0.0 < row["train/hidden_error"] < 2e-3 and row["train/tokens_unscored"] == 0 for row in rows)
    assert all(0.0 < row["train/divergence"] < 1.0 for row in rows)


def test_the_sets_of_a_run_are_the_students_when_it_sampled(launch: Launch, tmp_path: Path) -> None:
    """Rollouts that the weights of version 0 sampled: at each trained token the recorded ids are the likeliest of the
    built-in student, and the log-probs the built-in teacher's, both by transformers."""
    record = tmp_path / "run.record"
    run = launch(
        *("--divergence=reverse_kl", "--teacher.top_k=20", "--teacher.top_k_of=student", "--teacher.top_mass=0.99"),
        *("--actors=1", "--teachers=1", "--learner.eval_every=0", "--steps=3", f"--record={record}"),
    )
    assert run.wait() == 0, run.text()
    assert_balanced(run.summary())
    assert run.summary()["tokens"]["masked"].get("unscorable", 0) == 0
    assert all(0.0 < row["train/divergence"] < 5.0 and row["train/tokens_unscored"] == 0 for row in run.steps())
    student, teacher = (AutoModelForCausalLM.from_pretrained(path) for path in (STUDENT_DIR, TEACHER_DIR))
    n_compared = 0
    with Recording(record) as recording:
        for batch in recording.batches:
            for item, (ids, _, mask, _, *payloads), _ in recording.rollouts(batch):
                if any(span.version.step for span in item.spans):
                    continue
                with torch.no_grad():
                    read = torch.from_numpy(ids.copy()).long()[None]
                    p_LV, q_LV = (model(input_ids=read).logits[0].log_softmax(-1) for model in (student, teacher))
                bytes_, at = payloads[0].tobytes(), 0
                for piece in item.top_k:
                    top = decode_top_k(bytes_[at : at + piece.n_bytes])
                    at += piece.n_bytes
                    told_ids, told = top.padded()
                    for row, t in enumerate(range(piece.start, piece.end)):
                        if not mask[t]:
                            continue
                        n = int(top.counts_T[row])
                        likeliest = p_LV[t - 1].sort(descending=True)
                        assert set(told_ids[row, :n].tolist()) == set(likeliest.indices[:n].tolist())
                        mass = float(likeliest.values[:n].exp().sum())
                        assert n == 20 or mass >= 0.99 - 1e-4
                        assert n == 1 or mass - float(likeliest.values[n - 1].exp()) < 0.99 + 1e-4
                        exact = q_LV[t - 1, told_ids[row, :n]].clamp(min=-40).numpy()
                        np.testing.assert_allclose(told[row, :n], exact, atol=0.05)
                        n_compared += 1
    assert n_compared > 500


def test_a_run_trains_on_parts_of_rollouts_that_a_teacher_with_another_tokenizer_scores(
    launch: Launch, tmp_path: Path
) -> None:
    """A replay makes the same updates, and by the sampled text alone, others."""
    other = ("--teacher.tokenizer=other", f"--models.teacher={far_model(tmp_path)}", "--divergence=reverse_kl")
    parts = ("--buffer.release=segment", "--max-staleness=2", "--actor.segment_tokens=16")
    run = launch(*SETS, *other, *parts, "--steps=3")
    assert run.wait() == 0, run.text()
    assert_balanced(run.summary())
    assert run.summary()["tokens"]["masked"].get("unscorable", 0) == 0
    rows = run.steps()
    assert all(0.0 < row["train/tokens_unscored"] < 0.3 * row["train/tokens"] for row in rows)
    assert all(row["train/reverse_kl"] > 1.0 for row in rows)
    weights = Path("checkpoints", "step_000003", "model.safetensors")
    for flags, same in (((), True), (("--objective=k1",), False)):
        again = tmp_path / f"again-{len(flags)}"
        assert replay.main([str(run.record), f"--run-dir={again}", *flags]) == 0
        assert ((again / weights).read_bytes() == (run.run_dir / weights).read_bytes()) is same
        assert lines(again)[0]["train/reverse_kl"] == rows[0]["train/reverse_kl"]
