"""Tiny tokenizers of the two kinds whose tokens stand for bytes, trained on a few words, and a model of one."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import Qwen3Config, Qwen3ForCausalLM

from stillhouse.builtin.tokenizer import build_tokenizer
from stillhouse.models.tokenizer_file import FileTokenizer

CORPUS: Final = (
    "the student writes and the teacher reads what the student wrote",
    "1234 + 5678 = 6912; it's 12% of 3.14159, isn't it?",
    "def f(x):\n    return x * 2\n\n\nprint(f(21))  # naïve café, 東京 и Москва 🙂🙂",
)
KINDS: Final = ("bytes", "bytes_without_words", "spaces", "spaces_at_the_front")
END: Final = "</s>"


@cache
def tiny(kind: str, n_tokens: int = 320, *, think: bool = False) -> FileTokenizer:
    """`think`: with <think>, which is added and not special. bytes: byte-level BPE with GPT-2's words.
    bytes_without_words: without. spaces: SentencePiece-like, with bytes for rare characters. spaces_at_the_front: the
    same as Llama's, which puts a space before each text."""
    core = Tokenizer(models.BPE(unk_token=None, byte_fallback=kind.startswith("spaces"), fuse_unk=True))
    alphabet: list[str] = []
    if kind.startswith("bytes"):
        words = kind == "bytes"
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
        core.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    elif kind == "spaces":
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    else:
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        core.decoder = decoders.Sequence(steps)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)] if kind.startswith("spaces") else []
    trainer = trainers.BpeTrainer(
        vocab_size=n_tokens + len(bytes_), initial_alphabet=alphabet, special_tokens=bytes_, show_progress=False
    )
    corpus = CORPUS if kind.startswith("bytes") else CORPUS[:2]  # other characters fall back to bytes
    core.train_from_iterator(corpus, trainer)
    text = json.loads(core.to_str())
    text["added_tokens"] = []  # the trainer made special tokens of the bytes
    core = Tokenizer.from_str(json.dumps(text))
    core.add_special_tokens([AddedToken("<s>", special=True), AddedToken(END, special=True)])
    if think:
        core.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    folder = Path(mkdtemp(prefix="tiny-tokenizer-"))
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "bos_token": "<s>"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return FileTokenizer(folder)


def far_model(folder: Path) -> Path:
    """A random model with the other built-in tokenizer."""
    tokenizer = build_tokenizer(pairs=True)
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **shape, **heads)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
