"""YAML for people: text of several lines is written line by line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    pass


def _lines(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _lines)


def yaml_text(documents: Iterable[Mapping[str, Any]]) -> str:
    """One file with all documents, keys in their order."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=1000)
