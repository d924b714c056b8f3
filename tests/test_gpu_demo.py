"""`make gpu-demo` up to the device: what it says where something is missing, and its plan for one GPU."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest

from stillhouse.engines.config import ServerConfig
from stillhouse.launch.machine.machine import NO_GPUS, Machine
from stillhouse.launch.machine.torch_build import TorchBuild
from tests.launch.checks.test_placement import CPU_ONLY, CUDA_12, Installed, placed

FOLDER: Final = Path(__file__).parents[1] / "scripts" / "gpu"
ONE: Final = Machine(("0",), (24.0,))


def why_not(machine: Machine, own: TorchBuild = CUDA_12, missing: tuple[str, ...] = ()) -> str:
    spec = importlib.util.spec_from_file_location("gpu_demo", FOLDER / "gpu_demo.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.why_not(machine, Installed(own, missing=missing), ServerConfig(device="cuda"))


@pytest.mark.parametrize(
    ("machine", "own", "missing", "said"),
    [
        (NO_GPUS, CUDA_12, (), "make demo"),
        (Machine(unlisted="nvidia-smi fails"), CUDA_12, (), "nvidia-smi fails. Without one"),
        (ONE, CUDA_12, ("sglang",), "pip install sglang"),
        (ONE, CPU_ONLY, (), "has no CUDA"),
    ],
)
def test_it_says_in_one_line_what_is_missing(
    machine: Machine, own: TorchBuild, missing: tuple[str, ...], said: str
) -> None:
    words = why_not(machine, own, missing)
    assert said in words and "\n" not in words


def test_auto_alone_chooses_servers_and_shared_memory_on_one_gpu() -> None:
    assert why_not(ONE) == ""
    settings = tomllib.loads((FOLDER / "gpu_demo.toml").read_text(encoding="utf-8"))
    del settings["learner"]["record"], settings["steps"]
    found = placed(settings, 1)
    assert found.mistakes == []
    assert (found.config.actor.engine, found.config.teacher.engine) == ("sglang", "sglang")
    assert found.config.weights.transport == "ipc"
    assert [plan.name for plan in found.plans] == ["server-actor-0", "server-teacher-0"]
    for plan in found.plans:
        arguments = plan.launch.arguments
        assert arguments[:2] == ("--device", "cuda") and "--max-total-tokens" in arguments, arguments
    assert "GPU 0: starts server-actor-0, then server-teacher-0, then learner" in found.report()
