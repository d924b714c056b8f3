"""Engines by name: built in, of an installed package, or `module:attribute`."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from actors.config import ActorConfig
from engines.registry import UnknownEngine, find_engine, known_engines
from launch.config.run import RunConfig
from launch.config.tree import build
from launch.errors import ConfigError
from teachers.config import TeacherConfig

SCRIPTED = """
from engines.provider import EngineProvider

class Scripted(EngineProvider):
    name = "scripted"
    title = "scripted"
    roles = ("actor",)

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
    with pytest.raises(ValueError, match=r"urls are for engine sglang, got engine scripted"):
        ActorConfig(engine=name, urls=("http://h:1",))


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
