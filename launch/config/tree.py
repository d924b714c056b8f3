"""Turns plain data (nested dicts) into the tree of config Structs, with error messages that a person can act on.

A section that has several shapes is a table with a `name`; a bare string in its place is that name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias, TypeVar, cast

import msgspec

from stillhouse.launch.config.keys import (
    HINTS,
    Key,
    choices_of,
    default_of,
    find_key,
    given_by,
    is_table,
    keys_of,
    members_of_items,
    name_of,
    struct_of_items,
    struct_type,
    table_beside,
    type_name,
    unknown_key,
)
from stillhouse.launch.errors import ConfigError
from stillhouse.protocol.settings import Members, fields_of, members_of

Plain: TypeAlias = dict[str, object]
StructT = TypeVar("StructT", bound=msgspec.Struct)


def lacking(struct: type[msgspec.Struct], plain: Mapping[str, object]) -> list[str]:
    """The keys that a complete tree has and `plain` lacks, including those of the chosen members."""
    missing: list[str] = []
    for key in keys_of(struct):
        if not has(plain, key.name):
            missing.append(key.name)
            continue
        value = get(plain, key.name)
        if key.members is not None and isinstance(value, Mapping):
            section_values = cast(Mapping[str, object], value)
            tables = section_values if is_table(key.type) else {str(section_values.get("name")): section_values}
            for name, own in tables.items():
                below = f"{key.name}.{name}" if is_table(key.type) else key.name
                section = key.members.section(name, with_options=True)
                missing += [f"{below}.{leaf}" for leaf in lacking(section, cast(Mapping[str, object], own))]
    return missing


def build(struct: type[StructT], plain: Mapping[str, object]) -> StructT:
    """Build the tree from nested dicts. Raises ConfigError with all mistakes: unknown keys (with the nearest valid
    one), wrong types (key, got, expected), and values that a config class refuses."""
    mistakes: list[str] = []
    built = _build(struct, plain, "", [key.name for key in keys_of(struct)], mistakes)
    if mistakes or built is None:
        raise ConfigError(*mistakes)
    return built


def _build(
    struct: type[StructT], plain: Mapping[str, object], prefix: str, valid: list[str], mistakes: list[str]
) -> StructT | None:
    """Returns None if it adds to `mistakes`."""
    before = len(mistakes)
    plain = _gathered(struct, plain)
    fields = {field.name: field for field in fields_of(struct)}
    values: dict[str, object] = {}
    for name, value in plain.items():
        key = prefix + name
        if name not in fields:
            mistakes.append(unknown_key(key, valid) if "." not in name else _dotted(key, name))
            continue
        field_type = fields[name].type
        if (members := members_of(field_type)) is not None:
            if is_table(field_type):
                values[name] = _build_table(members, value, key, mistakes)
            else:
                values[name] = _build_member(members, name_of(default_of(fields[name])), value, key, mistakes)
            continue
        if (members := members_of_items(field_type)) is not None and isinstance(value, Mapping):
            table = cast(Mapping[str, object], value)
            values[name] = {
                own: _build_member(members, "", one, f"{key}.{own}", mistakes) for own, one in table.items()
            }
            continue
        item = struct_of_items(field_type)
        if item is not None and isinstance(value, Mapping):
            values[name] = _build_items(item, cast(Mapping[str, object], value), key, mistakes)
        elif (nested := struct_type(field_type)) is None:
            try:
                values[name] = msgspec.convert(value, field_type)
            except msgspec.ValidationError as error:
                mistakes.append(wrong_type(key, value, field_type, str(error)))
        elif isinstance(value, str) and (bare := given_by(nested)):
            values[name] = _build(nested, {bare: value}, f"{key}.", valid, mistakes)
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
        message = str(error)
        if message.partition(":")[0] in fields:
            message = prefix + message
        mistakes.append(message if message.startswith(prefix) else f"{prefix.rstrip('.')}: {message}")
        return None


def _dotted(key: str, name: str) -> str:
    """The message for a path in the place of one name."""
    section, _, leaf = name.rpartition(".")
    nested = f"{name.replace('.', ': {')}: ...{'}' * name.count('.')}"
    return f"{key}: one name with dots; nest it: `{nested}` in YAML, `{leaf} = ...` below `[{section}]` in TOML"


def _build_member(
    members: Members, default: str, value: object, key: str, mistakes: list[str]
) -> msgspec.Struct | None:
    """Build a section with several shapes from a name, or from a table with one. `default`: the name of a table that
    has none; empty: it must have one."""
    plain: Mapping[str, object] = {"name": value} if isinstance(value, str) else cast(Mapping[str, object], value)
    name = plain.get("name", default or None) if isinstance(value, str | Mapping) else None
    if not isinstance(name, str):
        got = value if name is None else name
        mistakes.append(f"{key}: got {got!r} ({type(got).__name__}), expected {choices_of(members)}")
        return None
    return _build_section(members, name, {**plain, "name": name}, key, mistakes)


def _build_table(
    members: Members, value: object, key: str, mistakes: list[str]
) -> dict[str, msgspec.Struct | None] | None:
    """Build a table of sections, each of the shape that its name selects."""
    built: dict[str, msgspec.Struct | None] = {}
    if not isinstance(value, Mapping):
        mistakes.append(f"{key}: got {value!r} ({type(value).__name__}), expected a table of {choices_of(members)}")
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
        section = members.section(name, with_options=plain.keys() > {"name"})
    except ValueError as error:
        mistakes.append(f"{key}: {error}")
        return None
    own = {field.name for field in fields_of(section)}
    foreign = [option for option in plain if option not in own]
    mistakes += [_foreign(members, name, own, f"{key}.{option}") for option in foreign]
    valid = [f"{key}.{leaf.name}" for leaf in keys_of(section)]
    built = _build(section, {o: v for o, v in plain.items() if o in own}, f"{key}.", valid, mistakes)
    return None if foreign else built


def _foreign(members: Members, name: str, own: set[str], key: str) -> str:
    """The message for an option of another member."""
    option = key.rpartition(".")[2]
    readers = [n for n, section in members.known().items() if find_key(section, option) is not None]
    options = ", ".join(sorted(own - {"name"}))
    expected = f"one of its options: {options}" if options else "no option"
    elsewhere = f"; {option} is an option of {', '.join(readers)}" if readers else ""
    return f"{key}: {name} does not read it, expected {expected}{elsewhere}"


def _build_items(
    item: type[StructT], plain: Mapping[str, object], key: str, mistakes: list[str]
) -> dict[str, StructT | None]:
    """Build a table of tables, all of the same Struct."""
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
    """Set a dotted key in nested dicts, and create the levels above it."""
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
    """The value at a dotted key in nested dicts, or None."""
    node: object = plain
    for level in key.split("."):
        node = node.get(level) if isinstance(node, Mapping) else None
    return node


def has(plain: Mapping[str, object], key: str) -> bool:
    """Whether nested dicts have a dotted key."""
    above, _, leaf = key.rpartition(".")
    node = get(plain, above) if above else plain
    return isinstance(node, Mapping) and leaf in node


def choose(plain: Plain, key: Key, name: object) -> None:
    """Set the name of a section with several shapes. If the name changes, the section's options are dropped, because
    they belonged to another member."""
    former = get(plain, key.name)
    if isinstance(former, Mapping) and former.get("name", name_of(key.default)) == name:  # pyright: ignore[reportUnknownMemberType]
        put(plain, f"{key.name}.name", name)
    else:
        put(plain, key.name, {"name": name})


def merge(under: Plain, over: Mapping[str, object], struct: type[msgspec.Struct] | None = None) -> Plain:
    """Merge two trees; `over` wins where both have a value. `struct` shows which sections have several shapes: if
    `over` changes the name of such a section, none of its options in `under` are kept."""
    merged = dict(under)
    fields = {field.name: field for field in fields_of(struct)} if struct is not None else {}
    for name, value in over.items():
        former = merged.get(name)
        field = fields.get(name)
        if field is not None and members_of(field.type) is not None and not is_table(field.type):
            merged[name] = _merged_member(former, value, name_of(default_of(field)))
        elif field is not None and members_of_items(field.type) is not None and isinstance(value, Mapping):
            below = cast(Plain, former) if isinstance(former, dict) else {}
            above = cast(Mapping[str, object], value)
            merged[name] = below | {own: _merged_member(below.get(own), one, "") for own, one in above.items()}
        elif isinstance(value, Mapping) and (isinstance(former, dict) or (field and struct_type(field.type))):
            nested = struct_type(field.type) if field is not None else None
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


def wrong_type(key: str, value: object, expected: object, detail: str) -> str:
    """The message for a value of the wrong type. `detail` is msgspec's, which knows more about nested values."""
    where = f" ({detail})" if "`$" in detail and "at `$`" not in detail else ""
    return f"{key}: got {value!r} ({type(value).__name__}), expected {type_name(expected)}{where}{HINTS.get(key, '')}"


def _gathered(struct: type[msgspec.Struct], plain: Mapping[str, object]) -> Mapping[str, object]:
    """Move sections that stand beside their table into it. Where both set a key the section wins, because a written
    run configuration (`msgspec.to_builtins`) has the table, and a user adds sections."""
    table = table_beside(struct)
    if table is None or plain.keys() <= set(struct.__struct_fields__):
        return plain
    sections = {name: plain[name] for name in table[1].known() if name in plain}
    former = cast(Plain, plain.get(table[0], {}))
    rest = {name: value for name, value in plain.items() if name not in sections}
    return {**rest, table[0]: merge(former, sections)} if sections else plain
