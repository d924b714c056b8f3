"""What the launcher's side tells the buffer of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import stillhouse.buffer.server
from stillhouse import builtin
from stillhouse.launch.config.command_line import parse_arguments, resolve_config
from stillhouse.launch.workers.roles import run_buffer
from stillhouse.launch.workers.start_role import StartRole
from stillhouse.models.tokenizer import load_tokenizer, token_map_fingerprint
from stillhouse.protocol.context import RoleContext


@pytest.mark.parametrize("readable", [True, False])
def test_the_buffer_is_told_the_vocabulary_of_the_student_that_the_configuration_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readable: bool
) -> None:
    """From its files; where only transformers can read them, the learner's counts."""
    seen: dict[str, Any] = {}

    def main(**settings: Any) -> int:
        seen.update(settings)
        return 0

    monkeypatch.setattr(stillhouse.buffer.server, "main", main)
    student = builtin.STUDENT_DIR if readable else tmp_path / "another"
    config = resolve_config(parse_arguments([f"--student={student}"]))
    context = RoleContext(
        role="buffer",
        index=0,
        name="buffer-0",
        incarnation="i",
        run_id="r",
        run_dir=tmp_path,
        buffer_address="",
        resume=False,
        config=config,
    )
    assert run_buffer(context) == 0
    expected = token_map_fingerprint(load_tokenizer(builtin.STUDENT_DIR)) if readable else None
    assert seen["vocab_fingerprint"] == expected


def test_workers_wait_for_the_buffer_as_long_as_the_launcher_does(tmp_path: Path) -> None:
    config = resolve_config(parse_arguments(["--launch.ready_timeout_s=77"]))
    start = StartRole(
        entry="",
        role="actor",
        index=0,
        name="actor-0",
        incarnation="i",
        run_id="r",
        buffer_address="",
        resume=False,
    )
    assert start.context(config, tmp_path).buffer_away_s == 77.0
