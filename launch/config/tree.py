"""From plain data to a tree of config Structs, with errors that a person can act on. Knows no config class by name.

A *key* is the dotted path of one leaf, `learner.lr`. A section may have several shapes, of which its `name` chooses one
(`protocol.settings.Member`); in plain data a bare text in its place is that name.

Docstrings under fields are read from the source (ast), because Python drops them; they are the help text, and the
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
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, cast

import msgspec
import yaml

from launch.config.renamed import farewell
from launch.errors import ConfigError
from protocol.settings import Member, Members, Settings, described, members_of

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
    members: Members | None = None
    """Where the key is a section with several shapes, or a table of such: those there are. Its value is then a name."""


def find_key(struct: type[msgspec.Struct], name: str) -> Key | None:
    """The leaf of this dotted name, or None. A field that is a dict of config Structs has its entries below it:
    `actor.environments.calculator.max_turns`."""
    head, _, rest = name.partition(".")
    field = next((f for f in msgspec.structs.fields(struct) if f.name == head), None)
    if field is None:
        section = _sections_beside(struct).get(head) if rest else None
        if section is None:
            return None
        below = find_key(section, rest) or Key(rest, Any, msgspec.NODEFAULT, "")  # an unknown one is refused by `build`
        return below._replace(name=f"{head}.{below.name}")
    if (members := members_of(field.type)) is not None:
        return _find_in_members(members, field, name, rest, field_docs(struct).get(field.name, ""))
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
    return below._replace(name=name.removesuffix(rest_of_struct) + below.name) if below is not None else None


def _find_in_members(members: Members, field: msgspec.structs.FieldInfo, name: str, rest: str, doc: str) -> Key | None:
    """A key below a section with several shapes. Which of them it is for is not known yet, so one that no known member
    has is a key too, of any type; `build` looks at it when the name is known."""
    if _is_table(field.type):
        member, _, rest = rest.partition(".")
        known = members.known()
        sections = [known[member]] if member in known else []
        if not rest:
            return None
    elif rest in ("", "name"):
        return Key(name.removesuffix(".name"), str, _default(field), doc, members)
    else:
        sections = list(members.known().values())
    found = [key for section in sections if (key := find_key(section, rest)) is not None]
    if not found:
        return Key(name, Any, msgspec.NODEFAULT, "")
    return found[0]._replace(name=name, type=functools.reduce(operator.or_, (key.type for key in found)))


def keys_of(struct: type[msgspec.Struct], prefix: str = "") -> Iterator[Key]:
    """Every leaf, in the order of the source. A section with several shapes is one leaf; `Key.members` has its keys."""
    docs = field_docs(struct)
    for field in msgspec.structs.fields(struct):
        name = prefix + field.name
        if (members := members_of(field.type)) is not None:
            yield Key(name, field.type, _default(field), docs.get(field.name, ""), members)
        elif (nested := _struct_type(field.type)) is not None:
            yield from keys_of(nested, f"{name}.")
        else:
            yield Key(name, field.type, _default(field), docs.get(field.name, ""))


def sections_of(struct: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """Every section below the top, with its Struct, in the order of the source: `learner`, `learner.tasks`, ..."""
    for field in msgspec.structs.fields(struct):
        nested = _struct_type(field.type) if members_of(field.type) is None else None
        if nested is not None:
            yield prefix + field.name, nested
            yield from sections_of(nested, f"{prefix}{field.name}.")


def lacking(struct: type[msgspec.Struct], plain: Mapping[str, object]) -> list[str]:
    """Keys that a tree written in full would say and `plain` does not, those of chosen members included."""
    missing: list[str] = []
    for key in keys_of(struct):
        if not has(plain, key.name):
            missing.append(key.name)
            continue
        value = get(plain, key.name)
        if key.members is not None and isinstance(value, Mapping):
            told = cast(Mapping[str, object], value)
            tables = told if _is_table(key.type) else {str(told.get("name")): told}
            for name, own in tables.items():
                below = f"{key.name}.{name}" if _is_table(key.type) else key.name
                section = _section(key.members, name, with_options=True)
                missing += [f"{below}.{leaf}" for leaf in lacking(section, cast(Mapping[str, object], own))]
    return missing


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
    plain = _gathered(struct, plain)
    fields = {field.name: field for field in msgspec.structs.fields(struct)}
    values: dict[str, object] = {}
    for name, value in plain.items():
        key = prefix + name
        if name not in fields:
            mistakes.append(unknown_key(key, valid))
            continue
        field_type = fields[name].type
        if (members := members_of(field_type)) is not None:
            build_one = _build_table if _is_table(field_type) else _build_member
            values[name] = build_one(members, fields[name], value, key, mistakes)
            continue
        item = struct_of_items(field_type)
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
        if told.partition(":")[0] in fields:
            told = prefix + told
        mistakes.append(told if told.startswith(prefix) else f"{prefix.rstrip('.')}: {told}")
        return None


def _build_member(
    members: Members, field: msgspec.structs.FieldInfo, value: object, key: str, mistakes: list[str]
) -> msgspec.Struct | None:
    """A section with several shapes: a name, or a table with one (the default's where it is left out)."""
    plain: Mapping[str, object] = {"name": value} if isinstance(value, str) else cast(Mapping[str, object], value)
    name = plain.get("name", _name(_default(field))) if isinstance(value, str | Mapping) else None
    if not isinstance(name, str):
        got = value if name is None else name
        mistakes.append(f"{key}: got {got!r} ({type(got).__name__}), expected {_choices(members)}")
        return None
    return _build_section(members, name, {**plain, "name": name}, key, mistakes)


def _build_table(
    members: Members, field: msgspec.structs.FieldInfo, value: object, key: str, mistakes: list[str]
) -> dict[str, msgspec.Struct | None] | None:
    """A table of sections, each of the shape that its name says."""
    built: dict[str, msgspec.Struct | None] = {}
    if not isinstance(value, Mapping):
        mistakes.append(f"{key}: got {value!r} ({type(value).__name__}), expected a table of {_choices(members)}")
        return None
    for name, own in cast(Mapping[str, object], value).items():
        below = f"{key.rpartition('.')[0] if members.beside else key}.{name}"
        if isinstance(own, Mapping):
            built[name] = _build_section(members, name, cast(Plain, own), below, mistakes)
        else:
            mistakes.append(f"{below}: got {own!r} ({type(own).__name__}), expected a table of keys")
    return built


def _build_section(
    members: Members, name: str, plain: Mapping[str, object], key: str, mistakes: list[str]
) -> msgspec.Struct | None:
    try:
        section = _section(members, name, with_options=plain.keys() > {"name"})
    except ValueError as error:
        mistakes.append(f"{key}: {error}")
        return None
    own = {field.name for field in msgspec.structs.fields(section)}
    foreign = [option for option in plain if option not in own]
    mistakes += [_foreign(members, name, own, f"{key}.{option}") for option in foreign]
    valid = [f"{key}.{leaf.name}" for leaf in keys_of(section)]
    built = _build(section, {o: v for o, v in plain.items() if o in own}, f"{key}.", valid, mistakes)
    return None if foreign else built


def _section(members: Members, name: str, *, with_options: bool) -> type[msgspec.Struct]:
    return members.section(name, with_options=with_options)


def _foreign(members: Members, name: str, own: set[str], key: str) -> str:
    """The message for an option of another member."""
    option = key.rpartition(".")[2]
    readers = [n for n, section in members.known().items() if find_key(section, option) is not None]
    options = ", ".join(sorted(own - {"name"}))
    expected = f"one of its options: {options}" if options else "no option"
    elsewhere = f"; {option} is an option of {', '.join(readers)}" if readers else ""
    return f"{key}: {name} does not read it, expected {expected}{elsewhere}"


def _choices(members: Members) -> str:
    return f"one of {', '.join(members.known())}"


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


def choose(plain: Plain, key: Key, name: object) -> None:
    """Set the name of a section with several shapes. Options there are stay where the name does, else they go: they
    were another member's."""
    former = get(plain, key.name)
    if isinstance(former, Mapping) and former.get("name", _name(key.default)) == name:  # pyright: ignore[reportUnknownMemberType]
        put(plain, f"{key.name}.name", name)
    else:
        put(plain, key.name, {"name": name})


def merge(under: Plain, over: Mapping[str, object], struct: type[msgspec.Struct] | None = None) -> Plain:
    """Both trees; where both say something, `over` wins. `struct` says which of their sections have several shapes: one
    that `over` gives another name keeps no option of `under`."""
    merged = dict(under)
    fields = {field.name: field for field in msgspec.structs.fields(struct)} if struct is not None else {}
    for name, value in over.items():
        former = merged.get(name)
        field = fields.get(name)
        if field is not None and members_of(field.type) is not None and not _is_table(field.type):
            merged[name] = _merged_member(former, value, _name(_default(field)))
        elif isinstance(value, Mapping) and (isinstance(former, dict) or (field and _struct_type(field.type))):
            nested = _struct_type(field.type) if field is not None else None
            below = cast(Plain, former) if isinstance(former, dict) else {}
            merged[name] = merge(below, cast(Mapping[str, object], value), nested)
        else:
            merged[name] = value
    return merged


def _merged_member(former: object, value: object, default: str) -> object:
    under, over = ({"name": side} if isinstance(side, str) else side for side in (former, value))
    if not isinstance(under, Mapping) or not isinstance(over, Mapping):
        return over
    below, above = cast(Plain, under), cast(Plain, over)
    named = below.get("name", default)
    return {**below, **above} if above.get("name", named) == named else over


def parse_text(key: Key, text: str) -> object:
    """What a command-line word means for this key: the text itself where the key takes text, else its YAML reading
    (numbers, true/false, null, [a, b]); `a,b` makes a list. Raises ConfigError."""
    if text.lower() in ("none", "null") and _accepts(None, key.type):
        return None
    if key.type is Any:
        return yaml.safe_load(text)
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
    raise ConfigError(f"{key.name}: got {text!r}, expected {type_name(key.type)}")


def unknown_key(key: str, valid: Iterable[str]) -> str:
    """The message for a key that is not there, naming the one that was probably meant."""
    if (message := farewell(key)) is not None:
        return message
    valid = list(valid)
    leaf, leaves = key.rpartition(".")[2], [name.rpartition(".")[2] for name in valid]
    near = [name for name, its_leaf in zip(valid, leaves, strict=True) if its_leaf == leaf]  # on another branch
    near = near or difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    if not near:
        close = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.7)
        near = [name for name, its_leaf in zip(valid, leaves, strict=True) if its_leaf in close]
    hint = f"; did you mean {' or '.join(near[:3])}?" if near else "; --help all lists the keys"
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
        if (members := members_of(annotation)) is not None:
            return _choices(members)
        return described(annotation) if arguments[0] in (int, float) else type_name(arguments[0])
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


