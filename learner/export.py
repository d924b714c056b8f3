"""Exports a run's student for use without this project.

    stillhouse export-model CHECKPOINT OUT [--base STUDENT]      of a run with adapters: a step_... folder
    stillhouse export-model s3://bucket/run OUT                  the newest checkpoint of a run's store, of any run

    OUT/merged/     the student with its adapters added in: a Hugging Face folder like any other
    OUT/adapter/    the adapters alone, in peft's format: PeftModel.from_pretrained(student, "OUT/adapter")

From a store without adapters, OUT is the checkpoint, which is a Hugging Face folder. It is read while the run goes on,
by any machine that reaches the store; nothing else of the run is needed, but for adapters the student.

The learner exports adapters itself after its last step, into `export/` of the run folder. OUT is replaced as a whole,
once everything is written.
"""

from __future__ import annotations

import argparse
import errno
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from transformers import PreTrainedTokenizerBase

from stillhouse.learner.checkpoints.files import CheckpointError, verify
from stillhouse.learner.checkpoints.stored import StoredCheckpoints
from stillhouse.learner.config import ADAPTER_CONFIG, LoraConfig
from stillhouse.learner.step.lora import BASE, Adapters, BaseModel
from stillhouse.models.loading import load_causal_lm, save_hf
from stillhouse.models.tokenizer import load_tokenizer
from stillhouse.protocol.object_store import Store, StoreError

LOOKS: Final = 5
"""How often a store is looked at for a checkpoint that stays there until it is copied: the run deletes older ones."""


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
    student = base or msgspec.json.decode((checkpoint / BASE).read_bytes(), type=BaseModel).path
    lora = LoraConfig(rank=adapter["r"], alpha=adapter["lora_alpha"], targets=tuple(sorted(adapter["target_modules"])))
    model = load_causal_lm(student, device="cpu", dtype="float32", attention="packed", train=True)
    adapters = Adapters(model, lora, base=student)
    adapters.load(checkpoint)
    return export(adapters, load_tokenizer(checkpoint), out)


def from_store(url: str, out: Path, base: str | None = None) -> Exported | Path:
    """Export the newest complete checkpoint of the store at `url`; without adapters, OUT is that. Raises StoreError,
    and as `from_checkpoint`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tmp-export-", dir=out.parent) as folder:
        checkpoint = _newest_in(Store(url), Path(folder))
        if (checkpoint / ADAPTER_CONFIG).is_file():
            return from_checkpoint(checkpoint, out, base)
        shutil.rmtree(out, ignore_errors=True)
        return checkpoint.rename(out)


def _newest_in(store: Store, folder: Path) -> Path:
    for _ in range(LOOKS):
        try:
            found = StoredCheckpoints(store).fetch_newest(folder, newer_than=None)
        except StoreError as error:
            if error.errno != errno.ENOENT:
                raise
            continue  # it was deleted meanwhile, and there is a newer one
        if found.path is not None:
            return found.path
    raise CheckpointError(f"{store.url} has no complete checkpoint of a run")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="stillhouse export-model", description="Export a run's student.")
    parser.add_argument(
        "checkpoint", help="a step_... folder of a run with learner.lora.rank above 0, or the URL of any run's `store`"
    )
    parser.add_argument("out", type=Path, help="folder to write; replaced if it is there")
    parser.add_argument("--base", help="the student, if it is no longer where the run found it")
    given = parser.parse_args(arguments)
    try:
        if "://" in given.checkpoint:
            exported = from_store(given.checkpoint, given.out, given.base)
        else:
            exported = from_checkpoint(Path(given.checkpoint), given.out, given.base)
    except (ValueError, OSError) as error:
        print(f"export: {error}", file=sys.stderr)
        return 1
    if isinstance(exported, Path):
        print(f"student  {exported}")
    else:
        print(f"merged   {exported.merged}\nadapter  {exported.adapter}")
    return 0
