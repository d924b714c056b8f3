"""`stillhouse replay`: what it refuses and how it says so, what it prints, and Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from stillhouse import builtin
from stillhouse.engines.base import ScoreOptions, ScoreRequest
from stillhouse.engines.torch.scorer import TorchScorer
from stillhouse.launch.checks.model_files import read_vocabulary
from stillhouse.launch.checks.preflight import check, check_recorded
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.errors import ConfigError
from stillhouse.protocol.handshake import vocab_fingerprint
from stillhouse.protocol.messages import TopKPiece
from stillhouse.protocol.payloads.aligned import END, encode_aligned
from stillhouse.protocol.payloads.hidden import encode_hidden
from stillhouse.recording.format import RecordedRollout, Writer
from stillhouse.recording.reader import Recording
from stillhouse.replay import command as replay
from stillhouse.teachers.config import TeacherConfig
from tests.learner.records import record, rollout
from tests.patience import RUN_PATIENCE_S, Limit

ROOT = Path(__file__).parents[2]
vocabulary = read_vocabulary(builtin.STUDENT_DIR / "tokenizer.json")
assert vocabulary is not None
FINGERPRINT = vocab_fingerprint(vocabulary)


def plain(**learner: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "steps": 3,
        "launch": {"threads_per_worker": 1},
        "learner": {"eval_every": 0, "warmup_steps": 0, "lr": 1e-3} | learner,
    }
    return msgspec.to_builtins(build(RunConfig, settings))


def recorded(path: Path, *, writer: Writer = "student", fingerprint: str = FINGERPRINT, n: int = 3) -> Path:
    batches: Sequence[Sequence[RecordedRollout]] = [[rollout(f"r{b}-{i}", 8) for i in range(4)] for b in range(n)]
    return record(path, batches, writer=writer, vocab_fingerprint=fingerprint, config=plain())


def test_columns_of_prompts_do_not_matter_where_no_prompts_are_read(tmp_path: Path) -> None:
    file, columns = recorded(tmp_path / "a.record"), "--learner.tasks.columns.ground_truth=answer"
    with Recording(file) as recording:
        assert not replay.prepare(replay.parse([str(file), columns]), recording)[0].learner.tasks.columns


# ------------------------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "file of recorded batches first"),
        (["--epochs=3"], "file of recorded batches first"),
        (["FILE", "--epochs=0"], "--epochs: got '0'"),
        (["FILE", "--order=random"], "expected one of recorded, shuffled"),
        (["FILE", "--learner.lrr=1"], r"learner.lrr: unknown key; did you mean learner.lr"),
        (["FILE", "--resume", "--run-dir=gone"], "gone holds no replay"),
        (["FILE", "--resume"], "runs/latest does not exist"),
        (["FILE", "--objective", "k9"], "divergence = 'k9'"),
        (["FILE", "--learner.objective.importance=seldom"], "importance = 'seldom'"),
        (["FILE", "--student=/nowhere"], "models.student: no folder"),
        (["FILE", "--learner.objective.divergence=jsd"], r"expected one above 0, e\.g\. 256"),
        (["FILE", "--learner.objective.divergence=jsd", "--teacher.top_k=256"], "holds no top-k sets"),
        (["nothing.record"], "no file 'nothing.record'"),
    ],
)
def test_mistakes_are_told_before_anything_is_made(
    flags: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = recorded(tmp_path / "FILE")
    assert replay.main(flags) == 2
    assert re.search(expected, capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == [file]


def test_a_students_vocabulary_that_is_not_the_files_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = recorded(tmp_path / "r", fingerprint="cd" * 32)
    assert replay.main([str(file), f"--run-dir={tmp_path / 'run'}"]) == 2
    assert "another vocabulary" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_the_recorded_runs_configuration_is_what_a_replay_begins_with(tmp_path: Path) -> None:
    file = recorded(tmp_path / "r")
    assert replay.main([str(file), f"--run-dir={tmp_path / 'run'}", "--divergence", "k3", "--epochs", "2"]) == 0
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert "divergence:\n" in config and 'name: "k3"' in config and "lr: 0.001" in config and "steps: 6" in config
    account = json.loads((tmp_path / "run" / "replay.json").read_text())
    assert (account["steps"], account["tokens_trained"], account["eval"]) == (6, 2 * 3 * 4 * 8, [])
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["replay/epoch"], row["replay/recorded_step"]) for row in rows] == [
        (epoch, step) for epoch in (0, 1) for step in (1, 2, 3)
    ]


def test_a_recording_with_a_key_of_another_release_is_refused_by_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = plain()
    config["learner"]["publish"] = {"verify": "reload"}
    batches = [[rollout(f"r{i}", 8) for i in range(4)]]
    file = record(tmp_path / "r", batches, vocab_fingerprint=FINGERPRINT, config=config)
    assert replay.main([str(file), f"--run-dir={tmp_path / 'run'}"]) == 2
    err = capsys.readouterr().err
    assert "learner.publish: unknown key" in err and str(file) in err, err
    assert not (tmp_path / "run").exists()


def test_keys_of_another_release_that_are_about_processes_are_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = plain()
    config["launch"]["gone"] = 1
    config["cluster"]["actors"]["gone"] = {"also": 2}
    file = record(
        tmp_path / "r", [[rollout(f"r{i}", 8) for i in range(4)]], vocab_fingerprint=FINGERPRINT, config=config
    )
    assert replay.main([str(file), f"--run-dir={tmp_path / 'run'}"]) == 0
    assert "are left out: cluster.actors.gone, launch.gone" in capsys.readouterr().err


def with_hidden_states(path: Path, teacher: Path) -> Path:
    """A recording of the demo's kind: the built-in student's rollouts, with the states of a teacher."""
    scorer = TorchScorer.load(teacher, TeacherConfig(payload="hidden"))
    made: list[RecordedRollout] = []
    for i in range(4):
        item, (ids, *others, _) = rollout(f"r{i}", 8)[:2]
        (scores,) = scorer.score([ScoreRequest(ids, 2)], ScoreOptions(hidden=True))
        assert scores.hidden is not None
        payload = np.frombuffer(encode_hidden(scores.hidden, scorer.head_identity), np.uint8)
        item = msgspec.structs.replace(item, top_k=(TopKPiece(0, 2, 10, len(payload)),))
        sent = np.concatenate([np.zeros(2, np.float32), scores.logprobs])[None]
        made.append(RecordedRollout(item, (ids, *others, sent, payload)))
    settings = plain(objective={"divergence": {"name": "reverse_kl"}})
    settings["teacher"]["payload"], settings["models"]["teacher"] = "hidden", str(teacher)
    return record(path, [made] * 2, vocab_fingerprint=FINGERPRINT, config=settings)


def test_hidden_states_meet_the_head_of_the_recorded_teacher_or_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where nothing is evaluated. Then the teacher's folder gets another head."""
    teacher = tmp_path / "teacher"
    shutil.copytree(builtin.TEACHER_DIR, teacher)
    file = with_hidden_states(tmp_path / "r", teacher)
    assert replay.main([str(file), f"--run-dir={tmp_path / 'run'}"]) == 0, capsys.readouterr().err
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 2 and all(0 < row["train/hidden_error"] < 0.02 for row in rows)
    weights = load_file(teacher / "model.safetensors")
    save_file(
        weights | {"lm_head.weight": weights["model.embed_tokens.weight"] * 1.01},
        teacher / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(ValueError, match="belong to the output head"):
        replay.main([str(file), f"--run-dir={tmp_path / 'other'}"])
    shutil.rmtree(teacher)
    assert replay.main([str(file), f"--run-dir={tmp_path / 'sampled'}", "--objective=k1"]) == 0, "no head is needed"
    assert (
        replay.main([str(file), f"--run-dir={tmp_path / 'third'}"]) == 2 and "models.teacher" in capsys.readouterr().err
    )


def test_scores_of_a_teacher_with_another_tokenizer_are_replayed_and_are_no_sets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    item, arrays = rollout("r", 8)[:2]
    payload = np.frombuffer(encode_aligned(np.full(8, END, np.uint8)), np.uint8)
    item = msgspec.structs.replace(item, top_k=(TopKPiece(0, 2, 10, len(payload)),))
    settings = plain()
    settings["teacher"]["tokenizer"] = "other"
    scored = [RecordedRollout(item, (*arrays, payload))]
    file = str(record(tmp_path / "r", [scored], vocab_fingerprint=FINGERPRINT, config=settings))
    sets = ("--objective=reverse_kl", "--teacher.top_k=64")
    assert replay.main([file, f"--run-dir={tmp_path / 'run'}"]) == 0
    assert replay.main([file, f"--run-dir={tmp_path / 'other'}", *sets]) == 2
    assert "holds no top-k sets" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_ends_after_a_step_with_its_checkpoint(tmp_path: Path) -> None:
    file, folder, output = recorded(tmp_path / "r"), tmp_path / "run", tmp_path / "out"
    flags = [f"--run-dir={folder}", "--objective=k3", "--epochs=1000000", "--learner.checkpoint_every=0"]
    with output.open("wb") as out:
        replaying = subprocess.Popen(
            [sys.executable, "-m", "stillhouse.launch.cluster", "replay", str(file), *flags],
            cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        try:
            limit = Limit(RUN_PATIENCE_S)
            while "\nstep " not in output.read_text():
                assert replaying.poll() is None and not limit.passed, output.read_text()
                time.sleep(0.05)
            replaying.send_signal(signal.SIGINT)
            assert replaying.wait(RUN_PATIENCE_S) == 130, output.read_text()
        finally:
            replaying.kill()
            replaying.wait(RUN_PATIENCE_S)
    account = json.loads((folder / "replay.json").read_text())
    assert account["reason"] == "stopped by SIGINT" and account["steps"] >= 1
    assert (folder / "checkpoints" / f"step_{account['steps']:06d}" / "manifest.json").is_file()
    assert json.loads((folder / "run.json").read_text())["state"] == "stopped"
    assert 'name: "k3"' in (folder / "config.yaml").read_text()


# ------------------------------------------------------------------------------- before a run that records or mixes


def mistakes(resume: bool = False, **learner: Any) -> str:
    config = check(build(RunConfig, {"learner": learner})).config
    try:
        check_recorded(config, resume=resume)
    except ConfigError as error:
        return str(error)
    return ""


def test_files_and_objectives_of_a_run_are_looked_at_before_it_starts(tmp_path: Path) -> None:
    own, theirs = recorded(tmp_path / "own"), recorded(tmp_path / "theirs", writer="teacher")
    foreign = recorded(tmp_path / "foreign", writer="teacher", fingerprint="cd" * 32)

    def mixed(file: Path, fraction: float = 0.5) -> dict[str, Any]:
        return {"offline": {"file": str(file), "student_fraction": fraction}}

    assert mistakes(record=str(tmp_path / "new")) == mistakes(**mixed(theirs)) == ""
    assert "holds another run's batches" in mistakes(record=str(own))
    assert mistakes(resume=True, record=str(own)) == ""
    assert "was written by the student" in mistakes(**mixed(own))
    assert "belong to another vocabulary" in mistakes(**mixed(foreign))
    assert "no file" in mistakes(**mixed(tmp_path / "gone"))
    assert "trains on the file alone" in mistakes(**mixed(theirs, 0.0))
    assert "teaches nothing on the student's own tokens" in mistakes(
        objective={"divergence": "seq_kd", "importance": "none"}
    )
