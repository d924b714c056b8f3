"""Settings of the inference engines. No torch here: the launcher checks them before anything heavy is imported."""

from __future__ import annotations

import msgspec

from engines.base import UpdateMode
from models.dtypes import DtypeName


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The embedded torch engine that writes rollouts (`engines.torch.engine`)."""

    max_concurrent: int = 64
    """Slots: requests decoded together. KV memory grows with it; so does throughput, up to a few hundred on a CPU."""
    max_context: int = 1024
    """Tokens a slot holds, prompt and sampled together. A request that reaches it ends with reason "length"."""
    update_mode: UpdateMode = "in_place"
    """At a weight swap `in_place` keeps the KV cache of running requests; `retract` recomputes it."""
    dtype: DtypeName = "float32"
    """Of weights and KV cache. Log-probs are computed in float32 whatever this says."""
    device: str = "auto"
    """Torch device: auto (GPUs where there are any) or cuda: each actor gets one that is free, and they share where
    there are too few; cpu; cuda:1: all of them on that one."""
    prefill_tokens_per_step: int = 4096
    """Prompt tokens (padding included) that may join one decode step; a longer prompt joins alone."""
    emit_every_steps: int = 8
    """Decode steps between two deltas of a running request. A request that ends is reported at once, and every request
    is reported before a weight swap."""
    fused: bool = True
    """Use the hand-written decoder where the architecture has one (Llama, Qwen2, Qwen3); off: transformers' modules."""

    def __post_init__(self) -> None:
        for name, least in (
            ("max_concurrent", 1),
            ("max_context", 2),
            ("prefill_tokens_per_step", 1),
            ("emit_every_steps", 1),
        ):
            value: int = getattr(self, name)
            if value < least:
                raise ValueError(f"{name} = {value}; expected at least {least}")
        if not self.device:
            raise ValueError("device is empty; expected auto, cpu, cuda or cuda:<n>")
