"""Checks that the parts of a configuration fit one another, the student and the environments. Otherwise a run would
start, and then stall or discard everything. No torch, unless a user's own module imports it.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from stillhouse import builtin
from stillhouse.actors.envs.registry import UnknownEnvironment, check_options
from stillhouse.buffer.batch_size import MOST_ROLLOUTS
from stillhouse.engines.registry import BUILT_IN, find_engine
from stillhouse.launch.config.group_filters import group_filters, undistilled_groups
from stillhouse.launch.config.message_sizes import batches_that_will_be_cut, rollouts_that_no_message_holds
from stillhouse.launch.config.payloads import engines_for_payloads, other_tokenizers, payload_mistakes, payload_warnings
from stillhouse.launch.config.pools import TeacherPool, engine_of, teacher_pools, worker_groups
from stillhouse.launch.config.quantized import quantized
from stillhouse.launch.config.run import BUILTIN, RunConfig
from stillhouse.learner.objectives.config import compares_distributions
from stillhouse.learner.objectives.registry import Member
from stillhouse.models.description import known_vocabulary_size
from stillhouse.protocol.addresses import is_local
from stillhouse.protocol.plugins import CannotLoad, load_callable
from stillhouse.weights.config import find_transport

BUILTIN_RATE_LIMIT: Final = 6e-4
"""Learning rate * (1 + max_staleness) up to which the built-in student learned steadily from sampled tokens."""


class Findings(NamedTuple):
    """Messages of one line each, which begin with the key."""

    mistakes: list[str]
    """Problems that make the run impossible."""
    warnings: list[str]
    """Problems that keep the run from doing everything that was asked for."""


def check_consistency(config: RunConfig, student: Path | None) -> Findings:
    """`student`: the model's folder, None if it was not found."""
    rows, window = known_vocabulary_size(student), _writing_window(config, student)
    return Findings(
        mistakes=[
            *_pools(config),
            *_apis(config),
            *_environments(config),
            *_advantages_of_parts(config),
            *_own_functions(config),
            *_group_rewards(config),
            *group_filters(config),
            *_adapters(config),
            *_average_as_teacher(config, student),
            *quantized(config, student),
            *_groups_that_never_fit(config),
            *_batch_in_one_message(config),
            *payload_mistakes(config, student),
            *other_tokenizers(config),
            *engines_for_payloads(config),
            *_transport(config),
            *_ranks_in_plain_text(config),
            *_turns(config),
            *rollouts_that_no_message_holds(config, rows, window),
            *_teachers_window(config),
            *(_context_window(config, student) if student is not None else ()),
        ],
        warnings=[
            *_left_to_others(config),
            *_late_apis(config),
            *_rate_for_the_bound(config),
            *(_router_loss(student) if student is not None else ()),
            *_uneven_groups(config),
            *undistilled_groups(config),
            *_little_room(config, student),
            *_little_room_for_teachers(config),
            *payload_warnings(config, student),
            *open_ports(config),
            *batches_that_will_be_cut(config, rows, window),
        ],
    )


def _rate_for_the_bound(config: RunConfig) -> Iterator[str]:
    """Warn where the built-in student is known to collapse (docs/decisions/staleness-in-practice.md). The bias of stale
    tokens grows with staleness times rate (arXiv 2607.01083), so a higher bound needs a lower rate."""
    rate, bound, objective = config.learner.lr, config.buffer.max_staleness, config.learner.objective
    pools = [pool for pool in config.learner.tasks.routes if objective.reads_teachers and objective.coef_of(pool)]
    used = [objective.divergence_of(pool) for pool in pools]
    sampled = next((one for one in used if not compares_distributions(one)), None)
    if (
        config.models.student == BUILTIN
        and sampled is not None
        and rate * (1 + bound) > BUILTIN_RATE_LIMIT * (1 + 1e-9)
    ):
        yield (
            f"learner.lr: {rate:g} with buffer.max_staleness = {bound}; with divergence = "
            f"{sampled.name!r}, the built-in student collapsed in runs with lr * (1 + "
            f"max_staleness) above {BUILTIN_RATE_LIMIT:g}. Lower one of them, or compare whole distributions: "
            "--divergence reverse_kl --teacher.top_k 256"
        )


