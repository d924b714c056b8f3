"""What the members of the weight group are: actors with an embedded engine, or with an SGLang server each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from engines.buckets import ALIGN_BYTES, Layout, PackedLayout
from engines.manifest import Manifest
from learner.publish_choices import SentDtype, server_dtype
from learner.publish_config import PublishConfig

CheckBy: TypeAlias = Literal["expected", "reload", "off"]
"""How a server proves that it has what was sent (engines.weight_control.Check); off: not at all."""
AnyLayout: TypeAlias = Layout | PackedLayout


@dataclass(frozen=True, slots=True)
class Members:
    """Of one run: all are of one kind."""

    kind: Literal["engines", "servers"] = "engines"
    ranks_each: int = 1
    """Above 1: the tensor-parallel ranks of a server."""
    check_by: CheckBy = "off"
    dtype: SentDtype = "keep"
    """Of their weights; keep: not known."""

    def staging(self, manifest: Manifest, bucket_bytes: int) -> AnyLayout:
        """How copies of the weights are laid, so that buckets can be sent as they lie. With engines the cuts are made
        later, and only the places of the tensors count."""
        if self.kind == "servers":
            return PackedLayout(manifest, bucket_bytes)
        return Layout(manifest, ALIGN_BYTES)


EMBEDDED = Members()


class EngineSettings(Protocol):
    @property
    def dtype(self) -> Literal["float32", "bfloat16", "float16"]: ...


class ServerSettings(Protocol):
    @property
    def device(self) -> str: ...
    @property
    def tp(self) -> int: ...
    @property
    def args(self) -> tuple[str, ...]: ...


class ActorSettings(Protocol):
    @property
    def engine(self) -> Literal["auto", "torch", "sglang"]: ...
    @property
    def torch(self) -> EngineSettings: ...
    @property
    def server(self) -> ServerSettings: ...
    @property
    def urls(self) -> tuple[str, ...]: ...


def members_of(actor: ActorSettings, publish: PublishConfig, student: str) -> Members:
    """What weights are sent to. The device of servers has been found out by the launcher. `student`: its path."""
    if actor.engine != "sglang":
        return Members(dtype=actor.torch.dtype)
    server, check_by = actor.server, publish.verify
    if check_by == "auto":
        check_by = "expected" if server.device == "cpu" and server.tp == 1 else "reload"
    dtype = "keep" if actor.urls else server_dtype(server.args, server.device, checkpoint_dtype(student))
    return Members(kind="servers", ranks_each=server.tp, check_by=check_by, dtype=dtype)


def checkpoint_dtype(student: str) -> str | None:
    """As config.json names it; None: it does not, or this is no local folder."""
    try:
        config: dict[str, Any] = json.loads((Path(student).expanduser() / "config.json").read_text())
    except (OSError, ValueError):
        return None
    of_text: dict[str, Any] = config.get("text_config") or {}
    named = [of.get(key) for of in (config, of_text) for key in ("dtype", "torch_dtype")]
    return next((str(name) for name in named if name), None)
