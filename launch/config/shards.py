"""Checks that a buffer of several shards has something to do for each of them. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from stillhouse.buffer.batch_size import MOST_ROLLOUTS
from stillhouse.launch.config.pools import worker_groups
from stillhouse.launch.config.run import RunConfig
from stillhouse.protocol.addresses import HIGHEST


def shards(config: RunConfig) -> Iterator[str]:
    """A shard waits for nobody but its own workers, and a batch for a piece of every shard. All have ports of their
    own. What one sends for a batch is one message."""
    yield from _message(config)
    if config.buffer.shards > 1:
        yield from _batches(config)
        yield from _ports(config)
        yield from too_few_workers(config)


def _message(config: RunConfig) -> Iterator[str]:
    n_shards, n_rollouts = config.buffer.shards, config.buffer.batch_rollouts
    if n_rollouts > n_shards * MOST_ROLLOUTS:
        yield (
            f"buffer.batch_rollouts: got {n_rollouts} with buffer.shards = {n_shards}, expected at most "
            f"{n_shards * MOST_ROLLOUTS}; no message of a shard holds more, so batches would be smaller than that. Use "
            f"buffer.shards = {-(-n_rollouts // MOST_ROLLOUTS)} or more"
        )


def too_few_workers(config: RunConfig) -> Iterator[str]:
    """A role with no workers is left to those that join."""
    n_shards = config.buffer.shards
    for group in worker_groups(config):
        if 0 < group.n < n_shards:
            own = group.role == "teacher" and group.key != "teacher"
            count = f"{group.key}.count" if own else f"{group.role}s"
            yield (
                f"buffer.shards: got {n_shards} with {count} = {group.n}, expected at most {group.n}; each shard needs "
                "one of its own, or no batch would ever be complete"
            )


def _ports(config: RunConfig) -> Iterator[str]:
    bind, n_shards, weights = config.buffer.bind, config.buffer.shards, config.weights
    port = bind.rpartition(":")[2]
    if not bind.startswith("tcp://"):
        yield (
            f"buffer.bind: got {bind} with buffer.shards = {n_shards}, expected tcp://HOST:PORT; shards listen at "
            "consecutive ports"
        )
    first = int(port) if port.isdecimal() else 0
    if not first:
        return
    others = range(first + 1, first + n_shards)
    if others[-1] > HIGHEST:
        yield (
            f"buffer.bind: got port {first} with buffer.shards = {n_shards}, expected one of at most "
            f"{HIGHEST - n_shards + 1}; shards listen at consecutive ports"
        )
    for key, taken in (("control_port", weights.control_port), ("store_port", weights.store_port)):
        if taken in others:
            yield (
                f"weights.{key}: got {taken}, expected none of {first} to {others[-1]}, where the buffer's shards "
                "listen (buffer.bind, buffer.shards)"
            )


def _batches(config: RunConfig) -> Iterator[str]:
    n_shards, n_rollouts, group = config.buffer.shards, config.buffer.batch_rollouts, config.learner.tasks.group_size
    whole_groups = config.buffer.release == "rollout"
    unit = n_shards * group if whole_groups else n_shards
    if n_rollouts % unit:
        what = f"buffer.shards * learner.tasks.group_size = {n_shards} * {group}" if whole_groups else "buffer.shards"
        yield (
            f"buffer.batch_rollouts: got {n_rollouts} with buffer.shards = {n_shards}, expected a multiple of {what}; "
            "each shard fills an equal part of every batch"
        )
