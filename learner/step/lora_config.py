"""Settings of low-rank adapters (LoRA, arXiv 2106.09685). No torch here."""

from __future__ import annotations

import math

import msgspec


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Train adapters of the student's matrices, W + alpha / rank * B A, and leave W as it is."""

    rank: int = 0
    """Rows of A and columns of B; 0 = no adapters: all weights are trained."""
    alpha: float = 32.0
    """The product B A counts alpha / rank times."""
    targets: tuple[str, ...] = ()
    """Linear layers that get an adapter, by the end of their name (q_proj). Empty: all but the output head."""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"lora.rank must be 0 (off) or more, got {self.rank}")
        if not 0.0 < self.alpha < math.inf:
            raise ValueError(f"lora.alpha must be positive and finite, got {self.alpha}")
        if not all(self.targets):
            raise ValueError(f"lora.targets must name layers, e.g. q_proj, got {self.targets}")
        if self.targets and not self.rank:
            raise ValueError(
                f"lora.targets = {self.targets} with lora.rank = 0 trains no adapter; give a rank, e.g. 16"
            )
