"""Settings of an objective: what is minimised, and how tokens are weighed. No torch here.

How the sampling temperature enters. Teachers score at temperature 1, so the two distributions are compared, and the
student is trained, at temperature 1. `tasks.temperature` only decides which tokens get sampled: mu is the log-prob
under the distribution really sampled from, s the one at temperature 1, and r = exp(s - mu) corrects the difference
exactly (up to the cap). At the default of 1 a fresh token has r = 1.

Settings of the rollouts that the teacher wrote and the student is trained on besides its own. No torch here.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, TypeAlias

import msgspec

from learner.objectives.options import Capped, Distributions, Sampled
from learner.objectives.registry import ADVANTAGE, AGGREGATIONS, DIVERGENCE, WEIGHT, check_member
from learner.prompts.config import TaskConfig
from protocol.settings import Member, NonNegativeFloat, PositiveFloat, Settings, Share

DomainScale: TypeAlias = Literal["none", "rms"]
_NO_CORRECTION = ("none", "geometric", "geometric_masked", "gspo")
"""Importance weights that do not turn samples of one distribution into those of another, token by token."""


class ObjectiveConfig(Settings, frozen=True, kw_only=True):
    """Divergence, importance weight and advantage are each a name and the options of the member with that name. All
    members: docs/objectives.md; further ones by entry point or module:function."""

    divergence: Annotated[Member, DIVERGENCE] = Sampled()
    """From the student's distribution to the teachers'. Of sampled tokens: k1, k2: s - q, the gradient of the reverse
    KL; k3: 1 - exp(q - s), the gradient of the forward KL; seq_kd: -1, cross-entropy, for text that the teacher wrote.
    Between distributions, which need teacher.top_k: reverse_kl, forward_kl, mixed, jsd, multi_sample."""
    coef: NonNegativeFloat = 1.0
    """Weight of the divergence against the rewards: A = A_reward - sum over its teachers of coef * cost. Between
    distributions coef * divergence is added to the loss. 0: rewards only; with teachers = 0 nobody scores."""
    teacher_coefs: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    """Teacher pool -> its own coef, instead of the common one."""
    domain_scale: DomainScale = "none"
    """For costs of sampled tokens. rms: the costs of each domain (tag) are divided by their root mean square over the
    batch, so that teachers whose log-probs differ in size pull equally hard. none: as they are."""
    importance: Annotated[Member, WEIGHT] = Capped()
    """Weight of a token sampled by an older policy, from r = exp(s - mu). none: 1; truncated: min(r, cap); masked: r
    inside [low, high], else 0; ppo: r where PPO's clip to [low, high] leaves a gradient, else 0; decoupled: ppo around
    the policy that the step began with; of whole rollouts: sequence, sequence_masked, geometric, geometric_masked,
    gspo."""
    advantage: Annotated[Member, ADVANTAGE] = Member(name="none")
    """From the rewards: none; of whole rollouts grpo, reinforce_pp, reinforce_pp_baseline; of single tokens, by a
    learned value function, gae (PPO's). All but none need buffer.release = rollout."""
    aggregation: str = "token_mean"
    """From the losses of tokens to the loss of the batch: token_mean; sequence_mean, the mean over rollouts of their
    token means; constant, the sum over the tokens divided by rollouts times tasks.max_new_tokens, which no length
    changes (Dr. GRPO)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        DIVERGENCE.check(self.divergence)
        WEIGHT.check(self.importance)
        ADVANTAGE.check(self.advantage)
        check_member(AGGREGATIONS, self.aggregation)
        check_seq_kd(self.divergence, self.importance)
        for pool, coef in self.teacher_coefs.items():
            if not 0.0 <= coef < math.inf:
                raise ValueError(f"teacher_coefs.{pool} must be at least 0, got {coef}")
        if self.coef == 0.0 and not any(self.teacher_coefs.values()) and self.advantage.name == "none":
            raise ValueError(
                "coef = 0 with advantage = 'none' leaves nothing to learn from; expected a coef above 0 or an advantage"
            )
        if self.domain_scale != "none" and self.needs_top_k:
            raise ValueError(
                f"domain_scale = {self.domain_scale!r} with divergence = {self.divergence.name!r}: only costs of "
                "sampled tokens are scaled by domain; use divergence = 'k1', 'k2' or 'k3', or domain_scale = 'none'"
            )

    @property
    def needs_top_k(self) -> bool:
        """Whether the divergence is between distributions, for which teachers must send top-k sets."""
        return isinstance(self.divergence, Distributions)

    def check_tasks(self, tasks: TaskConfig) -> None:
        """Raises ValueError where tasks give nothing to learn from, or sample in a way that cannot be corrected."""
        for pool in self.teacher_coefs:
            if pool not in tasks.routes:
                pools = ", ".join(tasks.routes)
                raise ValueError(
                    f"objective.teacher_coefs names the pool {pool!r}; expected one of tasks.routes: {pools}"
                )
        if not tasks.routes and self.advantage.name == "none":
            raise ValueError(
                "tasks.routes = {} with objective.advantage = 'none' leaves nothing to learn from, for no teacher "
                "scores anything; expected a pool in tasks.routes, or an advantage"
            )
        if tasks.top_p < 1.0 or tasks.top_k > 0:
            raise ValueError(
                f"tasks.top_p = {tasks.top_p}, tasks.top_k = {tasks.top_k}: this never shows some tokens, so no "
                "importance ratio recovers the student's distribution; train with top_p = 1 and top_k = 0"
            )
        if tasks.temperature != 1.0:
            self._check_temperature(tasks.temperature)

    def _check_temperature(self, temperature: float) -> None:
        """mu must be comparable where it is compared."""
        sampled = f"tasks.temperature = {temperature}"
        if self.domain_scale != "none":
            raise ValueError(
                f"objective.domain_scale = {self.domain_scale!r} with {sampled}: the size of costs is measured by the "
                "log-probs sampled with; use temperature 1, or domain_scale = 'none'"
            )
        if self.importance.name in _NO_CORRECTION:
            raise ValueError(
                f"{sampled} with objective.importance = {self.importance.name!r}: the student is compared with its "
                "teacher at temperature 1, which needs the ratio of each token; use importance = 'truncated', or "
                "temperature 1"
            )
        if isinstance(self.divergence, Sampled) and self.divergence.kl_student == "behaviour":
            raise ValueError(
                f"{sampled} with objective.divergence.kl_student = 'behaviour': mu at that temperature cannot be "
                "compared with a teacher at temperature 1; use kl_student = 'current', or temperature 1"
            )


def check_seq_kd(divergence: Member, importance: Member) -> None:
    """Raises ValueError: a correction back to the student's distribution takes all out of cross-entropy, because the
    mean of grad s over the student's own tokens is 0."""
    if divergence.name == "seq_kd" and importance.name != "none":
        raise ValueError(
            f"divergence = 'seq_kd' with importance = {importance.name!r}: cross-entropy is on the text as it stands; "
            "expected importance = 'none'"
        )


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
