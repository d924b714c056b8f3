"""What the members of the weight group are: actors with an embedded engine, or with an SGLang server each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from weights.buckets import ALIGN_BYTES, BucketLayout, Layout, PackedLayout
from weights.config import WeightsConfig
from weights.manifest import Manifest
from weights.publish_choices import ActorSettings, SentDtype, held_dtype

CheckBy: TypeAlias = Literal["reload", "canary", "off"]
"""How a server proves that it has what was sent (weights.control.Check): by its checksums after loading the snapshot
file and by a canary; by the canary alone, where the file is what it was sent; not at all."""


@dataclass(frozen=True, slots=True)
class Members:
    """Of one run: all are of one kind."""

    kind: Literal["engines", "servers"] = "engines"
    ranks_each: int = 1
    """Above 1: the tensor-parallel ranks of a server."""
    check_by: CheckBy = "off"
    dtype: SentDtype = "keep"
    """Of their weights; keep: not known."""

    def staging(self, manifest: Manifest, bucket_bytes: int) -> BucketLayout:
        """How copies of the weights are laid, so that buckets can be sent as they lie. With engines the cuts are made
        later, and only the places of the tensors count."""
        if self.kind == "servers":
            return PackedLayout(manifest, bucket_bytes)
        return Layout(manifest, ALIGN_BYTES)


EMBEDDED = Members()


def members_of(actor: ActorSettings, weights: WeightsConfig, student: str) -> Members:
    """What weights are sent to. The device of servers has been found out by the launcher. `student`: its path."""
    dtype = held_dtype(actor, student)
    if actor.engine != "sglang":
        return Members(dtype=dtype)
    check_by: CheckBy = "canary" if weights.transport == "folder" else "reload"
    if weights.verify == "off":
        check_by = "off"
    return Members(kind="servers", ranks_each=actor.server.tp, check_by=check_by, dtype=dtype)
