"""Old keys are refused by name, and the message has the new one."""

from __future__ import annotations

import pytest

from launch.config.command_line import parse_arguments
from launch.config.renamed import RENAMED, new_name
from launch.config.run import RunConfig
from launch.config.tree import build, find_key, keys_of
from launch.errors import ConfigError


def test_a_section_of_a_former_version_is_refused_with_its_new_name() -> None:
    with pytest.raises(ConfigError, match=r"learner\.publish: is weights\.\* now"):
        build(RunConfig, {"learner": {"publish": {"host": "10.0.0.7"}}})


def test_so_is_a_key_below_it_on_the_command_line() -> None:
    with pytest.raises(ConfigError, match=r"--learner\.publish\.host: is weights\.host now"):
        parse_arguments(["--learner.publish.host", "10.0.0.7"])


def test_what_is_named_exists_and_what_was_renamed_does_not() -> None:
    sections = {key.name.rpartition(".")[0] for key in keys_of(RunConfig)}
    for old, new in RENAMED.items():
        assert find_key(RunConfig, old) is None and old not in sections
        assert not new.endswith(".*") or new.removesuffix(".*") in sections
    assert new_name("learner.publish_every") is None
