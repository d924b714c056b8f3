"""Reads YAML as a person means it, where PyYAML reads another thing in silence."""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.composer import ComposerError


class _Loader(yaml.SafeLoader):
    """Reads 1e-3 as a number, which is text in YAML 1.1, and keys as the text that they are written as (`on` is not
    True). A key that is there twice is an error; PyYAML drops the first value."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ComposerError(None, None, "expected text as a key", key.start_mark)
            if key.value in lines:
                problem = f"the key {key.value!r} is there twice, first in line {lines[key.value]}; write it once"
                raise ComposerError(None, None, problem, key.start_mark)
            lines[key.value] = key.start_mark.line + 1
            if key.tag != "tag:yaml.org,2002:merge":
                key.tag = "tag:yaml.org,2002:str"
        return node


_Loader.yaml_implicit_resolvers = {
    first: list(resolvers) for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def load_yaml(text: str) -> object:
    """Plain data from one document. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=_Loader)


def fault_of(error: yaml.YAMLError) -> str:
    """An error in words, with the line: `line 3, column 1: ...`."""
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    if mark is None:
        return " ".join(str(error).split())
    problem = str(getattr(error, "problem", error))
    hint = ": YAML is indented with spaces, not with tabs" if r"'\t'" in problem else ""
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}{hint}"
