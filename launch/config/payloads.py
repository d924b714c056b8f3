"""Checks of what teachers send (protocol.payloads) against the engines, the models, the objective and the buffer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from stillhouse import builtin
from stillhouse.engines.registry import BUILT_IN, find_engine
from stillhouse.launch.config.pools import TeacherPool, teacher_pools, worker_groups
from stillhouse.launch.config.run import BUILTIN, RunConfig
from stillhouse.learner.objectives.options import Distributions
from stillhouse.models.description import known_expert_shape, known_hidden_size, known_vocabulary_size
from stillhouse.protocol.payloads.expert_ids import REPORTS_EXPERTS, most_bytes
from stillhouse.protocol.payloads.kind import ModelSizes
from stillhouse.protocol.payloads.student_sets import MIXES_TEACHER, REPORTS_KEPT, most_kept_bytes


def sizes_of(pool: TeacherPool, rows: int | None) -> ModelSizes:
    """`rows`: rows of the student's embedding."""
    named = pool.config.models.teacher
    folder = builtin.TEACHER_DIR if named == BUILTIN else Path(named).expanduser()
    return ModelSizes(rows, known_hidden_size(folder))


def payload_bytes(pool: TeacherPool, rows: int | None) -> int | None:
    """The most that a token's payload takes; None: not known."""
    return pool.config.teacher.sends.most_bytes(sizes_of(pool, rows))


def _why_not_mixed(config: RunConfig) -> str:
    """What does not go with a mixture of student and teacher; empty: nothing."""
    if config.pools:
        return "pools: actors mix with one teacher, models.teacher"
    if config.teacher.tokenizer == "other":
        return "teacher.tokenizer = other, whose tokens are not the student's"
    if config.learner.tasks.has_privileged:
        return "privileged prompts, which actors do not read"
    if config.teacher.api.url:
        return "teacher.api, behind which the model is not here"
    if config.learner.ema.decay:
        return "learner.ema: the teacher changes, and actors have it as it was"
    return ""


def engines_for_payloads(config: RunConfig) -> Iterator[str]:
    """Return mistakes: engines that cannot do what the teachers' payloads need."""
    pools, truncated = teacher_pools(config), config.learner.tasks.truncated
    for group in worker_groups(config):
        if truncated and group.role == "actor" and (why := group.engine.lacks(REPORTS_KEPT)):
            yield (
                f"learner.tasks.top_k = {config.learner.tasks.top_k} needs an {group.key}.engine that "
                f"{REPORTS_KEPT.does}: {why}; use torch or sglang, or top_p = 1, top_k = 0 and min_p = 0"
            )
        if config.mixed_teacher and group.role == "actor" and (why := group.engine.lacks(MIXES_TEACHER)):
            yield (
                f"learner.tasks.teacher_share: got {config.learner.tasks.teacher_share} with {group.key}.engine = "
                f"{group.settings.engine!r}, expected torch, which {MIXES_TEACHER.does}: {why}; or 0, and e.g. "
                "learner.offline with text that the teacher wrote"
            )
        if config.learner.routing_replay and group.role == "actor" and (why := group.engine.lacks(REPORTS_EXPERTS)):
            yield (
                f"learner.routing_replay: got true with {group.key}.engine = {group.settings.engine!r}, expected torch "
                f"or sglang, which {REPORTS_EXPERTS.does}: {why}; or false"
            )
        for pool in pools if group.role == "actor" else [pool for pool in pools if pool.key == group.key]:
            kind = pool.config.teacher.sends
            for need in (need for need in kind.needs if need.role == group.role):
                if why := group.engine.lacks(need):
                    able = " or ".join(repr(name) for name in BUILT_IN if not find_engine(name).lacks(need))
                    key, value = kind.setting(pool.key)
                    yield (
                        f"{group.key}.engine: got {group.settings.engine!r} with {key} = {value}, expected {able}, "
                        f"which {need.does}: {why}; or {kind.instead(pool.key)}"
                    )


def payload_mistakes(config: RunConfig, student: Path | None) -> Iterator[str]:
    """Return mistakes of the pools: what their divergence needs and they do not send, and what cannot be sent."""
    rows, tasks = known_vocabulary_size(student), config.learner.tasks
    if tasks.truncated and config.top_ids is not None:
        yield (
            f"teacher.top_k_of: got student with learner.tasks.top_k = {tasks.top_k}, expected teacher: what is sampled"
            " from travels in the place of the student's likeliest tokens; or top_p = 1, top_k = 0 and min_p = 0"
        )
    if tasks.teacher_share and (why := _why_not_mixed(config)):
        yield f"learner.tasks.teacher_share: got {tasks.teacher_share} with {why}, expected 0, or that left out"
    if tasks.truncated and rows and (most := most_kept_bytes(tasks.top_k, rows)) > config.buffer.max_top_k_bytes:
        yield (
            f"buffer.max_top_k_bytes: got {config.buffer.max_top_k_bytes}, expected at least {most}, the bytes per "
            f"token of the ids that learner.tasks.top_k = {tasks.top_k} keeps; or a smaller top_k"
        )
    if config.learner.routing_replay and student is not None:
        if (shape := known_expert_shape(student)) is None:
            yield "learner.routing_replay: got true, and the student is no mixture of experts; expected false"
        elif (most := most_bytes(shape)) > config.buffer.max_top_k_bytes:
            yield (
                f"buffer.max_top_k_bytes: got {config.buffer.max_top_k_bytes}, expected at least {most}, the bytes per "
                "token of the experts that learner.routing_replay sends"
            )
    for pool in teacher_pools(config):
        yield from _pool_mistakes(config, pool, rows)


