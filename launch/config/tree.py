"""From plain data to a tree of config Structs, with errors that a person can act on. Knows no config class by name.

A *key* is the dotted path of one leaf, `learner.lr`. Docstrings under fields are read from the source (ast), because
Python drops them; they are the help text, and the comments in the resolved configuration.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias, TypeVar, cast

import msgspec
import yaml

from launch.errors import ConfigError

Plain: TypeAlias = dict[str, object]
StructT = TypeVar("StructT", bound=msgspec.Struct)


class Key(NamedTuple):
    """One leaf of the tree."""

    name: str
    """Dotted."""
    type: object
    default: object
    """`msgspec.NODEFAULT` when it must be given."""
    doc: str


def find_key(struct: type[msgspec.Struct], name: str) -> Key | None:
    """The leaf of this dotted name, or None. A field that is a dict of config Structs has its entries below it:
    `actor.environments.calculator.max_turns`."""
    head, _, rest = name.partition(".")
    field = next((f for f in msgspec.structs.fields(struct) if f.name == head), None)
    if field is None:
        return None
    nested, rest_of_struct = _struct_type(field.type), rest
    if nested is None and rest and typing.get_origin(field.type) is dict:
        item = typing.get_args(field.type)[1]
        head, _, rest_of_struct = rest.partition(".")
        nested = _struct_type(item)
        if nested is None:
            return None if rest_of_struct else Key(name, item, msgspec.NODEFAULT, "")
    if nested is None:
        return None if rest else Key(name, field.type, _default(field), field_docs(struct).get(field.name, ""))
    below = find_key(nested, rest_of_struct)
    return below._replace(name=name) if below is not None else None


def keys_of(struct: type[msgspec.Struct], prefix: str = "") -> Iterator[Key]:
    """Every leaf, in the order of the source."""
    docs = field_docs(struct)
    for field in msgspec.structs.fields(struct):
        name = prefix + field.name
        if (nested := _struct_type(field.type)) is not None:
            yield from keys_of(nested, f"{name}.")
        else:
            yield Key(name, field.type, _default(field), docs.get(field.name, ""))


@cache
def field_docs(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Field name -> the docstring that follows it in the class body, on one line."""
    docs: dict[str, str] = {}
    for cls in reversed(struct.__mro__):
        if cls is msgspec.Struct or not issubclass(cls, msgspec.Struct):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        body = cast(ast.ClassDef, definition).body
        for field, following in pairwise(body):
            match field, following:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as text)):
                    docs[name] = " ".join(text.split())
                case _:
                    pass
    return docs


def build(struct: type[StructT], plain: Mapping[str, object]) -> StructT:
    """The tree from nested dicts. Raises ConfigError with all mistakes: unknown keys (with the nearest valid one),
    wrong types (key, got, expected), and what a config class itself refuses."""
    mistakes: list[str] = []
    built = _build(struct, plain, "", [key.name for key in keys_of(struct)], mistakes)
    if mistakes or built is None:
        raise ConfigError(*mistakes)
    return built


def _build(
    struct: type[StructT], plain: Mapping[str, object], prefix: str, valid: list[str], mistakes: list[str]
) -> StructT | None:
    """The Struct, or None after adding to `mistakes`."""
    before = len(mistakes)
    fields = {field.name: field for field in msgspec.structs.fields(struct)}
    values: dict[str, object] = {}
    for name, value in plain.items():
        key = prefix + name
        if name not in fields:
            mistakes.append(unknown_key(key, valid))
            continue
        field_type = fields[name].type
        item = _struct_of_items(field_type)
        if item is not None and isinstance(value, Mapping):
            values[name] = _build_items(item, cast(Mapping[str, object], value), key, mistakes)
        elif (nested := _struct_type(field_type)) is None:
            try:
                values[name] = msgspec.convert(value, field_type)
            except msgspec.ValidationError as error:
                mistakes.append(wrong_type(key, value, field_type, str(error)))
        elif isinstance(value, Mapping):
            values[name] = _build(nested, cast(Mapping[str, object], value), f"{key}.", valid, mistakes)
        else:
            mistakes.append(f"{key}: got {value!r} ({type(value).__name__}), expected a table of keys {key}.*")
    mistakes += [
        f"{prefix}{name}: missing, expected {type_name(field.type)}"
        for name, field in fields.items()
        if field.required and name not in values and name not in plain
    ]
    if len(mistakes) > before:
        return None
    try:
        return struct(**values)
    except ValueError as error:
        told = str(error)
        mistakes.append(told if told.startswith(prefix) else f"{prefix.rstrip('.')}: {told}")
        return None


