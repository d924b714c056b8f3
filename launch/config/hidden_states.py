"""Checks of teachers that send hidden states (teacher.payload = hidden)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from stillhouse import builtin
from stillhouse.engines.registry import BUILT_IN, find_engine
from stillhouse.launch.config.pools import TeacherPool, engine_of, teacher_pools
from stillhouse.launch.config.run import BUILTIN, RunConfig
from stillhouse.models.description import known_hidden_size
from stillhouse.protocol.hidden_codec import most_bytes


def state_bytes(pool: TeacherPool) -> int | None:
    """Bytes per token of the hidden states of the pool's model; None if the model is not found or does not say."""
    named = pool.config.models.teacher
    size = known_hidden_size(builtin.TEACHER_DIR if named == BUILTIN else Path(named).expanduser())
    return None if size is None else most_bytes(size)


def hidden_states(config: RunConfig) -> Iterator[str]:
    """Return mistakes of the pools that send hidden states."""
    for pool in teacher_pools(config):
        if pool.config.teacher.payload != "hidden":
            continue
        engine, ema = pool.config.teacher.engine, config.learner.ema
        if why := engine_of(pool.config, "teacher").why_no_hidden_states():
            able = " or ".join(repr(name) for name in BUILT_IN if not find_engine(name).why_no_hidden_states())
            yield (
                f"{pool.key}.engine: got {engine!r} with {pool.key}.payload = hidden, expected {able}: {why}; or "
                f"{pool.key}.top_k = 256 in place of hidden states"
            )
        if ema.decay and ema.pool == pool.name:
            yield (
                f"{pool.key}.payload: got hidden with learner.ema.decay = {ema.decay}, expected top_k: the learner "
                "reads a teacher's output head once, and that of an average changes"
            )
        limit, each = config.buffer.max_top_k_bytes, state_bytes(pool)
        if each is not None and each > limit:
            yield (
                f"buffer.max_top_k_bytes: got {limit}, expected at least {each}, the bytes of a hidden state of "
                f"{pool.model_key} ({pool.key}.payload = hidden)"
            )
