"""What ships: problem files that are disjoint and right, and two complete Hugging Face folders that fit together."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from stillhouse.builtin import (
    CALCULATOR_EVAL_JSONL,
    CALCULATOR_TRAIN_JSONL,
    DATA_DIR,
    EVAL_JSONL,
    STUDENT_DIR,
    TEACHER_DIR,
    TRAIN_JSONL,
)
from stillhouse.builtin.addition import STYLES, TOOL_TAGS, Problem, read_problems, solution, write_problems
from stillhouse.builtin.tokenizer import build_tokenizer, prompt_token_ids
from tests.patience import PATIENCE_S

FOLDERS = [TEACHER_DIR, STUDENT_DIR]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return cast(PreTrainedTokenizerFast, AutoTokenizer.from_pretrained(STUDENT_DIR))


@pytest.mark.parametrize(
    ("path", "count", "tag"),
    [
        (TRAIN_JSONL, 8_192, "addition"),
        (EVAL_JSONL, 256, "addition"),
        (CALCULATOR_TRAIN_JSONL, 2_048, "calculator"),
        (CALCULATOR_EVAL_JSONL, 256, "calculator"),
    ],
)
def test_problem_files_hold_distinct_problems_with_right_answers(path: Path, count: int, tag: str) -> None:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    tasks = read_problems(path)
    assert len(set(tasks)) == len(rows) == count
    assert [set(row) for row in rows] == [{"prompt", "ground_truth", "tag"}] * count
    assert [row["ground_truth"] for row in rows] == [str(task.answer) for task in tasks]
    assert {row["tag"] for row in rows} == {tag}


def test_evaluation_problems_are_in_no_training_file() -> None:
    assert set(read_problems(EVAL_JSONL)).isdisjoint(read_problems(TRAIN_JSONL))
    assert set(read_problems(CALCULATOR_EVAL_JSONL)).isdisjoint(read_problems(CALCULATOR_TRAIN_JSONL))


def test_a_problem_file_with_another_line_is_refused(tmp_path: Path) -> None:
    write_problems(tmp_path / "p.jsonl", [Problem(1, 2)])
    with (tmp_path / "p.jsonl").open("a") as file:
        file.write('{"prompt": "hello"}\n')
    with pytest.raises(ValueError, match="line 2: expected a prompt like"):
        read_problems(tmp_path / "p.jsonl")


def test_everything_shipped_is_small() -> None:
    assert sum(file.stat().st_size for file in DATA_DIR.rglob("*") if file.is_file()) < 5 * 2**20 + 400_000
    models = sum(file.stat().st_size for folder in FOLDERS for file in folder.iterdir())
    assert models < 5_000_000


@pytest.mark.parametrize("folder", FOLDERS)
def test_model_folders_are_complete_float32_and_tied(folder: Path) -> None:
    config: Any = AutoConfig.from_pretrained(folder)
    assert (config.model_type, config.num_hidden_layers, config.tie_word_embeddings) == ("qwen3", 3, True)
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        assert {t.get_dtype() for t in tensors.values()} == {"F32"}
        assert tensors["model.embed_tokens.weight"].get_shape() == [config.vocab_size, config.hidden_size]


@pytest.mark.parametrize("folder", FOLDERS)
def test_both_stop_at_the_end_of_turn_and_at_the_end_of_text(folder: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    stops = GenerationConfig.from_pretrained(folder).eos_token_id
    assert stops == [tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>")]
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|pad|>"


def test_teacher_and_student_have_one_token_map_and_one_template(tokenizer: PreTrainedTokenizerFast) -> None:
    other: Any = AutoTokenizer.from_pretrained(TEACHER_DIR)
    assert other.get_vocab() == tokenizer.get_vocab()
    assert other.chat_template == tokenizer.chat_template


def test_the_shipped_tokenizer_is_what_the_build_makes(tokenizer: PreTrainedTokenizerFast) -> None:
    built = build_tokenizer()
    assert built.get_vocab() == tokenizer.get_vocab()
    assert built.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_prompts_go_through_the_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = prompt_token_ids(tokenizer, "8293+4758=")
    assert tokenizer.decode(ids) == "<|im_start|>user\n8293+4758=<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("text", [*TOOL_TAGS, "<|im_end|>", "1", "user", "assistant"])
def test_tags_digits_and_roles_are_one_token_each(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert len(tokenizer.encode(text, add_special_tokens=False)) == 1


@pytest.mark.parametrize(
    "text", [*(solution(Problem(8293, 4758), s) for s in STYLES), "Grüße, 世界 🌍\t\n", "<calc>1+2</calc>"]
)
def test_any_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_paths_and_problems_import_without_torch() -> None:
    imports = "import sys, builtin, stillhouse.builtin.addition"
    code = f"{imports}; assert not {{'torch', 'transformers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)
