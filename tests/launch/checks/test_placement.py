"""Where a run is put, what its actors run on, and by what weights are sent: against a table that was written by hand.

No GPU is needed: machines, and what interpreters have, are given.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stillhouse import builtin
from stillhouse.engines.provider import ModelShape
from stillhouse.engines.registry import find_engine
from stillhouse.launch.checks import memory
from stillhouse.launch.checks.memory import read_shape
from stillhouse.launch.checks.placement import Member, choose_engines, choose_weight_backend
from stillhouse.launch.checks.server_preflight import Found, check_servers
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.errors import ConfigError
from stillhouse.launch.machine.machine import InstalledPackages, Interpreters, Machine, pretended_machine
from stillhouse.launch.machine.torch_build import TorchBuild, constants
from stillhouse.launch.workers.start_role import StartRole
from stillhouse.weights.config import WeightsConfig

PYTHON = Path(sys.executable)
NCCL_12 = (("nvidia-nccl-cu12", "2.27.5"),)
CUDA_12 = TorchBuild("2.13.0", "12.8", None, NCCL_12)
OTHER_NCCL = TorchBuild("2.14.1", "13.0", None, (("nvidia-nccl-cu13", "2.30.7"),))
CPU_ONLY = TorchBuild("2.13.0+cpu")


class Installed(Interpreters):
    """What the learner's interpreter has, and that of the servers (the same file here, which is no matter)."""

    def __init__(self, own: TorchBuild = CUDA_12, servers: TorchBuild = CUDA_12, missing: tuple[str, ...] = ()) -> None:
        self._given, self._look = own, InstalledPackages(missing=missing, torch=servers)

    def look(self, python: Path, modules: tuple[str, ...] = ()) -> InstalledPackages:
        return self._look

    def own(self) -> TorchBuild:
        return self._given


def placed(plain: dict[str, Any], gpus: int, installed: Interpreters | None = None, host_gib: float = 0.0) -> Found:
    """As preflight does it."""
    machine = Machine(tuple(map(str, range(gpus))), (80.0,) * gpus, host_gib=host_gib)
    installed = installed or Installed()
    models = {"student": str(builtin.STUDENT_DIR), "teacher": str(builtin.TEACHER_DIR)}
    server = {"server": {"python": sys.executable}}
    roles = {role: server | plain.get(role, {}) for role in ("actor", "teacher")}
    chosen = choose_engines(build(RunConfig, {"models": models} | plain | roles), machine, installed)
    return check_servers(chosen.config, machine, installed, chosen.why)


def table(found: Found) -> dict[str, Any]:
    """Role -> GPU or GPUs; None: the CPU."""
    assert found.mistakes == []
    servers = {plan.worker: tuple(map(int, plan.gpus)) for plan in found.plans}
    return found.placement.places.seats | servers


ROLES = ("actor", "teacher")
EMBEDDED = {"actor": {"engine": "torch"}, "teacher": {"engine": "torch"}}
SERVED = {"actor": {"engine": "sglang"}, "teacher": {"engine": "sglang"}}
TP2: dict[str, Any] = {
    role: {"engine": "sglang", "server": {"python": sys.executable, "tp": 2}} for role in ("actor", "teacher")
}
SERVED_ACTORS = {"actor": {"engine": "sglang"}, "teacher": {"engine": "torch"}}