def _name(default: object) -> str:
    """Of the member that a field has by default."""
    return default.name if isinstance(default, Member) else ""


def _table_beside(struct: type[msgspec.Struct]) -> tuple[str, Members] | None:
    """The field whose sections stand beside it, if the Struct has one (`Members.beside`)."""
    for field in msgspec.structs.fields(struct):
        if (members := members_of(field.type)) is not None and members.beside:
            return field.name, members
    return None


def _sections_beside(struct: type[msgspec.Struct]) -> Mapping[str, type[Settings]]:
    table = _table_beside(struct)
    return table[1].known() if table is not None else {}


def _gathered(struct: type[msgspec.Struct], plain: Mapping[str, object]) -> Mapping[str, object]:
    """The same data, with sections that stand beside their table moved into it. Where both set a key the section wins:
    what a run wrote (`msgspec.to_builtins`) has the table, what a user adds has sections."""
    table = _table_beside(struct)
    if table is None or plain.keys() <= set(struct.__struct_fields__):
        return plain
    sections = {name: plain[name] for name in table[1].known() if name in plain}
    former = cast(Plain, plain.get(table[0], {}))
    rest = {name: value for name, value in plain.items() if name not in sections}
    return {**rest, table[0]: merge(former, sections)} if sections else plain


def _is_table(annotation: object) -> bool:
    """Of `Annotated[dict[str, Settings], Members]`."""
    return typing.get_origin(typing.get_args(annotation)[0]) is dict


def _struct_type(annotation: object) -> type[msgspec.Struct] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct) else None


def struct_of_items(annotation: object) -> type[msgspec.Struct] | None:
    """SomeStruct, where a key is a table of them: `dict[str, SomeStruct]`."""
    return _struct_type(typing.get_args(annotation)[1]) if typing.get_origin(annotation) is dict else None


def _default(field: msgspec.structs.FieldInfo) -> object:
    if field.default_factory is not msgspec.NODEFAULT:
        return cast(Callable[[], object], field.default_factory)()
    return field.default
