"""Settings of the objectives: of the student's own tokens, and of offline data. No torch here.

Teachers score at temperature 1, so the two distributions are compared, and the student is trained, at temperature 1.
`tasks.temperature` only decides which tokens get sampled: mu is the log-prob under the distribution really sampled
from, s the one at temperature 1, and r = exp(s - mu) corrects the difference exactly (up to the cap). At the default of
1 a fresh token has r = 1."""

# Why it is so: docs/decisions/temperature.md

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

import msgspec

from stillhouse.learner.objectives.options import Capped, Distributions, LogRatio, Null, SampledDivergence
from stillhouse.learner.objectives.registry import (
    ADVANTAGE,
    AGGREGATIONS,
    COST_TRANSFORM,
    DIVERGENCE,
    LENGTH_PENALTY,
    REJECTION,
    WEIGHT,
    check_member,
    counts_by_turn,
)
from stillhouse.learner.prompts.config import TaskConfig
from stillhouse.protocol.settings import Member, NonNegativeFloat, PositiveFloat, Settings, Share
from stillhouse.protocol.topk_layout import MAX_TOKENS_KEPT

DomainScale: TypeAlias = Literal["none", "rms"]
TeacherBalance: TypeAlias = Literal["none", "tokens"]
CostReturn: TypeAlias = Literal["sum", "mean"]
_NO_CORRECTION = ("none", "geometric", "gspo")
"""Importance weights that do not correct each token's distribution."""


