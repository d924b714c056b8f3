"""Tags of tool calls that a tokenizer counts as special tokens, as Mistral's and Llama's do, stay in the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from transformers import AutoTokenizer

from stillhouse.actors.envs.base import TextTokenizer
from stillhouse.actors.tool_calls import Parsed, ToolCall, ToolDialect, parse_tool_calls
from stillhouse.models.tokenizer_file import FileTokenizer
from tests.actors.conftest import STUDENT_DIR

TAGS = ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"]


@pytest.fixture(scope="module", params=["file", "transformers"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    made: Any = AutoTokenizer.from_pretrained(STUDENT_DIR)
    made.add_special_tokens({"additional_special_tokens": TAGS})
    if request.param == "transformers":
        return TextTokenizer(made)
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    made.save_pretrained(folder)
    return TextTokenizer(FileTokenizer(folder))


@pytest.mark.parametrize(
    ("text", "dialect"),
    [
        ('Let me see.[TOOL_CALLS]f[ARGS]{"a": 1}', "mistral"),
        ('Let me see.<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "llama_json"),
        ('Let me see.<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>', "deepseek"),
    ],
)
def test_calls_are_read_from_the_tokens(tokenizer: TextTokenizer, text: str, dialect: str) -> None:
    ids = tokenizer.encode(text + "<|im_end|>")
    assert tokenizer.decode(ids) == text, "the end of the turn is no part of it"
    call = ToolCall("f", {"a": 1})
    assert parse_tool_calls(tokenizer.decode(ids), cast(ToolDialect, dialect)) == Parsed("Let me see.", (call,), 0)
    assert tokenizer.decode(np.zeros(0, np.int32)) == ""