def _build_items(
    item: type[StructT], plain: Mapping[str, object], key: str, mistakes: list[str]
) -> dict[str, StructT | None]:
    """A table of tables, each a Struct of the same kind."""
    built: dict[str, StructT | None] = {}
    for name, value in plain.items():
        below = f"{key}.{name}"
        if isinstance(value, Mapping):
            valid = [f"{below}.{leaf.name}" for leaf in keys_of(item)]
            built[name] = _build(item, cast(Mapping[str, object], value), f"{below}.", valid, mistakes)
        else:
            mistakes.append(f"{below}: got {value!r} ({type(value).__name__}), expected a table of keys {below}.*")
    return built


def put(plain: Plain, key: str, value: object) -> None:
    """Set a dotted key in nested dicts, making the levels above it."""
    *levels, leaf = key.split(".")
    node = plain
    for depth, level in enumerate(levels):
        below = node.setdefault(level, {})
        if not isinstance(below, dict):
            above = ".".join(levels[: depth + 1])
            raise ConfigError(f"{above}: got {below!r}, expected a table, because {key} is set too")
        node = cast(Plain, below)
    node[leaf] = value


def get(plain: Mapping[str, object], key: str) -> object:
    """The value at a dotted key in nested dicts, None where there is none."""
    node: object = plain
    for level in key.split("."):
        node = node.get(level) if isinstance(node, Mapping) else None
    return node


def has(plain: Mapping[str, object], key: str) -> bool:
    """Do nested dicts say something for a dotted key?"""
    above, _, leaf = key.rpartition(".")
    node = get(plain, above) if above else plain
    return isinstance(node, Mapping) and leaf in node


def merge(under: Plain, over: Mapping[str, object]) -> Plain:
    """Both trees; where both say something, `over` wins."""
    merged = dict(under)
    for name, value in over.items():
        former = merged.get(name)
        if isinstance(former, dict) and isinstance(value, Mapping):
            merged[name] = merge(cast(Plain, former), cast(Mapping[str, object], value))
        else:
            merged[name] = value
    return merged


def parse_text(key: Key, text: str) -> object:
    """What a command-line word means for this key: the text itself where the key takes text, else its YAML reading
    (numbers, true/false, null, [a, b]); `a,b` makes a list. Raises ConfigError."""
    if text.lower() in ("none", "null") and _accepts(None, key.type):
        return None
    parts = [part.strip() for part in text.split(",")]
    readings: list[Callable[[], object]] = [
        lambda: text,
        lambda: msgspec.convert(text, key.type, strict=False),
        lambda: yaml.safe_load(text),
        lambda: parts,
        lambda: msgspec.convert(parts, key.type, strict=False),
    ]
    for reading in readings:
        try:
            value = reading()
        except (msgspec.ValidationError, yaml.YAMLError):
            continue
        if _accepts(value, key.type):
            return value
    raise ConfigError(wrong_type(key.name, text, key.type, ""))


def unknown_key(key: str, valid: Iterable[str]) -> str:
    """The message for a key that is not there, naming the one that was probably meant."""
    valid = list(valid)
    leaf, leaves = key.rpartition(".")[2], [name.rpartition(".")[2] for name in valid]
    near = [name for name, its_leaf in zip(valid, leaves, strict=True) if its_leaf == leaf]  # on another branch
    near = near or difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    if not near:
        close = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.7)
        near = [name for name, its_leaf in zip(valid, leaves, strict=True) if its_leaf in close]
    hint = f"; did you mean {' or '.join(near[:3])}?" if near else "; --help lists all keys"
    return f"{key}: unknown key{hint}"


def wrong_type(key: str, value: object, expected: object, detail: str) -> str:
    """The message for a value of the wrong type. `detail` is msgspec's, which knows more about nested values."""
    where = f" ({detail})" if "`$" in detail and "at `$`" not in detail else ""
    return f"{key}: got {value!r} ({type(value).__name__}), expected {type_name(expected)}{where}"


def type_name(annotation: object) -> str:
    """A type as a person would say it: `float`, `one of a, b`, `list of str`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is typing.Annotated:
        return type_name(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(argument) for argument in arguments)
    if origin in (list, tuple):
        return f"list of {type_name(arguments[0])}" if arguments else "list"
    if annotation is type(None):
        return "none"
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _accepts(value: object, annotation: object) -> bool:
    try:
        msgspec.convert(value, annotation)
    except msgspec.ValidationError:
        return False
    return True


def _struct_type(annotation: object) -> type[msgspec.Struct] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct) else None


def _struct_of_items(annotation: object) -> type[msgspec.Struct] | None:
    """Of `dict[str, SomeStruct]`."""
    return _struct_type(typing.get_args(annotation)[1]) if typing.get_origin(annotation) is dict else None


def _default(field: msgspec.structs.FieldInfo) -> object:
    if field.default_factory is not msgspec.NODEFAULT:
        return cast(Callable[[], object], field.default_factory)()
    return field.default