class ObjectiveConfig(Settings, frozen=True, kw_only=True):
    """The loss. Divergence, importance weight and advantage are each a name, with the options that this name has.
    docs/objectives.md lists all names; packages add more by entry point, and module:function names a function."""

    divergence: Annotated[Member, DIVERGENCE] = LogRatio()
    """Divergence between student and teachers. On sampled tokens: k1, k2 (s - q, the gradient of the reverse KL), k3
    (1 - exp(q - s), the gradient of the forward KL), seq_kd (-1, cross-entropy; only for text that the teacher wrote),
    null (a constant on unlikely tokens, without a teacher). The others are between distributions and need
    teacher.top_k."""
    cost_transform: Annotated[Member, COST_TRANSFORM] = Member(name="none")
    """Change of each cost of a sampled token, before anything else is done with it. clip: limited to `limit` nats in
    both directions. log: sign(cost) * log(1 + |cost|). Either makes single tokens count less, and the gradient is then
    no longer that of the named divergence. none: no change."""
    coef: NonNegativeFloat = 1.0
    """Weight of the divergence. On sampled tokens A = A_reward - sum over teachers of coef * cost; between
    distributions coef * divergence is added to the loss. 0: train on rewards only; teachers = 0 then runs without
    teachers."""
    teacher_coefs: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    """Teacher pool -> coefficient of this pool, in place of coef. A pool with 0 scores for the figures only, and
    needs no top-k sets: if its divergence would, its figures are those of k1."""
    teacher_divergences: dict[str, Annotated[Member, DIVERGENCE]] = msgspec.field(default_factory=dict[str, Member])
    """Teacher pool -> divergence of this pool, in place of divergence, with options of its own. The pool must send what
    its divergence needs (pools.NAME.top_k or pools.NAME.payload). The costs and divergences of a token's pools are
    added up."""
    teacher_balance: TeacherBalance = "none"
    """Balance between pools whose tasks have more or longer rollouts than others. tokens: the divergences of all pools
    have the same total weight in a batch, before coefficients, however many tokens each pool scored. none: each token
    counts the same."""
    domain_scale: DomainScale = "none"
    """Scaling of the costs of sampled tokens. rms: divide the costs of each domain (tag) by their root mean square over
    the batch, so that every domain pulls equally hard. none: leave them as they are."""
    importance: Annotated[Member, WEIGHT] = Capped()
    """Weight of a token that an older policy sampled, from r = exp(s - mu). none: 1. truncated: min(r, cap). cispo: r
    limited to [low, high]. ppo: r where PPO's clip to [low, high] leaves a gradient, else 0. decoupled: ppo around the
    policy that the step started with. From the r of whole rollouts: sequence, geometric, gspo."""
    rejection: Annotated[Member, REJECTION] = Member(name="none")
    """Tokens that are not trained because r is outside [low, high]; the others keep the weight of importance. none: all
    are trained. token: by r of the token. Whole rollouts, by the product of r (sequence) or its geometric mean
    (geometric). Divergences between distributions are not affected."""
    advantage: Annotated[Member, ADVANTAGE] = Member(name="none")
    """Advantage from rewards. none: rewards are not trained on. Per rollout: grpo, reinforce_pp, reinforce_pp_baseline.
    Per turn, from the rewards of each turn: turn_returns.
    Per token, with a learned value function: gae (as in PPO). All except none need buffer.release = rollout."""
    length_penalty: Annotated[Member, LENGTH_PENALTY] = Member(name="none")
    """Term that is added to rewards, by the number of tokens that the student wrote. overlong: falls from 0 to -1 near
    tasks.max_new_tokens (DAPO). group_length: by the shortest and longest rollout of the group (Kimi k1.5). Needs an
    advantage."""
    turn_discount: Share = 1.0
    """Discount of the divergence per turn: that of a token is multiplied by turn_discount ** (turns before its own).
    0: only the first turn is distilled. Rewards are not changed."""
    cost_discount: Share = 0.0
    """Discount per trained token with which a token also answers for the costs of those that follow it. 0: each token
    answers only for itself. 1: for all that follows, which is the gradient of the divergence between whole rollouts,
    with much more variance. Only with costs of sampled tokens."""
    cost_return: CostReturn = "sum"
    """What a token answers for with cost_discount. sum: the discounted sum of the costs. mean: this divided by the sum
    of the discounts, so that the beginning of a long rollout does not weigh more than its end (MiniLLM)."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the student's entropy, in nats per token, which is added to what is maximised: it slows the loss of
    variety. 0: off."""
    prefix_gain: NonNegativeFloat = 0.0
    """Extra weight of the divergence early in a rollout, where the text is still near the teacher's (gamma of IW-OPD,
    published: 0.5). A token's divergence is multiplied by 1 + prefix_gain * (1 - D / T): D is the sum of |mu - q| over
    the tokens before it, T that over all of them. 0: off."""
    aggregation: str = "token_mean"
    """Mean that makes the batch's loss from the losses of tokens. token_mean: over all tokens. sequence_mean: over
    rollouts, of their token means. turn_mean: over turns of the student, of their token means. sequence_turn_mean: over
    rollouts, of the means over their turns. constant: the sum divided by rollouts x tasks.max_new_tokens, which does
    not depend on the lengths (Dr. GRPO)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_members()
        self._check_divergences(self.divergences)
        COST_TRANSFORM.check(self.cost_transform)
        WEIGHT.check(self.importance)
        REJECTION.check(self.rejection)
        ADVANTAGE.check(self.advantage)
        LENGTH_PENALTY.check(self.length_penalty)
        by_turn = counts_by_turn(self.aggregation)
        if not by_turn:
            check_member(AGGREGATIONS, self.aggregation)
        for pool, coef in self.teacher_coefs.items():
            if not 0.0 <= coef < math.inf:
                raise ValueError(f"teacher_coefs.{pool} must be at least 0, got {coef}")
        if not self.has_divergence and self.advantage.name == "none":
            raise ValueError(
                "coef = 0 with advantage = 'none' leaves nothing to learn from; expected a coef above 0 or an advantage"
            )
        if by_turn and self.importance.name == "gspo":
            raise ValueError(
                f"aggregation = {self.aggregation!r} with importance = 'gspo', whose ratio is that of whole rollouts; "
                "expected aggregation = 'sequence_mean', or another importance"
            )
        if self.turn_discount < 1.0 and not self.has_divergence:
            raise ValueError(
                f"turn_discount = {self.turn_discount} with coef = 0: there is no divergence to discount; expected 1, "
                "or a coef above 0"
            )
        by_pool = self.teacher_coefs or self.teacher_divergences
        if isinstance(self.divergence, Null) and (
            by_pool or self.domain_scale != "none" or self.teacher_balance != "none"
        ):
            raise ValueError(
                "divergence = 'null' reads no teacher: expected no teacher_coefs and no teacher_divergences, "
                "domain_scale = 'none' and teacher_balance = 'none'; coef is the weight of its cost"
            )
        if self.prefix_gain and not self.reads_teachers:
            raise ValueError(
                f"prefix_gain = {self.prefix_gain} without a teacher in the loss: its weights are from the scores of "
                "teachers; expected 0, or a coef above 0 and a divergence other than null"
            )
        if self.length_penalty.name != "none" and self.advantage.name == "none":
            raise ValueError(
                f"length_penalty = {self.length_penalty.name!r} with advantage = 'none', which trains on no reward; "
                "expected an advantage, or length_penalty = 'none'"
            )

        self._check_discount()

    def _check_discount(self) -> None:
        """Raises ValueError for a discount of costs where it would do nothing, or something wrong."""
        if not self.cost_discount:
            if self.cost_return != "sum":
                raise ValueError(
                    f"cost_return = {self.cost_return!r} with cost_discount = 0: a token answers only for itself; "
                    "expected a cost_discount above 0, or cost_return = 'sum'"
                )
            return
        got = f"cost_discount = {self.cost_discount}"
        if not self.has_divergence:
            raise ValueError(f"{got} with coef = 0: there are no costs; expected 0, or a coef above 0")
        for one in self.divergences:
            if compares_distributions(one) or one.name == "seq_kd":
                raise ValueError(
                    f"{got} with divergence = {one.name!r}: only costs of tokens that the student sampled are "
                    "discounted; expected 'k1', 'k2', 'k3' or 'null', or cost_discount = 0"
                )
            if has_baseline(one):
                raise ValueError(
                    f"{got} with divergence.baseline = 'expected_cost', whose mean over what follows is that of the "
                    "costs: only noise would be left of them; expected baseline = 'none', or cost_discount = 0"
                )

    def _check_members(self) -> None:
        """Raises ValueError for a divergence that is none, or that cannot be that of a single pool."""
        DIVERGENCE.check(self.divergence)
        for pool, divergence in self.teacher_divergences.items():
            key = f"teacher_divergences.{pool}"
            try:
                DIVERGENCE.check(divergence)
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from error
            if isinstance(divergence, Null):
                raise ValueError(
                    f"{key}: got 'null', which reads no teacher; expected another one, or divergence = null"
                )

    def _check_divergences(self, divergences: Sequence[Member]) -> None:
        """Raises ValueError for other choices that do not fit the divergences of the run. `divergences`: all of
        them."""
        named = f"divergence = {', '.join(dict.fromkeys(repr(one.name) for one in divergences))}"
        of_distributions = [compares_distributions(one) for one in divergences]
        for divergence in divergences:
            check_seq_kd(divergence, self.importance)
        if self.cost_transform.name != "none" and all(of_distributions):
            raise ValueError(
                f"cost_transform = {self.cost_transform.name!r} with {named}: only costs of sampled tokens are "
                "transformed; use divergence = 'k1', 'k2' or 'k3', or cost_transform = 'none'"
            )
        if self.domain_scale != "none" and any(of_distributions):
            raise ValueError(
                f"domain_scale = {self.domain_scale!r} with {named}: only costs of sampled tokens are scaled by "
                "domain; use divergence = 'k1', 'k2' or 'k3', or domain_scale = 'none'"
            )
        if self.rejection.name == "none":
            return
        rejection = f"rejection = {self.rejection.name!r}"
        if any(one.name == "seq_kd" for one in divergences):
            raise ValueError(
                f"{rejection} with divergence = 'seq_kd': cross-entropy is on the text as it stands; expected 'none'"
            )
        if all(of_distributions) and self.advantage.name == "none":
            raise ValueError(
                f"{rejection} with {named} and advantage = 'none': only terms of sampled tokens are rejected, and "
                "there are none; expected rejection = 'none', or an advantage"
            )

    @property
    def has_divergence(self) -> bool:
        """False if only rewards are trained on."""
        return self.coef > 0.0 or any(self.teacher_coefs.values())

    @property
    def reads_teachers(self) -> bool:
        """False if the loss does not depend on what teachers say."""
        return self.has_divergence and not isinstance(self.divergence, Null)

    @property
    def divergences(self) -> tuple[Member, ...]:
        """The common one, and those of single pools."""
        return (self.divergence, *self.teacher_divergences.values())

    def coef_of(self, pool: str) -> float:
        """The coefficient of a teacher pool."""
        return self.teacher_coefs.get(pool, self.coef)

    def divergence_of(self, pool: str) -> Member:
        """The divergence of a teacher pool. With a coefficient of 0 it is only a figure, for which no teacher sends
        more than scores of sampled tokens."""
        own = self.teacher_divergences.get(pool, self.divergence)
        reads_payloads = compares_distributions(own) or has_baseline(own)
        return LogRatio() if reads_payloads and not self.coef_of(pool) else own

    def divergence_key(self, pool: str) -> str:
        """The key that gives a pool its divergence."""
        return f"teacher_divergences.{pool}" if pool in self.teacher_divergences else "divergence"

    def needs_top_k_for(self, pool: str) -> str:
        """Key and value because of which the teachers of a pool must send top-k sets, or hidden states in place of
        them. Empty: they need not."""
        divergence, key = self.divergence_of(pool), self.divergence_key(pool)
        if has_baseline(divergence):
            return f"{key}.baseline = 'expected_cost' of {divergence.name!r}"
        return f"{key} = {divergence.name!r}" if compares_distributions(divergence) else ""

    def check_tasks(self, tasks: TaskConfig) -> None:
        """Raises ValueError for tasks without anything to learn from, or with sampling that cannot be corrected."""
        for key in ("teacher_coefs", "teacher_divergences"):
            for pool in getattr(self, key):
                if pool not in tasks.routes:
                    pools = ", ".join(tasks.routes)
                    raise ValueError(f"objective.{key} names the pool {pool!r}; expected one of tasks.routes: {pools}")
        if self.teacher_divergences:
            self._check_divergences([self.divergence_of(pool) for pool in tasks.routes])
        if not tasks.routes and self.advantage.name == "none" and self.reads_teachers:
            raise ValueError(
                "tasks.routes = {} with objective.advantage = 'none' leaves nothing to learn from: no teacher "
                "scores anything; expected a pool in tasks.routes, or an advantage"
            )
        if tasks.group_reward and self.advantage.name == "none":
            raise ValueError(
                f"tasks.group_reward = {tasks.group_reward!r} with objective.advantage = 'none', which trains on no "
                "reward; expected an advantage, or no group_reward"
            )
        if self.length_penalty.name == "group_length" and tasks.group_size == 1:
            raise ValueError(
                "objective.length_penalty = 'group_length' with tasks.group_size = 1 compares a rollout with itself; "
                "expected a larger group, or 'overlong'"
            )
        if tasks.truncated:
            self._check_truncated(tasks)
        if tasks.temperature != 1.0:
            self._check_not_the_students(f"tasks.temperature = {tasks.temperature}", "temperature 1")
        if tasks.teacher_share:
            if tasks.truncated:
                raise ValueError(
                    f"tasks.teacher_share = {tasks.teacher_share} with top_k, top_p or min_p: tokens that only the "
                    "teacher would write are not among those that are left; expected one of the two"
                )
            self._check_not_the_students(f"tasks.teacher_share = {tasks.teacher_share}", "teacher_share = 0")

    def _check_truncated(self, tasks: TaskConfig) -> None:
        """Raises ValueError for top-p, top-k or min-p that cannot be trained with."""
        sampled = f"tasks.top_p = {tasks.top_p}, tasks.top_k = {tasks.top_k}, tasks.min_p = {tasks.min_p}"
        if not 1 < tasks.top_k <= MAX_TOKENS_KEPT:
            raise ValueError(
                f"{sampled}: the ids of all tokens that may be sampled travel to the learner, at most top_k of them at "
                f"each place; expected a top_k from 2 to {MAX_TOKENS_KEPT}, e.g. 64, or all three off (1, 0 and 0)"
            )
        if any(map(has_baseline, self.divergences)):
            raise ValueError(
                f"{sampled} with objective.divergence.baseline = 'expected_cost', a mean over tokens of which some are "
                "never sampled; expected baseline = 'none', or top_p = 1, top_k = 0 and min_p = 0"
            )

    def _check_not_the_students(self, sampled: str, off: str) -> None:
        """Raises ValueError if something takes mu, at another temperature or of a mixture with a teacher, for the
        student's log-probs at temperature 1. `sampled`: the setting; `off`: without it."""
        if self.domain_scale != "none":
            raise ValueError(
                f"objective.domain_scale = {self.domain_scale!r} with {sampled}: the size of costs is measured by the "
                f"log-probs sampled with; use {off}, or domain_scale = 'none'"
            )
        if self.prefix_gain:
            raise ValueError(
                f"objective.prefix_gain = {self.prefix_gain} with {sampled}: its weights compare teachers with the "
                f"log-probs sampled with; use {off}, or prefix_gain = 0"
            )
        if self.importance.name in _NO_CORRECTION:
            raise ValueError(
                f"{sampled} with objective.importance = {self.importance.name!r}: what sampled is not the student that "
                "is compared with its teacher, which needs the ratio of each token; use importance = 'truncated', or "
                f"{off}"
            )
        if self.rejection.name != "none":
            raise ValueError(
                f"{sampled} with objective.rejection = {self.rejection.name!r}: r is not 1 for what the present policy "
                f"would write too, so it would be rejected; use rejection = 'none', or {off}"
            )
        if any(isinstance(one, SampledDivergence) and one.kl_student == "behaviour" for one in self.divergences):
            raise ValueError(
                f"{sampled} with objective.divergence.kl_student = 'behaviour': mu is not the student's log-prob, "
                f"which is compared with the teacher's; use kl_student = 'current', or {off}"
            )


