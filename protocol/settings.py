"""What sections of the configuration are made of. Ranges stand in the types, and a section may have several shapes.

    class Jsd(Member, frozen=True, kw_only=True):
        name: str = "jsd"
        beta: Annotated[float, Meta(gt=0, lt=1)] = 0.5

    class ObjectiveConfig(Settings, frozen=True, kw_only=True):
        divergence: Annotated[Member, DIVERGENCES] = K1()          DIVERGENCES: Members

`launch.config.tree` reads `Annotated[Member, Members]` as a section whose keys are those of the member that `name`
chooses (`objective.divergence.beta`; a bare `divergence = "k1"` is a name without options), and
`Annotated[dict[str, Settings], Members]` as a table with one section per member name. In both a member comes from
whatever registry the `Members` object stands for, so that an installed package can bring one with keys of its own.
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


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section of the configuration. The ranges in its types hold however it was made, by `msgspec.convert` or by a
    call, and numbers are finite. A subclass with a __post_init__ of its own calls this one first."""

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
    """A section of which there are several shapes: `name` says which, a subclass adds what that one reads."""

    name: str = ""


class Members:
    """Put beside a field's type: where the shapes of its section are found."""

    beside: ClassVar[bool] = False
    """For a table: its sections stand beside it in the tree of keys (`actor.NAME.KEY`), not below its own name."""

    def known(self) -> Mapping[str, type[Settings]]:
        """Built in or installed: name -> section. For help and for hints, so nothing that is slow to import."""
        raise NotImplementedError

    def section(self, name: str, *, with_options: bool) -> type[Settings]:
        """The shape of one. Raises ValueError for a name that there is not (got, expected). `with_options`: some are
        given, so that a section which only an import can find has to be found."""
        raise NotImplementedError


def members_of(annotation: object) -> Members | None:
    """The `Members` that stand beside a type."""
    if typing.get_origin(annotation) is not Annotated:
        return None
    return next((extra for extra in typing.get_args(annotation)[1:] if isinstance(extra, Members)), None)


def described(annotation: object) -> str:
    """A type with its range: `int >= 1`, `float > 0 and < 1`."""
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
    for sign, limit in ((">", meta.gt), (">=", meta.ge), ("<", meta.lt), ("<=", meta.le)):
        if limit is not None:
            yield sign, limit


@cache
def _ranged(struct: type[msgspec.Struct]) -> tuple[tuple[str, object], ...]:
    """Fields that are numbers."""
    found = ((field.encode_name, field.type) for field in msgspec.structs.fields(struct))
    return tuple(
        (name, annotation) for name, annotation in found if _bare(annotation) is int or _bare(annotation) is float
    )
