"""Base classes for sections of the configuration. Ranges are in the types, and a section may have several shapes.

    class Jsd(Member, frozen=True, kw_only=True):
        name: str = "jsd"
        beta: Annotated[float, Meta(gt=0, lt=1)] = 0.5

    class ObjectiveConfig(Settings, frozen=True, kw_only=True):
        divergence: Annotated[Member, DIVERGENCES] = K1()          DIVERGENCES: Members

`launch.config.tree` reads `Annotated[Member, Members]` as a section with the keys of the member that `name` selects
(`objective.divergence.beta`; a bare `divergence = "k1"` is a name without options), and
`Annotated[dict[str, Settings], Members]` as a table with one section per member name. In both, the `Members` object
looks the member up in a registry, so an installed package can add one with keys of its own.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, ClassVar, TypeAlias

import msgspec
from msgspec import Meta

PositiveFloat: TypeAlias = Annotated[float, Meta(gt=0)]
NonNegativeFloat: TypeAlias = Annotated[float, Meta(ge=0)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
PositiveInt: TypeAlias = Annotated[int, Meta(ge=1)]
NonNegativeInt: TypeAlias = Annotated[int, Meta(ge=0)]
Port: TypeAlias = Annotated[int, Meta(ge=0, le=65535)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section of the configuration. The ranges of its types are checked whether it is made by `msgspec.convert` or by
    a call, and numbers must be finite. A subclass with a __post_init__ of its own calls this one first."""

    given_by: ClassVar[str] = ""
    """The field that a bare text in the place of the section sets; empty: it must be a table."""

    def __post_init__(self) -> None:
        for name, annotation in _ranged(type(self)):
            value = getattr(self, name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name}: got {value}, expected {described(annotation)}")
            try:
                msgspec.convert(value, annotation)
            except msgspec.ValidationError:
                raise ValueError(f"{name}: got {value!r}, expected {described(annotation)}") from None


class Member(Settings, frozen=True, kw_only=True):
    """A section with several shapes: `name` selects one, and its subclass adds the keys of that shape."""

    name: str = ""


class Members:
    """Annotates a field's type with the registry in which the shapes of its section are found."""

    beside: ClassVar[bool] = False
    """For a table: its sections stand beside it in the tree of keys (`actor.NAME.KEY`), not below its own name."""

    def known(self) -> Mapping[str, type[Settings]]:
        """Built-in and installed shapes by name, for help and hints; must not import anything slow."""
        raise NotImplementedError

    def section(self, name: str, *, with_options: bool) -> type[Settings]:
        """The shape called `name`. Raises ValueError for an unknown name. `with_options`: options are given, so a
        section that only an import can find must be imported."""
        raise NotImplementedError


@cache
def fields_of(struct: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """The fields of a Struct. msgspec evaluates all annotations at each call, which takes 18 ms for a run's tree."""
    return msgspec.structs.fields(struct)


def members_of(annotation: object) -> Members | None:
    """The `Members` that annotate a type."""
    if typing.get_origin(annotation) is not Annotated:
        return None
    return next((extra for extra in typing.get_args(annotation)[1:] if isinstance(extra, Members)), None)


def described(annotation: object) -> str:
    """A type with its range: `int >= 1`, `float > 0 and < 1`, `int >= 0 and a multiple of 64`."""
    name = getattr(_bare(annotation), "__name__", str(annotation))
    limits = [f"{sign} {limit}" for meta in _metas(annotation) for sign, limit in _limits(meta)]
    return f"{name} {' and '.join(limits)}" if limits else f"finite {name}"


def _bare(annotation: object) -> object:
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation


def _metas(annotation: object) -> list[Meta]:
    if typing.get_origin(annotation) is not Annotated:
        return []
    return [extra for extra in typing.get_args(annotation)[1:] if isinstance(extra, Meta)]


def _limits(meta: Meta) -> Iterator[tuple[str, float]]:
    signs = {">": meta.gt, ">=": meta.ge, "<": meta.lt, "<=": meta.le, "a multiple of": meta.multiple_of}
    yield from ((sign, limit) for sign, limit in signs.items() if limit is not None)


@cache
def _ranged(struct: type[msgspec.Struct]) -> tuple[tuple[str, object], ...]:
    """(name, type) of the fields that are numbers."""
    found = ((field.encode_name, field.type) for field in fields_of(struct))
    return tuple(
        (name, annotation) for name, annotation in found if _bare(annotation) is int or _bare(annotation) is float
    )