def compares_distributions(divergence: Member) -> bool:
    """True for a divergence between distributions; False for a cost of sampled tokens."""
    return isinstance(divergence, Distributions)


def has_baseline(divergence: Member) -> bool:
    """True if the mean cost is subtracted from the cost of a sampled token."""
    return isinstance(divergence, LogRatio) and divergence.baseline != "none"


def check_seq_kd(divergence: Member, importance: Member) -> None:
    """Raises ValueError for seq_kd with an importance weight: corrected to the student's distribution, the gradient of
    cross-entropy is 0, because grad s has mean 0 over the student's own tokens."""
    if divergence.name == "seq_kd" and importance.name != "none":
        raise ValueError(
            f"divergence = 'seq_kd' with importance = {importance.name!r}: cross-entropy is on the text as it stands; "
            "expected importance = 'none'"
        )


def check_given(writer: str, file: str, objective: ObjectiveConfig) -> None:
    """Raises ValueError for an objective that needs log-probs which a recording of given text does not have: nobody
    knows with which probability its tokens were sampled."""
    unweighted = objective.importance.name == "none" == objective.rejection.name
    no_sample = all(one.name == "seq_kd" or compares_distributions(one) for one in objective.divergences)
    if writer != "data" or (unweighted and no_sample):
        return
    raise ValueError(
        f"{file} is text that was there already, so the probability with which it was sampled is not known: got "
        f"divergence = {objective.divergence.name!r} with importance = {objective.importance.name!r}, expected seq_kd, "
        "or a divergence between distributions (forward_kl, ...) on a file written with teacher.top_k, and "
        "importance = none"
    )