BY_HAND: list[tuple[str, dict[str, Any], int, dict[str, Any], str]] = [
    # what, configuration, GPUs, where each role is, by what weights go
    ("1 actor", EMBEDDED | {"actors": 1}, 8, {"learner": 0, "teacher-0": 1, "actor-0": 2}, "nccl"),
    (
        "4 actors",
        EMBEDDED | {"actors": 4},
        8,
        {"learner": 0, "teacher-0": 1, "actor-0": 2, "actor-1": 3, "actor-2": 4, "actor-3": 5},
        "nccl",
    ),
    (
        "6 actors fill the box",
        EMBEDDED | {"actors": 6},
        8,
        {"learner": 0, "teacher-0": 1} | {f"actor-{i}": 2 + i for i in range(6)},
        "nccl",
    ),
    (
        "the seventh actor shares with the teacher, which is in no weight group",
        EMBEDDED | {"actors": 7},
        8,
        {"learner": 0, "teacher-0": 1} | {f"actor-{i}": 2 + i for i in range(6)} | {"actor-6": 1},
        "nccl",
    ),
    (
        "the eighth shares with another actor, not with the learner",
        EMBEDDED | {"actors": 8},
        8,
        {"learner": 0, "teacher-0": 1} | {f"actor-{i}": 2 + i for i in range(6)} | {"actor-6": 1, "actor-7": 2},
        "gloo",
    ),
    ("all on one", EMBEDDED, 1, {"learner": 0, "teacher-0": 0, "actor-0": 0, "actor-1": 0}, "gloo"),
    ("two GPUs", EMBEDDED, 2, {"learner": 0, "teacher-0": 1, "actor-0": 1, "actor-1": 1}, "gloo"),
    (
        "one device for all actors, by name",
        EMBEDDED | {"actor": {"engine": "torch", "torch": {"device": "cuda:3"}}},
        8,
        {"learner": 0, "teacher-0": 1, "actor-0": 3, "actor-1": 3},
        "gloo",
    ),
    (
        "the learner where nobody else is",
        EMBEDDED | {"actors": 1, "actor": {"engine": "torch", "torch": {"device": "cuda:0"}}},
        2,
        {"learner": 1, "teacher-0": 0, "actor-0": 0},
        "nccl",
    ),
    (
        "actors on the CPU",
        EMBEDDED | {"actors": 1, "actor": {"engine": "torch", "torch": {"device": "cpu"}}},
        8,
        {"learner": 0, "teacher-0": 1, "actor-0": None},
        "gloo",
    ),
    ("no GPU", EMBEDDED | {"actors": 1}, 0, {"learner": None, "teacher-0": None, "actor-0": None}, "gloo"),
    (
        "device cpu on a machine with GPUs",
        {"actors": 1, "device": "cpu"},
        8,
        {"learner": None, "teacher-0": None, "actor-0": None},
        "gloo",
    ),
    ("SGLang, 1 actor", SERVED | {"actors": 1}, 8, {"learner": 0, "actor-0": (1,), "teacher-0": (2,)}, "nccl"),
    (
        "SGLang, 4 actors",
        SERVED | {"actors": 4},
        8,
        {"learner": 0, **{f"actor-{i}": (1 + i,) for i in range(4)}, "teacher-0": (5,)},
        "nccl",
    ),
    (
        "SGLang, 6 actors: the teacher has the last one",
        SERVED | {"actors": 6},
        8,
        {"learner": 0, **{f"actor-{i}": (1 + i,) for i in range(6)}, "teacher-0": (7,)},
        "nccl",
    ),
    ("SGLang, tp 2, 1 actor", TP2 | {"actors": 1}, 8, {"learner": 0, "actor-0": (1, 2), "teacher-0": (3, 4)}, "nccl"),
    (
        "SGLang, tp 2, 2 actors",
        TP2 | {"actors": 2},
        8,
        {"learner": 0, "actor-0": (1, 2), "actor-1": (3, 4), "teacher-0": (5, 6)},
        "nccl",
    ),
    (
        "servers first, an embedded teacher beside the learner when none is left",
        SERVED_ACTORS | {"actors": 7},
        8,
        {"learner": 0, "teacher-0": 0, **{f"actor-{i}": (1 + i,) for i in range(7)}},
        "nccl",
    ),
]


@pytest.mark.parametrize(
    ("plain", "gpus", "where", "backend"), [row[1:] for row in BY_HAND], ids=[r[0] for r in BY_HAND]
)
def test_roles_are_where_the_table_says(plain: dict[str, Any], gpus: int, where: dict[str, Any], backend: str) -> None:
    found = placed(plain, gpus)
    assert table(found) == where
    assert found.placement.weights.backend == found.config.weights.backend == backend


def test_auto_is_sglang_where_gpus_and_an_environment_are_found_and_embedded_otherwise() -> None:
    assert table(placed({"actors": 4}, 8)) == table(placed(SERVED | {"actors": 4}, 8))
    without = placed({"actors": 4}, 8, Installed(missing=("sglang",)))
    assert table(without) == table(placed(EMBEDDED | {"actors": 4}, 8))
    assert (
        f"actors: embedded on GPU 2, 3, 4, 5 (auto: GPUs, but {PYTHON} has no sglang; SGLang" in without.placement.text
    )
    assert "751 to 3,045 tokens/s" in without.placement.text, "what that costs is said before the start"
    no_gpu = placed({"actors": 4}, 0)
    assert (no_gpu.config.actor.engine, no_gpu.config.teacher.engine) == ("torch", "torch")
    assert "(auto: no GPU)" in no_gpu.placement.text
    assert "\n" not in no_gpu.placement.text


