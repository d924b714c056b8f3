"""What `weights.*` leaves at auto, as functions of what is known. No torch here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from weights.config import PublishDtype, Staging

SentDtype: TypeAlias = Literal["keep", "float32", "bfloat16", "float16"]

CPU_BUCKET_BYTES: Final = 64 << 20
GPU_BUCKET_BYTES: Final = 512 << 20
"""For SGLang servers each bucket costs a round over HTTP, which 64 MiB, at the speed of NVLink, are not worth."""

_NAMES: Final[dict[str, SentDtype]] = {
    **dict.fromkeys(("bfloat16", "torch.bfloat16"), "bfloat16"),
    **dict.fromkeys(("float16", "half", "torch.float16"), "float16"),
}


def sent_dtype(asked: PublishDtype, held: SentDtype) -> SentDtype:
    """`held`: the dtype of the members' weights; keep where it is not known."""
    return held if asked == "auto" else asked


def server_dtype(args: Sequence[str], device: str, checkpoint_dtype: str | None) -> SentDtype:
    """In what a server that the launcher starts holds its weights: by --dtype among its further arguments, else by the
    student's config.json (`checkpoint_dtype`). keep where that cannot be told without loss: SGLang makes float16 of a
    float32 checkpoint, and ours on a CPU run in float32."""
    for i, word in enumerate(args):
        name, given, value = word.partition("=")
        if name == "--dtype":
            wanted = value if given else args[i + 1] if i + 1 < len(args) else ""
            if wanted != "auto":
                return _NAMES.get(wanted, "keep")
    return "keep" if device == "cpu" else _NAMES.get(checkpoint_dtype or "", "keep")


def checkpoint_dtype(student: str) -> str | None:
    """As config.json names it; None: it does not, or this is no local folder."""
    try:
        config: dict[str, Any] = json.loads((Path(student).expanduser() / "config.json").read_text())
    except (OSError, ValueError):
        return None
    of_text: dict[str, Any] = config.get("text_config") or {}
    named = [of.get(key) for of in (config, of_text) for key in ("dtype", "torch_dtype")]
    return next((str(name) for name in named if name), None)


def bucket_size(asked: int, device_type: str) -> int:
    """`asked`: 0 = by the learner's device. A bucket is never larger than all weights together."""
    return asked or (GPU_BUCKET_BYTES if device_type == "cuda" else CPU_BUCKET_BYTES)


def staged_in(asked: Staging, device_type: str, backend: Literal["gloo", "nccl"]) -> Literal["device", "host"]:
    """Gloo sends from host memory: copies that lie there go out as they lie. On a CPU the device is the host."""
    if device_type != "cuda":
        return "device"
    if asked == "auto":
        return "host" if backend == "gloo" else "device"
    return asked
