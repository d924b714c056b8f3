"""Writes checkpoints without a running learner."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from stillhouse.learner.checkpoints.checkpoint import Contents, LearnerState, write_checkpoint
from stillhouse.learner.checkpoints.files import new_draft
from stillhouse.learner.step.lora import Adapters
from stillhouse.models.loading import converted_on_saving, weights_to_save
from stillhouse.models.transfer import Shares


def save_checkpoint(
    root: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    state: LearnerState,
    *,
    keep: int,
    adapters: Adapters | None = None,
) -> Path:
    """Write a checkpoint of the model as it is, with `adapters` instead if given, from one process and without copies.
    Otherwise like `write_checkpoint`."""
    draft = new_draft(root, state.version)
    named = weights_to_save(model, converted=converted_on_saving(model)) if adapters is None else adapters.tensors()
    contents = Contents.of(state, Shares({name: tensor.detach() for name, tensor in named.items()}))
    return write_checkpoint(draft, contents, model, tokenizer, keep=keep, adapters=adapters)
