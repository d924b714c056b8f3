"""GPUs are found without nvidia-smi too, and a machine whose GPUs cannot be found says so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stillhouse.launch.checks.server_preflight import check_servers
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.machine.machine import NO_GPUS, Interpreters, Machine, find_machine
from stillhouse.launch.machine.torch_build import TorchBuild

NOWHERE = {"PATH": "/nowhere"}


class Proc:
    """/proc/driver/nvidia/gpus and /dev of a machine."""

    def __init__(self, root: Path, *, listed: int, nodes: int) -> None:
        self.proc, self.dev = root / "proc", root / "dev"
        self.dev.mkdir()
        (self.dev / "nvidiactl").touch()
        for i in range(listed):
            folder = self.proc / f"0000:{i + 1:02x}:00.0"
            folder.mkdir(parents=True)
            text = f"Model: \t\t NVIDIA H100\nGPU UUID: \t GPU-{i}{i}\nBus Location: \t 0000:{i + 1:02x}:00.0\n"
            text += f"Device Minor: \t {i}\n"
            (folder / "information").write_text(text)
        for i in range(nodes):
            (self.dev / f"nvidia{i}").touch()

    def find(self, python: str = "/no/python", **environment: str) -> Machine:
        return find_machine(NOWHERE | environment, proc=self.proc, dev=self.dev, python=python)


def test_without_nvidia_smi_the_driver_tells_which_there_are(tmp_path: Path) -> None:
    machine = Proc(tmp_path, listed=4, nodes=4)
    assert machine.find().gpus == ("0", "1", "2", "3")
    assert machine.find(CUDA_VISIBLE_DEVICES="2,0").gpus == ("2", "0")
    assert machine.find(CUDA_VISIBLE_DEVICES="GPU-33").gpus == ("GPU-33",)
    assert machine.find(CUDA_VISIBLE_DEVICES="").gpus == ()


def test_a_container_has_those_whose_nodes_it_has(tmp_path: Path) -> None:
    assert Proc(tmp_path, listed=4, nodes=2).find().gpus == ("0", "1")


@pytest.mark.parametrize("variable", [None, "5,6,7"])
def test_where_the_driver_lists_none_torch_counts_them(tmp_path: Path, variable: str | None) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 2\n")
    python.chmod(0o755)
    variables = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    found = Proc(tmp_path, listed=0, nodes=0).find(str(python), **variables)
    assert found.gpus == (("0", "1") if variable is None else ("5", "6"))


class Torch(Interpreters):
    """With CUDA, in this interpreter."""

    def own(self) -> TorchBuild:
        return TorchBuild("2.13.0", "12.8")


def test_gpus_that_cannot_be_found_are_an_error_unless_the_cpu_is_asked_for(tmp_path: Path) -> None:
    machine = Proc(tmp_path, listed=0, nodes=0).find()
    assert machine.gpus == () and "nvidia-smi is not in PATH" in machine.unlisted
    embedded = {"actor": {"engine": "torch"}, "teacher": {"engine": "torch"}}
    (mistake,) = check_servers(build(RunConfig, embedded), machine, Torch()).mistakes
    assert mistake.startswith(
        "device: got auto, but the GPUs of this machine cannot be found: nvidia-smi is not in PATH"
    )
    assert check_servers(build(RunConfig, embedded | {"device": "cpu"}), machine, Torch()).mistakes == []
    served = {"actor": {"engine": "sglang", "server": {"python": sys.executable, "device": "cuda"}}}
    mistakes = check_servers(build(RunConfig, served | {"teacher": {"engine": "torch"}}), machine, Torch()).mistakes
    assert any("cannot be found" in mistake for mistake in mistakes)


def test_a_node_of_rocm_or_wsl_alone_is_no_gpu(tmp_path: Path) -> None:
    dev = tmp_path / "dev"
    dev.mkdir()
    (dev / "kfd").touch()
    assert find_machine(NOWHERE, proc=tmp_path / "proc", dev=dev, python="/no/python") == NO_GPUS


def test_an_nvidia_smi_that_fails_is_no_machine_without_gpus(tmp_path: Path) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\nexit 9\n")
    command.chmod(0o755)
    machine = Proc(tmp_path, listed=2, nodes=2)
    assert machine.find(PATH=str(tmp_path)).gpus == ("0", "1")


def test_nvidia_smi_tells_memory_too(tmp_path: Path) -> None:
    command = tmp_path / "nvidia-smi"
    script = (
        "#!/bin/sh\n"
        "[ $1 = -L ] || { echo 81920; echo 40960; exit; }\n"
        "echo 'GPU 0: X (UUID: GPU-a)'; echo 'GPU 1: X (UUID: GPU-b)'\n"
    )
    command.write_text(script)
    command.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/bin:/usr/bin"}
    assert find_machine(environment) == Machine(("0", "1"), (80.0, 40.0))
    assert find_machine(environment | {"CUDA_VISIBLE_DEVICES": "1"}) == Machine(("1",), (40.0,))
