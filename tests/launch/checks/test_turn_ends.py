"""Every start says of a student, and of its teachers, whether answers end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest

from stillhouse.builtin import STUDENT_DIR, TEACHER_DIR
from stillhouse.launch.checks import preflight
from stillhouse.launch.checks.turn_ends import turn_end_warnings
from stillhouse.launch.config.run import RunConfig
from stillhouse.models.chat_text import closing_id
from stillhouse.models.tokenizer import load_tokenizer
from stillhouse.models.tokenizer_file import FileTokenizer
from tests.actors.test_next_turn import family

END_OF_TEXT = 314


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A student that stops at the end of a text, as base models do, with the template of a chat."""
    folder = shutil.copytree(STUDENT_DIR, tmp_path / "base")
    for file, change in (
        ("generation_config.json", {"eos_token_id": END_OF_TEXT}),
        ("tokenizer_config.json", {"eos_token": "<|endoftext|>"}),
    ):
        (folder / file).write_text(json.dumps({**json.loads((folder / file).read_text()), **change}))
    return folder


def test_a_start_warns_of_answers_that_do_not_end(base: Path) -> None:
    config = RunConfig()
    assert not [one for one in preflight.check(config).warnings if "stops only" in one]
    config = preflight.replace(config, models=preflight.replace(config.models, student=str(base)))
    student, teacher = [one for one in preflight.check(config).warnings if "stops only" in one]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    right = cast(Any, load_tokenizer(base)).apply_chat_template(turns, return_dict=False)
    end = load_tokenizer(base).convert_tokens_to_ids("<|im_end|>")
    assert end in right and f"closes a turn with '<|im_end|>' ({end}), but the student stops only at" in student
    assert f"'<|endoftext|>' ({END_OF_TEXT})" in student and student.startswith("models.student: ")
    assert teacher.startswith("models.teacher: it ends a turn with '<|im_end|>'")


def test_a_list_of_stop_tokens_that_has_the_templates_is_enough(base: Path) -> None:
    end = closing_id(FileTokenizer(base))
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [END_OF_TEXT, end]}))
    assert not [*turn_end_warnings(base, {"models.teacher": TEACHER_DIR})]
    (base / "chat_template.jinja").unlink()
    assert closing_id(FileTokenizer(base)) is None and not [*turn_end_warnings(base, {})]


def test_folders_that_cannot_be_read_here_are_left_to_others(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    assert not [*turn_end_warnings(tmp_path, {})] and not [*turn_end_warnings(STUDENT_DIR, {"t": tmp_path})]


@pytest.mark.parametrize(("name", "ends"), [("qwen3", "<|im_end|>"), ("glm4moe", None)])
def test_the_closing_token_of_model_families(name: str, ends: str | None) -> None:
    tokenizer = family(name)
    expected = None if ends is None else tokenizer.convert_tokens_to_ids(ends)
    assert closing_id(cast(Any, tokenizer)) == expected
