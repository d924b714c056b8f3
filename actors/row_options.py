"""What a row of the prompts file may set for itself: the options that its environment, or its reward, declares.

Rows are data: they may come from a stranger. Nothing is declared unless the author says so, and nothing should be that
names code, a process, a file, an address, a secret or a limit: those come from the configuration alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar, cast

T = TypeVar("T")
Check = Callable[..., None]


class RowRefused(ValueError):
    """A row sets what only the configuration may set; the message names it, and what rows may set."""


def row_may_set(*names: str, check: Check | None = None) -> Callable[[T], T]:
    """Decorates an agent, a reward or an environment's class: rows may set these options. `check(**given)` gets those
    that a row gives, and raises ValueError for a value that only the configuration may have.

    A class may have the attribute `row_options`, a tuple of names, and the static method `check_row_options` instead.
    """

    def mark(decorated: T) -> T:
        marked = cast(Any, decorated)
        marked.row_options = names
        if check is not None:
            marked.check_row_options = staticmethod(check) if inspect.isclass(decorated) else check
        return decorated

    return mark


def declared_by(what: object) -> tuple[str, ...]:
    """The options that rows may set. Raises ValueError for an attribute `row_options` that is not a tuple of names."""
    names: object = getattr(what, "row_options", ())
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in cast("tuple[Any, ...]", names)):
        raise ValueError(f"row_options: got {names!r:.80}, expected a tuple of names of options")
    return cast("tuple[str, ...]", names)


def given_by_row(of_row: Mapping[str, Any], what: object, whose: str) -> dict[str, Any]:
    """The options that a row gives to `what`. None changes nothing: tables fill options that other rows have with null.
    Raises RowRefused for one that is not declared, and ValueError for a value that `what` refuses from rows."""
    given = {name: value for name, value in of_row.items() if value is not None}
    refuse_undeclared(given, declared_by(what), whose)
    check: Check | None = getattr(what, "check_row_options", None)
    if check is not None:
        check(**given)
    return given


def refuse_undeclared(given: Collection[str], declared: Collection[str], whose: str) -> None:
    """Raises RowRefused."""
    for name in given:
        if name not in declared:
            known = ", ".join(sorted(declared)) or "nothing"
            raise RowRefused(
                f"a row may not set {name[:80]!r} of {whose}, which only the configuration may set (expected in a row: "
                f"{known}). Set it in actor.environments.NAME.options, and let rows name that environment in `env`"
            )


def refuse_module(*, id: str | None = None, **_: Any) -> None:
    """Check a registered name that a row gives. Raises RowRefused for `module:name`, which would import the module."""
    if id is not None and (not isinstance(id, str) or ":" in id):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RowRefused(f"id: a row may not name {id!r:.80}; expected a registered name without a module")
