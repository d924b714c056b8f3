"""Converts an object graph of listed classes to bytes and back. No pickle: nothing is imported or called by name.

    bytes = MessagePack [[[class name, field names] ...], [[class index, field values ...] ...]]

Objects of the listed classes keep their identity: they are in the second list, numbered in the order in which they are
reached from the root, and are referred to by number. Numbers, strings and None stand for themselves. Everything else is
a list that begins with a letter:

    o object    l list    t tuple    q deque    d dict    D OrderedDict    s set (sorted)    n named tuple
    S message struct    e enum    a array    b bytes    m bound method of a listed object

What came in a blob (`buffer.blobs`) is not in the bytes. They refer to it by number, and `Frozen` lists these numbers:

    k blob    f bytes of one of its arrays    A arrays of a message, of which some are in blobs

Equal graphs give equal bytes. A mutable container must have one owner: meeting it twice is an error, and so is any
class that is not listed."""

from __future__ import annotations

import enum
import gc
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import msgspec
import numpy as np

from stillhouse.buffer.blobs import Arrays, KeptArrays, KeptBytes, Load, number_of

_ATOMS = frozenset((type(None), bool, int, float, str))


class FreezeError(Exception):
    """The graph contains something that cannot be converted, which is a bug."""


class ThawError(Exception):
    """The bytes are not an object graph of the expected classes."""


class Frozen(NamedTuple):
    """A graph as bytes, and the numbers of all blobs to which they refer, ascending."""

    body: bytes
    blobs: tuple[int, ...] = ()


class Custom(NamedTuple):
    """Conversion of a class that defines its own: `get` returns its contents, `fill` puts them into a new instance."""

    get: Callable[[Any], Sequence[Any]]
    fill: Callable[[Any, Sequence[Any]], None]
    late: bool = False
    """Its `fill` looks at what other objects contain, so it comes last."""


class Freezer:
    """Converts graphs of the listed classes. `classes`: objects with identity, and how to access their contents (None:
    all attributes except cached properties). `values`: named tuples, message structs and enums, compared by value."""

    def __init__(self, classes: dict[type[Any], Custom | None], values: Iterable[type[Any]]) -> None:
        self._custom = classes
        self._classes = {kind.__name__: kind for kind in classes}
        self._values = {kind.__name__: kind for kind in values}
        self._tuples = {k for k in self._values.values() if issubclass(k, tuple)}
        self._structs = {k for k in self._values.values() if issubclass(k, msgspec.Struct)}
        self._enums = {k for k in self._values.values() if issubclass(k, enum.Enum)}

    def freeze(self, root: object) -> Frozen:
        """Convert a graph. Raises FreezeError."""
        with no_garbage_collection():
            return _Writing(self).write(root)

    def thaw(self, body: bytes, load: Load) -> Any:
        """Rebuild a graph and return its root. `load` reads blobs. Raises ThawError."""
        try:
            with no_garbage_collection():
                return self._thawed(body, load)
        except (msgspec.DecodeError, msgspec.ValidationError, LookupError, TypeError, ValueError) as error:
            raise ThawError(f"{type(error).__name__}: {error}") from error

    def _thawed(self, body: bytes, load: Load) -> Any:
        classes, objects = msgspec.msgpack.decode(body)
        kinds = [(self._classes[name], fields) for name, fields in classes]
        made = [kinds[one[0]][0].__new__(kinds[one[0]][0]) for one in objects]
        reader = _Reading(self, made, load)
        late: list[tuple[Custom, Any, list[Any]]] = []
        for new, one in zip(made, objects, strict=True):
            kind, fields = kinds[one[0]]
            contents = [reader.value(v) for v in one[1:]]
            custom = self._custom[kind]
            if custom is None:
                for field, value in zip(fields, contents, strict=True):
                    setattr(new, field, value)
            elif custom.late:
                late.append((custom, new, contents))
            else:
                custom.fill(new, contents)
        for custom, new, contents in late:
            custom.fill(new, contents)
        return made[0]

    def of(self, kind: type[Any]) -> Custom | None:
        return self._custom[kind]

    def is_listed(self, kind: type[Any]) -> bool:
        return kind in self._custom

    def value_kind(self, name: str) -> type[Any]:
        return self._values[name]

    def letter(self, kind: type[Any]) -> str:
        """Letter for a listed value class; empty for other classes."""
        return "n" if kind in self._tuples else "S" if kind in self._structs else "e" if kind in self._enums else ""


