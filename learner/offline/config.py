"""Settings of the rollouts that the teacher wrote and the student is trained on besides its own. No torch here."""

from __future__ import annotations

import math

import msgspec

from learner.objectives.registry import IMPORTANCE, check_member, divergence_group


class OfflineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Off-policy data beside the student's own (docs/decisions/off-policy-data.md)."""

    file: str = ""
    """Rollouts that the teacher wrote and graded, recorded by python -m launch.write. Empty: none."""
    student_fraction: float = 1.0
    """lambda: of the trained tokens, the share that the student wrote itself; the rest is from `file`. 1: all. For 0,
    the off-policy baseline, there is no run: python -m replay trains on the file alone."""
    divergence: str = "seq_kd"
    """Cost of a token of `file`. seq_kd: -1, which makes it plain cross-entropy on the teacher's text; the others as in
    learner.divergence; those between distributions if `file` was written with teacher.top_k."""
    importance: str = "none"
    """Weight of a token of `file`, from r = exp(s - mu); mu is the teacher's log-prob, for it wrote the text. none:
    expectations are over the teacher's tokens; with `truncated` k1 estimates the reverse KL on its text."""
    coef: float = 1.0
    """What a token of `file` weighs against one of the student."""

    def __post_init__(self) -> None:
        divergence_group(self.divergence)
        check_member(IMPORTANCE, self.importance)
        check_seq_kd("offline.", self.divergence, self.importance)
        if not 0.0 <= self.student_fraction <= 1.0:
            raise ValueError(f"offline.student_fraction must be in [0, 1], got {self.student_fraction}")
        if not 0.0 < self.coef < math.inf:
            raise ValueError(f"offline.coef must be positive and finite, got {self.coef}")
        if self.student_fraction < 1.0 and not self.file:
            raise ValueError(
                f"offline.student_fraction = {self.student_fraction} without offline.file: expected a file that the "
                "teacher wrote (python -m launch.write), or a fraction of 1"
            )
        if self.file and self.student_fraction == 1.0:
            raise ValueError(
                "offline.file with offline.student_fraction = 1 would not be used; expected a fraction below 1, or no "
                "file"
            )


def check_seq_kd(prefix: str, divergence: str, importance: str) -> None:
    """Raises ValueError: a correction back to the student's distribution takes all out of cross-entropy, because the
    mean of grad s over the student's own tokens is 0."""
    if divergence == "seq_kd" and importance != "none":
        raise ValueError(
            f"{prefix}divergence = 'seq_kd' with {prefix}importance = {importance!r}: cross-entropy is on the text as "
            f"it stands; expected {prefix}importance = 'none'"
        )
