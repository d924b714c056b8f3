"""Engines by name: built in, of an installed package, or `module:attribute`."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from stillhouse.actors.config import ActorConfig
from stillhouse.engines.registry import UnknownEngine, find_engine, known_engines
from stillhouse.launch.config.command_line import parse_arguments, resolve_config
from stillhouse.launch.config.files import write_config
from stillhouse.launch.config.help import help_text
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import Plain, build, put
from stillhouse.launch.errors import ConfigError
from stillhouse.teachers.config import TeacherConfig

SCRIPTED = """
from stillhouse.engines.provider import EngineProvider
from stillhouse.protocol.settings import PositiveInt, Settings

class Options(Settings, frozen=True, kw_only=True):
    echoes: PositiveInt = 3

class Scripted(EngineProvider):
    name = "scripted"
    title = "scripted"
    roles = ("actor",)
    options = {"actor": Options}

PROVIDER = Scripted()
NONE = object()
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module, and a dist-info folder with the entry point of an installed package."""
    (tmp_path / "scripted_for_test.py").write_text(SCRIPTED)
    info = tmp_path / "scripted_for_test-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scripted-for-test\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[stillhouse.engines]\nscripted = scripted_for_test:PROVIDER\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    find_engine.cache_clear()
    return tmp_path


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", ["scripted", "scripted_for_test:PROVIDER"])
def test_a_third_engine_is_found_and_configured_by_its_name(name: str) -> None:
    assert "scripted" in known_engines()
    assert find_engine(name).title == "scripted"
    assert build(RunConfig, {"actor": {"engine": name}}).actor.engine == name
    with pytest.raises(ValueError, match="for actor only, got it for a teacher"):
        TeacherConfig(engine=name)
    with pytest.raises(ValueError, match=r"urls are for engine sglang, vllm, got engine scripted"):
        ActorConfig(engine=name, urls=("http://h:1",))


@pytest.mark.usefixtures("package")
def test_a_third_engine_has_a_section_of_its_own(tmp_path: Path) -> None:
    """Set by flag, file or folder of a run; what is set last wins; `section` gives it to the engine."""
    (tmp_path / "run.toml").write_text("[actor.scripted]\nechoes = 4\n")

    def echoes(*words: str) -> int:
        config = resolve_config(parse_arguments(["--actor.engine=scripted", *words]))
        write_config(config, tmp_path / "config.yaml")
        return config.actor.section("scripted", find_engine("scripted").options["actor"]).echoes  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType, reportUnknownMemberType]

    assert echoes() == 3
    assert echoes(f"--config={tmp_path}/run.toml") == 4
    assert echoes(f"--config={tmp_path}/run.toml", "--actor.scripted.echoes=5") == 5
    resume = ["--resume", f"--run-dir={tmp_path}"]
    assert echoes(*resume) == 5
    assert echoes(*resume, "--actor.scripted.echoes=6") == 6
    assert "--actor.scripted.echoes" in help_text(["actor"])


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "actor.scripted.echos",
            5,
            "actor.scripted.echos: scripted does not read it, expected one of its options: echo",
        ),
        ("actor.scripted.echoes", 0, "actor.scripted.echoes: got 0 (int), expected int >= 1"),
        ("teacher.scripted.echoes", 5, "teacher.scripted: unknown key"),
        ("actor.torch.echoes", 5, "actor.torch.echoes: unknown key"),
    ],
)
def test_a_wrong_option_of_a_third_engine_is_refused_by_name(key: str, value: int, said: str) -> None:
    plain: Plain = {}
    put(plain, key, value)
    with pytest.raises(ConfigError) as caught:
        build(RunConfig, plain)
    assert caught.value.mistakes[0].startswith(said)


def test_an_unknown_engine_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown engine 'sglan'; did you mean 'sglang'\? Known: auto, .*sglang.*torch"
    ):
        build(RunConfig, {"actor": {"engine": "sglan"}})


@pytest.mark.usefixtures("package")
def test_what_is_no_provider_is_refused() -> None:
    with pytest.raises(UnknownEngine, match="is a object, expected an instance of a subclass"):
        find_engine("scripted_for_test:NONE")
    with pytest.raises(UnknownEngine, match="cannot load"):
        find_engine("scripted_for_test:MISSING")