def _router_loss(student: Path) -> Iterator[str]:
    """Warn of a loss that balances the load of experts (Qwen3-MoE, Mixtral: router_aux_loss_coef; DeepSeek:
    aux_loss_alpha): the objective is trained alone."""
    content = json.loads((student / "config.json").read_text(encoding="utf-8"))
    content = content | content.get("text_config", {})
    for name in sorted(name for name in content if "aux_loss" in name):
        if isinstance(coef := content[name], int | float) and coef > 0:
            yield (
                f"models.student: {name} = {coef:g} in {student / 'config.json'} is not used: the objective is trained "
                "alone, and nothing balances the load of the experts"
            )


def check_join(config: RunConfig, student: Path | None) -> list[str]:
    """Return the mistakes of workers that join a run. `actors` and `teachers` of `config` are theirs; what they do not
    set is the run's."""
    mistakes: list[str] = []
    pool, routes = config.teacher.pool, config.learner.tasks.routes
    if config.teachers and pool not in routes:
        mistakes.append(
            f"teacher.pool: got {pool!r}, to which learner.tasks.routes sends nothing; expected one of the run's "
            f"pools: {', '.join(routes) or '(none)'}"
        )
    if config.teachers and config.teacher.api.most_tokens < math.inf:
        mistakes.append(f"teacher.pool: got {pool!r}, whose budget the run's own teacher keeps; expected another one")
    mistakes += engines_for_payloads(config)
    if config.actors:
        mistakes += [*_environments(config), *_transport(config)]
        mistakes += _context_window(config, student) if student is not None else ()
    return mistakes


def _pools(config: RunConfig) -> Iterator[str]:
    if not config.teachers:
        return  # teachers that join name their pool
    routes = config.learner.tasks.routes
    served = [pool.name for pool in teacher_pools(config)]
    for other in routes:
        if other not in served:
            near = difflib.get_close_matches(other, served, n=1)
            whose = "a pool of `pools`" if config.pools else "the teacher.pool of all teachers of a run without `pools`"
            yield (
                f"learner.tasks.routes: got pool {other!r}, which no teacher serves; expected "
                f"{' or '.join(map(repr, near or served))}, {whose}"
            )
    for name in served:
        if name not in routes:
            yield (
                f"{f'pools.{name}' if config.pools else 'teacher.pool'}: got {name!r}, to which learner.tasks.routes "
                f"sends nothing; expected one of its pools: {', '.join(routes) or '(none)'}"
            )


def _apis(config: RunConfig) -> Iterator[str]:
    for pool in teacher_pools(config):
        api, key = pool.config.teacher.api, f"{pool.key}.api"
        if not api.url:
            continue
        if api.key_env and not os.environ.get(api.key_env):
            yield f"{key}.key_env: the environment has no {api.key_env}, expected the key of {api.url}"
        n = pool.config.teachers
        if api.most_tokens < math.inf and n != 1:
            yield (
                f"{'pools.' + pool.name + '.count' if config.pools else 'teachers'}: got {n} with a budget of {key}, "
                f"expected 1, which keeps it; it sends {key}.max_concurrent requests at one time"
            )
        model = config.pools[pool.name].model if config.pools else config.models.teacher.replace(BUILTIN, "")
        named, other = "models.teacher", pool.config.teacher.tokenizer == "other"
        named = f"pools.{pool.name}.model" if config.pools else named
        if other and not model:
            yield f"{named}: got none with {key} and tokenizer = other, expected a folder with its tokenizer"
        elif model and not other:
            yield (
                f"{named}: got {model!r} with {key}, which has its own; expected none. {key}.model names it there, and "
                f"{key}.reference a folder with the same weights to compare with"
            )
        if api.reference and not (Path(api.reference).expanduser() / "config.json").is_file():
            yield f"{key}.reference: {api.reference!r} is no model folder, expected one with config.json"
    if config.pools and config.teacher.api.url:
        yield "teacher.api: got an API beside pools, expected it as pools.NAME.api of one of them"


def _turns(config: RunConfig) -> Iterator[str]:
    """What launch.share = turns cannot share: its turns are among the processes of one machine."""
    if config.launch.share != "turns":
        return
    key = "launch.share: got turns"
    if config.launch.backend != "local" or config.cluster.actors.each or config.cluster.teachers.each:
        yield f"{key}, and workers on several hosts; expected launch.backend = local and no hosts in cluster"
    if config.learner.ranks > 1:
        yield f"{key} with learner.ranks = {config.learner.ranks}; expected 1: ranks keep their shares on their GPUs"
    for group in worker_groups(config):
        if group.n and group.settings.urls:
            yield (
                f"{key}, and {group.key}.urls; expected servers that the launcher starts, because others may be in use "
                "when they are to give their memory back"
            )
        elif group.n and (group.engine.loads_model or group.engine.servers) and not group.engine.takes_turns:
            yield f"{key}, and {group.key}.engine = {group.engine.name}, which cannot give its device back"


