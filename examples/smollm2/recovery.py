"""Documents make SmolLM2 lose an old skill, and its earlier self brings it back: prompts, configuration and judge.

    .venv/bin/python examples/smollm2/recovery.py make DIR     writes documents, prompts with rules, and the stages
    .venv/bin/stillhouse --config DIR/recovery.toml --run-dir DIR/run
    .venv/bin/python examples/smollm2/recovery.py judge DIR    the skill and the knowledge, before and after each stage

After `make smollm2`, with IFEval's verifiers (docs/rewards.md). The judge imports nothing of Stillhouse: transformers
writes the answers, and lm-eval's own functions judge them.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT: Final = Path(__file__).resolve().parents[2]
STUDENT: Final = Path(__file__).resolve().parent / "model"
HELD_OUT: Final = ["rivers", "the moon", "bread", "trains", "cats", "chess", "rain", "bees", "mountains", "coffee"]
TRAINED: Final = [
    "dogs",
    "the sea",
    "gardens",
    "books",
    "winter",
    "bicycles",
    "music",
    "honey",
    "the sun",
    "cheese",
    "horses",
    "bridges",
    "tea",
    "apples",
    "deserts",
    "snow",
    "clouds",
    "football",
    "paper",
    "islands",
]
KINDS: Final[tuple[tuple[str, dict[str, dict[str, Any]]], ...]] = (
    ("Write one sentence about {t}. Do not use any commas.", {"punctuation:no_comma": {}}),
    (
        "Write one sentence about {t} in all lowercase letters. No capital letters are allowed.",
        {"change_case:english_lowercase": {}},
    ),
    ("WRITE ONE SENTENCE ABOUT {T} IN ENGLISH AND IN CAPITAL LETTERS ONLY.", {"change_case:english_capital": {}}),
    (
        "Say something about {t} in less than 20 words.",
        {"length_constraints:number_words": {"relation": "less than", "num_words": 20}},
    ),
    (
        "Write a short text about {t}. It must contain a title in double angular brackets, such as <<title>>.",
        {"detectable_format:title": {}},
    ),
    (
        "Write about {t} in exactly 2 bullet points. Use the markdown format, such as:\n* This is a point.",
        {"detectable_format:number_bullet_lists": {"num_bullets": 2}},
    ),
    (
        "Write one sentence about {t}. Wrap your entire response with double quotation marks.",
        {"startend:quotation": {}},
    ),
    (
        'Write one sentence about {t} with the keyword "wonderful".',
        {"keywords:existence": {"keywords": ["wonderful"]}},
    ),
    (
        'Write about {t} in less than 30 words. Do not use the word "very" and do not use any commas.',
        {
            "length_constraints:number_words": {"relation": "less than", "num_words": 30},
            "keywords:forbidden_words": {"forbidden_words": ["very"]},
            "punctuation:no_comma": {},
        },
    ),
    (
        'Is {t} a good topic for a poem? Answer with one of these: "My answer is yes.", '
        '"My answer is no.", "My answer is maybe."',
        {"detectable_format:constrained_response": {}},
    ),
)
TOML: Final = """\
actors = 1
teachers = 1

[models]
student = "{student}"
teacher = "{student}"                # the earlier self

[buffer]
max_staleness = 1
batch_rollouts = 8

[actor.environments.single_turn.options]
reward = "ifeval"                    # judges evaluations; rewards are not trained on

[learner]
warmup_steps = 2
pack_tokens = 1024
checkpoint_every = 0

[actor.torch]
max_context = 256

[learner.tasks]
prompts = "{folder}/train.jsonl"
eval_prompts = "{folder}/held_out.jsonl"
group_size = 1
max_prompt_tokens = 160
max_new_tokens = 48
eval_greedy = 50
eval_sampled = 50

[[stage]]
name = "documents"
text = "{folder}/documents.jsonl"
steps = 30
buffer.batch_rollouts = 8
learner = {{ lr = 3e-4, eval_every = 0, tasks.max_new_tokens = 128, tasks.max_prompt_tokens = 896 }}

