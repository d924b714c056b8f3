"""Exports a run with adapters for use without this project.

    python -m learner.export CHECKPOINT OUT [--base STUDENT]

    OUT/merged/     the student with its adapters added in: a Hugging Face folder like any other
    OUT/adapter/    the adapters alone, in peft's format: PeftModel.from_pretrained(student, "OUT/adapter")

The learner does this itself after its last step, into `export/` of the run folder. OUT is replaced as a whole, once
everything is written.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec
from transformers import PreTrainedTokenizerBase

from learner.checkpoints.files import ADAPTER_CONFIG, CheckpointError, verify
from learner.config import LoraConfig
from learner.step.lora import BASE, Adapters, BaseModel
from models.loading import load_causal_lm, save_hf
from models.tokenizer import load_tokenizer


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
    adapter = json.loads((checkpoint / ADAPTER_CONFIG).read_text())
    student = base or msgspec.json.decode((checkpoint / BASE).read_bytes(), type=BaseModel).path
    lora = LoraConfig(rank=adapter["r"], alpha=adapter["lora_alpha"], targets=tuple(sorted(adapter["target_modules"])))
    model = load_causal_lm(student, device="cpu", dtype="float32", attention="packed", train=True)
    adapters = Adapters(model, lora, base=student)
    adapters.load(checkpoint)
    return export(adapters, load_tokenizer(checkpoint), out)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m learner.export", description="Merge a checkpoint's adapters.")
    parser.add_argument("checkpoint", type=Path, help="a step_... folder of a run with learner.lora.rank above 0")
    parser.add_argument("out", type=Path, help="folder to write; replaced if it is there")
    parser.add_argument("--base", help="the student, if it is no longer where the run found it")
    given = parser.parse_args(arguments)
    try:
        exported = from_checkpoint(given.checkpoint, given.out, given.base)
    except (ValueError, OSError) as error:
        print(f"export: {error}", file=sys.stderr)
        return 1
    print(f"merged   {exported.merged}\nadapter  {exported.adapter}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
