"""The keys of the configuration, read from the config Structs. Knows no config class by name.

A *key* is the dotted path of one leaf, `learner.lr`. A section may have several shapes, of which its `name` selects one
(`protocol.settings.Member`).

Docstrings under fields are read from the source (ast), because Python drops them. They are the help text, and the
comments in the resolved configuration.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import operator
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple, cast

import msgspec
import yaml

from stillhouse.launch.config.peers import PEERS
from stillhouse.launch.config.yaml_text import fault_of, load_yaml
from stillhouse.launch.errors import ConfigError
from stillhouse.protocol.settings import Member, Members, Settings, described, fields_of, members_of

ONLY_FLAGS: Final = ("run_dir", "name", "resume", "config")
HINTS: Final = {
    "launch.backend": "; a job for Slurm or Kubernetes is made by `stillhouse render slurm` or `stillhouse render k8s`"
}
"""Key -> what to do, behind the message about a wrong value."""


class Key(NamedTuple):
    """One leaf of the tree."""

    name: str
    """Dotted path."""
    type: object
    default: object
    """`msgspec.NODEFAULT` for a required key."""
    doc: str
    members: Members | None = None
    """The shapes, if the key is a section with several shapes or a table of such sections. Its value is then a name."""


def find_key(struct: type[msgspec.Struct], name: str) -> Key | None:
    """The leaf at this dotted path, or None. A dict of config Structs has its entries below its key, as in
    `actor.environments.calculator.max_turns`."""
    head, _, rest = name.partition(".")
    field = next((f for f in fields_of(struct) if f.name == head), None)
    if field is None:
        section = _sections_beside(struct).get(head) if rest else None
        if section is None:
            return None
        below = find_key(section, rest) or Key(rest, Any, msgspec.NODEFAULT, "")  # `build` refuses an unknown one
        return below._replace(name=f"{head}.{below.name}")
    if (members := members_of(field.type)) is not None:
        doc = field_docs(struct).get(field.name, "")
        return _find_in_members(members, field.type, default_of(field), name, rest, doc)
    nested, rest_of_struct = struct_type(field.type), rest
    if nested is None and rest and typing.get_origin(field.type) is dict:
        item = typing.get_args(field.type)[1]
        head, _, rest_of_struct = rest.partition(".")
        if (members := members_of(item)) is not None:
            return _find_in_members(members, item, msgspec.NODEFAULT, name, rest_of_struct, "")
        nested = struct_type(item)
        if nested is None:
            return None if rest_of_struct else Key(name, item, msgspec.NODEFAULT, "")
    if nested is None:
        return None if rest else Key(name, field.type, default_of(field), field_docs(struct).get(field.name, ""))
    if not rest_of_struct and rest != name and (bare := given_by(nested)):
        return find_key(struct, f"{name}.{bare}")
    below = find_key(nested, rest_of_struct)
    return below._replace(name=name.removesuffix(rest_of_struct) + below.name) if below is not None else None


def _find_in_members(
    members: Members, annotation: object, default: object, name: str, rest: str, doc: str
) -> Key | None:
    """Find a key below a section with several shapes. Its member is not chosen yet, so a key that no known member has
    is accepted with any type; `build` checks it once the name is known."""
    if is_table(annotation):
        member, _, rest = rest.partition(".")
        known = members.known()
        sections = [known[member]] if member in known else []
        if not rest:
            return None
    elif rest in ("", "name"):
        return Key(name.removesuffix(".name"), str, default, doc, members)
    else:
        sections = list(members.known().values())
    found = [key for section in sections if (key := find_key(section, rest)) is not None]
    if not found:
        return Key(name, Any, msgspec.NODEFAULT, "")
    return found[0]._replace(name=name, type=functools.reduce(operator.or_, (key.type for key in found)))


def keys_of(struct: type[msgspec.Struct], prefix: str = "") -> Iterator[Key]:
    """Every leaf, in source order. A section with several shapes is one leaf; `Key.members` has its keys."""
    docs = field_docs(struct)
    for field in fields_of(struct):
        name = prefix + field.name
        if (members := members_of(field.type)) is not None:
            yield Key(name, field.type, default_of(field), docs.get(field.name, ""), members)
        elif (nested := struct_type(field.type)) is not None:
            yield from keys_of(nested, f"{name}.")
        else:
            yield Key(name, field.type, default_of(field), docs.get(field.name, ""))


def sections_of(struct: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """Every section below the top with its Struct, in source order: `learner`, `learner.tasks`, ..."""
    for field in fields_of(struct):
        nested = struct_type(field.type) if members_of(field.type) is None else None
        if nested is not None:
            yield prefix + field.name, nested
            yield from sections_of(nested, f"{prefix}{field.name}.")


@cache
def field_docs(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Field name -> the docstring below the field in the class body, joined to one line."""
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