def test_an_embedded_engine_computes_in_bfloat16_on_a_gpu_unless_another_dtype_is_named() -> None:
    """All must know it: the learner sends the weights in it."""
    named = {"actor": EMBEDDED["actor"] | {"torch": {"dtype": "float16"}}}
    for plain, gpus, dtype in ((EMBEDDED, 2, "bfloat16"), (EMBEDDED, 0, "float32"), (EMBEDDED | named, 2, "float16")):
        actor = placed(plain, gpus).config.actor
        assert actor.torch.dtype == dtype
        assert find_engine("torch").members(actor, WeightsConfig(), "").dtype == dtype


def test_on_one_gpu_servers_are_told_their_share_and_start_in_turn_before_the_learner() -> None:
    shared = {role: {"engine": "sglang", "server": {"python": sys.executable, "gpus": [0]}} for role in ROLES}
    found = placed({**shared, "actors": 1}, 1)
    assert found.mistakes == []
    for plan in found.plans:
        assert "--max-total-tokens" in plan.added and plan.devices == (0,)
        assert plan.launch.arguments[-len(plan.added) :] == plan.added
    assert "GPU 0: starts server-actor-0, then server-teacher-0, then learner" in found.report()
    assert not [line for line in placed(SERVED, 8).report() if "starts" in line], "each has a GPU of its own"
    own = {"server": {"python": sys.executable, "gpus": [0], "args": ["--max-total-tokens", "30000"]}}
    (teacher, actor) = placed({**shared, "teacher": shared["teacher"] | own, "actors": 1}, 1).plans
    assert (teacher.worker, actor.worker) == ("teacher-0", "actor-0")
    assert teacher.launch.arguments[-2:] == ("--max-total-tokens", "30000")


def test_what_only_the_embedded_engine_can_do_decides_auto() -> None:
    average = placed({"learner": {"ema": {"decay": 0.9}}}, 8)
    assert (average.config.actor.engine, average.config.teacher.engine) == ("sglang", "torch")
    attached = build(RunConfig, {"teacher": {"urls": ["http://a:1"]}})
    assert choose_engines(attached, Machine(), Installed()).config.teacher.engine == "sglang"


def test_each_pool_has_its_engine() -> None:
    pools = {"pools": {"a": {}, "b": {"device": "cpu", "server": {"device": "cpu"}}, "c": {"engine": "torch"}}}
    routes = {"learner": {"tasks": {"routes": {"a": [], "b": [], "c": []}}}}
    chosen = choose_engines(build(RunConfig, {"teachers": 3} | pools | routes), Machine(("0",)), Installed()).config
    assert [pool.engine for pool in chosen.pools.values()] == ["sglang", "torch", "torch"]
    assert chosen.teacher.engine == "torch"


def test_the_command_of_the_readme_does_not_fit_on_eight_gpus_as_servers_and_does_embedded() -> None:
    """stillhouse --actors 32 --teachers 8."""
    (mistake,) = placed({"actors": 32, "teachers": 8}, 8).mistakes
    assert "got 8 visible GPUs, 7 of them free (1 has the learner or an embedded engine)" in mistake
    assert "expected 32 for 32 actor servers (tp 1), 8 for 8 teacher servers (tp 1)" in mistake
    assert "SGLang servers that fit there, actors' and teachers' together: 7 with tp 1" in mistake
    without = placed({"actors": 32, "teachers": 8}, 8, Installed(missing=("sglang",)))
    gpus = table(without)
    assert gpus["learner"] == 0 and 0 not in [gpu for who, gpu in gpus.items() if who != "learner"]
    why = "actor-0 and actor-7 share GPU 2, and NCCL takes one rank per GPU and host"
    assert without.placement.weights == ("gloo", why, False)


@pytest.mark.parametrize(
    ("plain", "gpus", "message"),
    [
        (SERVED | {"actors": 7}, 8, "expected 7 for 7 actor servers (tp 1), 1 for 1 teacher servers (tp 1)"),
        (TP2 | {"actors": 4}, 8, "actors' and teachers' together: 3 with tp 2"),
        (SERVED, 2, "got 2 visible GPUs, 1 of them free"),
        (EMBEDDED | {"learner": {"device": "cuda:8"}}, 8, "learner.device: got cuda:8, expected a number less than 8"),
        (EMBEDDED | {"learner": {"device": "gpu"}}, 8, "learner.device: got 'gpu', expected auto, cpu, cuda or cuda:N"),
        (EMBEDDED | {"weights": {"backend": "nccl"}}, 0, "got nccl, but the learner is on the CPU"),
    ],
)
def test_what_is_impossible_is_refused_by_key(plain: dict[str, Any], gpus: int, message: str) -> None:
    (mistake,) = placed(plain, gpus).mistakes
    assert message in mistake


