"""A control without a teacher: the same negative advantage for every token that the student itself found unlikely.

Ding and Zhang (arXiv 2608.31046) report that such a control does as well as on-policy distillation on their tasks. It
makes the student surer of what it says already, and knows nothing of the teacher's instruction. Selected as a cost:

    PYTHONPATH=examples/smollm2 .venv/bin/python launch/cluster.py --config examples/smollm2/context.toml \
        --divergence=null_teacher:unlikely --learner.objective.divergence.kl_student=behaviour

With `kl_student = behaviour` a token is judged by its log-prob when it was sampled, else by its present one.
No torch is imported here: the launcher reads the options.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from learner.objectives.options import Sampled
from protocol.settings import PositiveFloat

if TYPE_CHECKING:
    from torch import Tensor


class Unlikely(Sampled, frozen=True, kw_only=True):
    """Which tokens are unlikely, and the cost of each."""

    below: Annotated[float, Meta(lt=0)] = -4.2
    """Log-prob, nats. A fifth of the tokens that SmolLM2-135M samples after these questions before training are below
    it; the paper trains the least likely fifth. The bound is fixed: a cost must not depend on the microbatch."""
    penalty: PositiveFloat = 0.5
    """The cost, that is minus the advantage: -0.5 in the paper."""


def unlikely(student: Tensor, teacher: Tensor, options: Unlikely) -> Tensor:
    """`penalty` where s < `below`, else 0, whatever the teacher says. Shape: that of s and q broadcast together."""
    return (options.penalty * (student < options.below)).to(student.dtype).expand_as(student + teacher)


unlikely.options = Unlikely  # pyright: ignore[reportFunctionMemberAccess]
