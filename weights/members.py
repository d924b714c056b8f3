"""What the members of the weight group are: engines in the actors' processes, or a server each. No torch: an engine's
provider says it (engines.provider)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from weights.manifest import Manifest
from weights.publish_choices import SentDtype

if TYPE_CHECKING:
    from weights.buckets import BucketLayout

CheckBy: TypeAlias = Literal["reload", "canary", "off"]
"""How a server proves that it has what was sent: by its checksums after loading the snapshot file, and by a canary; by
the canary alone, where the file is what it was sent; not at all."""


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
        from weights.buckets import ALIGN_BYTES, Layout, PackedLayout

        if self.kind == "servers":
            return PackedLayout(manifest, bucket_bytes)
        return Layout(manifest, ALIGN_BYTES)


EMBEDDED = Members()
