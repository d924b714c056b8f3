"""What each figure of the metrics means: shown by TensorBoard beside its chart, and explained in docs/metrics.md.

The page has the same words, with links; a test compares the two. No torch."""

from __future__ import annotations

import re
from typing import Final

TAGS: Final = {
    "train/loss": "the loss",
    "train/divergence": (
        "the divergence that the loss uses: summed over a token's teachers, mean over the scored tokens"
    ),
    "train/reverse_kl": "s - q, mean over the scored tokens; reported for every choice of divergence",
    "train/hidden_error": (
        "with `teacher.payload = hidden`: mean difference between q as the learner computes it from the hidden "
        "states and q as the teacher sent it, in nats; the rounding of bfloat16. A step at which it is above 0.5 "
        "is not made"
    ),
    "train/excess_share": (
        "share of the scores (a token and one of its teachers) at which the sampled token is more than twice "
        "as likely for the student as for the teacher; with `k1` these are pushed down"
    ),
    "train/deficit_share": (
        "share of the scores at which the sampled token is less than half as likely for the student as for "
        "the teacher; with `k1` these are pushed up"
    ),
    "train/set_teacher_mass": (
        "if the objective reads top-k sets: mean probability that the teacher gives to the set it sent. What "
        "is missing to 1 is in the tail"
    ),
    "train/set_student_mass": (
        "if the objective reads top-k sets: mean probability that the student gives to the set. Far below the"
        " teacher's, much of the student's probability is compared as one bucket: raise `teacher.top_k`, or "
        "use `teacher.top_k_of = student`"
    ),
    "train/set_overlap": (
        "if the objective reads top-k sets: mean share of the student's likeliest tokens, as many as the set "
        "has but at most 16, that are in the set"
    ),
    "train/entropy": "mean entropy of the student at the trained positions",
    "train/logprob": "mean of s",
    "train/advantage_mean": "mean advantage of the trained tokens",
    "train/length_penalty": "mean term that `objective.length_penalty` adds to rewards; absent without it",
    "train/ratio_mean": (
        "mean of r. It is 1 in expectation; a drift means that an engine's log-probs differ from the learner's"
    ),
    "train/ratio_max": "maximum of r",
    "train/truncated_fraction": "share of tokens whose importance weight was capped or clipped",
    "train/rejected_fraction": (
        "share of tokens that `objective.rejection` left out of the loss; these are not in `train/truncated_fraction`"
    ),
    "train/weight_mean": "mean importance weight",
    "train/ess": "effective sample size of r, divided by the number of tokens",
    "train/tokens": "tokens trained",
    "train/tokens_unscored": "trained tokens that no teacher scored",
    "train/input_tokens": "tokens read, including context",
    "train/microbatches": "number of packed forward passes",
    "train/items": "rollouts (or pieces of them) in the batch",
    "train/items_idle": "rollouts (or pieces of them) without a token to train",
    "train/items_unrewarded": "rollouts (or pieces of them) without a reward",
    "train/items_nonfinite": "rollouts (or pieces of them) left out because of NaN or infinity",
    "train/grad_norm": "gradient norm before clipping",
    "train/lr": "learning rate",
    "train/step_s": "seconds spent in the model",
    "train/offline_<name>": "the same figures for tokens that a teacher wrote",
    "train/value_<name>": (
        "figures of the value function: `tokens`, `loss`, `explained_variance`, `return_mean`, `mean`, `grad_norm`"
    ),
    "train/updates_<name>": (
        "in steps with several updates: how many were `made` and `lost`; `ratio_max`, `truncated_fraction`, "
        "`logprob_shift` and `grad_norm` of the last one"
    ),
    "offline/<name>": "running totals of the recording that is mixed in (`--offline`)",
    "record/<name>": (
        "number of batches recorded, and of batches not recorded, by reason; `rollouts_left_out_total`: rollouts "
        "that `launch.write` could not record without the text that only the teacher reads"
    ),
    "rollouts/ended": "number of these rollouts",
    "rollouts/reward_mean": "mean over the rollouts with a reward; absent if none has one",
    "rollouts/reward_std": "standard deviation over the rollouts with a reward",
    "rollouts/group_reward_<reason>_total": (
        "groups that `tasks.group_reward` did not judge: it `raised`, gave a `bad_result` or a "
        "`reward_out_of_range`, or there was `no_row`"
    ),
    "rollouts/rewarded_turns_mean": "turns that were given a reward, over the rollouts with such turns",
    "rollouts/length_mean": "mean number of tokens that the student wrote, over all turns",
    "rollouts/length_max": "largest number of tokens that the student wrote",
    "rollouts/truncated_share": "share that ended at the length limit",
    "rollouts/repetition": "share of the runs of eight trained tokens that their rollout had before",
    "rollouts/ending_gap": (
        "student's minus teachers' log-prob of the last token, mean over the rollouts that the student ended, nats"
    ),
    "rollouts/reverse_kl_per_answer": "`train/reverse_kl` times `rollouts/length_mean`: what an answer costs, nats",
    "alarm/<name>": "1 while a figure is outside of the range it began in; absent before the first time",
    "rollouts/turns_mean": "number of turns of the student",
    "rollouts/<tag>/<name>": (
        "the same for each tag of the prompts, once the run has seen two tags. After 32 tags, the rest counts as "
        "`other`"
    ),
    "env/<name>_per_rollout": (
        "what environments report in `info` (for example `calculator_calls`), per finished rollout"
    ),
    "failed_rollouts/<reason>_total": "attempts that actors gave up, by reason",
    "agents/calls_per_rollout": "calls of an agent to the engine",
    "agents/roots_per_rollout": "calls that begin a conversation",
    "agents/forks_per_rollout": "calls that leave a known path",
    "agents/drift_tokens_per_rollout": "tokens of responses that came back as other tokens",
    "agents/dropped_responses_per_rollout": "responses that are not trained: retried or undelivered",
    "actors/alive": "number of live actors",
    "teachers/alive": "number of live teachers",
    "actors/busy_fraction": "share of the time since their start in which the engine computes, mean over actors",
    "teachers/busy_fraction": "share of the time since their start in which the engine computes, mean over teachers",
    "actors/running": "requests in the engines",
    "actors/rollouts_in_hand": "rollouts that actors hold",
    "actors/waiting_for_weights": "rollouts that actors hold and that wait for newer weights",
    "actors/generation_s": "from a request to the end of its turn, including queueing",
    "actors/environment_s": "time of one answer of an environment or agent",
    "actors/environment_processes_lost/<cause>": (
        "processes of environments that died since the previous step: `crash`, `stuck`, `hang`"
    ),
    "actors/tokens_per_decode_step": "batch size of the engines, in tokens per forward pass",
    "teachers/score_s": "from the arrival of an item at a teacher to its scores",
    "teachers/items_per_batch": "items that a teacher scores at once",
    "teachers/context_tokens_per_item": "tokens of an item, including context",
    "teachers/held_tokens": "tokens that wait or are being scored",
    "teachers/computed_tokens_per_item": (
        "embedded teachers: tokens that went through the model. What `context_tokens_per_item` has more was read "
        "from kept prefixes, or shared with another item of the batch"
    ),
    "teachers/prefix_hits_per_item": "embedded teachers: runs of the model that found a kept prefix",
    "teachers/prefix_evicted_tokens_per_item": "tokens of prefixes evicted for lack of room",
    "teachers/prefix_tokens": "tokens of prefixes that are kept now",
    "teachers/<pool>/token_share": "share of the trained tokens that this pool scored",
    "teachers/<pool>/divergence": (
        "the divergence that the loss uses for this pool (its own, or the common one), mean over the trained tokens "
        "that it scored"
    ),
    "teachers/<pool>/reverse_kl": "mu - q, mean over the trained tokens that this pool scored",
    "rate/<role>_tokens_per_s": "sampled by actors, scored by teachers, trained by the learner",
    "staleness/mean": (
        "mean over the tokens of optimizer steps between the version that sampled a token and the version that is "
        "updated"
    ),
    "staleness/max": "largest such distance",
    "staleness/tokens": "histogram of these distances (`staleness` in `metrics.jsonl`)",
    "time/step_s": "wall time since the previous step",
    "time/busy_s": "the part of it in which the learner computed",
    "wait/<cause>_s": (
        "the rest, by what the learner waited for: `data` (rollouts, or the rest of decoding them), `scoring` "
        "(teachers), `shards` (with `buffer.shards`: some have sent their share of the batch, others have not), "
        "`weights`, `eval`, `checkpoint`"
    ),
    "bound/<stage>": (
        "share of the learner's time that went to its own work (`learner`), to waiting for `teachers`, `actors`, "
        "`environments`, for processors that all roles share (`cpu`), for batches that the bound on staleness lets "
        "begin (`staleness`), for the slowest of the buffer's `shards`, `weights`, `eval` or `checkpoint`, or for "
        "something that could not be named (`unknown`). "
        "They sum to 1; absent in the first three steps"
    ),
    "bound/speedup": (
        "predicted speedup with what is advised (1: more of it alone gives nothing); absent when there is no prediction"
    ),
    "scaling/<outcome>_total": (
        "on Ray: decisions of the autoscaler so far, one every two minutes: `added_actors`, `added_teachers`, "
        "`removed_teachers`: a host of them; `refused_not_there`: the learner waits for a role, but workers that were "
        "asked for before have not joined yet; `refused_little_gain`: more of it is not predicted to help; "
        "`refused_most`: it has as many as `most` allows; `overtaken`: `scale` has changed the numbers meanwhile, or "
        "they cannot be written; `kept`: the learner waits for none of them; `no_figures`: no step since the last "
        "decision. Hosts of Ray: `hosts_left`: left, as they were asked to, before the end of the run; `hosts_killed`: "
        "were asked, and did not leave in time; `hosts_lost`: died or broke off, or their node did"
    ),
    "efficiency/learner_bubble": "share of the learner's time in which it waits",
    "efficiency/teacher_wait": "share of the teachers' time in which they score nothing",
    "efficiency/goodput": (
        "tokens trained, over the tokens that the buffer accepted, since the start. At the end of a run it is "
        "exact; before, tokens that are under way count as not trained"
    ),
    "efficiency/teacher_s_per_1000_tokens": "seconds of a teacher's work per 1,000 tokens scored",
    "efficiency/weight_pause_s": (
        "time in which an engine with requests stood still for new weights, mean per version and engine"
    ),
    "queue/groups_equal_total": "groups that dynamic sampling dropped because all their rewards were equal",
    "queue/reward_out_of_range_total": (
        "rollouts that are not scored because a reward was outside +-`buffer.reward_limit`; the buffer's log names them"
    ),
    "queue/batches_equal_in_a_row": "how many batches of such rollouts were dropped since the last batch left",
    "queue/shards_without_<role>": (
        "shards of the buffer that no actor, or no teacher, is connected to, while others have some; no batch is "
        "complete without them"
    ),
    "queue/<name>": (
        "what the buffer held when the step's batch was formed, mostly during the step before (tasks, tickets, "
        "rollouts, tokens), and running totals of reissued rollouts, hedged leases and circuit breakers"
    ),
    "tokens/accepted_total": "sampled tokens that the buffer accepted",
    "tokens/trained_total": "sampled tokens that were trained",
    "masked/<reason>_total": "tokens that were read as context but not trained, by reason",
    "dropped/<reason>_total": "tokens that were not trained and left the buffer, by reason",
    "tasks/dropped_<reason>_total": "prompts that could not be used",
    "weights/<name>": (
        "sending weights: members, bytes and seconds of the newest broadcast; running totals of broadcasts, "
        "snapshots, rebuilt groups and skipped versions"
    ),
    "weights/ema_<name>": (
        "snapshots of the moving average, for self-distillation: `snapshots_total`, `failures_total`, "
        "`put_off_total`, and the `step` of the newest"
    ),
    "weights/control_refused_total": (
        "connections to the port for weights that were refused, because they had no key of this run, or cut"
    ),
    "weights/dropped_<reason>_total": "actors that were dropped from the group, by reason",
    "weights/deltas_total": "versions sent as changes since the one before (`weights.delta`)",
    "weights/delta_changed": "share of the weights that the newest of them sent, 0 to 1",
    "weights/delta_whole_buckets_total": "buckets in them that went whole all the same",
    "weights/full_<reason>_total": (
        "versions sent whole. `off`: by the setting; `unable`: servers, files, and by wire; `small`: less than 32 MB; "
        "`first`: of a group; `measured`: this was faster, or had its turn to be measured; `overwritten`: the "
        "former version's memory was needed for the next one; `refused`: a member could not apply the changes "
        "(its log says why), and the version was sent a second time"
    ),
    "eval/accuracy_greedy": "share of greedy rollouts with a reward of at least 0.5",
    "eval/accuracy_sampled": "share of sampled rollouts with a reward of at least 0.5",
    "eval/reward_greedy": "mean reward of greedy rollouts",
    "eval/reward_sampled": "mean reward of sampled rollouts",
    "eval/avg_at_<n>": (
        "with n answers per prompt (`eval_samples`): mean over prompts of the share of answers with a reward of "
        "at least 0.5"
    ),
    "eval/pass_at_<k>": (
        "unbiased estimate that one of k answers is solved (Chen et al. 2021), for k = 2, 4, 8, ... and n"
    ),
    "eval/reverse_kl": "mu - q over the sampled rollouts' tokens",
    "eval/mean_length_greedy": "tokens that the student wrote in a greedy rollout",
    "eval/mean_length_sampled": "tokens that the student wrote in a sampled rollout",
    "eval/n_greedy": "number of greedy rollouts received",
    "eval/n_sampled": "number of sampled rollouts received",
    "eval/no_reward": "rollouts without a reward",
    "eval/failed": "rollouts given up by actors",
    "eval/missing": "rollouts that did not arrive",
    "eval/duplicates": "rollouts received twice",
    "eval/version_min": "step of the oldest weight version that wrote them",
    "eval/version_mean_step": "mean step of the versions that wrote them",
    "eval/samples": (
        "some generations, as text, with the reward of each turn (`turn_rewards` in `samples.jsonl`: turn, from "
        "1, and reward)"
    ),
    "eval/<tag>/<name>": "accuracies, rewards, reverse KL and counts for each tag of the prompts, if there are several",
    "eval/environments/<env>/<name>": (
        "the same for each environment, if there are several and the tags are not just their names"
    ),
    "eval/sets/<set>/<name>": (
        "all of these on another evaluation set (`learner.eval_sets`); in `metrics.jsonl` on a line of its own, "
        "which names the set"
    ),
    "health/nonfinite_total": "figures that were NaN or infinite",
    "health/unwritten_rows_total": "rows that could not be written (disk full)",
    "health/<tracker>_rows_lost_total": "rows that a tracker (`learner.trackers`) lost: it failed or did not keep up",
}
"""Tag -> meaning. `<name>` stands for any part of a tag. s, mu, q and r are explained in docs/metrics.md."""
UNITS: Final = {"_tokens_per_s": ", tokens per second", "_s": ", seconds", "_bytes": ", bytes", "_total": ", total"}


def _pattern(tag: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"<\w+>", ".+", re.escape(tag).replace(r"\<", "<").replace(r"\>", ">")))


_PATTERNS: Final = [
    (_pattern(tag), meaning)
    for tag, meaning in sorted(TAGS.items(), key=lambda entry: -len(re.sub(r"<\w+>", "", entry[0])))
    if "<" in tag
]
"""The most specific first."""


def meaning_of(tag: str) -> str:
    """The meaning of a tag; empty for one that TAGS lacks."""
    if tag in TAGS:
        return TAGS[tag]
    return next((meaning for pattern, meaning in _PATTERNS if pattern.fullmatch(tag)), "")


def title_of(tag: str) -> str:
    """Title of a chart, without the first part of the tag, which is its section: `step, seconds` for time/step_s."""
    name = tag.partition("/")[2] or tag
    ending = next((ending for ending in UNITS if name.endswith(ending)), "")
    words = name.removesuffix(ending).replace("_", " ").replace("/", ": ")
    return words + UNITS.get(ending, "")
