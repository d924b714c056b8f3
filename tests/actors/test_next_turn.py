"""What stands between a turn of the student and its next one, by the templates of two model families.

`chat_templates/` holds the chat templates of Qwen3 (Apache-2.0) and GLM-4.5 (MIT), as TRL 1.16 ships them."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from stillhouse.actors.envs.base import TextTokenizer
from tests.actors.adapters import verifiers_server
from tests.patience import PATIENCE_S

HERE = Path(__file__).parent
FAMILIES = {"qwen3": "qwen3", "glm4moe": "glm-4.5"}
"""Template -> renderer of the package renderers."""
TURNS = {
    "user": [{"role": "user", "content": "and 34"}],
    "tool": [{"role": "tool", "content": "46"}],
    "two tools": [{"role": "tool", "content": "46"}, {"role": "tool", "content": "x\n"}],
    "tool, user": [{"role": "tool", "content": "46"}, {"role": "user", "content": "go on"}],
}
SAID = {"plain": "the 46", "thought": "<think>\nhm\n</think>\n\nthe 46"}


def family(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with the family's template, and its special tokens."""
    template = (HERE / "chat_templates" / f"{name}.jinja").read_text()
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    found = set(re.findall(r"<\|\w+\|>|</?[a-z_]+>|\[gMASK\]", template)) | {"<|endoftext|>", "<|system|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, chat_template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(found)})
    return tokenizer


def ended_turn(tokenizer: TextTokenizer, said: str, stop: str) -> tuple[list[int], int]:
    """The student's tokens, and the last of them."""
    ids = tokenizer.encode(said + stop).tolist()
    return ids, ids[-1]


@pytest.mark.parametrize(
    ("name", "turns", "stop", "expected"),
    [
        ("qwen3", "user", "<|im_end|>", "\n<|im_start|>user\nand 34<|im_end|>\n<|im_start|>assistant\n"),
        ("qwen3", "user", "<|endoftext|>", "\n<|im_start|>user\nand 34<|im_end|>\n<|im_start|>assistant\n"),
        ("glm4moe", "user", "<|user|>", "\nand 34<|assistant|>"),
        ("glm4moe", "user", "<|endoftext|>", "<|user|>\nand 34<|assistant|>"),
        ("glm4moe", "user", "<|observation|>", "<|user|>\nand 34<|assistant|>"),
        ("glm4moe", "tool", "<|observation|>", "\n<tool_response>\n46\n</tool_response><|assistant|>"),
        ("glm4moe", "tool", "<|user|>", "<|observation|>\n<tool_response>\n46\n</tool_response><|assistant|>"),
    ],
)
def test_only_what_the_student_did_not_write_is_added(name: str, turns: str, stop: str, expected: str) -> None:
    tokenizer = TextTokenizer(family(name))
    _, last = ended_turn(tokenizer, "the 46", stop)
    added = tokenizer.chat_turns(TURNS[turns], ended_by=last)
    shown = tokenizer.shown(added)
    assert shown == expected, f"{shown!r}"


BRIDGE = """
import json, sys
from renderers.base import create_renderer, _populate_registry
from renderers import configs
from transformers import AutoTokenizer
asked = json.load(sys.stdin)
_populate_registry()
kinds = [kind for kind in vars(configs).values() if isinstance(kind, type) and hasattr(kind, "model_fields")]
kinds = [kind for kind in kinds if "name" in kind.model_fields]
kind = next(kind for kind in kinds if kind.model_fields["name"].default == asked["renderer"])
renderer = create_renderer(AutoTokenizer.from_pretrained(asked["folder"]), kind())
bridged = [renderer.bridge_to_next_turn(asked["prompt"], said, new) for said, new in asked["cases"]]
print(json.dumps([None if one is None else list(one.token_ids) for one in bridged]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not verifiers_server.PYTHON.exists(), reason=verifiers_server.MADE_BY)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_bridge_of_the_package_renderers_adds_the_same_where_it_adds_any(name: str, tmp_path: Path) -> None:
    """Not where it puts in a </think> for a student that was cut off before its own (docs/decisions/endpoint.md)."""
    saved = family(name)
    saved.save_pretrained(tmp_path)
    tokenizer = TextTokenizer(saved)
    prompt = tokenizer.chat_prompt([{"role": "user", "content": "add 12"}]).tolist()
    stops = {"qwen3": ["<|im_end|>"], "glm4moe": ["<|user|>", "<|observation|>"]}[name]
    cases = [
        (ended_turn(tokenizer, said, stop), new) for said in SAID.values() for stop in stops for new in TURNS.values()
    ]
    asked = {"folder": str(tmp_path), "renderer": FAMILIES[name], "prompt": prompt}
    done = subprocess.run(
        [str(verifiers_server.PYTHON), "-c", BRIDGE],
        input=json.dumps({**asked, "cases": [(said, new) for (said, _), new in cases]}),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    bridged: list[list[int] | None] = json.loads(done.stdout.splitlines()[-1])
    compared = 0
    for ((said, last), new), theirs in zip(cases, bridged, strict=True):
        if theirs is not None:
            assert [*prompt, *said, *tokenizer.chat_turns(new, ended_by=last).tolist()] == theirs, (said, new)
            compared += 1
    assert compared >= len(cases) // 4
