"""Keys that are gone are refused by name, with what they are now, wherever they come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stillhouse.launch.config.command_line import parse_arguments, resolve_config
from stillhouse.launch.config.files import write_config
from stillhouse.launch.config.keys import find_key, keys_of
from stillhouse.launch.config.renamed import REMOVED, RENAMED, new_name
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import Plain, build, put
from stillhouse.launch.errors import ConfigError


@pytest.mark.parametrize("key", RENAMED)
def test_a_key_that_is_gone_is_refused_by_name_in_a_file_and_on_the_command_line(key: str) -> None:
    plain: Plain = {}
    put(plain, key, 1)
    with pytest.raises(ConfigError) as caught:
        build(RunConfig, plain)
    (told,) = caught.value.mistakes
    assert told.startswith(f"{key}: is {RENAMED[key]} now") or key.startswith("learner.value.")
    with pytest.raises(ConfigError) as caught:
        parse_arguments([f"--{key}=1"])
    assert str(caught.value) == f"--{key}: is {RENAMED[key]} now"


@pytest.mark.parametrize("key", RENAMED)
def test_the_old_name_is_no_key_and_the_new_one_is_a_key_or_a_section(key: str) -> None:
    now = RENAMED[key].partition(" ")[0]
    if now.endswith(".*"):
        below = f"{now.removesuffix('.*')}."
        examples = [name for name in ("lr", "host") if find_key(RunConfig, below + name) is not None]
        assert examples, now
    else:
        known = find_key(RunConfig, now)
        assert known is not None and known.type is not Any, now
    assert find_key(RunConfig, key) is None
    assert key not in {name.rpartition(".")[0] for name in (leaf.name for leaf in keys_of(RunConfig))}


@pytest.mark.parametrize("key", REMOVED)
def test_a_key_without_a_successor_is_refused_with_the_reason(key: str) -> None:
    plain: Plain = {}
    put(plain, key, 1)
    for attempt in (lambda: build(RunConfig, plain), lambda: parse_arguments([f"--{key}=1"])):
        with pytest.raises(ConfigError, match=rf"{key}: was removed: .+; leave it out"):
            attempt()
    assert find_key(RunConfig, key) is None


def test_a_key_below_a_section_that_is_gone_is_named_in_full() -> None:
    with pytest.raises(ConfigError, match=r"--learner\.value\.clip: is learner\.objective\.advantage\.value\.clip now"):
        parse_arguments(["--learner.value.clip", "0.2"])
    with pytest.raises(ConfigError, match=r"--learner\.publish\.host: is weights\.host now"):
        parse_arguments(["--learner.publish.host", "10.0.0.7"])
    assert new_name("learner.publish_every") is None


def test_a_run_folder_of_before_is_refused_by_the_names_of_its_keys(tmp_path: Path) -> None:
    write_config(RunConfig(), tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    before = text.replace("\nlearner:\n", '\nlearner:\n  divergence: "k1"\n  value:\n    lr: 0.1\n')
    assert before != text
    (tmp_path / "config.yaml").write_text(before)
    with pytest.raises(ConfigError) as caught:
        resolve_config(parse_arguments(["--resume", f"--run-dir={tmp_path}"]))
    first, second = caught.value.mistakes
    assert first.endswith("config.yaml: learner.divergence: is learner.objective.divergence now")
    assert second.endswith("config.yaml: learner.value: is learner.objective.advantage.value.* now")


def test_what_a_run_is_resumed_with_may_choose_another_member(tmp_path: Path) -> None:
    """The folder says every option of its own one; none of them is left in the way."""
    first = resolve_config(parse_arguments(["--divergence=jsd", "--learner.objective.divergence.beta=0.3"]))
    write_config(first, tmp_path / "config.yaml")
    resume = ["--resume", f"--run-dir={tmp_path}"]
    assert resolve_config(parse_arguments(resume)) == first
    other = resolve_config(parse_arguments([*resume, "--learner.objective.importance.high=1.3", "--importance", "ppo"]))
    assert other.learner.objective.divergence == first.learner.objective.divergence
    assert other.learner.objective.importance.name == "ppo"
    changed = resolve_config(parse_arguments([*resume, "--divergence", "k3"]))
    assert changed.learner.objective.divergence.name == "k3"