@pytest.mark.parametrize("plain", [EMBEDDED, EMBEDDED | {"actors": 1}])
def test_nccl_on_a_shared_gpu_may_be_asked_for_and_goes_over_sockets(plain: dict[str, Any]) -> None:
    assert placed(plain, 1).placement.weights.backend == "gloo"
    asked = placed(plain | {"weights": {"backend": "nccl"}}, 1)
    assert asked.mistakes == [] and asked.placement.weights[::2] == ("nccl", True)
    assert "the learner and actor-0 share GPU 0, so it goes over NCCL's sockets" in asked.placement.text
    assert placed(EMBEDDED | {"actors": 1}, 8).placement.weights[::2] == ("nccl", False)


def test_servers_with_another_nccl_than_the_learner_get_gloo_and_nccl_is_refused() -> None:
    versions = Installed(servers=OTHER_NCCL)
    plain = SERVED | {"actors": 1}
    found = placed(plain, 8, versions)
    assert found.placement.weights.backend == "gloo"
    assert "the learner has NCCL 2.27.5" in found.placement.weights.why and "2.30.7" in found.placement.text
    (mistake,) = placed(plain | {"weights": {"backend": "nccl"}}, 8, versions).mistakes
    assert mistake.startswith("weights.backend: got nccl, but the learner has NCCL 2.27.5")


def test_an_nccl_for_another_cuda_is_refused_in_either_interpreter_where_gpus_are_used() -> None:
    mixed = CUDA_12._replace(nccl=(*NCCL_12, ("nvidia-nccl-cu13", "2.30.7")))
    (mistake,) = placed(EMBEDDED, 8, Installed(own=mixed)).mistakes
    assert mistake.startswith(f"learner.device: {PYTHON} has nvidia-nccl-cu13 installed, but torch 2.13.0 is built for")
    (mistake,) = placed(SERVED_ACTORS, 8, Installed(servers=mixed)).mistakes
    assert mistake.startswith("actor.server.python") and "pip uninstall nvidia-nccl-cu13" in mistake
    assert placed(EMBEDDED | {"device": "cpu"}, 8, Installed(own=mixed)).mistakes == []


def test_a_torch_without_cuda_stays_on_the_cpu_beside_gpus_and_says_so() -> None:
    found = placed(EMBEDDED | {"actors": 1}, 8, Installed(own=CPU_ONLY))
    assert table(found) == {"learner": None, "teacher-0": None, "actor-0": None}
    assert "learner on the CPU (torch 2.13.0+cpu has no CUDA)" in found.placement.text


LEARNER = Member("learner", (0,), "2.27.5", "/a")


@pytest.mark.parametrize(
    ("actors", "backend", "why"),
    [
        ([Member("actor-0", (1,), "2.27.5", "/b")], "nccl", "a GPU each, NCCL 2.27.5"),
        ([Member("actor-0", (1, 2), "2.27.5", "/b"), Member("actor-1", (2, 3), "2.27.5", "/b")], "gloo", "share GPU 2"),
        ([Member("actor-0", (0,), "2.27.5", "/b")], "gloo", "the learner and actor-0 share GPU 0"),
        ([Member("actor-0", (), None, "")], "gloo", "actor-0 is on the CPU"),
        ([Member("actor-0", None, None, "http://x")], "gloo", "the user started its server"),
        ([Member("actor-0", (1,), None, "/b")], "gloo", "no installed wheel says which NCCL /b has"),
        ([], "gloo", "actors that join"),
    ],
)
def test_nccl_is_taken_where_all_is_known_to_fit(actors: list[Member], backend: str, why: str) -> None:
    choice = choose_weight_backend("auto", LEARNER, actors)
    assert choice.backend == backend and why in choice.why
    assert choose_weight_backend("gloo", LEARNER, actors).backend == "gloo"


def test_what_is_only_not_known_may_be_asked_for() -> None:
    for actors in ([], [Member("actor-0", None, None, "http://x")], [Member("actor-0", (1,), None, "/b")]):
        assert choose_weight_backend("nccl", LEARNER, actors).backend == "nccl"


def test_one_interpreter_has_one_nccl_even_where_no_wheel_names_it() -> None:
    learner, actor = (Member(who, (i,), None, "/conda") for i, who in enumerate(("learner", "actor-0")))
    assert choose_weight_backend("auto", learner, [actor]).backend == "nccl"


