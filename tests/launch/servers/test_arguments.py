"""The user's own arguments of SGLang servers against the configuration and against GPUs that are shared; and the
environment in which NCCL must find the same on all sides."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from stillhouse.engines.arguments import value_of
from stillhouse.engines.base import EngineMismatch
from stillhouse.engines.config import ServerConfig
from stillhouse.engines.http.provider import check_layout
from stillhouse.engines.sglang.features import Features
from stillhouse.engines.sglang.servers import FRACTION, LOAD_FORMAT, TP, SGLangServers
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.machine.machine import InstalledPackages, Interpreters
from stillhouse.launch.servers.plan import contradictions, nccl_environment, server_environment
from tests.server_features import CAPABLE


def served(args: Sequence[str] = (), *, teacher: Sequence[str] = (), **server: Any) -> RunConfig:
    """Both roles on servers on GPUs; `args`: of the actors'."""
    common = {"python": sys.executable, "device": "cuda"} | server
    roles = {
        role: {"engine": "sglang", "server": common | {"args": list(own)}}
        for role, own in (("actor", args), ("teacher", teacher))
    }
    return build(RunConfig, {"actors": 1, **roles})


@pytest.mark.parametrize(
    ("args", "value"),
    [
        (["--tp-size", "2"], "2"),
        (["--tp-size=2"], "2"),
        (["--tp", "2"], "2"),
        (["--tp=2"], "2"),
        (["--tensor-parallel-size", "2"], "2"),
        (["--tensor-parallel-size=2"], "2"),
        (["--tensor-p=2"], "2"),
        (["--tp=4", "--log-level", "info", "--tensor-parallel-size=2"], "2"),
        (["--log-level", "info"], None),
        (["--tp-size-of-nothing", "2"], None),
        (["--tp"], None),
    ],
)
def test_an_option_is_found_however_it_is_spelt(args: list[str], value: str | None) -> None:
    assert value_of(args, TP) == value


@pytest.mark.parametrize("args", [["--tp", "2"], ["--tp-size=2"], ["--tensor-parallel-size", "2"]])
def test_tp_in_the_arguments_must_be_that_of_the_configuration(args: list[str]) -> None:
    (mistake,) = contradictions(served(args))
    assert mistake.startswith("actor.server.args: got --tp-size 2, but actor.server.tp is 1")
    assert "--actor.server.tp 2" in mistake
    (mistake,) = contradictions(served(teacher=args))
    assert mistake.startswith("teacher.server.args: got --tp-size 2")
    assert list(contradictions(served(args, tp=2, gpus=[]))) == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--dp-size", "2"], "got --dp-size 2, expected 1"),
        (["--pipeline-parallel-size=2"], "got --pp-size 2, expected 1"),
        (["--device", "cpu"], "got --device cpu, but actor.server.device is cuda"),
        (["--quantization", "fp8"], "got --quantization fp8, and the learner's weights arrive as they are"),
        (["--quantization=fp8", "--load-format=auto"], "Expected --load-format flash_rl"),
    ],
)
def test_arguments_that_cannot_work_are_refused_by_name(args: list[str], message: str) -> None:
    (mistake,) = contradictions(served(args))
    assert mistake.startswith("actor.server.args: ") and message in mistake


def test_what_fits_is_left_to_sglang() -> None:
    fits = ["--quantization", "fp8", "--load-format", "flash_rl", "--dp-size=1", "--device=cuda"]
    assert list(contradictions(served(fits))) == []
    assert list(contradictions(served(teacher=["--quantization", "fp8"]))) == []  # its weights do not change
    assert value_of(fits, LOAD_FORMAT) == "flash_rl"
    assert value_of(["--mem-fraction=0.3"], FRACTION) == "0.3"


def looked(*missing: str) -> InstalledPackages:
    return InstalledPackages(missing=missing)


