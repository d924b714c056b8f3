"""Ask models the same questions and print their greedy answers: every eighth held-out question, so none is picked.

.venv/bin/python examples/smollm2/ask.py FOLDER [FOLDER ...]      (after make smollm2, from the repository root)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

HELD_OUT: Final = Path(__file__).parent / "held_out.jsonl"
EVERY: Final = 8
MAX_NEW_TOKENS: Final = 48
"""As in context.toml."""


def ask(folder: Path, questions: Sequence[str]) -> list[str]:
    """The greedy answers of the model in `folder`, at most 48 tokens each."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
    model: Any = AutoModelForCausalLM.from_pretrained(str(folder))
    tokenizer.padding_side = "left"
    turns = [[{"role": "user", "content": question}] for question in questions]
    prompts = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    )
    written = model.generate(**prompts, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    texts = tokenizer.batch_decode(written[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    return [" ".join(text.split()) for text in texts]


def main(folders: Sequence[str]) -> int:
    """Print one block per question. Returns the exit code: 0, or 2 after a wrong command line."""
    absent = [folder for folder in folders if not (Path(folder) / "config.json").is_file()]
    if not folders or absent:
        print(f"usage: ask.py FOLDER [FOLDER ...]; not a model's folder: {absent}", file=sys.stderr)
        return 2
    questions: list[str] = [
        json.loads(line)["prompt"] for line in HELD_OUT.read_text(encoding="utf-8").splitlines()[EVERY - 1 :: EVERY]
    ]
    answers = [ask(Path(folder), questions) for folder in folders]
    for question, *said in zip(questions, *answers, strict=True):
        print("\n".join((question, *(f"    {text}" for text in said))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