class _Writing:
    def __init__(self, freezer: Freezer) -> None:
        self._freezer = freezer
        self._numbers: dict[int, int] = {}
        self._objects: list[object] = []
        self._kinds: dict[type[Any], int] = {}
        self._fields: list[tuple[str, ...]] = []
        self._owned: set[int] = set()
        self._blobs: set[int] = set()

    def write(self, root: object) -> Frozen:
        bodies: list[msgspec.Raw] = []
        encode = msgspec.msgpack.Encoder().encode
        self._number(root)
        done = 0
        while done < len(self._objects):  # grows while its members are written
            bodies.append(msgspec.Raw(encode(self._body(self._objects[done]))))  # at once: a tenth of the memory
            done += 1
        classes = [[kind.__name__, self._fields[i]] for kind, i in self._kinds.items()]
        return Frozen(msgspec.msgpack.encode([classes, bodies]), tuple(sorted(self._blobs)))

    def _body(self, obj: object) -> list[Any]:
        kind = type(obj)
        i = self._kinds.get(kind)
        if i is None:
            i = self._kinds[kind] = len(self._fields)
            self._fields.append(_field_names(obj) if self._freezer.of(kind) is None else ())
        custom = self._freezer.of(kind)
        contents = custom.get(obj) if custom is not None else [getattr(obj, field) for field in self._fields[i]]
        value = self.value
        return [i, *[v if type(v) in _ATOMS else value(v) for v in contents]]

    def _number(self, obj: object) -> int:
        number = self._numbers.get(id(obj))
        if number is None:
            number = self._numbers[id(obj)] = len(self._objects)
            self._objects.append(obj)
        return number

    def value(self, v: Any) -> Any:
        kind = type(v)
        if kind in _ATOMS:
            return v
        if self._freezer.is_listed(kind):
            return ["o", self._number(v)]
        if kind is tuple:
            return ["t", *map(self.value, v)]
        if kind is KeptArrays:
            return ["k", self._refer(v.number)]
        if kind is KeptBytes:
            return ["f", self._refer(v.number), v.place]
        if kind is Arrays:
            return self._arrays(v)
        letter = self._freezer.letter(kind)
        if letter == "S":
            return [letter, kind.__name__, v]
        if letter == "n":
            return [letter, kind.__name__, *map(self.value, v)]
        if letter == "e":
            return [letter, kind.__name__, v.value]
        if kind is np.ndarray:
            return ["a", v.dtype.str, v.shape, v.tobytes()]
        if isinstance(v, (bytes, memoryview)):
            return ["b", v]
        if kind is MethodType:
            return ["m", self._method_owner(v), v.__name__]
        return self._container(kind, v)

    def _refer(self, blob: int) -> int:
        self._blobs.add(blob)
        return blob

    def _arrays(self, v: Arrays) -> list[Any]:
        """Write the dtype and shape of each array, and its bytes or the number of its blob."""
        each = len(v) // max(1, len(v.numbers))
        numbers = [number_of(v, i // each) for i in range(len(v))]
        found = [
            [array.dtype.str, array.shape, self._refer(number) if number else array.tobytes()]
            for array, number in zip(v, numbers, strict=True)
        ]
        return ["A", v.numbers, found]

    def _container(self, kind: type[Any], v: Any) -> list[Any]:
        if id(v) in self._owned:
            raise FreezeError(f"a {kind.__name__} has two owners, expected one: {str(v)[:200]}")
        self._owned.add(id(v))
        if kind in (dict, OrderedDict):
            items = [self.value(part) for pair in v.items() for part in pair]
            return ["d" if kind is dict else "D", *items]
        if kind is list:
            return ["l", *map(self.value, v)]
        if kind is deque and v.maxlen is None:
            return ["q", *map(self.value, v)]
        if kind is set:
            return ["s", *map(self.value, sorted(v))]
        raise FreezeError(f"{kind.__qualname__} is not listed: {str(v)[:200]}")

    def _method_owner(self, method: MethodType) -> int:
        owner = method.__self__
        if not self._freezer.is_listed(type(owner)):
            raise FreezeError(f"{method} is not of a listed object")
        return self._number(owner)


class _Reading:
    def __init__(self, freezer: Freezer, made: list[Any], load: Load) -> None:
        self._freezer = freezer
        self._made = made
        self._load = load

    def value(self, v: Any) -> Any:
        if type(v) is not list:
            return v
        letter, rest = v[0], v[1:]
        if letter == "o":
            return self._made[rest[0]]
        if letter == "S":
            return msgspec.convert(rest[1], self._freezer.value_kind(rest[0]))
        if letter == "a":
            return _array(*rest)
        if letter == "k":
            return KeptArrays(rest[0], self._load(rest[0]))
        if letter == "f":
            return KeptBytes.of(self._load(rest[0])[rest[1]], *rest)
        if letter == "A":
            return self._arrays(*rest)
        if letter == "b":
            return rest[0]
        if letter == "e":
            return self._freezer.value_kind(rest[0])(rest[1])
        if letter == "m":
            return self._method(*rest)
        return self._container(letter, rest)

    def _container(self, letter: str, rest: list[Any]) -> Any:
        if letter == "n":
            return self._freezer.value_kind(rest[0])(*map(self.value, rest[1:]))
        values = [self.value(part) for part in rest]
        if letter == "t":
            return tuple(values)
        if letter == "l":
            return values
        if letter == "q":
            return deque(values)
        if letter == "s":
            return set(values)
        if letter in ("d", "D"):
            pairs = zip(values[::2], values[1::2], strict=True)
            return dict(pairs) if letter == "d" else OrderedDict(pairs)
        raise ThawError(f"unknown letter {letter!r}")

    def _arrays(self, numbers: list[int], found: list[Any]) -> Arrays:
        each = len(found) // max(1, len(numbers))
        contents = [c if type(c) is bytes else self._load(c)[i % each] for i, (_, _, c) in enumerate(found)]
        arrays = [_array(dtype, shape, c) for (dtype, shape, _), c in zip(found, contents, strict=True)]
        return Arrays.of(arrays, tuple(numbers))

    def _method(self, number: int, name: str) -> Any:
        owner = self._made[number]
        function = getattr(type(owner), name)
        return MethodType(function, owner)


def _field_names(obj: object) -> tuple[str, ...]:
    """Names of all attributes except cached properties, which are computed again."""
    kind = type(obj)
    slots = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]
    names = [*slots, *getattr(obj, "__dict__", ())]
    return tuple(name for name in names if not hasattr(getattr(kind, name, None), "attrname"))


@contextmanager
def no_garbage_collection() -> Generator[None]:
    """Context without the cyclic garbage collector, which would scan a million objects again and again and find
    nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _array(dtype: str, shape: list[int], data: bytes) -> np.ndarray[Any, Any]:
    array = np.frombuffer(data, np.dtype(dtype)).reshape(shape)
    array.flags.writeable = False
    return array
