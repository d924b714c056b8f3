"""`make gpu-demo`: the demo with real SGLang servers on one GPU, by what `auto` chooses. Says in one line why not.

python scripts/gpu/gpu_demo.py [ARGUMENTS of launch/cluster.py]       --check --gpus 1x24: planned for a GPU elsewhere
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from stillhouse.engines.config import ServerConfig
from stillhouse.engines.provider import AutoFacts
from stillhouse.engines.sglang.provider import SERVERS
from stillhouse.launch.machine.machine import Interpreters, Machine, find_machine

ROOT = Path(__file__).resolve().parents[2]


def why_not(machine: Machine, interpreters: Interpreters, server: ServerConfig) -> str:
    """What is missing, and what to do; empty: nothing."""
    if not machine.gpus:
        found = machine.unlisted or "no GPU that nvidia-smi and CUDA_VISIBLE_DEVICES show"
        return f"{found}. Without one: make demo; with real servers on a CPU: make sglang-cpu, then docs/sglang.md"
    look = functools.partial(interpreters.look, modules=SERVERS.modules)
    fits, why = SERVERS.fits(AutoFacts(server, (), "", "", True, look))
    if not fits:
        python = SERVERS.choose_python(server)
        return f"{why}. Expected SGLang for CUDA there: {python} -m pip install sglang"
    if not interpreters.own().has_gpu_code:
        return (
            f"torch of {sys.executable} has no CUDA. Expected a build that has: {sys.executable} -m pip install torch"
        )
    return ""


def main(words: Sequence[str]) -> None:
    if not any(word.startswith("--gpus") for word in words):
        reason = why_not(find_machine(), Interpreters(), ServerConfig(device="cuda"))
        if reason:
            sys.exit(f"make gpu-demo: {reason}")
    launcher = str(ROOT / "launch" / "cluster.py")
    config = str(Path(__file__).with_name("gpu_demo.toml"))
    os.execv(sys.executable, [sys.executable, launcher, "--config", config, *words])


if __name__ == "__main__":
    main(sys.argv[1:])
