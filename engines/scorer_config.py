"""Settings of the embedded scoring engine. No torch here: they are checked before anything heavy is imported."""

from __future__ import annotations

from typing import Protocol

import msgspec

from models.dtypes import LoadDtype


class ScorerSettings(Protocol):
    """What `TorchScorer.load` reads: ScorerConfig, or the configuration of a worker that has these fields."""

    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> LoadDtype: ...
    @property
    def max_batch_tokens(self) -> int: ...


class ScorerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The embedded torch engine that grades tokens (`engines.torch.scorer`)."""

    device: str = "auto"
    """Torch device: auto (cuda when there is one), cpu, cuda, cuda:1, ..."""
    dtype: LoadDtype = "auto"
    """Of the weights; auto = bfloat16 on cuda, float32 elsewhere. Log-probs are float32 whatever this says."""
    max_batch_tokens: int = 4096
    """Context tokens of one packed forward; a longer single request goes alone."""

    def __post_init__(self) -> None:
        if self.max_batch_tokens < 1:
            raise ValueError(f"max_batch_tokens = {self.max_batch_tokens}; expected at least 1")
        if not self.device:
            raise ValueError("device is empty; expected auto, cpu, cuda or cuda:<n>")
