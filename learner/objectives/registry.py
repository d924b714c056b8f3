"""Members of an objective by name: built in, from installed packages, or `module:function`.

A package registers a member under the group's entry points in its pyproject.toml, and the class of its options under
the same name in `<group>.options` (docs/objectives.md has complete examples):

    [project.entry-points."stillhouse.divergences"]
    huber = "my_package.costs:huber"
    [project.entry-points."stillhouse.divergences.options"]
    huber = "my_package.options:Huber"

No torch here: the launcher checks names and options before anything starts. An attribute `options` of the function can
replace the second entry, but then the launcher must import the function's module when options are given.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, NamedTuple

import msgspec

from stillhouse.learner.objectives.options import (
    Capped,
    Cispo,
    Clip,
    Clipped,
    Decoupled,
    Distributions,
    GroupLength,
    Grpo,
    Gspo,
    Jsd,
    LogRatio,
    Mixed,
    MultiSample,
    Null,
    Overlong,
    RatioBounds,
    SampledDivergence,
    TokenAdvantage,
    TurnAdvantage,
    TurnReturns,
)
from stillhouse.protocol.plugins import CannotLoad, installed, load
from stillhouse.protocol.settings import Member, Members


class Group(NamedTuple):
    """One registry: name -> `module:function`."""

    key: str
    """Key in the objective's section, for messages."""
    entry_points: str
    built_in: Mapping[str, str]
    base: type[Member] = Member
    """Base class of the members' options."""
    sections: Mapping[str, type[Member]] = {}
    """Options of built-in members that need more than the base."""

    def section(self, name: str) -> type[Member]:
        """Options of a built-in member."""
        return self.sections.get(name, self.base)


_HERE = "stillhouse.learner.objectives"

DIVERGENCES = Group(
    "divergence",
    "stillhouse.divergences",
    {name: f"{_HERE}.sampled:{name}" for name in ("k1", "k2", "k3", "seq_kd", "null")},
    SampledDivergence,
    {"k1": LogRatio, "k2": LogRatio, "seq_kd": Member, "null": Null},
)
"""Costs of a sampled token: `learner.objectives.sampled.CostFn`."""

DISTRIBUTION_DIVERGENCES = Group(
    "divergence",
    "stillhouse.distribution_divergences",
    {name: f"{_HERE}.distributions:{name}" for name in ("forward_kl", "reverse_kl", "mixed", "jsd", "multi_sample")},
    Distributions,
    {"mixed": Mixed, "jsd": Jsd, "multi_sample": MultiSample},
)
"""Between whole distributions: `learner.objectives.distributions.DistributionFn`. They have the same key as the
costs."""

COST_TRANSFORMS = Group(
    "cost_transform",
    "stillhouse.cost_transforms",
    {"none": f"{_HERE}.sampled:unchanged", "clip": f"{_HERE}.sampled:clip", "log": f"{_HERE}.sampled:log"},
    sections={"clip": Clip},
)
"""Changes of costs of sampled tokens: `learner.objectives.sampled.CostTransformFn`."""

IMPORTANCE = Group(
    "importance",
    "stillhouse.importance",
    {
        "none": f"{_HERE}.importance:no_weights",
        "truncated": f"{_HERE}.importance:truncated",
        "sequence": f"{_HERE}.importance:sequence",
        "geometric": f"{_HERE}.importance:geometric",
        "cispo": f"{_HERE}.importance:cispo",
        "ppo": f"{_HERE}.importance:ppo",
        "gspo": f"{_HERE}.importance:gspo",
        "decoupled": f"{_HERE}.importance:decoupled",
    },
    sections={
        **dict.fromkeys(("truncated", "sequence", "geometric"), Capped),
        "cispo": Cispo,
        "ppo": Clipped,
        "gspo": Gspo,
        "decoupled": Decoupled,
    },
)
"""Weights of tokens from an older policy: `learner.objectives.importance.ImportanceFn`."""

REJECTIONS = Group(
    "rejection",
    "stillhouse.rejections",
    {name: f"{_HERE}.rejection:{name}" for name in ("none", "token", "sequence", "geometric")},
    sections=dict.fromkeys(("token", "sequence", "geometric"), RatioBounds),
)
"""Tokens on which two policies disagree: `learner.objectives.rejection.RejectionFn`."""

