"""Engines by name: the built-in ones, those that installed packages name, and `module:attribute`. No torch.

A package adds its own in its pyproject.toml:

    [project.entry-points."stillhouse.engines"]
    scripted = "my_package.engine:PROVIDER"
"""

from __future__ import annotations

import difflib
import functools
from typing import Final

from engines.provider import EngineProvider, EngineRole
from protocol.plugins import installed, load

ENTRY_POINT_GROUP: Final = "stillhouse.engines"
BUILT_IN: Final = {
    "torch": "engines.torch.provider:PROVIDER",
    "sglang": "engines.sglang.provider:PROVIDER",
}
AUTO: Final = "auto"
"""The launcher chooses: the first of `AUTO_ORDER` that fits, else EMBEDDED (launch.checks.engine_choice)."""
AUTO_ORDER: Final = ("sglang",)
EMBEDDED: Final = "torch"
"""The engine that works anywhere: in the worker's process, on any device."""


class UnknownEngine(ValueError):
    """No engine of this name, or it cannot be loaded."""


def known_engines() -> dict[str, str]:
    """Name -> `module:attribute` of its provider. A package cannot take a built-in name."""
    return installed(ENTRY_POINT_GROUP) | BUILT_IN


@functools.cache
def find_engine(name: str) -> EngineProvider:
    """The provider behind a name or a `module:attribute` path. `auto`, before anybody has chosen, is the embedded one.
    Raises UnknownEngine, naming all that are known."""
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
    except (ImportError, AttributeError, ValueError) as error:
        raise UnknownEngine(f"engine {name!r}: cannot load {path!r}: {error}") from error
    if not isinstance(provider, EngineProvider):
        raise UnknownEngine(
            f"engine {name!r}: {path!r} is a {type(provider).__name__}, expected an instance of a subclass of "
            "engines.provider.EngineProvider"
        )
    return provider


def check_engine(role: EngineRole, name: str, urls: tuple[str, ...]) -> None:
    """Raises ValueError where there is no such engine, where it cannot do what the role needs, or where `urls` name
    servers that it has no use for."""
    if name == AUTO:
        return
    provider = find_engine(name)
    if role not in provider.roles:
        raise ValueError(f"engine {name} is for {' and '.join(provider.roles)} only, got it for a {role}")
    if urls and provider.servers is None:
        on_servers = ", ".join(other for other in BUILT_IN if find_engine(other).servers is not None)
        raise ValueError(f"urls are for engine {on_servers}, got engine {name}")
