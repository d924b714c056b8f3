"""`--help`: a page that fits a screen or two, sections and keys on request, and what there is not."""

from __future__ import annotations

import pytest

from stillhouse.launch.config.command_line import parse_arguments
from stillhouse.launch.config.help import MAIN_KEYS, help_text
from stillhouse.launch.config.keys import find_key, keys_of, sections_of
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.errors import ConfigError


def test_the_overview_has_the_main_keys_and_every_section_and_is_short() -> None:
    text = help_text()
    assert all(f"--{name}" in text for name in MAIN_KEYS)
    assert all(f"\n  {name} " in text for name, _ in sections_of(RunConfig))
    assert 15 <= len(MAIN_KEYS) <= 25 and len(text.splitlines()) < 110


def test_the_main_keys_are_keys() -> None:
    assert [name for name in MAIN_KEYS if find_key(RunConfig, name) is None] == []


def test_a_section_has_its_keys_those_below_it_and_no_others() -> None:
    text = help_text(["learner"])
    for key in keys_of(RunConfig):
        assert (f"  --{key.name}" in text) == key.name.startswith("learner."), key.name


def test_a_name_that_is_a_short_flag_and_a_section_shows_both() -> None:
    text = help_text(["teacher"])
    assert "--models.teacher, --teacher" in text and "--teacher.sglang.api_key_env" in text and "--actor." not in text


def test_one_key_by_name_alias_or_flag() -> None:
    for topic in ("buffer.max_staleness", "max_staleness", "--max-staleness"):
        text = help_text([topic])
        assert "--buffer.max_staleness, --max-staleness" in text and "lease_s" not in text


def test_the_keys_of_a_table_of_sections() -> None:
    assert "--pools.NAME.model" in help_text(["pools"])


def test_what_there_is_not_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="--help bufer: unknown key; did you mean buffer"):
        help_text(["bufer"])


def test_words_after_help_are_topics() -> None:
    line = parse_arguments(["--help", "learner.tasks", "buffer"])
    assert line.help and line.topics == ("learner.tasks", "buffer")


def test_version_is_a_switch() -> None:
    assert parse_arguments(["--version"]).version
