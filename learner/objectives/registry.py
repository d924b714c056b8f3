"""The members of an objective by name: built-in ones, those of installed packages, and `module:function`.

A package adds its own in its pyproject.toml, under the group's entry points (docs/objectives.md has whole examples):

    [project.entry-points."stillhouse.divergences"]
    huber = "my_package.costs:huber"

No torch here: the launcher checks the names before anything starts.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, NamedTuple


class Group(NamedTuple):
    """One registry: name -> `module:function`."""

    key: str
    """Of learner.config, for messages."""
    entry_points: str
    built_in: Mapping[str, str]


_HERE = "learner.objectives"

DIVERGENCES = Group(
    "divergence",
    "stillhouse.divergences",
    {name: f"{_HERE}.sampled:{name}" for name in ("k1", "k2", "k3", "seq_kd")},
)
"""Costs of a sampled token: `learner.objectives.sampled.CostFn`."""

DISTRIBUTION_DIVERGENCES = Group(
    "divergence",
    "stillhouse.distribution_divergences",
    {name: f"{_HERE}.distributions:{name}" for name in ("forward_kl", "reverse_kl", "mixed", "jsd", "multi_sample")},
)
"""Between whole distributions: `learner.objectives.distributions.DistributionFn`. They share the key with the costs."""

IMPORTANCE = Group(
    "importance",
    "stillhouse.importance",
    {
        "none": "learner.objectives.importance:no_weights",
        **{
            name: f"learner.objectives.importance:{name}"
            for name in (
                "truncated",
                "masked",
                "sequence",
                "sequence_masked",
                "geometric",
                "geometric_masked",
                "ppo",
                "gspo",
                "decoupled",
            )
        },
    },
)
"""How much a token of an older policy counts: `learner.objectives.importance.ImportanceFn`."""

ADVANTAGES = Group(
    "advantage",
    "stillhouse.advantages",
    {
        "none": f"{_HERE}.advantages:no_advantage",
        "grpo": f"{_HERE}.advantages:grpo",
        "reinforce_pp": f"{_HERE}.advantages:reinforce_pp",
        "reinforce_pp_baseline": f"{_HERE}.advantages:reinforce_pp_baseline",
    },
)
"""From rewards of rollouts: `learner.objectives.advantages.AdvantageFn`."""

TOKEN_ADVANTAGES = Group(
    "advantage",
    "stillhouse.token_advantages",
    {"gae": f"{_HERE}.token_advantages:gae_whitened"},
)
"""From rewards and a value function: `learner.objectives.token_advantages.TokenAdvantageFn`. They share the key."""

AGGREGATIONS = Group(
    "aggregation",
    "stillhouse.aggregations",
    {name: f"{_HERE}.aggregation:{name}" for name in ("token_mean", "sequence_mean", "constant")},
)
"""From losses of tokens to the loss of a batch: `learner.objectives.aggregation.AggregationFn`."""


def known_members(group: Group) -> dict[str, str]:
    """Name -> `module:function`. A package cannot take a built-in name."""
    installed = {entry.name: entry.value for entry in entry_points(group=group.entry_points)}
    return installed | dict(group.built_in)


def check_member(group: Group, name: str, *, others: tuple[str, ...] = ()) -> str:
    """The `module:function` behind a name, without importing it. Raises ValueError naming the nearest known name;
    `others` of the same key are named too."""
    if name in group.built_in:
        return group.built_in[name]  # without reading the entry points of all installed packages
    if ":" in name:
        return name
    known = known_members(group)
    if name in known:
        return known[name]
    names = [*known, *others]
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    nearest = f"; did you mean {close[0]!r}?" if close else ";"
    raise ValueError(
        f"{group.key} = {name!r}{nearest} expected one of {', '.join(names)}, a module:function, or a name from an "
        f"entry point in the group {group.entry_points!r}"
    )


def divergence_group(name: str) -> Group:
    """Whether `learner.divergence` is a cost of sampled tokens or between distributions. `module:function` is a cost.
    Raises ValueError for a name that neither has."""
    return _one_of(DIVERGENCES, DISTRIBUTION_DIVERGENCES, name)


def needs_top_k(name: str) -> bool:
    """Whether this divergence is between distributions, for which teachers must send top-k sets."""
    return divergence_group(name) is DISTRIBUTION_DIVERGENCES


def advantage_group(name: str) -> Group:
    """Whether `learner.advantage` is one of rollouts, or of tokens, which needs a value function. `module:function` is
    one of rollouts. Raises ValueError for a name that neither has."""
    return _one_of(ADVANTAGES, TOKEN_ADVANTAGES, name)


def _one_of(plain: Group, other: Group, name: str) -> Group:
    for group in (plain, other):
        if name in group.built_in:
            return group
    if ":" not in name and name in known_members(other):
        return other
    check_member(plain, name, others=(*other.built_in,))
    return plain


def find_member(group: Group, name: str) -> Callable[..., Any]:
    """The function behind a name. Raises ValueError when it is unknown or cannot be imported."""
    path = check_member(group, name)
    module_name, _, attribute = path.partition(":")
    try:
        member = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{group.key} = {name!r}: cannot load {path!r}: {error}") from error
    if not callable(member):
        raise ValueError(f"{group.key} = {name!r}: {path!r} is a {type(member).__name__}, expected a function")
    return member