def _late_apis(config: RunConfig) -> Iterator[str]:
    for pool in teacher_pools(config):
        api = pool.config.teacher.api
        if api.url and api.timeout_s >= config.buffer.lease_s:
            yield (
                f"{pool.key}.api.timeout_s: {api.timeout_s:g} is not below buffer.lease_s = {config.buffer.lease_s:g}; "
                "what takes longer than a lease is asked, and paid for, again"
            )


def _left_to_others(config: RunConfig) -> Iterator[str]:
    if not config.actors and not config.cluster.actors.each:
        yield "actors: 0; no rollouts until some join (stillhouse join RUN --actors N)"
    if not config.teachers and not config.cluster.teachers.each and config.learner.tasks.routes:
        pools = " or ".join(config.learner.tasks.routes)
        yield f"teachers: 0; nothing is scored until some join (stillhouse join RUN --teachers N --pool {pools})"
    for name, pool in config.pools.items() if config.teachers else ():
        if not pool.count:
            yield (
                f"pools.{name}.count: 0; what is sent to it is not scored until teachers join (stillhouse join "
                f"RUN --teachers N --pool {name})"
            )


def _environments(config: RunConfig) -> Iterator[str]:
    """Check that the tasks' environment and all configured ones are known, can be loaded, and accept their options."""
    for name, environment in config.environments.items():
        key = f"actor.environments.{name}" if name in config.actor.environments else "learner.tasks.env"
        try:
            check_options(environment.name, environment.options, more_in_rows=True)
        except UnknownEnvironment as error:
            yield f"{key}: {error}"
        except ValueError as error:
            yield f"{key}.options: {error}"


def _advantages_of_parts(config: RunConfig) -> Iterator[str]:
    """An advantage compares the rewards of whole rollouts, but the other release policies release parts of them."""
    advantage, release = config.learner.objective.advantage.name, config.buffer.release
    if advantage != "none" and release != "rollout":
        yield (
            f"learner.objective.advantage: got {advantage!r} with buffer.release = {release}, expected "
            "buffer.release = rollout; it needs whole rollouts, and the first batch with parts of one would end the run"
        )


def _own_functions(config: RunConfig) -> Iterator[str]:
    """Load what the user names by `module:attribute` and only a worker would load, after minutes of starting."""
    learner, objective = config.learner, config.learner.objective
    named = [("learner.trackers", path) for path in learner.trackers]
    named += [("learner.optimizer", learner.optimizer.name), ("learner.tasks.group_reward", learner.tasks.group_reward)]
    named += [("weights.transport", config.weights.way), ("learner.objective.aggregation", objective.aggregation)]
    members = {field: getattr(objective, field) for field in objective.__struct_fields__}
    members |= {f"teacher_divergences.{pool}": own for pool, own in objective.teacher_divergences.items()}
    named += [(f"learner.objective.{key}", one.name) for key, one in members.items() if isinstance(one, Member)]
    for key, path in named:
        try:
            if ":" in path:
                load_callable(path, key)
        except CannotLoad as error:
            yield str(error)


def _group_rewards(config: RunConfig) -> Iterator[str]:
    path, release = config.learner.tasks.group_reward, config.buffer.release
    if path and release != "rollout":
        yield (
            f"learner.tasks.group_reward: got {path!r} with buffer.release = {release}, expected buffer.release = "
            "rollout; the other policies release parts of groups, which it cannot judge"
        )


def _adapters(config: RunConfig) -> Iterator[str]:
    """Check that peft is installed. It is not imported, because it loads torch."""
    if config.learner.lora.rank and importlib.util.find_spec("peft") is None:
        yield (
            f"learner.lora.rank: got {config.learner.lora.rank}, which needs the package peft: "
            "pip install -e '.[lora]'; or expected 0, which trains all weights"
        )


def _transport(config: RunConfig) -> Iterator[str]:
    """Check that there is one of this name. It is not imported, because it loads torch."""
    try:
        find_transport(config.weights.way)
    except ValueError as error:
        yield str(error)
    if config.weights.way == "ipc" and (config.actor.urls or not is_local(config.weights.host)):
        got = "actor.urls" if config.actor.urls else f"weights.host = {config.weights.host}"
        yield (
            f"weights.transport: got ipc with {got}; expected actors on this machine, with servers that the launcher "
            "starts; or use auto"
        )
    servers = engine_of(config, "actor").servers
    if config.weights.way == "ipc" and servers is not None and not servers.takes_ipc:
        yield f"weights.transport: got ipc with actor.engine = {config.actor.engine}, which has no such way; use auto"


