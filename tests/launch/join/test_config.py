"""What those who join run with, and what they are refused for before anything starts."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from stillhouse import builtin
from stillhouse.launch.config.command_line import split_words
from stillhouse.launch.config.run import ALIASES, RunConfig
from stillhouse.launch.config.tree import Plain, build
from stillhouse.launch.errors import ConfigError
from stillhouse.launch.join import config as join_config
from stillhouse.launch.join.command import check_folder, parse_join
from stillhouse.launch.join.config import Joining, check_joining
from stillhouse.launch.join.target import Target
from stillhouse.launch.machine import torch_build
from stillhouse.launch.machine.machine import Machine
from stillhouse.launch.machine.torch_build import TorchBuild
from stillhouse.weights.config import NCCL_SOCKETS_ONLY

MODELS = {"student": str(builtin.STUDENT_DIR), "teacher": str(builtin.TEACHER_DIR)}


def target(*, address: str = "tcp://127.0.0.1:5555", **plain: Any) -> Target:
    """A run as its launcher wrote it down: with the engines that it chose."""
    engines = {role: {"engine": "torch"} | plain.pop(role, {}) for role in ("actor", "teacher")}
    config = build(RunConfig, {"models": MODELS} | engines | plain)
    settings = cast(Plain, msgspec.to_builtins(config))
    return Target(name="run", address=address, run_id="r", keys=None, settings=settings, home=Path("/nowhere"))


def joining(run: Target, *arguments: str) -> Joining:
    aliases = {**ALIASES, "pool": "teacher.pool"}
    return check_joining(run, split_words(arguments, own=(), switches=(), aliases=aliases).overrides, "p")


def test_it_is_the_runs_configuration_with_what_the_host_sets() -> None:
    run = target(actors=8, teachers=3, actor={"segment_tokens": 32}, buffer={"max_staleness": 7}, steps=9)
    found = joining(run, "--teachers", "2", "--teacher.max_batch_tokens", "512")
    assert (found.config.actors, found.config.teachers, found.roles) == (0, 2, ("teacher",))
    assert found.config.teacher.max_batch_tokens == 512
    assert (found.config.actor.segment_tokens, found.config.buffer.max_staleness, found.config.steps) == (32, 7, 9)


def test_teachers_have_the_model_and_the_settings_of_the_pool_that_they_serve() -> None:
    learner = {"tasks": {"routes": {"a": [], "b": []}}}
    run = target(pools={"a": {"max_batch_tokens": 99}, "b": {"model": MODELS["student"]}}, teachers=2, learner=learner)
    with pytest.raises(ConfigError, match="say which pool the teachers serve: a, b"):
        joining(run, "--teachers=1")
    a, b = joining(run, "--teachers=1", "--pool=a").config, joining(run, "--teachers=1", "--pool=b").config
    assert (a.teacher.pool, a.teacher.max_batch_tokens, a.models.teacher) == ("a", 99, MODELS["teacher"])
    assert (b.teacher.pool, b.models.teacher) == ("b", MODELS["student"])
    with pytest.raises(ConfigError, match=r"teacher\.pool: got 'c'"):
        joining(run, "--teachers=1", "--pool=c")


def test_what_speaks_of_the_runs_own_machine_is_left_out() -> None:
    servers = {"gpus": [0, 1], "port": 30000, "host": "10.77.0.9"}
    run = target(actors=2, actor={"engine": "sglang", "urls": ["http://a:1", "http://b:1"], "server": servers})
    found = joining(run, "--teachers=1")
    assert found.config.actor.urls == () and found.config.actor.server.gpus == ()
    assert (found.config.actor.server.port, found.config.actor.server.host) == (0, "127.0.0.1")


@pytest.mark.parametrize(
    ("run", "arguments", "message"),
    [
        (target(), (), "say how many workers join"),
        (target(), ("--teachers=1", "--pool=math"), "teacher.pool: got 'math', to which"),
        (target(), ("--actors=-1",), "actors: got '-1', expected int >= 0"),
        (target(), ("--actors=1", "--student=/no/such"), "models.student: no folder"),
        (target(), ("--actors=1", "--actor.torch.max_context=999999"), "actor.torch.max_context: got 999999"),
        (target(models=MODELS | {"teacher": "/gone"}), ("--teachers=1",), "--models.teacher FOLDER to say where it is"),
        (target(address="tcp://203.0.113.9:5555"), ("--actors=1",), "weights.host: the learner sends"),
        (
            target(weights={"transport": "ipc"}, actor={"engine": "sglang"}),
            ("--actor.urls=http://127.0.0.1:1",),
            "weights.transport: got ipc with actor.urls",
        ),
    ],
)
def test_what_does_not_fit_the_run_is_refused_by_key(
    run: Target, arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stillhouse.engines.sglang.attached.PROBE_TIMEOUT_S", 0.5)
    with pytest.raises(ConfigError) as refused:
        joining(run, *arguments)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "flag", ["--learner.lr=1", "--buffer.max_staleness=1", "--teacher.top_k=8", "--launch.prometheus=1"]
)
def test_keys_of_the_run_are_refused_before_the_run_is_looked_for(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag.partition('=')[0]}: belongs to the run"):
        parse_join(["run", "--actors=1", flag])


def test_from_another_machine_teachers_can_join_a_run_whose_weights_stay_on_its_own() -> None:
    assert joining(target(address="tcp://203.0.113.9:5555"), "--teachers=1").roles == ("teacher",)


def test_all_actors_of_a_run_take_weights_in_one_way(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho '{}'\n")
    python.chmod(0o755)
    arguments = ("--actors=1", "--actor.engine=sglang", "--actor.server.device=cpu", f"--actor.server.python={python}")
    with pytest.raises(ConfigError, match=r"actor\.engine: got sglang, expected torch"):
        joining(target(), *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--actors=1",), "actor.torch.device: the run sends weights by NCCL, and has GPUs of this machine"),
        (("--actors=1", "--actor.torch.device=cpu"), "which needs a GPU of its own for each actor"),
        (("--actors=2", "--actor.torch.device=cuda:3"), "which needs a GPU of its own for each actor"),
        (("--actors=1", "--actor.torch.device=cuda:3"), ""),
        (("--teachers=2",), ""),
    ],
)
def test_an_actor_joins_a_run_on_nccl_with_a_gpu_that_nobody_else_has(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join_config, "find_machine", lambda: Machine(("0", "1", "2", "3")))
    monkeypatch.setattr(torch_build, "own_build", lambda: TorchBuild("2.13.0", "12.8"))
    run = target(weights={"backend": "nccl"})
    if not message:
        assert joining(run, *arguments).config.actors == int("--actors=1" in arguments)
        return
    with pytest.raises(ConfigError) as refused:
        joining(run, *arguments)
    assert message in str(refused.value)


def test_an_actor_joins_a_run_on_nccl_on_a_shared_gpu_where_nccl_uses_sockets_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(join_config, "find_machine", lambda: Machine(("0",)))
    monkeypatch.setattr(torch_build, "own_build", lambda: TorchBuild("2.13.0", "12.8"))
    run, arguments = target(weights={"backend": "nccl"}), ("--actors=2", "--actor.torch.device=cuda:0")
    with pytest.raises(ConfigError, match="set NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1"):
        joining(run, *arguments)
    for name, value in NCCL_SOCKETS_ONLY.items():
        monkeypatch.setenv(name, value)
    assert joining(run, *arguments).config.actors == 2


def test_a_model_of_another_vocabulary_is_refused_before_it_loads(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(builtin.TEACHER_DIR, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["one more"] = len(tokenizer["model"]["vocab"]) + 7
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="has another vocabulary than the run's student"):
        joining(target(), "--teachers=1", f"--teacher={other}")


def test_servers_are_called_after_those_who_join(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho '{}'\n")
    python.chmod(0o755)
    run = target(teacher={"engine": "sglang", "server": {"device": "cpu", "python": str(python)}})
    assert [plan.worker for plan in joining(run, "--teachers=2").servers] == ["teacher-p-0", "teacher-p-1"]


def test_names_are_the_hosts_unless_said_and_must_fit_on_the_wire() -> None:
    first, second = parse_join(["run", "--actors=1"]), parse_join(["run", "--actors=1"])
    assert first is not None and second is not None and first.prefix != second.prefix
    with pytest.raises(ConfigError, match="--name-prefix: got 'a b'"):
        parse_join(["run", "--name-prefix", "a b"])
    with pytest.raises(ConfigError, match="expected a RUN, got none"):
        parse_join(["--actors", "1"])


def test_ranks_of_the_learner_join_a_run_with_several_hosts_from_its_own_folder(tmp_path: Path) -> None:
    learner = {"ranks": 4, "hosts": 2}
    (tmp_path / "run.json").touch()
    run = replace(target(learner=learner), home=tmp_path / "joined")
    found = check_joining(run, (), "p", ranks=2)
    assert (found.config.actors, found.config.teachers, found.roles) == (0, 0, ())
    wrong = [
        (run, 1, "got 1, expected 2: the run has 4 ranks on 2 hosts"),
        (replace(run, settings=target().settings), 1, "expected a run with learner.hosts above 1"),
        (replace(run, home=Path("/nowhere/joined")), 2, "expected the run's own folder"),
        (replace(run, address="tcp://10.255.255.1:5555"), 2, "meet at 127.0.0.1, which only the run's machine reaches"),
    ]
    for one, ranks, said in wrong:
        with pytest.raises(ConfigError, match=said):
            check_joining(one, (), "p", ranks=ranks)
    elsewhere, line = parse_join(["run", "--learner-ranks=2", "--dir=x"]), parse_join(["run", "--learner-ranks=2"])
    assert elsewhere is not None and line is not None and line.ranks == 2
    with pytest.raises(ConfigError, match="--dir: with --learner-ranks"):
        check_folder(elsewhere)
    check_folder(line)


def test_a_join_warns_of_what_it_opens_on_its_own_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "elsewhere", True)
    plain = target(weights={"host": "10.0.0.1", "allow_plain_network": True})
    (told,) = joining(plain, "--actors=1").warnings
    assert "the ports of the weight group accept any client" in told
    assert joining(plain, "--teachers=1").warnings == (), "teachers are on encrypted links only"
    assert joining(target(weights={"host": "10.0.0.1"}), "--actors=1").warnings == ()


def test_who_joins_from_elsewhere_has_the_cores_of_that_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_config, "usable_cores", lambda: 6.0)
    assert joining(target(), "--actors=1").placement.threads_of("actor", 0) == 1, "the run has the cores"
    monkeypatch.setattr(Target, "elsewhere", True)
    there = joining(target(weights={"host": "10.0.0.1", "allow_plain_network": True}), "--actors=1").placement
    assert there.threads_of("actor", 0) == 2, "the built-in model is small"
    assert "threads on 6 cores: actors 2" in there.text and "learner on" not in there.text
