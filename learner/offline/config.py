"""Settings of the rollouts that the teacher wrote and the student is trained on besides its own. No torch here."""

from __future__ import annotations

from typing import Annotated

from learner.objectives.config import ObjectiveConfig, check_seq_kd
from learner.objectives.options import Distributions, Sampled
from learner.objectives.registry import DIVERGENCE, WEIGHT
from protocol.settings import Member, PositiveFloat, Settings, Share


class OfflineConfig(Settings, frozen=True, kw_only=True):
    """Off-policy data beside the student's own (docs/decisions/off-policy-data.md)."""

    file: str = ""
    """Rollouts that the teacher wrote and scored, recorded by python -m launch.write. Empty: none."""
    student_fraction: Share = 1.0
    """lambda: of the trained tokens, the share that the student wrote itself; the rest is from `file`. 1: all. For 0,
    the off-policy baseline, there is no run: python -m replay trains on the file alone."""
    divergence: Annotated[Member, DIVERGENCE] = Member(name="seq_kd")
    """Cost of a token of `file`. seq_kd: -1, which makes it plain cross-entropy on the teacher's text; the others as in
    learner.objective.divergence; those between distributions if `file` was written with teacher.top_k."""
    importance: Annotated[Member, WEIGHT] = Member(name="none")
    """Weight of a token of `file`, from r = exp(s - mu); mu is the teacher's log-prob, for it wrote the text. none:
    expectations are over the teacher's tokens; with `truncated` k1 estimates the reverse KL on its text."""
    coef: PositiveFloat = 1.0
    """What a token of `file` weighs against one of the student."""

    def __post_init__(self) -> None:
        super().__post_init__()
        DIVERGENCE.check(self.divergence)
        WEIGHT.check(self.importance)
        check_seq_kd(self.divergence, self.importance)
        if isinstance(self.divergence, Sampled) and self.divergence.kl_student == "behaviour":
            raise ValueError(
                "divergence.kl_student: got behaviour, expected current: mu of these tokens is the teacher's log-prob"
            )
        if isinstance(self.divergence, Distributions) and self.divergence.context_cap:
            raise ValueError(
                f"divergence.context_cap: got {self.divergence.context_cap}, expected 0: the contexts of these tokens "
                "are the teacher's, and are not weighted"
            )
        if self.student_fraction < 1.0 and not self.file:
            raise ValueError(
                f"student_fraction = {self.student_fraction} without a file: expected one that the teacher wrote "
                "(python -m launch.write), or a fraction of 1"
            )
        if self.file and self.student_fraction == 1.0:
            raise ValueError(
                "file with student_fraction = 1 would not be used; expected a fraction below 1, or no file"
            )

    @property
    def objective(self) -> ObjectiveConfig:
        """For these tokens alone: no rewards, one coefficient for all teachers."""
        return ObjectiveConfig(divergence=self.divergence, importance=self.importance, coef=self.coef)