ADVANTAGES = Group(
    "advantage",
    "stillhouse.advantages",
    {
        "none": f"{_HERE}.advantages:no_advantage",
        "grpo": f"{_HERE}.advantages:grpo",
        "reinforce_pp": f"{_HERE}.advantages:reinforce_pp",
        "reinforce_pp_baseline": f"{_HERE}.advantages:reinforce_pp_baseline",
    },
    sections={"grpo": Grpo},
)
"""From rewards of rollouts: `learner.objectives.advantages.AdvantageFn`."""

TURN_ADVANTAGES = Group(
    "advantage",
    "stillhouse.turn_advantages",
    {"turn_returns": f"{_HERE}.advantages:turn_returns"},
    TurnAdvantage,
    {"turn_returns": TurnReturns},
)
"""From the rewards of turns: `learner.objectives.advantages.TurnAdvantageFn`. They have the same key."""

TOKEN_ADVANTAGES = Group(
    "advantage",
    "stillhouse.token_advantages",
    {"gae": f"{_HERE}.advantages:gae_whitened"},
    TokenAdvantage,
)
"""From rewards and a value function: `learner.objectives.advantages.TokenAdvantageFn`. They have the same key."""

AGGREGATIONS = Group(
    "aggregation",
    "stillhouse.aggregations",
    {name: f"{_HERE}.losses:{name}" for name in ("token_mean", "sequence_mean", "constant")},
)
"""From losses of tokens to the loss of a batch: `learner.objectives.losses.AggregationFn`."""


TURN_AGGREGATIONS = Group(
    "aggregation",
    "stillhouse.turn_aggregations",
    {name: f"{_HERE}.losses:{name}" for name in ("turn_mean", "sequence_turn_mean")},
)
"""By turn of the student: `learner.objectives.losses.TurnAggregationFn`. They have the same key."""

LENGTH_PENALTIES = Group(
    "length_penalty",
    "stillhouse.length_penalties",
    {name: f"{_HERE}.length:{name}" for name in ("none", "overlong", "group_length")},
    sections={"overlong": Overlong, "group_length": GroupLength},
)
"""Added to rewards: `learner.objectives.length.LengthPenaltyFn`."""


class Loaded(NamedTuple):
    """A member, ready to be called."""

    function: Callable[..., Any]
    options: Member
    own_options: bool
    """True if it has more options than its group's base."""


class MemberChoice(Members):
    """The members of one or two groups under one key. A `module:function` belongs to the first group."""

    def __init__(self, *groups: Group) -> None:
        self._groups = groups

    def known(self) -> Mapping[str, type[Member]]:
        return {name: _listed(group, name) for group in self._groups for name in known_members(group)}

    def section(self, name: str, *, with_options: bool) -> type[Member]:
        group = self.group(name)
        if name in group.built_in:
            return group.section(name)
        section = _options_entry(group, name)
        if section is None and with_options:
            section = _options_attribute(group, name, find_member(group, name))
        return section or group.base

    def group(self, name: str) -> Group:
        """The group with this name. Raises ValueError for an unknown name."""
        for group in self._groups:
            if name in group.built_in:
                return group
        first, *others = self._groups
        for group in others:
            if ":" not in name and name in known_members(group):
                return group
        check_member(first, name, others=tuple(other for group in others for other in group.built_in))
        return first

    def make(self, name: str, **options: Any) -> Member:
        """The section of a member, with defaults for the options not given. Raises ValueError."""
        section = self.section(name, with_options=bool(options))
        try:
            return msgspec.convert({"name": name, **options}, section)
        except msgspec.ValidationError as error:
            raise ValueError(f"{self._groups[0].key} = {name!r}: {error}") from error

    def check(self, member: Member) -> None:
        """Raises ValueError for a section whose type does not fit its name."""
        group = self.group(member.name)
        expected = group.section(member.name) if member.name in group.built_in else group.base
        if not isinstance(member, expected):
            raise ValueError(
                f"{group.key}: got {type(member).__name__} with the name {member.name!r}, expected {expected.__name__}"
            )

    def load(self, member: Member) -> Loaded:
        """Raises ValueError for a member that cannot be imported."""
        group = self.group(member.name)
        function = find_member(group, member.name)
        section = _options_attribute(group, member.name, function)
        if section is not None and type(member) is group.base:  # no options were given
            member = msgspec.convert(msgspec.to_builtins(member), section)
        return Loaded(function, member, type(member) not in (group.base, Member))


