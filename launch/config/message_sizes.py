"""Checks that a run's longest rollouts and largest batches fit into one message to the learner. The buffer splits or
masks what does not (`buffer.batch_size`); these messages say so before the start, and name the keys to change."""

from __future__ import annotations

from collections.abc import Iterator

from stillhouse.buffer.batch_size import BATCH_BYTES, SCORE_BYTES, TOKEN_BYTES
from stillhouse.launch.config.payloads import payload_bytes
from stillhouse.launch.config.pools import teacher_pools
from stillhouse.launch.config.run import RunConfig
from stillhouse.protocol.codec import MAX_FRAME_BYTES


def rollouts_that_no_message_holds(config: RunConfig, rows: int | None, window: int | None) -> Iterator[str]:
    """Return mistakes. `rows`: rows of the student's embedding; `window`: longest sequence that an actor writes; None
    if unknown."""
    tasks, each = config.learner.tasks, _set_bytes(config, rows)
    sets_bytes = min(tasks.max_new_tokens, _longest(config, window)) * each
    if sets_bytes > MAX_FRAME_BYTES:
        yield (
            f"teacher.top_k: payloads of up to {each} bytes per token make {sets_bytes >> 20} MiB of a rollout of "
            f"learner.tasks.max_new_tokens = {tasks.max_new_tokens}; expected at most {MAX_FRAME_BYTES >> 20} MiB: "
            "lower top_k, max_new_tokens or buffer.max_top_k_bytes"
        )
    a_group = tasks.group_size * _rollout_bytes(config, rows, window)
    if config.buffer.release == "rollout" and a_group > BATCH_BYTES:
        yield (
            f"learner.tasks.group_size: a group of {tasks.group_size} rollouts may take {a_group >> 20} MiB, expected "
            f"at most {BATCH_BYTES >> 20}, because buffer.release = rollout sends it whole: {_remedy(config)}"
        )


def batches_that_will_be_cut(config: RunConfig, rows: int | None, window: int | None) -> Iterator[str]:
    """Return warnings; arguments as above."""
    a_rollout = _rollout_bytes(config, rows, window)
    a_batch = config.buffer.batch_rollouts * a_rollout
    if a_batch > BATCH_BYTES:
        yield (
            f"buffer.batch_rollouts: {config.buffer.batch_rollouts} rollouts of {_longest(config, window)} tokens take "
            f"{a_batch >> 20} MiB, but a message {BATCH_BYTES >> 20}: batches of long rollouts will have fewer, down "
            f"to {BATCH_BYTES // a_rollout}; to avoid that, {_remedy(config)}"
        )


def _remedy(config: RunConfig) -> str:
    lengths = "learner.tasks.max_prompt_tokens, max_new_tokens"
    if not _single_turn(config):
        lengths += ", actor.torch.max_context (tokens of the environment count)"
    return (
        f"lower it, {lengths}, buffer.max_rollout_tokens, the number of pools in learner.tasks.routes or teacher.top_k"
    )


def _rollout_bytes(config: RunConfig, rows: int | None, window: int | None) -> int:
    longest, n_pools = _longest(config, window), len(config.learner.tasks.routes)
    with_sets = min(config.learner.tasks.max_new_tokens, longest) if _single_turn(config) else longest
    return longest * (TOKEN_BYTES + SCORE_BYTES * n_pools) + with_sets * _set_bytes(config, rows)


def _longest(config: RunConfig, window: int | None) -> int:
    """Longest rollout in tokens: prompt, answer, and (except in `single_turn`) what the environment adds."""
    tasks, bounds = config.learner.tasks, [config.buffer.max_rollout_tokens]
    if window is not None:
        bounds.append(window)
    if _single_turn(config) or window is None:
        bounds.append(tasks.max_prompt_tokens + tasks.max_new_tokens)
    return min(bounds)


def _single_turn(config: RunConfig) -> bool:
    return all(environment.name == "single_turn" for environment in config.environments.values())


def _set_bytes(config: RunConfig, rows: int | None) -> int:
    """Largest payloads of all pools together, in bytes per token."""
    return sum(min(payload_bytes(p, rows) or 0, config.buffer.max_top_k_bytes) for p in teacher_pools(config))
