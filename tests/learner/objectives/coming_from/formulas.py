"""The losses of other trainers on a batch, written anew from reading their source, with their own names for settings.

Each function takes its settings out of `given`, so that one which it does not read is noticed, and returns a loss that
is differentiable in `s` of the rollouts (`divergences`: in `z`). docs/coming-from.md says which files of which versions
were read.

Legend: n trained tokens of a rollout.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from tests.learner.objectives.coming_from import divergences
from tests.learner.objectives.coming_from.batch import Batch, Given

Formula: TypeAlias = Callable[[Given, Batch], Tensor]


def advantages(batch: Batch, *, std: bool, epsilon: float = 1e-6) -> list[float]:
    """Reward minus the mean of the group, divided by the sample standard deviation of the group."""
    found: list[float] = []
    for rollout in batch.rollouts:
        group = [other.reward for other in batch.rollouts if other.group == rollout.group]
        centred = rollout.reward - statistics.fmean(group)
        found.append(centred / (statistics.stdev(group) + epsilon) if std else centred)
    return found


def surrogate(ratio: Tensor, advantage: Tensor | float, low: float, high: float, dual: float | None) -> Tensor:
    """PPO's clipped loss [n]; with `dual` at most -dual * A where A < 0."""
    advantage_n = torch.as_tensor(advantage, dtype=torch.float64).expand_as(ratio)
    loss = torch.maximum(-advantage_n * ratio, -advantage_n * ratio.clamp(low, high))
    return loss if dual is None else torch.where(advantage_n < 0, torch.minimum(loss, -advantage_n * dual), loss)


def token_mean(losses: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(losses)).mean()


def mean_of_means(losses: Sequence[Tensor]) -> Tensor:
    return torch.stack([loss.mean() for loss in losses]).mean()


def geometric(ratio: Tensor) -> Tensor:
    return ratio.log().mean().exp()


def within(ratio: Tensor, low: float, high: float) -> Tensor:
    return ((ratio >= low) & (ratio <= high)).double()


# ---------------------------------------------------------------------------------------------------------------- TRL


