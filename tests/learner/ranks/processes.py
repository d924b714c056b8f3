"""Ranks as processes, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from stillhouse.learner.ranks.group import ProcessGroup
from stillhouse.protocol.addresses import free_port
from tests.patience import RUN_PATIENCE_S

ROOT = Path(__file__).parents[3]
REPLICAS = "TEST_REPLICAS"
CONTEXT = "TEST_CONTEXT"


def group_of(timeout_s: float) -> ProcessGroup:
    """In such a process: its group."""
    replicas, context = (int(os.environ[name]) for name in (REPLICAS, CONTEXT))
    return ProcessGroup(device=torch.device("cpu"), timeout_s=timeout_s, replicas=replicas, context=context)


def run_ranks(
    n_ranks: int, module: str, *args: str, replicas: int = 1, context: int = 1
) -> list[subprocess.CompletedProcess[str]]:
    """Run `main(args)` of the module on each rank, over gloo, to its end. Not with -m: what it starts by a fork server
    would import it again."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common = {**os.environ, "WORLD_SIZE": str(n_ranks), REPLICAS: str(replicas), CONTEXT: str(context), **address}
    common |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", f"import sys; from {module} import main; main(sys.argv[1:])", *args],
            env={**common, "RANK": str(rank)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(n_ranks)
    ]
    try:
        said = [rank.communicate(timeout=2 * RUN_PATIENCE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            for pipe in filter(None, (rank.stdout, rank.stderr)):
                pipe.close()  # those of a rank that took too long are open, which a later test would be blamed for
    return [
        subprocess.CompletedProcess(rank.args, rank.returncode, output, errors)
        for rank, (output, errors) in zip(ranks, said, strict=True)
    ]
