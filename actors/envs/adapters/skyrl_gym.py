"""Environments of the package skyrl_gym (tried: 0.4.0), under the names that they are registered by
(docs/agents/skyrl_gym.md).

One episode of the environment is one rollout: it gets each turn of the student as text and answers with turns of its
own. The reward is the sum over the episode.
"""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from stillhouse.actors.agent import Context, options_checked_by
from stillhouse.actors.envs.adapters.shared.chat import turns_of
from stillhouse.actors.envs.adapters.shared.packages import import_package
from stillhouse.actors.envs.base import EnvTask
from stillhouse.actors.envs.episode import EnvironmentFault
from stillhouse.actors.row_options import refuse_module, row_may_set
from stillhouse.protocol.plugins import import_module

_package = import_package("skyrl_gym", environment="skyrl_gym", package="skyrl-gym", extra="skyrl-gym")
_omegaconf = import_package("omegaconf", environment="skyrl_gym", package="skyrl-gym", extra="skyrl-gym")

RUNS_CODE: Final = frozenset({"lcb", "searchcode"})
"""Environments of the package that run what the student wrote as Python, with the actor's rights."""
NOT_FOR_IT: Final = frozenset({"prompt", "messages", "env", "env_options"})
"""Columns of a row that are no extras of the environment."""


class _Said(NamedTuple):
    """What the environment answers to a turn."""

    role: str
    text: str


def _check(
    *,
    id: str,
    env_config: Mapping[str, Any] | None = None,
    extras: Mapping[str, Any] | None = None,
    allow_code: bool = False,
) -> None:
    """Raises ValueError for an unknown id, naming the nearest, and for one that runs what the student writes."""
    module, _, name = id.rpartition(":")
    try:
        if module:
            import_module(module)
        creator = _registry().spec(name).entry_point
        if isinstance(creator, str):
            _registry().load_env_creator(creator)
    except ImportError as error:
        raise ValueError(f"id: got {id!r}: {error}") from error
    except _package.error.Error as error:
        known = sorted(_registry().registry)
        close = difflib.get_close_matches(name, known, n=1)
        nearest = f"; did you mean {close[0]!r}?" if close else "."
        raise ValueError(f"id: nothing is registered as {name!r}{nearest} Known: {', '.join(known)}") from error
    if name in RUNS_CODE and not allow_code:
        raise ValueError(
            f"{name!r} runs what the student writes as Python with the actor's rights; where that can do no harm, set "
            "allow_code = true"
        )


@row_may_set("id", check=refuse_module)
@options_checked_by(_check)
async def skyrl_gym(
    ctx: Context,
    task: EnvTask,
    *,
    id: str,
    env_config: Mapping[str, Any] | None = None,
    extras: Mapping[str, Any] | None = None,
    allow_code: bool = False,
) -> None:
    """`id`: the registered name; `module:name` imports the module, which registers it. `env_config`: the environment's
    settings. `extras`: what it gets beside the columns of the row, and before them. `allow_code`: also
    environments that run the student's code."""
    _check(id=id, allow_code=allow_code)
    environment = _package.make(
        id.rpartition(":")[2],
        env_config=_omegaconf.OmegaConf.create(dict(env_config or {})),
        extras=_extras(task) | dict(extras or {}),
    )
    with contextlib.closing(environment):
        asked = turns_of(task.row)
        begun, _ = environment.init([dict(turn) for turn in asked])
        try:
            # A prompt that is left as it was is the learner's, with its system prompt and templates.
            await _talk(ctx if begun == asked else ctx.root(begun), environment)
        finally:
            ctx.note(**{f"skyrl_gym_{name}": value for name, value in _numbers(environment.get_metrics()).items()})


async def _talk(line: Context, environment: Any) -> None:
    while True:
        turn = await line.generate()
        output: Mapping[str, Any] = environment.step(turn.text)
        line.reward(float(output["reward"]))
        line.note(skyrl_gym_turns=1.0)
        if output.get("postprocessed_action") not in (None, turn.text):
            # The environment would have the student say something else. What it sampled is what is trained.
            line.note(skyrl_gym_rewritten_turns=1.0)
        if output["done"]:
            return
        said = _said(output["observations"])
        line.observe(said.text, role=said.role)


def _said(observations: Sequence[Mapping[str, Any]]) -> _Said:
    """One turn of the chat from those of the environment. Raises EnvironmentFault where they are not of one role."""
    roles = {str(each["role"]) for each in observations} or {"user"}
    if len(roles) > 1:
        raise EnvironmentFault(f"the environment answers a turn in the roles {sorted(roles)}, expected one role")
    return _Said(roles.pop(), "\n\n".join(str(each["content"]) for each in observations))


def _extras(task: EnvTask) -> dict[str, Any]:
    """What an environment is made for, in the columns of SkyRL's data: those of the row, and the ground truth under
    both names that the package looks for."""
    of_row = {name: value for name, value in task.row.items() if name not in NOT_FOR_IT}
    truth = {} if task.ground_truth is None else {"ground_truth": task.ground_truth}
    return {"reward_spec": truth, "reward_model": truth, "extra_info": {}} | of_row


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    found = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _registry() -> Any:
    return _package.envs.registration
