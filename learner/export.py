"""Makes Hugging Face folders of checkpoints. `stillhouse export` (tools.export) adds a model card.

The learner of a run with adapters does this itself after its last step, into `export/` of the run folder:

    OUT/merged/     the student with its adapters added in: a Hugging Face folder like any other
    OUT/adapter/    the adapters alone, in peft's format: PeftModel.from_pretrained(student, "OUT/adapter")

OUT is replaced as a whole, once everything is written.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import msgspec
from transformers import PreTrainedTokenizerBase

from stillhouse.learner.checkpoints.files import (
    EMA,
    MANIFEST,
    OPTIMIZER,
    TRAINER,
    VALUE_HEAD,
    CheckpointError,
    verify,
)
from stillhouse.learner.config import ADAPTER_CONFIG, LoraConfig
from stillhouse.learner.step.lora import BASE, Adapters, BaseModel
from stillhouse.models.loading import load_causal_lm, save_hf
from stillhouse.models.tokenizer import load_tokenizer


class Exported(NamedTuple):
    merged: Path
    adapter: Path


def export(adapters: Adapters, tokenizer: PreTrainedTokenizerBase, out: Path) -> Exported:
    """Write OUT. Merges the adapters in place, so nothing can be trained afterwards. Raises OSError and keeps the old
    OUT."""
    temporary = out.with_name(f".tmp-{out.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        adapters.save(temporary / "adapter")
        save_hf(adapters.merge(), tokenizer, temporary / "merged")
        shutil.rmtree(out, ignore_errors=True)
        temporary.rename(out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return Exported(out / "merged", out / "adapter")


def from_checkpoint(checkpoint: Path, out: Path, base: str | None = None) -> Exported:
    """Raises CheckpointError for anything but a complete checkpoint with adapters, LoraError for another student."""
    verify(checkpoint)
    if not (checkpoint / ADAPTER_CONFIG).is_file():
        raise CheckpointError(f"{checkpoint} holds no adapters: it is a Hugging Face folder already")
    adapter = json.loads((checkpoint / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    saved = msgspec.json.decode((checkpoint / BASE).read_bytes(), type=BaseModel)
    student = base or saved.path
    lora = LoraConfig(
        rank=adapter["r"],
        alpha=adapter["lora_alpha"],
        targets=tuple(sorted(adapter["target_modules"])),
        quantize=saved.quantize,
    )
    model = load_causal_lm(
        student, device="cpu", dtype="float32", attention="packed", train=True, quantize=saved.quantize
    )
    adapters = Adapters(model, lora, base=student)
    adapters.load(checkpoint)
    return export(adapters, load_tokenizer(checkpoint), out)


def copy_student(checkpoint: Path, out: Path) -> None:
    """Copy what is the student's into the new folder `out`: not the optimizer, and no state of the run. Raises
    CheckpointError, OSError."""
    for name in verify(checkpoint).files:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{checkpoint / MANIFEST} names {name!r}; expected files of this folder")
        if name not in (TRAINER, OPTIMIZER, EMA, VALUE_HEAD):
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkpoint / name, out / name)
