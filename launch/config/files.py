"""Reads TOML or YAML configuration files, and writes the resolved tree as YAML (which, unlike TOML, has a null)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, cast

import msgspec
import yaml

from launch.config.keys import field_docs
from launch.config.renamed import gone
from launch.config.run import RunConfig
from launch.config.tree import Plain, build, lacking
from launch.errors import ConfigError
from protocol.atomic_file import write_atomic

END: Final = "..."
"""Last line of a resolved configuration: YAML's end-of-document marker."""


class _Loader(yaml.SafeLoader):
    """Reads 1e-3 as a number. PyYAML follows YAML 1.1, in which it is text."""


_Loader.yaml_implicit_resolvers = {
    first: list(resolvers) for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_plain(path: Path) -> Plain:
    """Nested dicts from a .toml, .yaml or .yml file. Raises ConfigError if it is missing, unreadable or not a table."""
    if not path.is_file():
        raise ConfigError(f"--config {path}: no such file")
    try:
        if path.suffix == ".toml":
            return tomllib.loads(path.read_text(encoding="utf-8"))
        if path.suffix not in (".yaml", ".yml"):
            raise ConfigError(
                f"--config {path}: got a {path.suffix or 'suffixless'} file, expected .toml, .yaml or .yml"
            )
        loaded: object = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (tomllib.TOMLDecodeError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"--config {path}: got {type(loaded).__name__} at the top, expected keys and values")
    return {str(name): value for name, value in cast(dict[object, object], loaded).items()}


def read_config(path: Path) -> RunConfig:
    """Read a configuration file; missing keys have their defaults. Raises ConfigError."""
    return build(RunConfig, read_plain(path))


def read_resolved(path: Path) -> Plain:
    """Read a file that `write_config` wrote. Raises ConfigError if any key is missing, because its default would be
    used silently."""
    plain = read_plain(path)
    lines = path.read_text(encoding="utf-8").splitlines()
    if renamed := list(gone(plain)):
        raise ConfigError(*(f"{path}: {mistake}" for mistake in renamed))
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