DIVERGENCE = MemberChoice(DIVERGENCES, DISTRIBUTION_DIVERGENCES)
COST_TRANSFORM = MemberChoice(COST_TRANSFORMS)
WEIGHT = MemberChoice(IMPORTANCE)
REJECTION = MemberChoice(REJECTIONS)
ADVANTAGE = MemberChoice(ADVANTAGES, TURN_ADVANTAGES, TOKEN_ADVANTAGES)
LENGTH_PENALTY = MemberChoice(LENGTH_PENALTIES)


def counts_by_turn(aggregation: str) -> bool:
    """Whether an aggregation is one of turns. Raises ValueError for an unknown name."""
    if aggregation in TURN_AGGREGATIONS.built_in:
        return True
    if ":" not in aggregation and aggregation not in AGGREGATIONS.built_in:
        if aggregation in known_members(TURN_AGGREGATIONS):
            return True
        check_member(AGGREGATIONS, aggregation, others=tuple(TURN_AGGREGATIONS.built_in))
    return False


def known_members(group: Group) -> dict[str, str]:
    """Name -> `module:function`. A package cannot take a built-in name."""
    built_in = dict(group.built_in)
    return built_in | installed(group.entry_points) | built_in


def check_member(group: Group, name: str, *, others: tuple[str, ...] = ()) -> str:
    """The `module:function` of a name, without importing it. Raises ValueError with the nearest known name; `others`
    are more names of the same key."""
    if name in group.built_in:
        return group.built_in[name]  # no need to read the entry points of all packages
    if ":" in name:
        return name
    known = known_members(group)
    if name in known:
        return known[name]
    names = [*known, *others]
    close = [one for one in names if name in one.split("_")] or difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    nearest = f"; did you mean {' or '.join(map(repr, close))}?" if close else ";"
    raise ValueError(
        f"{group.key} = {name!r}{nearest} expected one of {', '.join(names)}, a module:function, or a name from an "
        f"entry point in the group {group.entry_points!r}"
    )


def find_member(group: Group, name: str) -> Callable[..., Any]:
    """The function of a name. Raises ValueError if it is unknown or cannot be imported."""
    path = check_member(group, name)
    member = _imported(group, name, path)
    if not callable(member):
        raise ValueError(f"{group.key} = {name!r}: {path!r} is a {type(member).__name__}, expected a function")
    return member


def _imported(group: Group, name: str, path: str) -> Any:
    try:
        return load(path)
    except CannotLoad as error:
        raise ValueError(f"{group.key} = {name!r}: {error}") from error


def _listed(group: Group, name: str) -> type[Member]:
    """Options of a member, for listings. Options that fail to import are reported when the member is chosen."""
    try:
        return group.section(name) if name in group.built_in else _options_entry(group, name) or group.base
    except ValueError:
        return group.base


def _options_entry(group: Group, name: str) -> type[Member] | None:
    """Options class that a package registers for its member; None without one. Raises ValueError."""
    for entry in entry_points(group=f"{group.entry_points}.options", name=name):
        return _checked(group, name, _imported(group, name, entry.value))
    return None


def _options_attribute(group: Group, name: str, function: Callable[..., Any]) -> type[Member] | None:
    section = getattr(function, "options", None)
    return None if section is None else _checked(group, name, section)


def _checked(group: Group, name: str, section: object) -> type[Member]:
    if not (isinstance(section, type) and issubclass(section, group.base)):
        raise ValueError(
            f"{group.key} = {name!r}: its options are {section!r}, expected a subclass of "
            f"{group.base.__module__}.{group.base.__name__}"
        )
    return section
