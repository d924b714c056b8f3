"""Adapters whose package is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stillhouse.actors.envs.adapters.packages import import_package
from stillhouse.actors.envs.registry import BUILT_IN, UnknownEnvironment, check_options, find_environment

ADAPTERS = {
    "gymnasium": ("gymnasium", "gymnasium"),
    "reasoning_gym": ("reasoning_gym", "reasoning-gym"),
    "skyrl_gym": ("skyrl_gym", "skyrl-gym"),
    "textarena": ("textarena", "textarena"),
    "mcp": ("mcp", "mcp"),
}
"""Name -> the module that is imported, and our extra for it."""


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_missing_package_is_one_line_that_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, extra = ADAPTERS[name]
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    for part in ("spaces", *ADAPTERS):
        monkeypatch.delitem(sys.modules, f"stillhouse.actors.envs.adapters.{part}", raising=False)
    find_environment.cache_clear()
    with pytest.raises(UnknownEnvironment) as raised:
        check_options(name, {})
    find_environment.cache_clear()
    assert str(raised.value) == f"environment {name!r} needs the package {extra}: pip install -e '.[{extra}]'"


def test_every_extra_is_in_the_pyproject_and_tried_in_an_exact_version() -> None:
    root = Path(__file__).parents[3]
    extras, exact = (root / "pyproject.toml").read_text(), (root / "constraints.txt").read_text()
    for _, extra in ADAPTERS.values():
        assert f'\n{extra} = ["{extra}>=' in extras
        assert f"\n{extra}==" in exact
    assert set(ADAPTERS) | {"openenv", "openenv_session", "verifiers"} == {
        name for name, path in BUILT_IN.items() if ".adapters." in path
    }


def test_what_a_package_lacks_itself_is_not_taken_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_there.py").write_text("import no_such_module_at_all")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        import_package("half_there", environment="half", package="half-there", extra="half")
