"""Reads TOML or YAML configuration files, and writes the resolved tree as YAML (which, unlike TOML, has a null)."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, cast

import msgspec
import yaml

from stillhouse import SOURCES
from stillhouse.launch.config.keys import field_docs
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import Plain, build, lacking
from stillhouse.launch.config.yaml_text import fault_of, load_yaml
from stillhouse.launch.errors import ConfigError
from stillhouse.protocol.atomic_file import write_atomic

SHIPPED: Final = ("examples", "builtin")
"""Folders of the package whose files can be named from anywhere as they are in a checkout."""
END: Final = "..."
"""Last line of a resolved configuration: YAML's end-of-document marker."""


def read_plain(path: Path) -> Plain:
    """Nested dicts from a .toml, .yaml or .yml file. Raises ConfigError if it is missing, unreadable or not a table."""
    if (shipped := _of_package(path)) is not None:
        return _with_its_files(read_plain(shipped))
    if not path.is_file():
        raise ConfigError(f"--config {path}: no such file")
    try:
        if path.suffix == ".toml":
            return tomllib.loads(_text_of(path))
        if path.suffix not in (".yaml", ".yml"):
            raise ConfigError(
                f"--config {path}: got a {path.suffix or 'suffixless'} file, expected .toml, .yaml or .yml"
            )
        loaded = load_yaml(_text_of(path))
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}, {fault_of(error)}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {path}: {error}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"--config {path}: got {type(loaded).__name__} at the top, expected keys and values")
    return cast(Plain, loaded)


def _of_package(name: Path) -> Path | None:
    """Where the package has examples/... or builtin/..., if the working folder has no such file."""
    shipped = SOURCES / "stillhouse" / name
    ours = str(name).partition("/")[0] in SHIPPED and not name.exists() and shipped.exists()
    return shipped if ours else None


def _with_its_files(plain: Plain) -> Plain:
    """The files that a configuration of the package names, where the package has them."""
    found: Plain = {}
    for key, value in plain.items():
        if isinstance(value, dict):
            found[key] = _with_its_files(cast(Plain, value))
        else:
            file = _of_package(Path(value)) if isinstance(value, str) else None
            found[key] = value if file is None else str(file)
    return found


def _text_of(path: Path) -> str:
    """Content of a file in UTF-8, without the byte order mark that some editors write."""
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"--config {path}, line {line}: not UTF-8 ({error.reason}); save the file as UTF-8"
        ) from error


def read_config(path: Path) -> RunConfig:
    """Read a configuration file; missing keys have their defaults. Raises ConfigError."""
    return build(RunConfig, read_plain(path))


def read_resolved(path: Path) -> Plain:
    """Read a file that `write_config` wrote. Raises ConfigError if any key is missing, because its default would be
    used silently."""
    plain = read_plain(path)
    lines = path.read_text(encoding="utf-8").splitlines()
    missing = lacking(RunConfig, plain)
    mend = f"put {path} back from a copy, or mend it by hand"
    if missing:
        keys = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ConfigError(f"{path} lacks {keys}: it was cut, or another version wrote it; {mend}")
    if END not in lines:
        raise ConfigError(
            f"{path} was cut: its last line is {lines[-1]!r}, expected {END!r}; {mend} (the last value may be wrong)"
        )
    return plain


def write_config(config: RunConfig, path: Path) -> None:
    """Write `config_text` into a file."""
    write_atomic(path, config_text(config).encode())


def config_text(config: RunConfig) -> str:
    """Every key with its value, under its docstring as a comment. `read_config` restores the same tree."""
    header = "# The resolved configuration of this run. Repeat the run with --config and this file."
    return "\n".join((header, *_lines(config, ""), END, ""))


def _lines(struct: msgspec.Struct, indent: str) -> Iterator[str]:
    docs = field_docs(type(struct))
    for name in struct.__struct_fields__:
        value: object = getattr(struct, name)
        if doc := docs.get(name):
            yield f"{indent}# {doc}"
        if isinstance(value, msgspec.Struct):
            yield f"{indent}{name}:"
            yield from _lines(value, indent + "  ")
        else:
            yield f"{indent}{name}: {_text(msgspec.to_builtins(value))}"


def _text(value: object) -> str:
    """Any plain value on one line of YAML; text may contain any characters."""
    match value:
        case Mapping():
            items = cast(Mapping[object, object], value).items()
            return "{" + ", ".join(f"{_text(name)}: {_text(item)}" for name, item in items) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(_text, cast(Sequence[object], value))) + "]"
        case str():
            return yaml.safe_dump([value], default_style='"', default_flow_style=True, width=10**9).strip()[1:-1]
        case _:
            return yaml.safe_dump([value], default_flow_style=True).strip()[1:-1]
