"""Several pools of teachers: each teacher gets the model and the settings of its pool, wherever the launcher looks."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from stillhouse import builtin
from stillhouse.engines.sglang import attached
from stillhouse.engines.sglang.features import Features
from stillhouse.launch.checks.placement import place_run
from stillhouse.launch.checks.preflight import check
from stillhouse.launch.config.command_line import parse_arguments, resolve_config
from stillhouse.launch.config.consistency import check_consistency
from stillhouse.launch.config.files import read_config, write_config
from stillhouse.launch.config.pools import pool_of, teacher_pools
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import Plain, build, get, merge
from stillhouse.launch.errors import ConfigError
from stillhouse.launch.machine.machine import Interpreters, Machine
from stillhouse.launch.servers.attached import ask_servers
from stillhouse.launch.servers.plan import plan_servers
from stillhouse.learner.objectives.options import Distributions, Jsd, SampledDivergence
from tests.launch.servers.test_attached import A

FILE = """
[learner.tasks]
routes = { adders = ["addition"], multipliers = ["multiplication"] }
[teacher]
top_k = 8
max_batch_tokens = 2048
[pools.adders]
count = 2
[pools.multipliers]
model = "M"
top_k = 16
"""


def resolve(tmp_path: Path, text: str, *flags: str) -> RunConfig:
    file = tmp_path / "run.toml"
    file.write_text(text)
    return resolve_config(parse_arguments(["--config", str(file), *flags]))


def refused(**plain: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build(RunConfig, plain)
    return str(caught.value)


def test_each_teacher_reads_the_model_and_the_settings_of_its_pool(tmp_path: Path) -> None:
    config = resolve(tmp_path, FILE, "--teacher", "T", "--pools.multipliers.dtype", "bfloat16")
    assert config.teachers == 3
    seen = [pool_of(config, index).config for index in range(3)]
    assert [(own.teacher.pool, own.models.teacher) for own in seen] == [
        *[("adders", "T")] * 2,
        ("multipliers", "M"),
    ]
    assert [(own.teacher.top_k, own.teacher.max_batch_tokens, own.teacher.dtype) for own in seen] == [
        *[(8, 2048, "auto")] * 2,
        (16, 2048, "bfloat16"),
    ]
    assert check_consistency(config, None).mistakes == []


OWN = """
[learner.objective]
divergence = { name = "jsd", beta = 0.3 }
[learner.objective.teacher_divergences]
multipliers = "reverse_kl"
adders = { name = "jsd", beta = 0.7 }
"""


def test_a_pool_may_have_a_divergence_of_its_own_with_options(tmp_path: Path) -> None:
    config = resolve(tmp_path, FILE + OWN)
    objective = config.learner.objective
    assert objective.divergence_of("multipliers") == Distributions(name="reverse_kl")
    assert objective.divergence_of("adders") == Jsd(beta=0.7)
    assert objective.divergence_of("others") == Jsd(beta=0.3)
    key = "--learner.objective.teacher_divergences"
    changed = resolve(tmp_path, FILE + OWN, f"{key}.adders=k3", f"{key}.multipliers=jsd", f"{key}.multipliers.beta=0.2")
    assert changed.learner.objective.teacher_divergences == {
        "adders": SampledDivergence(name="k3"),
        "multipliers": Jsd(beta=0.2),
    }
    write_config(changed, tmp_path / "config.yaml")
    assert read_config(tmp_path / "config.yaml") == changed


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("adders=kl", "teacher_divergences.adders: divergence = 'kl'; did you mean 'forward_kl' or 'reverse_kl'?"),
        ("adders=jds", "teacher_divergences.adders: divergence = 'jds'; did you mean 'jsd'"),
        ("adders.gamma=2", "teacher_divergences.adders.gamma: jsd does not read it, expected one of its options: beta"),
        ("new.beta=0.2", "teacher_divergences.new: got {'beta': 0.2} (dict), expected one of k1, k2, k3"),
        ("new=k1", "objective.teacher_divergences names the pool 'new'; expected one of tasks.routes: adders"),
    ],
)
def test_a_wrong_divergence_of_a_pool_is_told(tmp_path: Path, flag: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(tmp_path, FILE + OWN, f"--learner.objective.teacher_divergences.{flag}")
    assert message in str(caught.value)


def test_a_file_laid_over_a_resumed_run_replaces_the_divergence_of_a_pool() -> None:
    under: Plain = {
        "learner": {"objective": {"teacher_divergences": {"a": {"name": "jsd", "beta": 0.3}, "b": {"name": "k3"}}}}
    }
    over = {"learner": {"objective": {"teacher_divergences": {"a": "k1"}}}}
    merged = get(merge(under, over, RunConfig), "learner.objective.teacher_divergences")
    assert merged == {"a": {"name": "k1"}, "b": {"name": "k3"}}


def test_each_pool_must_send_what_its_own_divergence_needs(tmp_path: Path) -> None:
    plain = FILE.replace("top_k = 8", "").replace("top_k = 16", "")
    assert not check_consistency(resolve(tmp_path, plain), builtin.STUDENT_DIR).mistakes
    (told,) = check_consistency(resolve(tmp_path, plain + OWN, "--pools.adders.top_k=8"), builtin.STUDENT_DIR).mistakes
    assert told.startswith(
        "learner.objective.teacher_divergences.multipliers = 'reverse_kl' needs pools.multipliers.top_k: got 0"
    )
    assert "learner.objective.teacher_divergences.multipliers = k1 without a baseline" in told
    fine = ("--pools.adders.top_k=8", "--pools.multipliers.top_k=8")
    assert not check_consistency(resolve(tmp_path, plain + OWN, *fine), builtin.STUDENT_DIR).mistakes
    own_k1 = (*fine, "--learner.objective.teacher_divergences.adders=k1")
    found = check_consistency(resolve(tmp_path, plain + OWN, *own_k1), builtin.STUDENT_DIR)
    assert not found.mistakes
    assert "pools.adders.top_k: got 8, but learner.objective.teacher_divergences.adders = 'k1' uses only" in str(
        found.warnings
    )


def test_a_resolved_configuration_is_the_same_when_it_is_read_again(tmp_path: Path) -> None:
    config = resolve(tmp_path, FILE)
    write_config(config, tmp_path / "config.yaml")
    assert read_config(tmp_path / "config.yaml") == config


def test_a_resumed_run_may_change_the_count_of_a_pool(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "run.json").write_text("{}")
    write_config(resolve(tmp_path, FILE), run_dir / "config.yaml")
    line = parse_arguments(["--run-dir", str(run_dir), "--resume", "--pools.adders.count", "4"])
    assert resolve_config(line).teachers == 5


def test_without_pools_there_is_one_of_as_many_teachers_as_asked_for() -> None:
    config = build(RunConfig, {"teachers": 3})
    assert [(pool.name, pool.first, pool.config) for pool in teacher_pools(config)] == [("default", 0, config)]


def test_a_wrong_key_of_a_pool_is_told_with_the_nearest_right_one() -> None:
    assert "pools.math.modle: unknown key; did you mean pools.math.model?" in refused(pools={"math": {"modle": "x"}})
    assert "pools.math: got 3 (int), expected a table" in refused(pools={"math": 3})


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"pools": {"a": {"count": 2}}, "teachers": 3}, "teachers is 3, expected 2, the sum of the pools (a: 2)"),
        ({"pools": {"a": {}}, "teacher": {"pool": "math"}}, "teacher.urls and teacher.pool are of a run with one pool"),
        ({"pools": {"a": {"top_mass": 2.0}}}, "pools.a.top_mass: got 2.0 (float), expected float > 0 and <= 1"),
        (
            {"pools": {"a": {"urls": ["http://x"], "engine": "torch"}}},
            "pools.a: urls are for engine sglang, vllm, got engine torch",
        ),
        ({"pools": {"a": {"count": -1}}}, "pools.a.count: got -1 (int), expected int >= 0"),
    ],
)
def test_pools_that_cannot_be_are_refused(plain: dict[str, Any], message: str) -> None:
    assert message in refused(**plain)


def test_routes_and_pools_must_name_one_another() -> None:
    routes = {"learner": {"tasks": {"routes": {"adder": [], "judges": []}}}}
    plain = {"pools": {"adders": {}, "judges": {}}, "teachers": 2, **routes}
    assert check_consistency(build(RunConfig, plain), None).mistakes == [
        "learner.tasks.routes: got pool 'adder', which no teacher serves; expected 'adders', a pool of `pools`",
        "pools.adders: got 'adders', to which learner.tasks.routes sends nothing; expected one of its pools: adder, "
        "judges",
    ]


def test_servers_are_planned_per_pool_with_its_model_gpus_and_ports() -> None:
    server = {"python": sys.executable, "device": "cuda"}
    big = {"model": "big", "count": 1, "engine": "sglang", "server": {**server, "tp": 2, "gpus": [2, 3], "port": 9000}}
    plain = {
        "teachers": 3,
        "teacher": {"engine": "sglang", "server": {**server, "port": 7000}},
        "models": {"teacher": "small"},
        "pools": {"first": {}, "big": big, "last": {}},
        "learner": {"device": "cpu"},
        "actor": {"engine": "torch", "torch": {"device": "cpu"}},
    }
    config, machine = build(RunConfig, plain), Machine(tuple(str(gpu) for gpu in range(5)))
    gpus = place_run(config, machine, Interpreters(), {}).places.servers
    plans = plan_servers(config, machine.gpus, gpus)
    assert [(plan.worker, plan.model, plan.gpus, plan.port) for plan in plans] == [
        ("teacher-0", "small", ("0",), 7000),
        ("teacher-1", "big", ("2", "3"), 9000),
        ("teacher-2", "small", ("1",), 7002),
    ]


def test_running_servers_of_a_pool_are_asked_and_their_layout_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(url: str, settings: Any, *, api_key: str) -> Features:
        return A

    monkeypatch.setattr(attached, "probe_server", probe)
    urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    pools = {"here": {}, "there": {"engine": "sglang", "urls": urls, "count": 2}}
    found = ask_servers(build(RunConfig, {"pools": pools, "teachers": 3}))
    assert found.mistakes == [] and [name for name, _ in found.servers] == ["teacher-1", "teacher-2"]
    server = found.config.pools["there"].server
    assert server is not None and (server.device, server.tp) == ("cuda", 2)
    assert found.config.pools["here"].server is None


def test_the_models_of_all_pools_are_looked_at_before_anything_starts(tmp_path: Path) -> None:
    other = Path(shutil.copytree(builtin.TEACHER_DIR, tmp_path / "other"))
    plain: dict[str, Any] = {
        "teachers": 2,
        "pools": {"mine": {}, "theirs": {"model": str(other)}},
        "learner": {"tasks": {"routes": {"mine": ["a"], "theirs": ["b"]}}},
    }
    resolved = check(build(RunConfig, plain)).config
    assert [pool.config.models.teacher for pool in teacher_pools(resolved)] == [str(builtin.TEACHER_DIR), str(other)]

    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    first, second = sorted(vocab, key=lambda token: vocab[token])[40:42]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"pools\.theirs\.model: its tokenizer differs from the student's"):
        check(build(RunConfig, plain))
    shutil.rmtree(other)
    with pytest.raises(ConfigError, match=r"pools\.theirs\.model: no folder"):
        check(build(RunConfig, plain))


API = "https://api.example.com/v1"


def test_an_api_is_given_by_its_address_or_by_a_table(tmp_path: Path) -> None:
    flags = ("--pools.multipliers.api", API, "--pools.multipliers.api.model", "m")
    text = FILE.replace('model = "M"\n', "")
    config = resolve(tmp_path, text, *flags)
    assert config.pools["multipliers"].api.url == API and config.pools["multipliers"].api.model == "m"
    assert resolve(tmp_path, text + f'api = {{ url = "{API}", model = "m" }}').pools == config.pools
    assert resolve(tmp_path, text + f'api = "{API}"').pools["multipliers"].api.url == API
    pool = teacher_pools(config)[1]
    assert pool.config.models.teacher == config.models.student and pool.model_key == "models.student"
    file = tmp_path / "config.yaml"
    write_config(config, file)
    assert read_config(file) == config


def test_an_api_needs_neither_folder_nor_gpu(tmp_path: Path) -> None:
    config = resolve_config(parse_arguments(["--teacher.api", API, "--device", "cuda"]))
    checked = check(config, Machine(("0", "1", "2", "3"), pretended=True))
    assert checked.config.teacher.engine == "api" and checked.config.models.teacher == "builtin"
    assert "teachers: an API on the CPU" in checked.servers.placement.text
    assert (
        "teacher-0" not in checked.servers.placement.places.seats or checked.servers.placement.gpu("teacher", 0) is None
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--teacher.api", API, "--teacher.api.key_env", "NO_SUCH_KEY"), "the environment has no NO_SUCH_KEY"),
        (("--teacher.api", API, "--teachers=2", "--teacher.api.budget_tokens=9"), "teachers: got 2 with a budget"),
        (("--teacher.api", API, "--teacher", "M"), "models.teacher: got 'M' with teacher.api"),
        (
            ("--teacher.api", API, "--teacher.tokenizer=other"),
            "models.teacher: got none with teacher.api",
        ),
        (("--teacher.api", API, "--teacher.api.reference", "/nowhere"), "'/nowhere' is no model folder"),
        (("--teacher.api", API, "--teacher.payload", "hidden"), "teacher.engine: got 'api'"),
        (("--teacher.api", API, "--teacher.top_k_of", "student", "--teacher.top_k=8"), "teacher.engine: got 'api'"),
    ],
)
def test_what_does_not_fit_an_api_is_refused(flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(resolve_config(parse_arguments(list(flags))))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--teacher.api", API, "--teacher.engine=torch"), "engine: got torch with api.url"),
        (("--teacher.engine=api",), "engine: got api with api.url = ''"),
        (("--teacher.api", API, "--teacher.urls", "http://localhost:1"), "got servers beside an api"),
        (("--teacher.api", "https://me:pw@example.com/v1"), "a user or password"),
    ],
)
def test_contradictions_about_an_api_are_refused(flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_config(parse_arguments(list(flags)))
    assert said in str(caught.value) and "pw@" not in str(caught.value)


def test_an_api_slower_than_a_lease_is_warned_of() -> None:
    config = resolve_config(parse_arguments(["--teacher.api", API, "--teacher.api.timeout_s=90"]))
    assert any("teacher.api.timeout_s: 90" in line for line in check_consistency(config, None).warnings)
