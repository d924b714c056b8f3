"""Before servers start: devices, GPUs, interpreters and addresses are looked at, and what they get is planned."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stillhouse import builtin
from stillhouse.launch.checks.preflight import check
from stillhouse.launch.checks.server_preflight import Found, check_servers
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.errors import ConfigError
from stillhouse.launch.machine import torch_build
from stillhouse.launch.machine.devices import fill_devices
from stillhouse.launch.machine.machine import NO_GPUS, find_machine
from stillhouse.launch.machine.torch_build import TorchBuild
from stillhouse.launch.processes.local import worker_environment
from stillhouse.launch.servers.plan import interface_of, server_environment, url_of
from stillhouse.launch.workers.launch_plan import preload_modules
from stillhouse.sglang_server.servers import DEFAULT_PYTHON

FAKE_SGLANG = str(Path(__file__).parents[1] / "fake_sglang")
LISTED = """\
GPU 0: NVIDIA H200 (UUID: GPU-aaaa)
GPU 1: NVIDIA H200 (UUID: GPU-bbbb)
GPU 2: NVIDIA H200 (UUID: GPU-cccc)
"""


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three GPUs, and an interpreter that has (the fake) sglang."""
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\ncat <<'END'\n{LISTED}END\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", FAKE_SGLANG)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch_build, "own_build", lambda: TorchBuild("2.13.0", "12.8"))


def found(server: dict[str, Any] | None = None, **plain: Any) -> Found:
    """Both roles on servers of this interpreter."""
    role = {"engine": "sglang", "server": {"python": sys.executable, **(server or {})}}
    models = {"student": str(builtin.STUDENT_DIR), "teacher": str(builtin.TEACHER_DIR)}
    machine = find_machine() if plain.get("device") != "cpu" else NO_GPUS
    return check_servers(build(RunConfig, {"actor": role, "teacher": role, "models": models, **plain}), machine)


@pytest.mark.parametrize(
    ("variable", "names"),
    [
        (None, ("0", "1", "2")),
        ("2,0", ("2", "0")),
        ("GPU-bbbb", ("GPU-bbbb",)),
        ("1,-1,2", ("1",)),
        ("7", ()),
        ("", ()),
    ],
)
def test_visible_gpus_are_those_that_cuda_would_see(variable: str | None, names: tuple[str, ...]) -> None:
    told = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert find_machine({**os.environ, **told}).gpus == names


def test_a_machine_without_a_driver_has_no_gpus(tmp_path: Path) -> None:
    assert find_machine({"PATH": "/nowhere"}, proc=tmp_path / "proc", dev=tmp_path) == NO_GPUS


def test_servers_get_gpus_after_the_learner_by_their_visible_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1,0")
    report = found(actors=1)
    assert report.mistakes == []
    assert [(plan.name, plan.gpus, plan.launch.forked) for plan in report.plans] == [
        ("server-actor-0", ("1",), False),
        ("server-teacher-0", ("0",), False),
    ]
    assert report.config.actor.server.device == report.config.teacher.server.device == "cuda"
    assert report.plans[0].model == str(builtin.STUDENT_DIR)
    assert "server-actor-0: on GPU 1, by" in "\n".join(report.report())


def test_too_few_gpus_are_told_before_anything_starts() -> None:
    (mistake,) = found(actors=4).mistakes
    assert "got 3 visible GPUs, 2 of them free" in mistake


def test_the_device_of_the_run_fills_what_is_auto_and_nothing_else() -> None:
    config = fill_devices(build(RunConfig, {"device": "cpu", "learner": {"device": "cuda:1"}}))
    assert config.learner.device == "cuda:1"
    assert config.actor.torch.device == config.actor.server.device == "cpu"
    assert config.teacher.device == config.teacher.server.device == "cpu"
    assert fill_devices(RunConfig()) == RunConfig()


def test_on_a_cpu_nobody_looks_for_gpus_and_the_users_arguments_come_last() -> None:
    report = found({"args": ["--mem-fraction-static", "0.5"], "port": 31000}, device="cpu")
    assert report.mistakes == []
    assert {plan.gpus for plan in report.plans} == {()}
    assert [plan.port for plan in report.plans] == [31000, 31001, 31000]
    assert report.plans[0].launch.arguments[-2:] == ("--mem-fraction-static", "0.5")


def test_an_interpreter_without_sglang_is_told_and_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH")
    for mistake in found(device="cpu").mistakes:
        assert f"{sys.executable} has no sglang" in mistake
        assert "make sglang-cpu" in mistake
    (mistake, _) = found({"python": "/no/python"}, device="cpu").mistakes
    assert mistake.startswith("actor.server.python: no interpreter /no/python")