def _writing_window(config: RunConfig, student: Path | None) -> int | None:
    """Longest sequence in tokens that an actor writes; None if unknown."""
    if (limit := engine_of(config, "actor").context_limit(config.actor)) is not None:
        return limit.tokens
    return context_window(student) if student is not None else None


def _ranks_in_plain_text(config: RunConfig) -> Iterator[str]:
    """Ranks exchange batches and gradients by gloo or NCCL."""
    host = config.weights.host
    if config.learner.hosts > 1 and not is_local(host) and not config.weights.allow_plain_network:
        yield (
            f"learner.hosts: got {config.learner.hosts} with weights.host = {host}, which other machines can reach; "
            "the ranks exchange batches and gradients without encryption, and anyone there can take part "
            "(SECURITY.md). On a private network set weights.allow_plain_network = true; otherwise keep the learner on "
            "one host"
        )


def open_ports(config: RunConfig, *, actors: bool = True, ranks: bool = True) -> Iterator[str]:
    """Warn of ports that other machines can reach and that do not authenticate, each time, although they were allowed.
    `actors`, `ranks`: whether there are any here."""
    host = config.weights.host
    plain = ["the weight group"] if actors and config.weights.makes_groups else []
    plain += ["the learner's ranks"] if ranks and config.learner.hosts > 1 else []
    if not is_local(host) and plain:
        yield (
            f"weights.allow_plain_network: other machines can reach {host}; torch's store and the ports of "
            f"{' and '.join(plain)} accept any client, and nothing on them is encrypted: use a private network only "
            "(SECURITY.md)"
        )
    if not config.buffer.encrypted and config.buffer.allow_plain_network:
        yield (
            f"buffer.allow_plain_network: the links to {config.buffer.advertise or config.buffer.bind} are not "
            "encrypted, and anyone who can reach it can read the run, send it data, and end it (SECURITY.md)"
        )


def _average_as_teacher(config: RunConfig, student: Path | None) -> Iterator[str]:
    """An average of the student fits only teachers with its architecture, and its first snapshot is the student
    itself."""
    ema = config.learner.ema
    if not ema.decay:
        return
    pools = {pool.name: pool for pool in teacher_pools(config)}
    if ema.pool not in pools:
        yield f"learner.ema.pool: got {ema.pool!r}, which no teacher serves; expected one of {', '.join(pools)}"
        return
    pool = pools[ema.pool]
    named, engine = pool.config.models.teacher, pool.config.teacher.engine
    same = student is not None and named != BUILTIN and Path(named).expanduser().resolve() == student.resolve()
    if not same and (named != config.models.student or named == BUILTIN):
        yield (
            f"{pool.model_key}: got {named!r} with learner.ema.decay = {ema.decay}, expected the student's, "
            f"{student or config.models.student}: the teacher starts as the student, and becomes its average"
        )
    if not find_engine(engine).reads_snapshots():
        able = " or ".join(repr(name) for name in BUILT_IN if find_engine(name).reads_snapshots())
        yield (
            f"{pool.key}.engine: got {engine!r} with learner.ema.decay = {ema.decay}, expected {able}: other teachers "
            "do not read snapshots of the average"
        )


def _batch_in_one_message(config: RunConfig) -> Iterator[str]:
    if (n_rollouts := config.buffer.batch_rollouts) > MOST_ROLLOUTS:
        yield (
            f"buffer.batch_rollouts: got {n_rollouts}, expected at most {MOST_ROLLOUTS}; no message holds more, so "
            "batches would be smaller than that"
        )


def _groups_that_never_fit(config: RunConfig) -> Iterator[str]:
    """Release `rollout` starts a group only if all its rollouts may be in flight at once (see buffer.tickets)."""
    group, buffer = config.learner.tasks.group_size, config.buffer
    limit = (buffer.max_staleness + 1) * buffer.batch_rollouts
    if buffer.release == "rollout" and group > limit:
        yield (
            f"learner.tasks.group_size: got {group} with buffer.release = rollout, expected at most {limit}, the "
            "rollouts that may run at once: (buffer.max_staleness + 1) * buffer.batch_rollouts; none could start"
        )


