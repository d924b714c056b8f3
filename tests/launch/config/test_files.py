"""Configuration files: TOML and YAML in, YAML with comments out, and back."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillhouse.launch.config.files import read_config, read_plain, write_config
from stillhouse.launch.config.keys import field_docs, keys_of
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.errors import ConfigError


def test_the_resolved_config_reads_back_as_the_same_tree(tmp_path: Path) -> None:
    config = build(
        RunConfig,
        {
            "steps": 7,
            "models": {"student": "/a folder/with 'quotes': and # signs"},
            "learner": {
                "lr": 1e-5,
                "tasks": {"system_prompt": 'two\nlines\t"x"', "routes": {"math": ["a", "b"], "x": []}},
            },
            "actor": {"environments": {"tool": {"name": "calculator", "options": {"digits": 3, "names": ["a: b"]}}}},
        },
    )
    write_config(config, tmp_path / "config.yaml")
    assert read_config(tmp_path / "config.yaml") == config


@settings(max_examples=8, deadline=None)
@given(text=st.text(max_size=30), number=st.floats(min_value=1e-30, max_value=1e30))
def test_any_text_and_number_survives_the_round_trip(
    tmp_path_factory: pytest.TempPathFactory, text: str, number: float
) -> None:
    config = build(
        RunConfig, {"models": {"student": text}, "learner": {"lr": number, "tasks": {"routes": {"x": [text]}}}}
    )
    file = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    write_config(config, file)
    assert read_config(file) == config


def test_every_key_is_written_with_its_docstring_above(tmp_path: Path) -> None:
    write_config(RunConfig(), tmp_path / "config.yaml")
    lines = (tmp_path / "config.yaml").read_text().splitlines()
    for key in keys_of(RunConfig):
        assert any(line.strip().startswith(f"{key.name.rpartition('.')[2]}:") for line in lines), key.name
        assert any(line.strip() == f"# {key.doc}" for line in lines), key.name


def test_every_key_of_the_tree_has_a_docstring() -> None:
    assert [key.name for key in keys_of(RunConfig) if not key.doc] == []
    assert set(field_docs(RunConfig)) >= {"steps", "seed", "actors", "teachers"}


def test_toml_and_yaml_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("steps = 3\n[learner]\nlr = 1e-3\n")
    (tmp_path / "a.yaml").write_text("steps: 3\nlearner:\n  lr: 1e-3\n")
    assert read_plain(tmp_path / "a.toml") == read_plain(tmp_path / "a.yaml") == {"steps": 3, "learner": {"lr": 1e-3}}


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("missing.toml", None, "no such file"),
        ("a.json", "{}", "expected .toml, .yaml or .yml"),
        ("a.toml", "steps = = 3", "a.toml"),
        ("a.yaml", "- 1\n- 2\n", "got list at the top"),
        ("a.yaml", "a: [", "a.yaml"),
        (
            "a.yaml",
            "steps: 3\nlearner:\n  lr: 1\nlearner:\n",
            "a.yaml, line 4, .*'learner' is there twice, .*line 2",
        ),
        ("a.yaml", "learner:\n  pools:\n    a: {x: 1, y: 2, x: 3}\n", "line 3, .*'x' is there twice"),
        ("a.yaml", "learner:\n\tlr: 1\n", "line 2, column 1: .*with spaces"),
        ("a.yaml", "? [a, b]\n: 1\n", "line 1, .*text as a key"),
        ("a.toml", "[learner]\nlr = 1\n[learner]\nsteps = 2\n", "a.toml.*line 3"),
        ("a.toml", b'steps = 3\nname = "gr\xf6\xdfer"\n', "line 2: not UTF-8 .*save the file as UTF-8"),
        ("a.yaml", "steps: 3".encode("utf-16"), "line 1: not UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read_is_a_config_error(
    tmp_path: Path, name: str, content: str | bytes | None, told: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError, match=told):
        read_plain(tmp_path / name)


@pytest.mark.parametrize("text", ["learner.lr: 1.0e-4\n", "learner:\n  tasks.group_size: 4\n"])
def test_a_name_with_dots_is_told_how_to_nest(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"nest it: `(learner: \{lr|tasks: \{group_size): ...\}` in YAML"):
        read_config(tmp_path / "a.yaml")


def test_what_a_person_means_by_yaml_is_what_is_read(tmp_path: Path) -> None:
    """A byte order mark is no part of the text, names are text, and a merged key may be set again."""
    text = "\ufeffbase: &base {lr: 1e-3, on: yes}\n2: {<<: *base, lr: 2}\n"
    text += "deep: {a: &a {<<: *base, lr: 3}}\nagain: {<<: *a}\n"
    (tmp_path / "a.yaml").write_text(text, encoding="utf-8")
    (tmp_path / "a.toml").write_text("\ufeffsteps = 3\n", encoding="utf-8")
    base = {"lr": 1e-3, "on": True}
    assert read_plain(tmp_path / "a.yaml") == {
        "base": base, "2": base | {"lr": 2}, "deep": {"a": base | {"lr": 3}}, "again": base | {"lr": 3}
    }  # fmt: skip
    assert read_plain(tmp_path / "a.toml") == {"steps": 3}


def test_the_tree_is_frozen_and_refuses_unknown_fields_all_the_way_down() -> None:
    def structs(struct: type[msgspec.Struct]) -> list[type[msgspec.Struct]]:
        below = [f.type for f in msgspec.structs.fields(struct) if isinstance(f.type, type)]
        return [struct] + [s for b in below if issubclass(b, msgspec.Struct) for s in structs(b)]

    for struct in structs(RunConfig):
        assert struct.__struct_config__.frozen, struct
        assert struct.__struct_config__.forbid_unknown_fields, struct