def test_cuda_without_a_gpu_a_foreign_address_and_a_port_too_high_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    mistakes = "\n".join(found({"host": "203.0.113.1", "port": 65535}, device="cuda", actors=2, teachers=1).mistakes)
    assert "actor.server.device: got cuda, but nvidia-smi shows no GPU" in mistakes
    assert "actor.server.host: cannot listen on '203.0.113.1'" in mistakes
    assert "actor.server.port: got 65535, and 2 servers would need ports up to 65536" in mistakes


def test_servers_that_other_machines_reach_are_refused_without_a_certificate() -> None:
    plain = "\n".join(found({"host": "0.0.0.0"}, device="cpu").mistakes)
    assert "actor.server.host: got 0.0.0.0, which other machines can reach, and HTTP is not encrypted" in plain
    tls = found({"host": "0.0.0.0", "args": ["--ssl-certfile", "c.pem", "--ssl-keyfile", "k.pem"]}, device="cpu")
    assert tls.mistakes == [] and {plan.launch.certificate for plan in tls.plans} == {"c.pem"}
    assert url_of("0.0.0.0", 7, "https") == "https://127.0.0.1:7"


def test_as_many_workers_as_urls_are_expected() -> None:
    urls = {"engine": "sglang", "urls": ["http://127.0.0.1:1", "http://127.0.0.1:2"]}
    with pytest.raises(ConfigError, match=r"actors: got 3 with 2 actor\.urls, expected the same number of both"):
        check(build(RunConfig, {"actor": urls, "actors": 3}))


def test_a_server_that_is_not_there_is_told() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        teacher = {"engine": "sglang", "urls": [url], "sglang": {"connect_timeout_s": 0.5}}
        with pytest.raises(ConfigError, match=rf"teacher\.urls: {url} cannot be used as an SGLang server"):
            check(build(RunConfig, {"teacher": teacher}))


def test_a_key_that_the_environment_lacks_is_told() -> None:
    teacher = {"engine": "sglang", "urls": ["http://127.0.0.1:1"], "sglang": {"api_key_env": "NO_SUCH_KEY"}}
    with pytest.raises(ConfigError, match=r"teacher\.sglang\.api_key_env: the environment has no NO_SUCH_KEY"):
        check(build(RunConfig, {"teacher": teacher}))


def test_gloo_is_told_the_interface_at_which_the_learner_publishes() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.1") is None
    config = RunConfig()
    assert server_environment(config, Path("/tmp/x"), {})["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in server_environment(config, Path("/tmp/x"), {"GLOO_SOCKET_IFNAME": "eth7"})


def test_a_server_on_all_addresses_is_found_on_loopback() -> None:
    assert url_of("0.0.0.0", 7) == "http://127.0.0.1:7"
    assert url_of("::", 7) == "http://[::1]:7"
    assert url_of("10.0.0.2", 7) == "http://10.0.0.2:7"


def test_torch_is_preloaded_only_where_a_worker_has_a_model() -> None:
    both = build(RunConfig, {"actor": {"engine": "sglang"}, "teacher": {"engine": "sglang"}})
    assert "torch" not in preload_modules(both, ("qwen3",))
    assert "stillhouse.engines.sglang.weights" in preload_modules(both, ("qwen3",))
    one = build(RunConfig, {"actor": {"engine": "sglang"}})
    assert {
        "torch",
        "stillhouse.engines.torch.scorer",
        "stillhouse.engines.sglang.weights",
        "stillhouse.learner.worker",
    } <= set(preload_modules(one, ("qwen3",)))
    assert "stillhouse.engines.torch.engine" not in preload_modules(one, ("qwen3",))


def test_what_is_preloaded_for_servers_imports_neither_torch_nor_transformers_and_starts_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTHONPATH")
    config = build(RunConfig, {"actor": {"engine": "sglang"}, "teacher": {"engine": "sglang"}})
    code = (
        "import sys; from stillhouse.launch.processes import forkserver; forkserver.preload(sys.argv[1:]);"
        "print({'torch', 'transformers'} & set(sys.modules), forkserver.refusal())"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, *preload_modules(config, ("qwen3",))],
        capture_output=True,
        text=True,
        check=False,
        env=worker_environment(1),
    )
    assert told.stdout == "set() None\n", told.stderr


@pytest.mark.skipif(not DEFAULT_PYTHON.exists(), reason="no .venv-sglang: make sglang-cpu")
def test_on_a_cpu_servers_are_forked_from_the_environment_made_for_it() -> None:
    report = found({"python": ""}, device="cpu")
    assert report.mistakes == []
    assert all(plan.launch.forked and plan.launch.python == DEFAULT_PYTHON for plan in report.plans)


@pytest.mark.skipif(not DEFAULT_PYTHON.exists(), reason="no .venv-sglang: make sglang-cpu")
def test_the_environment_made_for_cpus_is_not_taken_for_gpus() -> None:
    (mistake, _) = found({"python": ""}, device="cuda", actors=1).mistakes
    assert f"actor.server.python: {DEFAULT_PYTHON} has no triton" in mistake
    assert mistake.endswith("name one that has it")