@pytest.mark.parametrize(
    ("missing", "args", "backend"),
    [
        ((), [], ()),  # SGLang chooses by the GPU
        (("flashinfer",), [], ("--attention-backend", "triton")),
        (("sgl_kernel/flash_ops",), [], ("--attention-backend", "flashinfer")),
        (("flashinfer", "sgl_kernel/flash_ops"), [], ("--attention-backend", "triton")),
        (("flashinfer",), ["--attention-backend=fa3"], ()),
        (("flashinfer",), ["--prefill-attention-backend", "fa3"], ()),
    ],
)
def test_a_server_gets_an_attention_backend_that_its_interpreter_has(
    missing: tuple[str, ...], args: list[str], backend: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = SGLangServers()
    cuda = ServerConfig(device="cuda", args=tuple(args))
    assert servers.suited(cuda, looked(*missing)) == backend
    assert servers.suited(ServerConfig(device="cpu"), looked(*missing)) == ()
    monkeypatch.setenv("SGLANG_IS_FLASHINFER_AVAILABLE", "false")  # SGLang's own switch
    assert servers.suited(ServerConfig(device="cuda"), looked()) == ("--attention-backend", "triton")
    chosen = servers.launch(cuda, ("--attention-backend", "triton")).arguments
    assert chosen[len(chosen) - len(args) :] == tuple(args), "the user's own come last and win"


def test_files_of_a_package_are_looked_up_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels" / "sm90").mkdir(parents=True)
    (tmp_path / "kernels" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "kernels" / "sm90" / "flash_ops.abi3.so").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    names = ("kernels", "kernels/flash_ops", "kernels/other_ops", "nothing/flash_ops")
    assert Interpreters().look(Path(sys.executable), names).missing == names[2:]


def test_nccl_finds_the_same_on_all_sides() -> None:
    """As SGLang 0.5.23 sets them unless they are set: 0, and 1 with its own switches."""
    config = served()
    both = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    assert nccl_environment(config, {}) == both
    assert both.items() <= server_environment(config, Path("/tmp/x"), {}).items()
    assert nccl_environment(config, {"NCCL_CUMEM_ENABLE": "1", "NCCL_SOCKET_IFNAME": "eth0"}) == {
        "NCCL_NVLS_ENABLE": "0"
    }
    shared = nccl_environment(config, {}, shared=True)
    assert shared == both | {
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_NET": "Socket",
    }
    assert shared.items() <= server_environment(config, Path("/tmp/x"), {}, shared=True).items()
    assert nccl_environment(served(["--enable-nccl-nvls"]), {})["NCCL_NVLS_ENABLE"] == "1"
    assert nccl_environment(served(["--enable-symm-mem"]), {})["NCCL_CUMEM_ENABLE"] == "1"


def test_on_a_network_nccl_chooses_the_interface_and_embedded_engines_keep_its_defaults() -> None:
    publish = {"host": "10.0.0.1", "allow_plain_network": True}
    assert nccl_environment(build(RunConfig, {"weights": publish}), {}) == {}
    assert nccl_environment(RunConfig(), {}) == {"NCCL_SOCKET_IFNAME": "lo"}


def test_a_broken_weight_group_does_not_end_a_server() -> None:
    variables = server_environment(served(), Path("/tmp/x"), {})
    assert (variables["TORCH_NCCL_ASYNC_ERROR_HANDLING"], variables["TORCH_NCCL_DUMP_ON_TIMEOUT"]) == ("2", "0")
    kept = server_environment(served(), Path("/tmp/x"), {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"})
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in kept


def server_says(device: Literal["cpu", "cuda"], tp: int) -> Features:
    return msgspec.structs.replace(CAPABLE, device=device, tp_size=tp)


def test_what_a_server_says_when_a_worker_connects_must_be_as_configured() -> None:
    check_layout(server_says("cuda", 2).facts, ServerConfig(device="cuda", tp=2))
    with pytest.raises(EngineMismatch, match=r"tp_size = 2, but server\.tp is 1"):
        check_layout(server_says("cuda", 2).facts, ServerConfig(device="cuda"))
    with pytest.raises(EngineMismatch, match=r"on cpu, but server\.device is cuda"):
        check_layout(server_says("cpu", 1).facts, ServerConfig(device="cuda"))
