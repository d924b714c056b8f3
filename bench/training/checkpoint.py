"""How long a checkpoint holds the training thread, and what memory it takes at its peak.

    .venv/bin/python bench/training/checkpoint.py examples/smollm2/model [--times 3]

Staged: copies in host memory, which is all that training waits for; then everything else, which a run does in the
background (learner.checkpoints.writer). At once: the same checkpoint without copies, while training waits. CPU seconds
are of this process. The peak is that of the resident memory above what there was before, sampled every 10 ms."""

from __future__ import annotations

import argparse
import ctypes
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch

from stillhouse.learner.checkpoints.checkpoint import (
    Contents,
    LearnerState,
    capture_rng,
    new_draft,
    save_checkpoint,
    write_checkpoint,
)
from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.step.make_trainer import make_trainer
from stillhouse.learner.step.optimizer import AdamWState
from stillhouse.learner.step.train_step import Trainer
from stillhouse.models.tokenizer import load_tokenizer
from stillhouse.protocol.messages import WeightVersion

LOOK_EVERY_S = 0.01


class Cost:
    """Wall and CPU seconds of a block, and the resident memory that it needed at its peak."""

    wall_s = cpu_s = peak_gb = 0.0

    def __str__(self) -> str:
        return f"{self.wall_s:7.2f} s  {self.cpu_s:7.2f} s of CPU  {self.peak_gb:+6.2f} GB at the peak"


@contextmanager
def measured() -> Generator[Cost]:
    ctypes.CDLL(None).malloc_trim(0)  # give back what was freed, so that it does not hide what is needed now
    process, cost, done = psutil.Process(), Cost(), threading.Event()
    before = process.memory_info().rss

    def look() -> None:
        while not done.wait(LOOK_EVERY_S):
            cost.peak_gb = max(cost.peak_gb, (process.memory_info().rss - before) / 1e9)

    watcher = threading.Thread(target=look)
    watcher.start()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    yield cost
    cost.wall_s, cost.cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    done.set()
    watcher.join()


def with_moments(trainer: Trainer) -> None:
    """As after a step: moments for every parameter."""
    named = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    moments = {f"{key}/{n}": torch.full_like(p, 1e-3) for n, p in named.items() for key in ("exp_avg", "exp_avg_sq")}
    steps = {f"step/{name}": torch.ones(()) for name in named}
    trainer.load_state_dict(AdamWState(moments | steps, (), 1))


def state_of(version: WeightVersion, optimizer: AdamWState) -> LearnerState:
    return LearnerState(version, optimizer, {}, None, capture_rng(), {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--times", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(given.model)
    learner = LearnerConfig(device="cpu")
    trainer = make_trainer(given.model, learner, steps=10, vocab_tokens=len(tokenizer), seed=0)
    with_moments(trainer)
    parameters = sum(p.numel() for p in trainer.model.parameters())
    print(f"{given.model}: {parameters / 1e6:.1f} M parameters")
    with TemporaryDirectory(dir=Path.cwd()) as folder:
        root = Path(folder)
        for step in range(1, given.times + 1):
            with measured() as at_once:
                state = state_of(WeightVersion(0, 2 * step), trainer.state_dict())
                path = save_checkpoint(root, trainer.model, tokenizer, state, keep=1)
            del state
            size_gb = sum(file.stat().st_size for file in path.iterdir()) / 1e9
            with measured() as both:
                with measured() as staging:
                    draft = new_draft(root, WeightVersion(0, 2 * step + 1))
                    staged = trainer.stage(draft)
                    assert staged is not None
                    contents = Contents.of(state_of(WeightVersion(0, 2 * step + 1), staged.optimizer), staged.weights)
                write_checkpoint(draft, contents, trainer.model, tokenizer, keep=1)
            del staged, contents
            print(
                f"at once, {size_gb:.2f} GB    {at_once}\nstaged               {staging}\n  and written        {both}"
            )


if __name__ == "__main__":
    main()
