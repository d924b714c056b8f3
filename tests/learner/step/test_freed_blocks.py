"""A learner on a CPU gives freed blocks back to the system, also those between blocks that are kept."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.patience import PATIENCE_S

PROGRAM = """
import sys
import torch
from stillhouse import builtin
from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.step.make_trainer import make_trainer

def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) / 1024

if sys.argv[1] == "learner":
    make_trainer(str(builtin.STUDENT_DIR), LearnerConfig(device="cpu"), steps=1, vocab_tokens=64, seed=0)
for _ in range(3):
    torch.ones(30 * 2**18)  # 30 MiB, freed at once: glibc takes this for the size from which it gives blocks back
before = resident()
freed, kept = [], []
for _ in range(100):
    freed.append(torch.ones(3 * 2**18))
    kept.append(torch.ones(2**12))
held = resident() - before
freed.clear()
print(held, resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_blocks_of_a_step_do_not_stay_with_the_learner() -> None:
    """100 blocks of 3 MiB, each followed by one of 16 KiB that is kept. Without a trainer they stay."""
    found = dict[str, list[float]]()
    for kind in ("learner", "other"):
        command = [sys.executable, "-c", PROGRAM, kind]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
        found[kind] = [float(word) for word in ended.stdout.split()]
    assert all(held > 180 for held, _ in found.values())  # less than 300 where blocks freed before are used again
    assert found["learner"][1] < 15 < 180 < found["other"][1]
