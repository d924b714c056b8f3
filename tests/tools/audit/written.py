"""A run's folder written byte by byte, by none of the project's own writers: what an audit is tried on."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgpack
import yaml

MAGIC = b"stillhouse batches\n"
GROUP = 2
"""Samples of a task."""
PROMPT = 2
"""Tokens of a prompt: what is trained begins there."""

Version = tuple[int, int]
Settled = tuple[int, int, str, str]


def record(kind: int, header: Mapping[str, Any], blob: bytes = b"") -> bytes:
    body = msgpack.packb(header) or b""
    head = struct.pack("<BIQ", kind, len(body), len(blob))
    return head + struct.pack("<I", zlib.crc32(head + body + blob)) + body + blob


def begin(**changes: Any) -> bytes:
    config = {"buffer": {"max_staleness": 1}}
    header = {
        "format": 1,
        "run": "a",
        "vocab_fingerprint": "",
        "writer": "student",
        "config_digest": "",
        "config": config,
    }
    return record(0, header | changes)


def resumed(version: Version, parent: Version | None = None) -> bytes:
    return record(1, {"version": version} | ({"parent": parent} if parent is not None else {}))


def item(
    task: int,
    sample: int,
    *runs: tuple[int, int],
    by: Version = (0, 0),
    attempt: int = 0,
    spans: Sequence[tuple[Version, int, int]] | None = None,
    offline: bool = False,
    reward: float | None = None,
    finish: str = "stop",
    squeezed: bool = True,
) -> tuple[dict[str, Any], bytes]:
    """A rollout, trained at `runs`, sampled by one version."""
    end = max((stop for _, stop in runs), default=PROMPT)
    mask = bytes(any(start <= at < stop for start, stop in runs) for at in range(end))
    raw = struct.pack(f"<{end}i", *range(end)) + bytes(4 * end) + mask + bytes(4 * end)
    stored = zlib.compress(raw) if squeezed else raw
    about = {
        "rollout_id": f"train-{task}-{sample}-{attempt}",
        "task_id": task,
        "sample_index": sample,
        "group_size": GROUP,
        "tag": "",
        "teachers": ["default"],
        "end": end,
        "spans": [(by, PROMPT, end)] if spans is None else spans,
        "final": True,
        "finish_reason": finish,
        "reward": reward,
        "n_turns": 1,
        "top_k": [],
    }
    frames = [("<i4", [end]), ("<f4", [end]), ("|u1", [end]), ("<f4", [1, end])]
    return {"item": about, "offline": offline, "frames": frames, "compressed": squeezed}, stored


def batch(
    version: Version,
    *items: tuple[dict[str, Any], bytes],
    settled: Sequence[Settled] = (),
    masked: Sequence[str] = (),
    batch_id: int = 0,
) -> bytes:
    at, listed = 0, list[dict[str, Any]]()
    for about, stored in items:
        listed.append({**about, "start": at, "stored_bytes": len(stored)})
        at += len(stored)
    header: dict[str, Any] = {
        "batch_id": batch_id or 1 + version[1],
        "version": version,
        "staleness": {0: 1},
        "items": listed,
        "settled": settled,
        "masked": masked,
    }
    return record(2, header, b"".join(stored for _, stored in items))


def trained(*samples: tuple[int, int]) -> list[Settled]:
    return [(task, sample, "trained", "") for task, sample in samples]


def group(task: int, *, by: Version = (0, 0), attempt: int = 0, tokens: int = 4) -> list[tuple[dict[str, Any], bytes]]:
    """All samples of a task, trained whole."""
    return [item(task, sample, (PROMPT, PROMPT + tokens), by=by, attempt=attempt) for sample in range(GROUP)]


class Written:
    """A run's folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "run"
        self.path.mkdir()
        self.file = self.path / "batches.record"
        self.config({"max_staleness": 1})

    def config(self, buffer: Mapping[str, Any], record_at: str | None = None) -> None:
        learner = {"record": "{run}" if record_at is None else record_at, "tasks": {"group_size": GROUP}}
        (self.path / "config.yaml").write_text(yaml.safe_dump({"buffer": dict(buffer), "learner": learner}))

    def record(self, *records: bytes) -> None:
        self.file.write_bytes(MAGIC + begin() + b"".join(records))

    def metrics(self, *rows: tuple[str, Version, int]) -> None:
        """(kind, version, tokens)."""
        lines = [{"kind": kind, "epoch": epoch, "step": step, "train/tokens": n} for kind, (epoch, step), n in rows]
        (self.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def checkpoint(
        self,
        version: Version,
        next_task: int,
        outstanding: Mapping[int, Sequence[int]] | None = None,
        ahead: Mapping[int, Sequence[int]] | None = None,
        partial: Mapping[tuple[int, int], int] | None = None,
    ) -> Path:
        """`outstanding`: open task -> its settled samples; `ahead`: the same of later tasks; `partial`: (task, sample)
        -> its trained tokens."""
        still_open = [
            {"task": {"task_id": task, "group_size": GROUP}, "prompt_ids": []} for task in (outstanding or {})
        ]
        progress = [
            (task, list(settled), [(s, f"train-{t}-{s}-0", n) for (t, s), n in (partial or {}).items() if t == task])
            for task, settled in {**(outstanding or {}), **(ahead or {})}.items()
        ]
        tasks = {"next_task_id": next_task, "outstanding": still_open, "progress": progress}
        raw = json.dumps({"format": 1, "version": version, "tasks": tasks}).encode()
        folder = self.path / "checkpoints" / f"step_{version[1]:06d}_epoch_{version[0]}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "trainer.json").write_bytes(raw)
        entry = {"sha256": hashlib.sha256(raw).hexdigest(), "bytes": len(raw)}
        manifest = {"format": 1, "version": version, "files": {"trainer.json": entry}}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        return folder