def choices_of(members: Members) -> str:
    return f"one of {', '.join(members.known())}"


def parse_text(key: Key, text: str) -> object:
    """Convert a command-line word to a value of this key: the text itself if the key takes text, else its YAML reading
    (numbers, true/false, null, [a, b]); `a,b` makes a list. Raises ConfigError."""
    if text.lower() in ("none", "null") and _accepts(None, key.type):
        return None
    if key.type is Any:
        try:
            return load_yaml(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{key.name}: got {text!r}: {fault_of(error)}") from error
    parts = [part.strip() for part in text.split(",")]
    readings: list[Callable[[], object]] = [
        lambda: text,
        lambda: msgspec.convert(text, key.type, strict=False),
        lambda: load_yaml(text),
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
    raise ConfigError(f"{key.name}: got {text!r}, expected {type_name(key.type)}{HINTS.get(key.name, '')}")


def unknown_key(key: str, valid: Iterable[str]) -> str:
    """The message for an unknown key, with the key that was probably meant."""
    if key in ONLY_FLAGS:
        return f"{key}: unknown key; it is a flag of the command line: --{key.replace('_', '-')}"
    valid = list(valid)
    leaf, leaves = key.rpartition(".")[2], [name.rpartition(".")[2] for name in valid]
    near = [PEERS[leaf]] if leaf in PEERS else []
    near += [n for n, its_leaf in zip(valid, leaves, strict=True) if its_leaf == leaf and n not in near]  # elsewhere
    near = near or difflib.get_close_matches(key, valid, n=1, cutoff=0.7)
    if not near:
        close = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75)
        near = [name for name, its_leaf in zip(valid, leaves, strict=True) if its_leaf in close]
    hint = f"; did you mean {' or '.join(near[:3])}?" if near else "; --help all lists the keys"
    return f"{key}: unknown key{hint}"


def type_name(annotation: object) -> str:
    """A type in words: `float`, `one of a, b`, `list of str`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        words = [str(argument) for argument in arguments]
        return f"one of {', '.join(words)}" if len(words) > 1 else words[0]
    if origin is typing.Annotated:
        if (members := members_of(annotation)) is not None:
            return choices_of(members)
        return described(annotation) if arguments[0] in (int, float) else type_name(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(argument) for argument in arguments)
    if origin is dict:
        return f"dict[{type_name(arguments[0])}, {type_name(arguments[1])}]"
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


def name_of(default: object) -> str:
    """The name of a field's default member."""
    return default.name if isinstance(default, Member) else ""


def table_beside(struct: type[msgspec.Struct]) -> tuple[str, Members] | None:
    """The field whose sections stand beside it in the tree (`Members.beside`), if the Struct has one."""
    for field in fields_of(struct):
        if (members := members_of(field.type)) is not None and members.beside:
            return field.name, members
    return None


def _sections_beside(struct: type[msgspec.Struct]) -> Mapping[str, type[Settings]]:
    table = table_beside(struct)
    return table[1].known() if table is not None else {}


def is_table(annotation: object) -> bool:
    """Whether the type is `Annotated[dict[str, Settings], Members]`."""
    return typing.get_origin(typing.get_args(annotation)[0]) is dict


def given_by(struct: type[msgspec.Struct]) -> str:
    """The field that a bare text in the place of this section sets (`Settings.given_by`); empty: none."""
    return struct.given_by if issubclass(struct, Settings) else ""


def struct_type(annotation: object) -> type[msgspec.Struct] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct) else None


def struct_of_items(annotation: object) -> type[msgspec.Struct] | None:
    """The Struct of a table `dict[str, SomeStruct]`, else None."""
    return struct_type(typing.get_args(annotation)[1]) if typing.get_origin(annotation) is dict else None


def members_of_items(annotation: object) -> Members | None:
    """The shapes of the sections of a table `dict[str, Annotated[Member, Members]]`, whose names are free; else
    None."""
    return members_of(typing.get_args(annotation)[1]) if typing.get_origin(annotation) is dict else None


def default_of(field: msgspec.structs.FieldInfo) -> object:
    if field.default_factory is not msgspec.NODEFAULT:
        return cast(Callable[[], object], field.default_factory)()
    return field.default
