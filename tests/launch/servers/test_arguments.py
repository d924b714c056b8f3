"""The user's own arguments of SGLang servers against the configuration and against GPUs that are shared; and the
environment in which NCCL must find the same on all sides."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from stillhouse.engines.config import ServerConfig
from stillhouse.engines.sglang.features import Features, ServerMismatch, check_layout
from stillhouse.engines.sglang.servers import FRACTION, LOAD_FORMAT, TP, value_of
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.machine.gpus import Places
from stillhouse.launch.servers.plan import contradictions, nccl_environment, overfull_gpus, server_environment
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


def places(**servers: tuple[tuple[int, ...], ...]) -> Places:
    return Places({"learner": 0}, servers)


def test_a_gpu_that_a_server_shares_needs_a_memory_fraction() -> None:
    mistakes = list(overfull_gpus(served(), places(actor=((0,),), teacher=((1,),))))
    assert mistakes == [
        "actor.server.args: server-actor-0 shares GPU 0 with the learner, and without --mem-fraction-static takes "
        "nearly all of its memory; expected e.g. --actor.server.args=--mem-fraction-static,0.3"
    ]
    fraction = served(["--mem-fraction-static", "0.3"])
    assert list(overfull_gpus(fraction, places(actor=((0,),), teacher=((1,),)))) == []
    (mistake,) = overfull_gpus(fraction, places(actor=((1,),), teacher=((1,),)))
    assert mistake.startswith("teacher.server.args: server-teacher-0 shares GPU 1 with server-actor-0")
    assert list(overfull_gpus(served(), places(actor=((1, 2),), teacher=((3, 4),)))) == []


def test_fractions_on_one_gpu_leave_room_together() -> None:
    both = served(["--mem-fraction-static=0.6"], teacher=["--mem-fraction-static=0.6"])
    (mistake,) = overfull_gpus(both, places(actor=((1,),), teacher=((1,),)))
    assert "the servers on GPU 1 take 1.2 of its memory together" in mistake


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
    check_layout(server_says("cuda", 2), ServerConfig(device="cuda", tp=2))
    with pytest.raises(ServerMismatch, match=r"tp_size = 2, but server\.tp is 1"):
        check_layout(server_says("cuda", 2), ServerConfig(device="cuda"))
    with pytest.raises(ServerMismatch, match=r"on cpu, but server\.device is cuda"):
        check_layout(server_says("cpu", 1), ServerConfig(device="cuda"))
