"""Finds engines by name: built-in ones, those of installed packages, and `module:attribute`. No torch.

A package adds its own in its pyproject.toml:

    [project.entry-points."stillhouse.engines"]
    scripted = "my_package.engine:PROVIDER"
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from typing import Final

from stillhouse.engines.provider import EngineProvider, EngineRole
from stillhouse.protocol.plugins import CannotLoad, installed, load
from stillhouse.protocol.settings import Members, Settings

ENTRY_POINT_GROUP: Final = "stillhouse.engines"
BUILT_IN: Final = {
    "torch": "stillhouse.engines.torch.provider:PROVIDER",
    "sglang": "stillhouse.engines.sglang.provider:PROVIDER",
    "api": "stillhouse.engines.api.provider:PROVIDER",
    "vllm": "stillhouse.engines.vllm.provider:PROVIDER",
}
AUTO: Final = "auto"
"""The launcher chooses: the first of `AUTO_ORDER` that fits, else EMBEDDED (launch.checks.placement)."""
AUTO_ORDER: Final = ("api", "sglang")
EMBEDDED: Final = "torch"
"""The engine that works anywhere: in the worker's process, on any device."""


class UnknownEngine(ValueError):
    """There is no engine of this name, or it cannot be loaded."""


class EngineOptions(Members):
    """Sections of keys that engines bring: `actor.NAME.KEY` or `teacher.NAME.KEY`. Those of torch, sglang and api are
    fields of `actor` and `teacher`."""

    beside = True

    def __init__(self, role: EngineRole) -> None:
        self._role: EngineRole = role

    def known(self) -> Mapping[str, type[Settings]]:
        found: dict[str, type[Settings]] = {}
        for name in known_engines():
            try:
                found[name] = self.section(name, with_options=True)
            except ValueError:
                continue  # broken, or without options: reported when somebody chooses it or sets one
        return found

    def section(self, name: str, *, with_options: bool) -> type[Settings]:
        section = find_engine(name).options.get(self._role)
        if section is None:
            raise ValueError(f"engine {name} brings no section of options for a {self._role}; expected none")
        return section


def known_engines() -> dict[str, str]:
    """Name -> `module:attribute` of its provider. A package cannot take a built-in name."""
    return installed(ENTRY_POINT_GROUP) | BUILT_IN


@functools.cache
def find_engine(name: str) -> EngineProvider:
    """The provider behind a name or a `module:attribute` path. `auto`, before the launcher has chosen, means the
    embedded engine. Raises UnknownEngine, listing the known names."""
    name = EMBEDDED if name == AUTO else name
    path = BUILT_IN.get(name) or (name if ":" in name else known_engines().get(name))
    if path is None:
        known = known_engines()
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        nearest = f"; did you mean {close[0]!r}?" if close else "."
        raise UnknownEngine(
            f"unknown engine {name!r}{nearest} Known: {', '.join((AUTO, *sorted(known)))}. Others are named "
            f"module:attribute, or by an entry point in the group {ENTRY_POINT_GROUP!r}"
        )
    try:
        provider = load(path)
    except CannotLoad as error:
        raise UnknownEngine(f"engine {name!r}: {error}") from error
    if not isinstance(provider, EngineProvider):
        raise UnknownEngine(
            f"engine {name!r}: {path!r} is a {type(provider).__name__}, expected an instance of a subclass of "
            "stillhouse.engines.provider.EngineProvider"
        )
    return provider


def check_engine(role: EngineRole, name: str, urls: tuple[str, ...]) -> None:
    """Raises ValueError when the engine is unknown, cannot fill the role, or has no use for the servers in `urls`."""
    if name == AUTO:
        return
    provider = find_engine(name)
    if role not in provider.roles:
        raise ValueError(f"engine {name} is for {' and '.join(provider.roles)} only, got it for a {role}")
    if urls and provider.servers is None:
        on_servers = ", ".join(other for other in BUILT_IN if find_engine(other).servers is not None)
        raise ValueError(f"urls are for engine {on_servers}, got engine {name}")
