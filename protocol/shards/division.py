"""What belongs to which shard of the buffer (docs/decisions/buffer-shards.md). A run with one shard has shard 0 only.

task                  `task_id % n`, and with it its rollouts, whose ids name the task
shard's port          the port of the buffer's address + the number of the shard
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

SEPARATOR: Final = ","
"""Between the addresses in one text, for a peer that connects to all shards."""


def shard_of(task_id: int, n_shards: int) -> int:
    """The shard that owns a task."""
    return task_id % n_shards


def task_of(rollout_id: str) -> int:
    """The task of a rollout, whose id is `kind-task-sample-attempt`. Raises ValueError for another text."""
    parts = rollout_id.split("-")
    if len(parts) != 4:
        raise ValueError(f"{rollout_id!r} is no rollout id: expected kind-task-sample-attempt")
    return int(parts[1])


def is_training(rollout_id: str) -> bool:
    """True for a rollout that is to be trained, false for one of an evaluation."""
    return rollout_id.startswith("train-")


def shard_address(address: str, shard: int) -> str:
    """Endpoint of a shard. `address`: the buffer's, which is that of shard 0. A port 0 or * (any) stays."""
    head, colon, port = address.rpartition(":")
    return address if shard == 0 or not port.isdecimal() or port == "0" else f"{head}{colon}{int(port) + shard}"


def all_addresses(address: str, n_shards: int) -> str:
    """Endpoints of all shards in one text."""
    return SEPARATOR.join(shard_address(address, shard) for shard in range(n_shards))


def of_shard(task_ids: Iterable[int], shard: int, n_shards: int) -> list[int]:
    """Places of those tasks that belong to a shard."""
    return [place for place, task_id in enumerate(task_ids) if shard_of(task_id, n_shards) == shard]