def test_each_worker_is_told_its_own_device() -> None:
    found = placed(EMBEDDED | {"actors": 3, "teachers": 2}, 8)
    told = {(role, i): found.placement.device(role, i) for role in ("teacher", "actor") for i in range(2)}
    assert told == {("teacher", 0): "cuda:1", ("teacher", 1): "cuda:2", ("actor", 0): "cuda:3", ("actor", 1): "cuda:4"}
    assert found.placement.device("learner", 0) == "cuda:0"
    assert found.placement.device("buffer", 0) == ""
    start = StartRole(
        entry="x:y",
        role="actor",
        index=1,
        name="actor-1",
        incarnation="i",
        run_id="r",
        buffer_address="tcp://127.0.0.1:1",
        resume=False,
        device=told["actor", 1],
    )
    context = msgspec.json.decode(msgspec.json.encode(start), type=StartRole).context(found.config, Path("/r"))
    assert context.config.actor.torch.device == "cuda:4"
    assert context.config.learner.device == found.config.learner.device == "auto"


def test_a_pretended_machine_has_as_many_gpus_as_said() -> None:
    assert pretended_machine("8") == Machine(tuple("01234567"), (80.0,) * 8, pretended=True)
    assert pretended_machine("2x24").gib == (24.0, 24.0)
    for wrong in ("0", "x", "8x0", "-1", "8x"):
        with pytest.raises(ConfigError, match=f"--gpus: got '{wrong}'"):
            pretended_machine(wrong)


def test_the_build_of_torch_is_read_from_its_version_file() -> None:
    source = "from typing import Optional\n__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip = None\n"
    assert constants(source) == {"__version__": "2.13.0+cu130", "cuda": "13.0", "hip": None}
    build_13 = TorchBuild("2.13.0", "13.0", None, (("nvidia-nccl-cu12", "2.27.5"), ("nvidia-nccl-cu13", "2.29.7")))
    assert build_13.nccl_version == "2.29.7"
    assert str(build_13.wrong_wheel()).startswith("has nvidia-nccl-cu12 installed")
    assert CUDA_12.wrong_wheel() is None and CPU_ONLY._replace(nccl=NCCL_12).wrong_wheel() is None


def test_copies_that_would_take_much_of_the_gpu_are_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stillhouse.launch.checks.memory.ROOMY", 1e-9)
    one = placed(EMBEDDED | {"actors": 1}, 1)
    assert (one.config.weights.transport, one.config.weights.staging) == ("ipc", "host")
    assert "memory that the learner shares from copies in host memory" in one.placement.text
    by_nccl = placed(EMBEDDED | {"actors": 1, "weights": {"backend": "nccl"}}, 1).config.weights
    assert (by_nccl.backend, by_nccl.staging) == ("nccl", "host")
    asked = placed(EMBEDDED | {"actors": 1, "weights": {"staging": "device"}}, 1).config.weights
    assert (asked.transport, asked.staging) == ("ipc", "device")


@pytest.mark.parametrize(
    ("parameters", "host_gib", "asked", "staging"),
    [(1e9, 64, "auto", "device"), (4e9, 64, "auto", "host"), (4e9, 8, "auto", "device"), (4e9, 64, "device", "device")],
    ids=["room on the GPU", "room on the host alone", "room nowhere", "asked for"],
)
def test_nccl_sends_from_host_memory_where_only_that_has_room_for_copies(
    parameters: float, host_gib: float, asked: str, staging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training 4e9 parameters takes 67 GiB, and two copies of them in bfloat16 15."""
    shape = read_shape(builtin.STUDENT_DIR)
    assert shape is not None
    of_size = shape._replace(parameters=int(parameters))

    def fixed(_: Path) -> ModelShape:
        return of_size

    monkeypatch.setattr(memory, "read_shape", fixed)
    roles = EMBEDDED | {"actors": 1, "teachers": 0, "weights": {"staging": asked}}
    found = placed(roles, 8, host_gib=host_gib)
    assert (found.config.weights.backend, found.config.weights.staging) == ("nccl", staging)
    assert ("weights by nccl from copies in host memory" in found.placement.text) == (staging == "host")
    fits = not any(line.endswith(memory.TIGHT) for line in found.memory)
    assert fits == (parameters < 4e9 or staging == "host")


def test_weights_go_by_shared_memory_where_all_actors_are_on_the_learners_gpu() -> None:
    one = placed(EMBEDDED | {"actors": 1}, 1)
    assert one.config.weights.transport == "ipc" and "memory that the learner shares" in one.placement.text
    assert one.config.weights.staging == "device", "two copies of the built-in student leave room"
    assert placed(EMBEDDED | {"actors": 1}, 8).config.weights.transport == "auto"
    assert placed(EMBEDDED | {"actors": 1, "weights": {"backend": "gloo"}}, 1).config.weights.transport == "auto"
    (mistake,) = placed(EMBEDDED | {"actors": 1, "weights": {"transport": "ipc"}}, 8).mistakes
    assert "actor-0" in mistake and "use auto" in mistake