def trl_grpo(given: Given, batch: Batch) -> Tensor:
    """GRPOTrainer._compute_loss. Without vLLM's correction, old_per_token_logps are those of the policy that wrote the
    completions; with it they are computed anew, and the ratio to what vLLM said is a weight."""
    loss_type, mode = given.pop("loss_type"), given.pop("vllm_importance_sampling_mode", None)
    scaled = given.pop("scale_rewards") == "group"
    by_sequence = given.pop("importance_sampling_level", "token") == "sequence"
    high, low, delta = given.pop("epsilon_high"), given.pop("epsilon", None), given.pop("delta", None)
    cap = given.pop("vllm_importance_sampling_clip_max", None)
    losses: list[Tensor] = []
    for rollout, advantage in zip(batch.rollouts, advantages(batch, std=scaled, epsilon=1e-4), strict=True):
        log_ratio = rollout.s - (rollout.mu if mode is None else rollout.start)
        ratio = log_ratio.mean().exp().expand_as(log_ratio) if by_sequence else log_ratio.exp()
        if loss_type == "cispo":
            loss = -ratio.clamp(max=high).detach() * advantage * rollout.s
        else:
            bounded = ratio if delta is None else ratio.clamp(max=delta)
            loss = -torch.minimum(bounded * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
        if mode is not None:
            off = rollout.start - rollout.mu
            weight = (off.sum() if mode.startswith("sequence") else off).exp()
            weight = weight.clamp(max=cap) if mode.endswith("truncate") else torch.where(weight > cap, 0.0, weight)
            loss = loss * weight
        losses.append(loss)
    if loss_type == "dr_grpo":
        return torch.cat(losses).sum() / (len(losses) * batch.max_new_tokens)
    return mean_of_means(losses) if loss_type == "grpo" else token_mean(losses)


def trl_minillm(given: Given, batch: Batch) -> Tensor:
    """MiniLLMTrainer._compute_advantage, detached, then the loss of GRPOTrainer without clipping or reward."""
    gamma, normalised = given.pop("gamma"), given.pop("length_normalization")
    assert normalised and not given.pop("single_step_decomposition") and given.pop("kd_temperature") == 1.0
    losses: list[Tensor] = []
    for rollout in batch.rollouts:
        rewards, powers = (rollout.q - rollout.s).detach(), gamma ** torch.arange(len(rollout.s), dtype=torch.float64)
        advantages = (rewards * powers).flip(0).cumsum(0).flip(0) / powers.flip(0).cumsum(0).flip(0)
        losses.append(-(rollout.s - rollout.mu).exp() * advantages)
    return token_mean(losses)


# --------------------------------------------------------------------------------------------------------------- verl


def verl_policy(given: Given, batch: Batch) -> Tensor:
    """ppo_loss with rollout correction. bypass_mode: old_log_prob is what the engine said; else it is computed at the
    start of the step."""
    mode, bypass, agg = given.pop("loss_mode", "vanilla"), given.pop("bypass_mode"), given.pop("loss_agg_mode")
    by_loss = given.pop("loss_type", "ppo_clip")
    low, high = given.pop("clip_ratio_low", None), given.pop("clip_ratio_high", None)
    dual, level = given.pop("clip_ratio_c", None), given.pop("rollout_is", None)
    cap, rule = given.pop("rollout_is_threshold", None), given.pop("rollout_rs", None)
    bounds = [float(one) for one in given.pop("rollout_rs_threshold", "0_0").split("_")]
    factor = given.pop("loss_scale_factor", None)
    scores = advantages(batch, std=given.pop("norm_adv_by_std_in_grpo"))
    losses: list[Tensor] = []
    for rollout, advantage in zip(batch.rollouts, scores, strict=True):
        old = rollout.mu if bypass else rollout.start
        ratio = (rollout.s - old).exp()
        off = ((rollout.s.detach() if bypass else rollout.start) - rollout.mu).exp()
        if by_loss == "reinforce":
            loss = -advantage * rollout.s
        elif mode == "cispo":
            loss = -ratio.clamp(1 - low, 1 + high).detach() * advantage * rollout.s
        else:
            loss = surrogate(ratio, advantage, 1 - low, 1 + high, dual)
        if level is not None:
            loss = loss * (off if level == "token" else off.prod()).clamp(max=cap)
        if rule is not None:  # the bounds are those of 1 / r: k1 is -log r
            told = {"token_k1": 1 / off, "seq_sum_k1": 1 / off.prod(), "seq_mean_k1": 1 / geometric(off)}[rule]
            loss = loss * within(told, *bounds)
        losses.append(loss)
    if agg == "seq-mean-token-sum-norm":
        return torch.stack([loss.sum() for loss in losses]).mean() / factor
    return {"token-mean": token_mean, "seq-mean-token-mean": mean_of_means}[agg](losses)


def verl_distillation(given: Given, batch: Batch) -> Tensor:
    """distillation_loss with an estimator of the sampled tokens. With use_policy_gradient the loss is a reward in the
    clipped surrogate, else it is differentiated."""
    mode, as_reward, agg = given.pop("loss_mode"), given.pop("use_policy_gradient"), given.pop("loss_agg_mode")
    assert agg == "token-mean"
    low, high, dual = (given.pop(name, None) for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c"))
    limit = given.pop("loss_max_clamp", math.inf)
    losses: list[Tensor] = []
    for rollout in batch.rollouts:
        gap = rollout.q - rollout.s
        loss = {"k1": -gap, "k2": gap.square() / 2, "k3": gap.exp() - gap - 1}[mode].clamp(-limit, limit)
        if as_reward:
            loss = surrogate((rollout.s - rollout.mu).exp(), -loss.detach(), 1 - low, 1 + high, dual)
        losses.append(loss)
    return token_mean(losses)


# -------------------------------------------------------------------------------------------------------------- slime


def slime_policy(given: Given, batch: Batch) -> Tensor:
    """policy_loss_function. The KL of apply_opd_kl_to_advantages is that of the log-probs at the start of the step, or
    with use_rollout_logprobs of the engine's."""
    estimator, coef = given.pop("advantage_estimator"), given.pop("opd_kl_coef", 0.0)
    scores = advantages(batch, std=given.pop("grpo_std_normalization"))
    by_token, from_engine = given.pop("calculate_per_token_loss"), given.pop("use_rollout_logprobs", False)
    low, high, dual = given.pop("eps_clip"), given.pop("eps_clip_high"), given.pop("eps_clip_c", None)
    weighted, icepop = given.pop("use_tis", False), given.pop("custom_tis_function_path", "") != ""
    cap, floor = given.pop("tis_clip", None), given.pop("tis_clip_low", 0.0)
    mean, bonus = token_mean if by_token else mean_of_means, given.pop("entropy_coef", 0.0)
    losses: list[Tensor] = []
    for rollout, score in zip(batch.rollouts, scores, strict=True):
        old = rollout.mu if from_engine else rollout.start
        advantage = score - coef * (old - rollout.q)
        ratio = (rollout.s - old).exp()
        if estimator == "cispo":
            loss = -ratio.clamp(1 - low, 1 + high).detach() * advantage * rollout.s
        else:
            loss = surrogate(ratio, advantage, 1 - low, 1 + high, dual)
        if weighted:
            off = (rollout.start - rollout.mu).exp()
            loss = loss * (off * within(off, floor, cap) if icepop else off.clamp(floor, cap))
        losses.append(loss)
    return mean(losses) - bonus * mean([-(one.z.exp() * one.z).sum(1) for one in batch.rollouts])


# ------------------------------------------------------------------------------------------------------------ NeMo-RL


def nemo_policy(given: Given, batch: Batch) -> Tensor:
    """ClippedPGLossFn, with the advantages of GRPOAdvantageEstimator or OPDAdvantageEstimator."""
    distilled = given.pop("adv_estimator") == "opd"
    scores = [0.0] * len(batch.rollouts)
    if not distilled:
        assert not given.pop("use_leave_one_out_baseline")
        scores = advantages(batch, std=given.pop("normalize_rewards"))
    by_token, plain = given.pop("token_level_loss"), given.pop("disable_ppo_ratio", False)
    limited = given.pop("use_cispo", False)
    low, high, dual = (given.pop(f"ratio_clip_{name}", None) for name in ("min", "max", "c"))
    assert given.pop("use_importance_sampling_correction")
    kind = given.pop("truncated_importance_sampling_type")
    top = given.pop("truncated_importance_sampling_ratio")
    bottom = given.pop("truncated_importance_sampling_ratio_min", 0.0)
    losses: list[Tensor] = []
    for rollout, score in zip(batch.rollouts, scores, strict=True):
        advantage = rollout.q - rollout.start if distilled else torch.full_like(rollout.mu, score)
        ratio = (rollout.s - rollout.start).exp()
        if plain:
            loss = -advantage * rollout.s
        elif limited:
            loss = -advantage * ratio.clamp(1 - low, 1 + high).detach() * rollout.s
        else:
            loss = surrogate(ratio, advantage, 1 - low, 1 + high, dual)
        off = (rollout.start - rollout.mu).exp()
        weight = {
            "tis": off.clamp(bottom, top),
            "icepop": off * within(off, bottom, top),
            "seq-mask-tis": off * within(geometric(off), bottom, top),
        }[kind]
        losses.append(loss * weight)
    return token_mean(losses) if by_token else mean_of_means(losses)


# --------------------------------------------------------------------------------------------------------------- ROLL


def roll_policy(given: Given, batch: Batch) -> Tensor:
    """ActorWorker.loss_func and train_infer_correction. In pure OPD the advantage is minus the KL of the engine's
    log-probs."""
    distilled, agg = given.pop("is_pure_opd", False), given.pop("loss_agg_mode")
    scores = [0.0] * len(batch.rollouts) if distilled else advantages(batch, std=given.pop("norm_std_type") == "group")
    coef = given.pop("opd_kl_coef", 1.0)
    clip, dual = given.pop("pg_clip"), given.pop("dual_clip_loss")
    level, cap = given.pop("is_weight.weight_type"), given.pop("is_weight.upper_bound")
    agg_type = given.pop("filters.agg_type", None)
    low, high = given.pop("filters.ratio_low", None), given.pop("filters.ratio_high", None)
    assert level == "token" and agg == "seq-mean-token-mean"
    losses: list[Tensor] = []
    for rollout, score in zip(batch.rollouts, scores, strict=True):
        advantage = -coef * (rollout.mu - rollout.q) if distilled else torch.full_like(rollout.mu, score)
        ratio = (rollout.s - rollout.start).exp()
        loss = surrogate(ratio, advantage, 1 - clip, 1 + clip, 1 + 2 * clip if dual else None)
        off = (rollout.start - rollout.mu).exp()
        loss = loss * off.clamp(max=cap)
        if agg_type is not None:
            loss = loss * within({"geometric": geometric(off), "sequence": off.prod()}[agg_type], low, high)
        losses.append(loss)
    return mean_of_means(losses)


# ------------------------------------------------------------------------------------------- AReaL, tinker, prime-rl


def areal_policy(given: Given, batch: Batch) -> Tensor:
    """ppo_actor_loss_fn with use_decoupled_loss: the ratio to the proximal policy is clipped, that of the proximal to
    the behaviour policy is capped, or rejects."""
    assert given.pop("use_decoupled_loss")
    low, high, dual = given.pop("eps_clip"), given.pop("eps_clip_higher"), given.pop("c_clip", None)
    level, action = given.pop("rejection_sampling.level"), given.pop("rejection_sampling.action")
    assert given.pop("rejection_sampling.metric") == "ratio" and given.pop("rejection_sampling.agg", "mean") == "mean"
    top, bottom = given.pop("rejection_sampling.upper"), given.pop("rejection_sampling.lower", 0.0)
    scores = advantages(batch, std=given.pop("reward_norm.std_level") == "group")
    losses: list[Tensor] = []
    for rollout, score in zip(batch.rollouts, scores, strict=True):
        loss = surrogate((rollout.s - rollout.start).exp(), score, 1 - low, 1 + high, dual)
        off = (rollout.start - rollout.mu).exp()
        weight = off if level == "token" else geometric(off).expand_as(off)
        weight = weight.clamp(bottom, top) if action == "clamp" else weight * within(weight, bottom, top)
        losses.append(loss * weight)
    return token_mean(losses)


def areal_distillation(given: Given, batch: Batch) -> Tensor:
    """grpo_loss_fn with a teacher and rl_loss_weight = 0."""
    assert given.pop("rl_loss_weight") == 0
    weight = given.pop("distill_loss_weight")
    return token_mean([-weight * (r.s - r.mu).exp() * (r.q - r.s.detach()) for r in batch.rollouts])


def tinker(given: Given, batch: Batch) -> Tensor:
    """incorporate_kl_penalty and compute_advantages, then the loss function of the service, which is a sum."""
    coef, kind = given.pop("kl_penalty_coef"), given.pop("loss_fn")
    discount = given.pop("kl_discount_factor", 0.0)
    low, high = given.pop("clip_low_threshold", 0.0), given.pop("clip_high_threshold", math.inf)
    total = torch.zeros((), dtype=torch.float64)
    for rollout, score in zip(batch.rollouts, advantages(batch, std=False), strict=True):
        penalty, ratio = coef * (rollout.mu - rollout.q), (rollout.s - rollout.mu).exp()
        for t in range(len(penalty) - 2, -1, -1):  # theirs also counts an environment's tokens, as the page says
            penalty[t] += discount * penalty[t + 1]
        advantage = score - penalty
        loss = {
            "importance_sampling": -ratio * advantage,
            "ppo": surrogate(ratio, advantage, low, high, None),
            "cispo": -ratio.clamp(low, high).detach() * advantage * rollout.s,
        }[kind]
        total = total + loss.sum()
    return total


def prime_distillation(given: Given, batch: Batch) -> Tensor:
    """ref_kl_loss_fn without its two fixed terms: the mask of tokens whose probability fell by more than 0.2, and 1e-3
    times the squared log-ratio."""
    assert given.pop("algorithm") == "opd"
    return token_mean([-(r.q - r.s).detach() * (r.s - r.mu).exp() for r in batch.rollouts])


# ------------------------------------------------------------------------------------------------------------ MiniLLM


def minillm(given: Given, batch: Batch) -> Tensor:
    """Loss._pg_loss in the first of the --ppo-epochs, on the rewards of PPOSampler.run_sample. `mu` is the mixture's.
    Advantages are not whitened."""
    assert given.pop("teacher_mixed_alpha") > 0
    gamma, scale, limit = given.pop("gamma"), given.pop("reward_scaling"), given.pop("cliprange_reward")
    clip = given.pop("cliprange")
    losses: list[Tensor] = []
    for rollout in batch.rollouts:
        old, n = rollout.start, len(rollout.s)
        rewards = ((rollout.q - old) / scale).clip(-limit, limit)
        returns = [sum(gamma ** (u - t) * rewards[u] for u in range(t, n)) for t in range(n)]
        advantages = torch.stack([torch.as_tensor(total) / (n - t) for t, total in enumerate(returns)])
        ratio = (rollout.s - old).exp() * (old - rollout.mu).exp()
        losses.append(surrogate(ratio, advantages, 1 - clip, 1 + clip, None))
    return token_mean(losses)


FORMULAS: dict[str, Formula] = {
    "trl-grpo": trl_grpo,
    "trl-distillation": divergences.trl_distillation,
    "trl-minillm": trl_minillm,
    "trl-async-distillation": divergences.trl_async_distillation,
    "verl": verl_policy,
    "verl-distillation": verl_distillation,
    "slime": slime_policy,
    "nemo-rl": nemo_policy,
    "nemo-rl-distillation": divergences.nemo_distillation,
    "roll": roll_policy,
    "roll-distillation": divergences.roll_distillation,
    "areal": areal_policy,
    "areal-distillation": areal_distillation,
    "tinker": tinker,
    "prime-rl": prime_distillation,
    "minillm": minillm,
}
