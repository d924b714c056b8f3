"""What each rank runs for tests/learner/ranks/test_checkpoints.py, in float64: `write` makes steps and a checkpoint,
`read` goes on from one. Prints one JSON line.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=... python -m tests.learner.ranks.checkpointed write FOLDER"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from stillhouse.learner.checkpoints.checkpoint import Contents, LearnerState, capture_rng, load_checkpoint
from stillhouse.learner.checkpoints.checkpoint import write_checkpoint as write_it
from stillhouse.learner.checkpoints.files import latest, new_draft
from stillhouse.learner.checkpoints.writer import ShareWriter, written_by_others
from stillhouse.learner.config import LearnerConfig, LoraConfig
from stillhouse.learner.ranks.group import ProcessGroup
from stillhouse.learner.step.lora import Adapters
from stillhouse.learner.step.train_step import Trainer
from stillhouse.models.transfer import Shares, rows_of
from stillhouse.protocol.messages import WeightVersion
from tests.learner.conftest import tiny_student, word_tokenizer
from tests.learner.ranks.processes import group_of
from tests.learner.ranks.same_as_one import GAE, PLAIN, TIMEOUT_S, items_of, tensors_of
from tests.learner.settings import learner_config
from tests.learner.step.payload_batches import VOCAB

CASES: Final[dict[str, dict[str, Any]]] = {
    "all weights": {},
    "moments on the host": {"moments": "host"},
    "muon": {"optimizer": "muon"},
    "adapters and value head": {"lora": LoraConfig(rank=2, alpha=4.0), "advantage": GAE, "importance": "ppo"},
}


def trainer_of(config: LearnerConfig, ranks: ProcessGroup, checkpoint: Path | None = None) -> Trainer:
    """As `learner.step.make_trainer` makes one, in float64."""
    model = tiny_student(dtype=torch.float64)
    torch.manual_seed(0)
    adapters = Adapters(model, config.lora, base="tiny") if config.lora.rank else None
    if checkpoint is not None and adapters is not None:
        adapters.load(checkpoint)
    elif checkpoint is not None:
        model.load_state_dict(load_file(checkpoint / "model.safetensors"), strict=False)
        model.tie_weights()
    trainer = Trainer(model, config, total_steps=10, adapters=adapters, vocab_tokens=VOCAB, ranks=ranks)
    if checkpoint is not None:
        state = load_checkpoint(checkpoint, verified=ranks.rank > 0)
        trainer.load_state_dict(state.optimizer)
        trainer.critic.load_state_dict(state.value_head)
    return trainer


def save(trainer: Trainer, writer: ShareWriter, root: Path, step: int) -> str:
    """A checkpoint by all ranks; what became of it, on rank 0."""
    ranks, version = trainer.ranks, WeightVersion(0, step)
    named = [str(new_draft(root, version)) if ranks.rank == 0 else ""]
    dist.broadcast_object_list(named)
    draft = Path(named[0])
    if (staged := trainer.stage(draft)) is None:
        assert not ranks.writes
        return ""
    weights, optimizer = staged
    mine = sum(tensor.numel() for name, tensor in optimizer.tensors.items() if name in optimizer.rows)
    whole = sum(torch.Size(place.shape).numel() for place in optimizer.rows.values())
    assert ranks.mesh.shares == 1 or 0 < mine < whole
    if ranks.rank:
        writer.write(draft, weights, optimizer.shares, adapters=trainer.adapters is not None)
        return ""
    state = LearnerState(version, optimizer, {}, None, capture_rng(), {}, value_head=trainer.critic.state_dict())
    try:
        written = write_it(
            draft,
            Contents.of(state, weights),
            trainer.model,
            word_tokenizer(),
            keep=9,
            adapters=trainer.adapters,
            others=lambda: written_by_others(ranks, draft),
        )
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return written.name


def write(folder: Path, ranks: ProcessGroup) -> dict[str, Any]:
    """Two steps and a checkpoint of each case; what a third step would lead to is for `read` to find."""
    saved: dict[str, Any] = {}
    for name, settings in CASES.items():
        trainer, writer = trainer_of(learner_config(**(PLAIN | settings)), ranks), ShareWriter(ranks)
        for seed in range(2):
            trainer.step(items_of(seed=seed, top_k=False))
        saved[name] = save(trainer, writer, folder / name, 2)
        writer.wait()
    return saved


def read(folder: Path, ranks: ProcessGroup) -> dict[str, Any]:
    """What each case goes on from, compared with the files of the checkpoint, and the sum of all after a third step."""
    found: dict[str, Any] = {}
    for name, settings in CASES.items():
        checkpoint = folder / name / "step_000002"
        trainer = trainer_of(learner_config(**(PLAIN | settings)), ranks, checkpoint)
        saved = load_file(checkpoint / "optimizer.safetensors")
        student = next(file for file in checkpoint.glob("*model.safetensors"))
        own = trainer.adapters.tensors() if trainer.adapters else dict(trainer.model.named_parameters())
        weights, optimizer = Shares.copied(own.items()), trainer.state_dict()  # of ranks that write none, too
        wrong = _different(weights.tensors, weights.rows, load_file(student))
        wrong += _different(optimizer.tensors, optimizer.rows, saved)
        assert all(rows_of(p) is not None for p in trainer.model.parameters())
        trainer.step(items_of(seed=2, top_k=False))
        sums = {key: float(tensor.double().square().sum()) for key, tensor in tensors_of(trainer).items()}
        found[name] = {"wrong": wrong, "steps": trainer.steps_done, "sums": sums}
    return found


def _different(own: Any, rows: Any, saved: dict[str, Tensor]) -> list[str]:
    if own.keys() != saved.keys():
        return sorted(own.keys() ^ saved.keys())
    wrong: list[str] = []
    for name, tensor in own.items():
        there = saved[name]
        if name in rows:
            there = there[rows[name].first : rows[name].first + len(tensor)]
        if not torch.equal(tensor, there):
            wrong.append(name)
    return wrong


def fail(folder: Path, ranks: ProcessGroup) -> dict[str, Any]:
    """One checkpoint is whole; at the next the disk of rank 1 is full; at the third rank 1 dies."""
    trainer, writer = trainer_of(learner_config(**PLAIN), ranks), ShareWriter(ranks)
    trainer.step(items_of(seed=0, top_k=False))
    outcomes = [save(trainer, writer, folder, 1)]
    writer.wait()
    real = os.pwrite

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def deadly(descriptor: int, data: Any, at: int) -> int:
        while not any(folder.glob(".tmp-*/trainer.json")):  # rank 0 has written all of its own
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
        return real(descriptor, data, at)

    for step, instead in ((2, full), (3, real), (4, deadly)):
        if ranks.rank == 1:
            os.pwrite = instead
        outcomes.append(save(trainer, writer, folder, step))
        writer.wait()
    found = latest(folder)
    return {"outcomes": outcomes, "latest": str(found.path), "left": sorted(path.name for path in folder.iterdir())}


DO: Final[dict[str, Callable[[Path, ProcessGroup], dict[str, Any]]]] = {"write": write, "read": read, "fail": fail}


def main(arguments: Sequence[str]) -> None:
    what, folder = arguments
    ranks = group_of(TIMEOUT_S)
    ranks.announce = lambda *_: None  # type: ignore[method-assign,assignment]
    result = DO[what](Path(folder), ranks)
    print(json.dumps(result), flush=True)
    if what == "fail":
        os._exit(0)  # a rank is missing, for which leaving in order would wait
    ranks.close()


if __name__ == "__main__":
    main(sys.argv[1:])