class OfflineConfig(Settings, frozen=True, kw_only=True):
    """Rollouts that a teacher wrote, mixed into the student's batches (docs/decisions/off-policy-data.md)."""

    file: str = ""
    """File of rollouts that a teacher wrote and scored, recorded by stillhouse write. Empty: none."""
    student_fraction: Share = 1.0
    """Share of the trained tokens that the student wrote itself (lambda); the rest comes from `file`. 1: all. To train
    on the file alone (0), use stillhouse replay."""
    divergence: Annotated[Member, DIVERGENCE] = Member(name="seq_kd")
    """Divergence on the tokens of `file`. seq_kd: plain cross-entropy on the teacher's text. Others: as in
    learner.objective.divergence; between distributions only if `file` was written with teacher.top_k."""
    importance: Annotated[Member, WEIGHT] = Member(name="none")
    """Importance weight of a token of `file`, from r = exp(s - mu), where mu is the teacher's log-prob. none:
    expectations are over the teacher's tokens. truncated, with k1: estimates the reverse KL on the teacher's text."""
    coef: PositiveFloat = 1.0
    """Weight of a token of `file` relative to a token of the student."""

    def __post_init__(self) -> None:
        super().__post_init__()
        DIVERGENCE.check(self.divergence)
        WEIGHT.check(self.importance)
        check_seq_kd(self.divergence, self.importance)
        if isinstance(self.divergence, SampledDivergence) and self.divergence.kl_student == "behaviour":
            raise ValueError(
                "divergence.kl_student: got behaviour, expected current: mu of these tokens is the teacher's log-prob"
            )
        if isinstance(self.divergence, LogRatio) and self.divergence.baseline != "none":
            raise ValueError(
                f"divergence.baseline: got {self.divergence.baseline}, expected none: over text that the teacher "
                "wrote, a baseline would change the expected gradient"
            )
        if isinstance(self.divergence, Distributions) and self.divergence.context_cap:
            raise ValueError(
                f"divergence.context_cap: got {self.divergence.context_cap}, expected 0: the contexts of these tokens "
                "are the teacher's, and are not weighted"
            )
        if self.student_fraction < 1.0 and not self.file:
            raise ValueError(
                f"student_fraction = {self.student_fraction} without a file: expected one that a teacher wrote "
                "(stillhouse write), or a fraction of 1"
            )
        if self.file and self.student_fraction == 1.0:
            raise ValueError(
                "file with student_fraction = 1 would not be used; expected a fraction below 1, or no file"
            )

    @property
    def objective(self) -> ObjectiveConfig:
        """The objective of these tokens: no rewards, one coefficient for all teachers."""
        return ObjectiveConfig(divergence=self.divergence, importance=self.importance, coef=self.coef)
