"""Copies on disk of the known data sets (learner/prompts/known_sets.toml), each with a row of the same shape: columns
and types are those of the data sets' cards, texts are our own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

_DAPO: Final[dict[str, Any]] = {
    "data_source": "math_dapo",
    "prompt": [
        {
            "content": "Solve the following math problem step by step. The last line of your response should be of the "
            "form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is 30 + 4?\n\n"
            'Remember to put your answer on its own line after "Answer:".',
            "role": "user",
        }
    ],
    "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
}
_MATH: Final = {
    "problem": "Write $x$ if $2x = 1$.",
    "solution": "Halve both sides: $x = \\boxed{\\frac{1}{2}}$.",
    "answer": "\\frac{1}{2}",
}

ROWS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "HuggingFaceH4/MATH-500": (
        "test",
        _MATH | {"subject": "Algebra", "level": 2, "unique_id": "test/algebra/1.json"},
    ),
    "HuggingFaceH4/aime_2024": (
        "train",
        {"id": 60, "problem": "What is $200 + 4$?", "solution": "It is $\\boxed{204}$.", "answer": "204"}
        | {"url": "https://artofproblemsolving.com/wiki", "year": "2024"},
    ),
    "Maxwell-Jia/AIME_2024": (
        "train",
        {"ID": "2024-II-4", "Problem": "What is $30 + 3$?", "Solution": "It is 33.", "Answer": 33},
    ),
    "math-ai/aime25": ("test", {"problem": "What is $60 + 10$?", "answer": "70", "id": "0"}),
    "yentinglin/aime_2025": (
        "train",
        {"id": "0", "problem": "What is $60 + 10$?", "answer": "70", "solution": "", "url": "", "year": "2025"},
    ),
    "openai/gsm8k": (
        "test",
        {
            "question": "Ann has 1,000 eggs and sells 18. How many are left?",
            "answer": "1,000 - 18 = <<1000-18=982>>982\n#### 982",
        },
    ),
    "agentica-org/DeepScaleR-Preview-Dataset": ("train", _MATH),
    "BytedTsinghua-SIA/DAPO-Math-17k": ("train", _DAPO),
    "open-r1/DAPO-Math-17k-Processed": (
        "train",
        {**_DAPO, "prompt": "What is 30 + 4?", "solution": "34", "source_prompt": _DAPO["prompt"]},
    ),
    "google/IFEval": (
        "train",
        {
            "key": 1000,
            "prompt": "Write about rivers in at least 20 words. Do not use commas.",
            "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
            "kwargs": [
                {"num_highlights": None, "relation": None, "num_words": None},  # a table has the keys of all
                {"num_highlights": None, "relation": "at least", "num_words": 20},
            ],
        },
    ),
}
"""Name -> the split that is read by default, and a row."""
CONFIGS: Final = {"openai/gsm8k": "main", "open-r1/DAPO-Math-17k-Processed": "all"}
"""Data sets whose rows are in a configuration of their own."""


def write_known_set(name: str, folder: Path) -> Path:
    """A copy of one row in `folder`/NAME, which `datasets` reads as it reads the hub's."""
    split, row = ROWS[name]
    there = folder / name
    there.mkdir(parents=True, exist_ok=True)
    (there / f"{split}.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    if config := CONFIGS.get(name):
        files = f"[{{split: {split}, path: {split}.jsonl}}]"
        text = f"---\nconfigs:\n- {{config_name: {config}, data_files: {files}}}\n---\n"
        (there / "README.md").write_text(text, encoding="utf-8")
    return there