def _pool_mistakes(config: RunConfig, pool: TeacherPool, rows: int | None) -> Iterator[str]:
    objective, ema = config.learner.objective, config.learner.ema
    kind, limit = pool.config.teacher.sends, config.buffer.max_top_k_bytes
    key, value = kind.setting(pool.key)
    needed_for = objective.needs_top_k_for(pool.name)
    divergence = objective.divergence_of(pool.name)
    if (
        needed_for
        and pool.config.teacher.tokenizer == "other"
        and (not kind.distributions or divergence.name not in ("reverse_kl", "multi_sample"))
    ):
        yield (
            f"{pool.key}.tokenizer: got other with learner.objective.{needed_for} and {pool.key}.top_k = "
            f"{pool.config.teacher.top_k}, expected learner.objective.{objective.divergence_key(pool.name)} = "
            "reverse_kl with a top_k above 0, e.g. 256, or k1 without a baseline: what a set of another vocabulary "
            "leaves out, its sampled text puts right for these only; or a teacher with the student's tokenizer"
        )
    elif needed_for and not kind.distributions:
        yield (
            f"learner.objective.{needed_for} needs {key}: got {value}, expected one above 0, "
            f"e.g. 256, so that teachers send their likeliest tokens; or {pool.key}.payload = hidden; or "
            f"learner.objective.{objective.divergence_key(pool.name)} = k1 without a baseline, which needs neither"
        )
    if isinstance(divergence, Distributions) and divergence.temperature != 1.0 and not kind.needs_head:
        yield (
            f"learner.objective.{objective.divergence_key(pool.name)}.temperature = {divergence.temperature} needs "
            f"{pool.key}.payload = hidden: got {key} = {value}, which does not tell a tail at another temperature; "
            "or temperature = 1"
        )
    yield from kind.mistakes(pool.key, sizes_of(pool, rows))
    if kind.needs_head and ema.decay and ema.pool == pool.name:
        yield (
            f"{key}: got {value} with learner.ema.decay = {ema.decay}, expected top_k: the learner reads a "
            "teacher's output head once, and that of an average changes"
        )
    each = payload_bytes(pool, rows)
    if kind.exact and each is not None and each > limit:
        yield (
            f"buffer.max_top_k_bytes: got {limit}, expected at least {each}, the bytes per token of {kind.what} of "
            f"{pool.model_key} ({key} = {value})"
        )


def payload_warnings(config: RunConfig, student: Path | None) -> Iterator[str]:
    """Warn of payloads that neither this run nor a recording uses, that the buffer may refuse, or that serve their
    divergence badly."""
    rows, objective, limit = known_vocabulary_size(student), config.learner.objective, config.buffer.max_top_k_bytes
    doubts = dict[str, None]()
    for pool in teacher_pools(config):
        kind, divergence = pool.config.teacher.sends, objective.divergence_of(pool.name).name
        key, value = kind.setting(pool.key)
        if kind.distributions and not (objective.needs_top_k_for(pool.name) or config.learner.record):
            by = objective.divergence_key(pool.name)
            only = f"learner.objective.{by} = {divergence!r} uses only the sampled token"
            if not objective.coef_of(pool.name):
                only = "learner.objective has the coefficient 0 for this pool, whose figures need only sampled tokens"
            yield f"{key}: got {value}, but {only}; {kind.what} will be made, sent and discarded"
        each = payload_bytes(pool, rows)
        if not kind.exact and each is not None and each > limit:
            yield (
                f"{key}: {value} takes up to {each} bytes per token, buffer.max_top_k_bytes is {limit}; segments whose "
                "payload takes more on average will be refused, and masked as unscorable"
            )
        if why := kind.doubts(divergence):
            doubts[f"{key}: {value} with learner.objective.divergence = {divergence!r}, {why}"] = None
    yield from doubts


def other_tokenizers(config: RunConfig) -> Iterator[str]:
    """Return mistakes of pools with another tokenizer than the student: what they share with others, and options that
    compare single tokens."""
    pools, objective = teacher_pools(config), config.learner.objective
    for pool in (pool for pool in pools if pool.config.teacher.tokenizer == "other"):
        of_others = {name for other in pools if other is not pool for name in _shared_tags(config, pool, other)}
        if of_others:
            yield (
                f"{pool.key}.tokenizer: got other, and other pools score its tags ({', '.join(sorted(of_others))}), "
                "expected tags of its own in learner.tasks.routes: a prompt is given to all its teachers in the same "
                "tokens"
            )
        for key, value, off in (
            ("domain_scale", objective.domain_scale, "none"),
            ("prefix_gain", objective.prefix_gain, 0.0),
            ("cost_discount", objective.cost_discount, 0.0),
        ):
            if value != off:
                yield (
                    f"learner.objective.{key}: got {value} with {pool.key}.tokenizer = other, expected {off}: it reads "
                    "the scores of single tokens, and this teacher has those of spans"
                )


def _shared_tags(config: RunConfig, one: TeacherPool, other: TeacherPool) -> list[str]:
    mine, theirs = (config.learner.tasks.routes.get(pool.name) for pool in (one, other))
    if mine is None or theirs is None:
        return []
    shared = [tag for tag in mine if tag in theirs] if mine and theirs else [*mine, *theirs]
    return shared or ([] if mine and theirs else ["all"])