def _uneven_groups(config: RunConfig) -> Iterator[str]:
    group, buffer = config.learner.tasks.group_size, config.buffer
    if buffer.release == "rollout" and buffer.batch_rollouts % group:
        yield (
            f"buffer.batch_rollouts: {buffer.batch_rollouts} is not a multiple of learner.tasks.group_size = {group}; "
            "with buffer.release = rollout groups are released whole, so batches will have another number of rollouts"
        )


def _context_window(config: RunConfig, student: Path) -> Iterator[str]:
    """Check the actors' context limit. A server has none of its own: it takes its window from the model."""
    limit, window = engine_of(config, "actor").context_limit(config.actor), context_window(student)
    if limit is not None and window is not None and limit.tokens > window:
        yield (
            f"{limit.key}: got {limit.tokens}, expected at most {window}, the max_position_embeddings of "
            f"{student / 'config.json'}"
        )


def context_window(folder: Path) -> int | None:
    """Longest sequence in tokens that a model's config.json allows; None if it does not say."""
    content: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    nested = content.get("text_config")
    for section in (content, nested if isinstance(nested, dict) else {}):
        for name in ("max_position_embeddings", "n_positions"):
            window: object = section.get(name)
            if isinstance(window, int):
                return window
    return None


def teacher_window(pool: TeacherPool) -> int | None:
    """Longest sequence in tokens that the pool's model reads; None if the model is not found or does not say. That of
    an API is known when its teacher starts."""
    if pool.config.teacher.api.url:
        return None
    named = pool.config.models.teacher
    folder = builtin.TEACHER_DIR if named == BUILTIN else Path(named).expanduser()
    return context_window(folder) if (folder / "config.json").is_file() else None


def _teachers_window(config: RunConfig) -> Iterator[str]:
    """Check the teachers' context. A rollout that is too long for a teacher is masked, so long answers would never be
    trained."""
    tasks, (key, answer) = config.learner.tasks, _longest_answer(config)
    longest = tasks.max_prompt_tokens + answer
    limit, at_most = engine_of(config, "actor").context_limit(config.actor), ""
    if limit is not None:
        longest, at_most = min(longest, limit.tokens), f", and at most {limit.key}"
    for pool in teacher_pools(config):
        window = teacher_window(pool)
        if window is not None and longest > window:
            yield (
                f"{pool.model_key}: its context of {window} tokens is less than the {longest} that a rollout may have "
                f"(learner.tasks.max_prompt_tokens + {key} = {tasks.max_prompt_tokens} + "
                f"{answer}{at_most}); lower one of them, or use a teacher with a longer context"
            )


def _longest_answer(config: RunConfig) -> tuple[str, int]:
    learner = config.learner
    answers = {"max_new_tokens": learner.tasks.max_new_tokens}
    if learner.eval_every:
        answers |= {f"eval_sets.{name}.max_new_tokens": one.max_new_tokens for name, one in learner.eval_sets.items()}
    return max(answers.items(), key=lambda item: item[1])


def _little_room_for_teachers(config: RunConfig) -> Iterator[str]:
    """Warn if privileged prompts may not fit into a teacher's context. A rollout that does not fit is masked."""
    tasks = config.learner.tasks
    for pool in teacher_pools(config) if tasks.has_privileged else ():
        window = teacher_window(pool)
        if window is not None and tasks.max_teacher_prompt_tokens + tasks.max_new_tokens > window:
            yield (
                f"{pool.model_key}: its context of {window} is less than learner.tasks.max_teacher_prompt_tokens + "
                f"max_new_tokens = {tasks.max_teacher_prompt_tokens} + {tasks.max_new_tokens}; tokens beyond it will "
                "get no score, and be masked"
            )


def _little_room(config: RunConfig, student: Path | None) -> Iterator[str]:
    tasks, limit = config.learner.tasks, engine_of(config, "actor").context_limit(config.actor)
    if limit is not None:
        window, source = limit.tokens, f"{limit.key}: "
    else:
        of_model = context_window(student) if student is not None else None
        if of_model is None:
            return
        window, source = of_model, "models.student: its context of "  # a server may be configured to use less
    key, answer = _longest_answer(config)
    if tasks.max_prompt_tokens + answer > window:
        full = max(0, window - answer)
        yield (
            f"{source}{window} is less than learner.tasks.max_prompt_tokens + {key} = "
            f"{tasks.max_prompt_tokens} + {answer}; answers to prompts of more than {full} tokens will "
            f"be cut short (finish reason length), and prompts of {window} tokens or more get no answer"
        )
