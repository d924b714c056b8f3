"""A checkpoint is whole or not there, whenever its writer dies; what was saved comes back bit for bit."""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from stillhouse.launch.checks.model_files import find_model
from stillhouse.learner.checkpoints import checkpoint
from stillhouse.learner.checkpoints import files as checkpoint_files
from stillhouse.learner.checkpoints.checkpoint import LearnerState, capture_rng, load_checkpoint
from stillhouse.learner.checkpoints.files import CheckpointError, NoneUsable, damaged, go_on_from, latest, newest, prune
from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.step.train_step import Trainer
from stillhouse.models.loading import load_causal_lm
from stillhouse.models.packed import choose_way
from stillhouse.protocol.messages import Ledger, LedgerCounts, WeightVersion
from tests.full_disk import small_disk
from tests.learner.checkpoints.saving import save_checkpoint
from tests.learner.conftest import build_hybrid, make_item, tiny_student, word_tokenizer
from tests.patience import PATIENCE_S
from tests.power_cut import PowerCut

Save = Callable[..., Path]


@pytest.fixture
def trainer(request: pytest.FixtureRequest) -> Trainer:
    model: PreTrainedModel = getattr(request, "param", tiny_student)()
    choose_way(model)
    model.generation_config = GenerationConfig(eos_token_id=[1, 5])
    trainer = Trainer(model, LearnerConfig(), total_steps=100)
    trainer.step([make_item("a", [0, 1, 1])])
    return trainer


def _ledger() -> Ledger:
    counts = LedgerCounts(accepted=9, trained=4, masked={"stale": 2}, dropped={"run_ended": 1}, waiting=1, in_flight=1)
    return Ledger(counts, counts, counts, {"nan_logprob": 3}, counts)


def _state(trainer: Trainer, step: int, epoch: int = 0) -> LearnerState:
    return LearnerState(
        version=WeightVersion(epoch, step),
        optimizer=trainer.state_dict(),
        tasks={"format": 1, "next_task_id": 12, "outstanding": [{"task_id": 3, "prompt": [1, 2]}]},
        ledger=_ledger(),
        rng=capture_rng(),
        metrics={"loss": 0.25, "reverse_kl": float("nan")},
        ema={"w": torch.arange(3.0)},
        value_head={"head/linear.weight": torch.arange(4.0)},
    )


@pytest.fixture
def save(trainer: Trainer, tmp_path: Path) -> Save:
    def write(step: int, *, epoch: int = 0, keep: int = 9) -> Path:
        state = _state(trainer, step, epoch)
        return save_checkpoint(tmp_path, trainer.model, word_tokenizer(), state, keep=keep)

    return write


def test_everything_comes_back(save: Save, trainer: Trainer, tmp_path: Path) -> None:
    random.seed(5)
    state = _state(trainer, 40)
    path = save(40)
    assert path == tmp_path / "step_000040" and latest(tmp_path) == (path, WeightVersion(0, 40), ())
    loaded = load_checkpoint(path)
    assert (loaded.version, loaded.tasks, loaded.ledger, loaded.rng) == (
        state.version,
        state.tasks,
        state.ledger,
        state.rng,
    )
    assert loaded.metrics == {"loss": 0.25, "reverse_kl": None}
    assert loaded.ema.keys() == {"w"} and torch.equal(loaded.ema["w"], state.ema["w"])
    assert loaded.value_head.keys() == state.value_head.keys()
    assert all(torch.equal(loaded.value_head[name], tensor) for name, tensor in state.value_head.items())
    assert loaded.optimizer.steps_done == 1 and loaded.optimizer.tensors.keys() == state.optimizer.tensors.keys()
    assert all(torch.equal(loaded.optimizer.tensors[k], v) for k, v in state.optimizer.tensors.items())


