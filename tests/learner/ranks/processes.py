"""Ranks as processes, for tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

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
    """Run `main(args)` of the module on each rank, over gloo, to its end. They are forks of one process, which imports
    it once. Not with -m: what it starts by a fork server would import it again."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common = {"WORLD_SIZE": str(n_ranks), REPLICAS: str(replicas), CONTEXT: str(context), **address}
    common |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with tempfile.TemporaryDirectory() as folder:
        outputs = [(Path(folder, f"{rank}.out"), Path(folder, f"{rank}.err")) for rank in range(n_ranks)]
        program = f"import {module}; from {__name__} import fork_ranks; fork_ranks({module}.main, {folder!r})"
        with subprocess.Popen(
            [sys.executable, "-c", program, *args], env={**os.environ, **common}, cwd=ROOT, start_new_session=True
        ) as parent:
            try:
                parent.wait(timeout=2 * RUN_PATIENCE_S)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(parent.pid, signal.SIGKILL)  # those of a rank that took too long are left
        codes = json.loads(Path(folder, "codes").read_text(encoding="utf-8"))
        return [
            subprocess.CompletedProcess(args, code, out.read_text(encoding="utf-8"), errors.read_text(encoding="utf-8"))
            for code, (out, errors) in zip(codes, outputs, strict=True)
        ]


def fork_ranks(main: Callable[[list[str]], object], folder: str) -> None:
    """In the process above: fork the ranks, and leave their exit codes."""
    pids = [os.fork() or _become_rank(rank, main, folder) for rank in range(int(os.environ["WORLD_SIZE"]))]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    Path(folder, "codes").write_text(json.dumps(codes), encoding="utf-8")


def _become_rank(rank: int, main: Callable[[list[str]], object], folder: str) -> NoReturn:
    os.environ["RANK"] = str(rank)
    for fd, name in ((1, f"{rank}.out"), (2, f"{rank}.err")):
        os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT), fd)
    code = 1
    try:
        main(sys.argv[1:])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
