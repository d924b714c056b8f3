"""Adapters whose package is not installed."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from stillhouse.actors.envs.adapters.shared.packages import import_package
from stillhouse.actors.envs.registry import BUILT_IN, UnknownEnvironment, check_options, find_environment

ROOT = Path(__file__).parents[3]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
ADAPTERS = {
    name: name.replace("_", "-")
    for name, path in BUILT_IN.items()
    if ".adapters." in path and name.replace("_", "-") in EXTRAS
}
"""Environment, which is also the module that is imported -> our extra for it. The others ask a server."""


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_missing_package_is_one_line_that_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    extra = ADAPTERS[name]
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    for part in ("shared.spaces", *ADAPTERS):
        monkeypatch.delitem(sys.modules, f"stillhouse.actors.envs.adapters.{part}", raising=False)
    find_environment.cache_clear()
    with pytest.raises(UnknownEnvironment) as raised:
        check_options(name, {})
    find_environment.cache_clear()
    assert str(raised.value) == f"environment {name!r} needs the package {extra}: pip install -e '.[{extra}]'"


def test_every_extra_is_tried_in_an_exact_version_and_installed_by_make_agents() -> None:
    exact = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    (agents,) = EXTRAS["agents"]
    for extra in ADAPTERS.values():
        assert EXTRAS[extra][0].startswith(f"{extra}>=") and f"\n{extra}==" in exact
        assert extra in agents.partition("[")[2].rstrip("]").split(",")
    assert len(ADAPTERS) >= 5


def test_what_a_package_lacks_itself_is_not_taken_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_there.py").write_text("import no_such_module_at_all")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        import_package("half_there", environment="half", package="half-there", extra="half")