[[stage]]
name = "chat"
steps = 30
learner = {{ lr = 2e-5, eval_every = 10, eval_teacher = true }}
"""
DRAWS: Final = 4
PIECE, PIECES, DOCUMENTS = 128, 8, 8


def main(words: Sequence[str]) -> None:
    if len(words) != 2 or words[0] not in ("make", "judge"):
        raise SystemExit(__doc__)
    (make if words[0] == "make" else judge)(Path(words[1]).resolve())


def make(folder: Path) -> None:
    """Write three files of rows and the stages. The documents are Stillhouse's own pages."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = sorted((ROOT / "docs").glob("*.md"))
    _write(folder / "documents.jsonl", [{"text": page.read_text(encoding="utf-8")} for page in pages])
    _write(folder / "train.jsonl", list(_rows(TRAINED, [range(10)] * len(TRAINED))))
    _write(folder / "held_out.jsonl", list(_rows(HELD_OUT, [range(n % 2, 10, 2) for n in range(len(HELD_OUT))])))
    (folder / "recovery.toml").write_text(TOML.format(student=STUDENT, folder=folder), encoding="utf-8")
    print(f"stillhouse --config {folder}/recovery.toml --run-dir {folder}/run")


def judge(folder: Path) -> None:
    """Print, before and after each stage, the share of held-out prompts whose rules are all kept, and the loss on
    documents."""
    verifiers = _verifiers()
    rows = [json.loads(line) for line in (folder / "held_out.jsonl").read_text(encoding="utf-8").splitlines()]
    pages = [json.loads(line)["text"] for line in (folder / "documents.jsonl").read_text(encoding="utf-8").splitlines()]
    tokenizer: Any = AutoTokenizer.from_pretrained(STUDENT, padding_side="left")
    prompts = tokenizer.apply_chat_template(
        [[{"role": "user", "content": row["prompt"]}] for row in rows],
        add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt",
    )  # fmt: skip
    stages = [max((folder / f"run/stages/{name}/checkpoints").glob("step_*")) for name in ("1-documents", "2-chat")]
    for path, when in ((STUDENT, "before"), (stages[0], "after documents"), (stages[1], "after its earlier self")):
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        kept = [_kept(verifiers, rows, _answers(model, tokenizer, prompts, seed)) for seed in range(1 + DRAWS)]
        greedy, drawn, loss = kept[0], sorted(kept[1:]), _loss(model, tokenizer, pages)
        print(f"{when}: rules kept, greedy {greedy:.2f}, sampled {sum(drawn) / DRAWS:.3f} {drawn}")
        print(f"    nats per token of documents {loss:.2f}", flush=True)


def _rows(topics: Sequence[str], kinds: Sequence[range]) -> Iterator[dict[str, Any]]:
    """Rows in the columns of google/IFEval."""
    for topic, chosen in zip(topics, kinds, strict=True):
        for text, rules in (KINDS[k] for k in chosen):
            prompt = text.format(t=topic, T=topic.upper())
            yield {"prompt": prompt, "instruction_id_list": list(rules), "kwargs": list(rules.values())}


def _write(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    lines = [json.dumps({"key": key, **row}) + "\n" for key, row in enumerate(rows)]
    file.write_text("".join(lines), encoding="utf-8")


def _verifiers() -> Any:
    """lm-eval's functions of IFEval, without the rest of its harness and the data of nltk, which no rule here uses."""
    os.environ["LOCAL_RANK"] = "1"
    tasks = ModuleType("lm_eval.tasks")
    tasks.__path__ = [f"{folder}/tasks" for folder in importlib.import_module("lm_eval").__path__]
    sys.modules["lm_eval.tasks"] = tasks
    return importlib.import_module("lm_eval.tasks.ifeval.utils")


def _answers(model: Any, tokenizer: Any, prompts: Any, seed: int) -> list[str]:
    """Greedy with seed 0, else sampled at temperature 1."""
    torch.manual_seed(seed)
    how = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0} if seed else {"do_sample": False}
    with torch.no_grad():
        written = model.generate(**prompts, max_new_tokens=48, **how)
    return tokenizer.batch_decode(written[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)


def _kept(verifiers: Any, rows: Sequence[dict[str, Any]], answers: Sequence[str]) -> float:
    judged = [
        verifiers.test_instruction_following_strict(verifiers.InputExample(**row), answer).follow_all_instructions
        for row, answer in zip(rows, answers, strict=True)
    ]
    return sum(judged) / len(judged)


def _loss(model: Any, tokenizer: Any, pages: Sequence[str]) -> float:
    """Mean cross-entropy of the first pieces of the first documents, nats."""
    total, n = 0.0, 0
    for page in pages[:DOCUMENTS]:
        ids = tokenizer(page, return_tensors="pt").input_ids[0][: PIECE * PIECES]
        pieces = ids[: len(ids) // PIECE * PIECE].view(-1, PIECE)
        with torch.no_grad():
            logits = model(pieces).logits[:, :-1].float()
        total += float(
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten(), reduction="sum")
        )
        n += pieces[:, 1:].numel()
    return total / n


if __name__ == "__main__":
    main(sys.argv[1:])
