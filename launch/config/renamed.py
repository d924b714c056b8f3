"""Keys of former versions. Each is refused by name, with its replacement or the reason for its removal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, cast

RENAMED: Final[Mapping[str, str]] = {
    "learner.publish": "weights.*",
    "learner.divergence": "learner.objective.divergence",
    "learner.mixed_weight": "learner.objective.divergence.weight (of mixed)",
    "learner.jsd_beta": "learner.objective.divergence.beta (of jsd)",
    "learner.samples": "learner.objective.divergence.samples (of multi_sample)",
    "learner.context_weight": "learner.objective.divergence.context_cap (2 for truncated, 0 for none)",
    "learner.kl_student": "learner.objective.divergence.kl_student (of k1, k2, k3)",
    "learner.coef": "learner.objective.coef",
    "learner.teacher_coefs": "learner.objective.teacher_coefs",
    "learner.domain_scale": "learner.objective.domain_scale",
    "learner.importance": "learner.objective.importance",
    "learner.ratio_cap": "learner.objective.importance.cap",
    "learner.ratio_low": "learner.objective.importance.low",
    "learner.ratio_high": "learner.objective.importance.high",
    "learner.ratio_dual": "learner.objective.importance.dual",
    "learner.advantage": "learner.objective.advantage",
    "learner.advantage_std": "learner.objective.advantage.std (of grpo)",
    "learner.value.discount": "learner.objective.advantage.discount (of gae)",
    "learner.value.decay": "learner.objective.advantage.decay (of gae)",
    "learner.value": "learner.objective.advantage.value.*",
    "learner.aggregation": "learner.objective.aggregation",
}
"""Old key or section -> new key, or what to do. A new name that ends with `.*`: the keys below keep their names."""
REMOVED: Final[Mapping[str, str]] = {
    "teacher.gather_s": "a single item always waits 5 ms for others to share its batch",
    "teacher.credit_batches": "a teacher always asks for two batches of work ahead",
    "launch.restart_window_s": "restarts are counted over the last five minutes",
    "launch.restart_backoff_max_s": "the wait grows up to 30 times launch.restart_backoff_s",
    "launch.memory_every_s": "memory is sampled every five seconds",
    "buffer.hedge_quantile": "it is 0.95; set buffer.hedge_multiple instead",
    "buffer.breaker_backoff_max_s": "the time without work grows up to 60 times buffer.breaker_backoff_s",
    "buffer.journal_memory_mb": "64 MiB of journal may always wait in memory",
    "weights.publish_wait_s": "with weights.every_version training always waits at least two minutes",
    "weights.keep_snapshots": "two snapshots are always kept",
    "weights.rejoin_delay_max_s": "the delay grows up to 60 times weights.rejoin_delay_s",
    "learner.tasks.eval_samples_shown": "four generations of each kind are always shown",
    "learner.ema.keep_snapshots": "two snapshots of the average are always kept",
    "teacher.sglang.stream_tokens": "scores come in one reply, not in a stream",
    "teacher.sglang.update_mode": "no request of a teacher runs across a weight swap",
    "teacher.sglang.pause_timeout_s": "a teacher's server is never paused",
    "teacher.sglang.breaker_failures": "the buffer has a breaker for each teacher (buffer.breaker_*)",
    "actor.sglang.breaker_failures": "three failures in a row always open the breaker",
    "learner.max_skipped_steps": "three skipped steps in a row always end the run",
    "actor.torch.emit_every_steps": "tokens are always handed out every eight decode steps",
    "buffer.tick_s": "deadlines are always checked every 50 ms",
}
"""Key without a successor -> the reason."""


def farewell(key: str) -> str | None:
    """The message for a key of a former version; None for any other key."""
    reason = REMOVED.get(f"teacher.{key.split('.', 2)[2]}" if key.startswith("pools.") and key.count(".") > 1 else key)
    if reason is not None:
        return f"{key}: was removed: {reason}; leave it out"
    return None if (now := new_name(key)) is None else f"{key}: is {now} now"


def new_name(key: str) -> str | None:
    """The new name of a renamed key, or of a key below a renamed section."""
    section = key
    while section and section not in RENAMED:
        section = section.rpartition(".")[0]
    now = RENAMED.get(section)
    if now is not None and now.endswith(".*") and section != key:
        return now.removesuffix(".*") + key.removeprefix(section)
    return now


def gone(plain: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    """Yield a message for each renamed or removed key in nested dicts."""
    for name, value in plain.items():
        key = prefix + name
        if key in RENAMED or key in REMOVED:
            yield str(farewell(key))
        elif isinstance(value, Mapping):
            yield from gone(cast(Mapping[str, object], value), f"{key}.")
