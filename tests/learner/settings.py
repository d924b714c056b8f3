"""A learner's settings in one call, those of its objective among them."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from stillhouse.learner.config import OPTIMIZER, LearnerConfig
from stillhouse.learner.objectives.config import ObjectiveConfig
from stillhouse.learner.objectives.registry import (
    ADVANTAGE,
    COST_TRANSFORM,
    DIVERGENCE,
    LENGTH_PENALTY,
    REJECTION,
    WEIGHT,
)

CHOICES: Final = {
    "divergence": DIVERGENCE,
    "cost_transform": COST_TRANSFORM,
    "importance": WEIGHT,
    "rejection": REJECTION,
    "advantage": ADVANTAGE,
    "length_penalty": LENGTH_PENALTY,
    "optimizer": OPTIMIZER,
}
OBJECTIVE: Final = frozenset(field.name for field in msgspec.structs.fields(ObjectiveConfig))


def objective_config(**fields: Any) -> ObjectiveConfig:
    """A member is a name, or (name, options)."""
    return ObjectiveConfig(**{name: _value(name, value) for name, value in fields.items()})


def learner_config(**fields: Any) -> LearnerConfig:
    """`fields`: of LearnerConfig, and of ObjectiveConfig."""
    objective = objective_config(**{name: value for name, value in fields.items() if name in OBJECTIVE})
    others = {name: _value(name, value) for name, value in fields.items() if name not in OBJECTIVE}
    return LearnerConfig(objective=objective, **others)


def _value(name: str, value: Any) -> Any:
    match value:
        case dict() if name == "teacher_divergences":
            return {pool: _value("divergence", one) for pool, one in value.items()}
        case str() if name in CHOICES:
            return CHOICES[name].make(value)
        case str() as member, dict() as options:
            return CHOICES[name].make(member, **options)
        case _:
            return value
