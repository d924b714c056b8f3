"""Settings of low-rank adapters (LoRA, arXiv 2106.09685). No torch here."""

from __future__ import annotations

from protocol.settings import NonNegativeInt, PositiveFloat, Settings


class LoraConfig(Settings, frozen=True, kw_only=True):
    """Low-rank adapters: train W + (alpha / rank) B A, and keep W as it is."""

    rank: NonNegativeInt = 0
    """Rank of the adapters. 0: no adapters, all weights are trained."""
    alpha: PositiveFloat = 32.0
    """Scale: the product B A is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Linear layers that get an adapter, by the end of their names (q_proj). Empty: all except the output head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(self.targets):
            raise ValueError(f"lora.targets must name layers, e.g. q_proj, got {self.targets}")
        if self.targets and not self.rank:
            raise ValueError(
                f"lora.targets = {self.targets} with lora.rank = 0 trains no adapter; give a rank, e.g. 16"
            )
