"""Tokenizer of the built-in models: byte-level BPE of 320 tokens with chat and tool tokens and a chat template.

Small on purpose, yet a complete Hugging Face tokenizer: 256 bytes, 8 added tokens, and merges for the words of the
solutions. Digits are never merged, so that the models see columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import cast

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from stillhouse.builtin.addition import STYLES, TOOL_TAGS, Operator, calculator_solution, chains, problems, solution

VOCAB_SIZE = 320
PAIRS_VOCAB_SIZE = 384
PAIRS_AND_WORDS = r"[+*=;#]?\d| ?[A-Za-z]+"
END_OF_TURN = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_CORPUS_SEED = 297


def build_tokenizer(*, pairs: bool = False) -> PreTrainedTokenizerFast:
    """Train the tokenizer on generated text; the result is always the same. `pairs`: another one, of PAIRS_VOCAB_SIZE
    tokens, in which a sign and the digit behind it are one token ("+8")."""
    core = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(PAIRS_AND_WORDS), "isolated") if pairs else pre_tokenizers.Digits(True)
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pairs)
    core.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    core.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", END_OF_TURN, END_OF_TEXT, PAD]
    trainer = trainers.BpeTrainer(
        vocab_size=(PAIRS_VOCAB_SIZE if pairs else VOCAB_SIZE) - len(special) - len(TOOL_TAGS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_corpus(), trainer)
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    # Not "special": a decoded rollout should show its tool calls.
    core.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TOOL_TAGS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END_OF_TURN,
        pad_token=PAD,
        additional_special_tokens=["<|im_start|>", END_OF_TEXT],
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def prompt_token_ids(tokenizer: PreTrainedTokenizerFast, prompt: str) -> list[int]:
    """Render one user turn with the chat template, up to the start of the assistant's answer."""
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return cast("list[int]", ids)  # one conversation, tokenize=True


def _corpus(lines_per_kind: int = 200) -> Iterator[str]:
    operators: tuple[Operator, ...] = ("+", "*")
    for operator in operators:
        for problem in islice(problems(_CORPUS_SEED, operator=operator), lines_per_kind):
            yield f"user\n{problem.prompt}\nassistant\n"
            yield from (solution(problem, style) for style in STYLES)
    for chain in islice(chains(_CORPUS_SEED), lines_per_kind):
        yield f"user\n{chain.prompt}\nassistant\n"
        yield from (piece.text for piece in calculator_solution(chain) if piece.text.startswith(" #"))