def test_folder_is_a_hugging_face_model_by_itself(save: Save, trainer: Trainer) -> None:
    path = save(40)
    assert find_model("models.teacher", str(path)) == path, "an earlier student may teach"
    model = AutoModelForCausalLM.from_pretrained(path)
    for (name, a), (_, b) in zip(trainer.model.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert model.generation_config.eos_token_id == [1, 5]
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer.get_vocab() == word_tokenizer().get_vocab() and tokenizer.chat_template
    assert not [p.name for p in path.iterdir() if p.suffix in {".pt", ".bin", ".pkl", ".pth"}]


@pytest.mark.parametrize("trainer", [tiny_student, build_hybrid, partial(build_hybrid, num_experts=4)], indirect=True)
def test_resumed_run_goes_on_exactly(save: Save, trainer: Trainer) -> None:
    path = save(1)
    model = load_causal_lm(path, device="cpu", dtype="float32", attention="packed", train=True)
    resumed = Trainer(model, LearnerConfig(), total_steps=100)
    resumed.load_state_dict(load_checkpoint(path).optimizer)
    batch = [make_item("b", [0, 0, 1, 1, 1])]
    one, other = trainer.step(batch).as_dict(), resumed.step(batch).as_dict()
    assert {**one, "step_s": 0} == {**other, "step_s": 0} and resumed.steps_done == 2
    for (name, a), (_, b) in zip(trainer.model.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_only_the_newest_are_kept(save: Save, tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(step, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000030", "step_000040"]
    with pytest.raises(ValueError, match="keep 0"):
        prune(tmp_path, keep=0)


def test_abandoned_branch_does_not_hide_the_new_one(save: Save, tmp_path: Path) -> None:
    """Epoch 1 went back from step 50 to step 40 and on: its step 50 is newer than the old one, and both stay whole."""
    save(50)
    path = save(50, epoch=1)
    assert path.name == "step_000050_epoch_1"
    assert latest(tmp_path).version == WeightVersion(1, 50) and load_checkpoint(path).version.epoch == 1
    save(45, epoch=2)
    assert latest(tmp_path).version == WeightVersion(2, 45)


def test_version_that_is_there_already_is_left_as_it_is_unless_it_is_broken(save: Save, tmp_path: Path) -> None:
    path = save(10)
    before = (path / "manifest.json").stat().st_mtime_ns
    assert save(10) == path and (path / "manifest.json").stat().st_mtime_ns == before
    (path / "trainer.json").unlink()
    assert save(10) == path and latest(tmp_path).path == path
    assert [aside.name for aside in damaged(tmp_path)] == ["damaged-step_000010"]
    (path / "trainer.json").unlink()
    assert save(10) == path and latest(tmp_path).path == path
    for aside in damaged(tmp_path):
        assert (aside / "model.safetensors").is_file(), "somebody may still want what is left of it"
    assert len(damaged(tmp_path)) == 2


def _truncate(path: Path) -> str:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    return "model.safetensors has .* bytes, its manifest says"


def _flip(path: Path) -> str:
    content = bytearray((path / "optimizer.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "optimizer.safetensors").write_bytes(content)
    return "optimizer.safetensors has changed"


def _remove(path: Path) -> str:
    (path / "trainer.json").unlink()
    return "trainer.json is missing"


def _no_manifest(path: Path) -> str:
    (path / "manifest.json").unlink()
    return "has no manifest.json"


def _torn_manifest(path: Path) -> str:
    (path / "manifest.json").write_text('{"format": 1')
    return "manifest.json cannot be read"


def _newer_format(path: Path) -> str:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    return "has format 99"


@pytest.mark.parametrize("spoil", [_truncate, _flip, _remove, _no_manifest, _torn_manifest, _newer_format])
def test_unusable_checkpoint_is_skipped_with_its_reason(
    save: Save, tmp_path: Path, spoil: Callable[[Path], str]
) -> None:
    good, bad = save(10), save(20)
    message = spoil(bad)
    found = latest(tmp_path)
    assert found.path == good and [skipped.path for skipped in found.skipped] == [bad]
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(bad)


@pytest.mark.parametrize("spoil", [_truncate, _remove, _no_manifest, _torn_manifest, _newer_format])
def test_what_is_damaged_is_never_deleted_and_never_counts_as_one_of_the_newest(
    save: Save, tmp_path: Path, spoil: Callable[[Path], str]
) -> None:
    older, bad = save(10), save(20)
    spoil(bad)
    assert newest(tmp_path) == older
    newer = save(30, keep=2)
    assert sorted(tmp_path.iterdir()) == [older, bad, newer]
    newest_of_all = save(40, keep=2)
    assert sorted(tmp_path.iterdir()) == [bad, newer, newest_of_all]


def test_a_run_of_which_every_checkpoint_is_damaged_is_not_begun_anew(save: Save, tmp_path: Path) -> None:
    paths = [save(10), save(20)]
    for path in paths:
        _truncate(path)
    with pytest.raises(NoneUsable) as refused:
        go_on_from(tmp_path)
    assert [skipped.path for skipped in refused.value.damaged] == paths[::-1]
    assert all(f"checkpoint {path} is damaged: " in str(refused.value) for path in paths)
    assert "put one back from a copy" in str(refused.value)


def test_without_a_finished_checkpoint_a_run_is_begun_anew(tmp_path: Path) -> None:
    assert latest(tmp_path / "none") == go_on_from(tmp_path / "none") == (None, None, ())
    (tmp_path / ".tmp-step_000010-1-ab").mkdir()  # its writer was killed: it never was one
    assert go_on_from(tmp_path).path is None


def test_failed_write_leaves_no_trace(save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = save(10)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save(20)
    assert list(tmp_path.iterdir()) == [good] and latest(tmp_path).path == good


@pytest.mark.parametrize("size_kib", [4, 12, 20, 28, 36, 44, 60])
def test_a_full_disk_is_an_os_error_and_leaves_no_trace(trainer: Trainer, tmp_path: Path, size_kib: int) -> None:
    """Whichever file it is that does not fit: some are written by Python, some by Rust, with errors of their own."""
    with small_disk(tmp_path / "disk", size_kib << 10) as disk:
        root = disk / "checkpoints"
        with pytest.raises(OSError, match="No space left on device") as told:
            save_checkpoint(root, trainer.model, word_tokenizer(), _state(trainer, 20), keep=1)
        assert told.value.errno == errno.ENOSPC
        assert not root.exists() or list(root.iterdir()) == []


def test_a_checkpoint_is_not_lost_because_an_older_one_cannot_be_deleted(
    save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stuck(_: Path) -> None:
        raise OSError(16, "Device or resource busy")

    save(10)
    monkeypatch.setattr(checkpoint_files, "_delete", stuck)
    newer = save(20, keep=1)
    assert latest(tmp_path).path == newer
    assert "could not be deleted" in caplog.text


def test_launcher_and_buffer_look_for_checkpoints_without_torch() -> None:
    """The buffer of a resumed run starts as fast as that of a new one."""
    code = (
        "import sys, stillhouse.launch.run, stillhouse.launch.workers.roles\n"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ---------------------------------------------------------------------------------------------- sudden death

FORK = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
CALLS = ("fsync", "rename", "rmdir", "unlink")


def _die_at(call: int, save: Save) -> None:
    """In the child: save step 20, and get SIGKILL just before the given one of the file-system calls that matter."""
    torch.set_num_threads(1)
    calls = itertools.count()

    def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return counted

    for name in CALLS:
        setattr(os, name, deadly(getattr(os, name)))
    save(20, keep=1)


def _in_child(target: Callable[..., None], *args: Any) -> Any:
    child = multiprocessing.get_context("fork").Process(target=target, args=args)
    child.start()
    return child


@FORK
def test_kill_before_any_file_system_call_leaves_a_usable_checkpoint(save: Save, tmp_path: Path) -> None:
    """keep=1: the writer also deletes the former checkpoint, and may die at any point of that too. Every third call:
    each one is looked at below, without a process."""
    outcomes: list[int] = []
    for call in range(0, 200, 3):
        save(10)
        child = _in_child(_die_at, call, save)
        child.join(PATIENCE_S)
        found = latest(tmp_path)
        assert found.path is not None and found.version is not None, f"nothing usable after dying at call {call}"
        assert not [s for s in found.skipped if not s.path.name.startswith(".tmp-")], found.skipped
        load_checkpoint(found.path)
        outcomes.append(found.version.step)
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
        shutil.rmtree(tmp_path / "step_000020", ignore_errors=True)
    assert outcomes == sorted(outcomes) and outcomes[0] == 10 and outcomes[-1] == 20 and len(outcomes) > 10
    assert [p.name for p in tmp_path.iterdir()] == ["step_000020"], "leftovers of the killed were not swept away"


# ---------------------------------------------------------------------------------------------- loss of power


def test_loss_of_power_at_any_call_leaves_a_usable_checkpoint(
    save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A killed process leaves what it wrote to the system's cache; without power only what was flushed is left."""
    steps: list[int] = []

    def left_step() -> int:
        there = tmp_path_factory.mktemp("left") / "checkpoints"
        power.copy(tmp_path, there)
        found = latest(there)
        assert found.path is not None and found.version is not None, f"nothing usable is left: {found.skipped}"
        load_checkpoint(found.path)
        return found.version.step

    power = PowerCut(monkeypatch, lambda: steps.append(left_step()) if saved else None)
    saved = False
    save(10)
    assert left_step() == 10
    saved = True
    save(20, keep=1)
    assert left_step() == 20, "what was reported as saved was not flushed"
    assert steps == sorted(steps) and set(steps) == {10, 20}
    assert [path.name for path in tmp_path.iterdir()] == ["step_000020"]
