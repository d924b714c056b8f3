"""A long-lived weight group costs no memory per round, neither in Python nor in torch and gloo underneath."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
ROUNDS = 300
BYTES_PER_ROUND = 400
"""Of both ranks together. What was mended (torch's record of the last 2000 operations) took some 4000; rounds take a
few dozen, for threads and sockets settle in."""

MEASURE = f"""
from tests.weights.test_collective import Ranks, mixed_tensors
from stillhouse.weights.buckets import EqualBuckets, manifest_of
from tests.heap import heap_bytes

ranks, named = Ranks(2), mixed_tensors(0)
layout = EqualBuckets(manifest_of(named), 1024)
ranks.join()

def rounds(first, end):
    for number in range(first, end):
        for future in ranks.broadcast(number, layout, named):
            future.result()

rounds(0, 50)
before = heap_bytes()
rounds(50, 50 + {ROUNDS})
print(heap_bytes() - before)
ranks.close()
"""


def test_rounds_of_a_group_leave_nothing_behind() -> None:
    """In a process of its own: torch decides at its first operation what it keeps."""
    environment = {key: value for key, value in os.environ.items() if key != "TORCH_FR_BUFFER_SIZE"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE],
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < ROUNDS * BYTES_PER_ROUND
