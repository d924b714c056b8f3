"""Several answers per prompt, and several evaluation sets, each with limits of its own."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import msgspec
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.evaluation.evaluation import EvalPlan, EvalPrompt, EvaluationRun
from stillhouse.learner.evaluation.figures import EvalRollout, at_k, describe, diversity
from stillhouse.learner.prompts.config import MAX_EVAL_PROMPTS, EvalSetConfig, TaskConfig
from stillhouse.protocol.messages import BatchItem, EvalResult, WeightVersion

V40 = WeightVersion(0, 40)
NONE = np.zeros(0)
PROMPTS = [EvalPrompt(np.array([65 + i, 66], dtype=np.int32), "t", str(i)) for i in range(5)]


def rollout(task_id: int, reward: float | None) -> EvalRollout:
    return EvalRollout(
        "r", task_id, "t", "", reward, "stop", np.zeros(0, np.int32), 0, NONE, np.zeros((0, 0)), (), None, 0, 0
    )


def slowly(prompts: dict[int, list[bool]]) -> dict[str, float]:
    """Every choice of K answers is looked at."""
    most = max(len(answers) for answers in prompts.values())
    found = {f"avg_at_{most}": float(np.mean([np.mean(answers) for answers in prompts.values()]))}
    for k in sorted({2, 4, 8, most} & set(range(2, most + 1))):
        shares = [
            np.mean([any(chosen) for chosen in itertools.combinations(answers, k)])
            for answers in prompts.values()
            if len(answers) >= k
        ]
        found[f"pass_at_{k}"] = float(np.mean(shares))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_pass_at_k_is_the_mean_over_all_choices_of_k_answers(seed: int) -> None:
    rng = random.Random(seed)
    prompts = {i: [rng.random() < 0.3 for _ in range(rng.randint(1, 9))] for i in range(6)}
    prompts[9] = [False, True]
    rollouts = [rollout(i, 0.5 if solved else 0.4) for i, answers in prompts.items() for solved in answers]
    rollouts += [rollout(0, None), rollout(77, None)]  # not judged: neither solved nor unsolved
    rng.shuffle(rollouts)
    assert at_k(rollouts) == pytest.approx(slowly(prompts))


@pytest.mark.parametrize("seed", range(8))
def test_diversity_is_distinct_n_counted_the_slow_way(seed: int) -> None:
    """Every n-gram is compared with those before it; answers of a few tokens, so that some have no 4-gram."""
    rng = random.Random(seed)
    answers = {
        i: [[rng.randint(0, 3) for _ in range(rng.randint(0, 7))] for _ in range(rng.randint(1, 5))] for i in range(6)
    }
    answers[9] = [[1, 2, 3, 4]] * 4
    written = [(i, np.array(ids, np.int32)) for i, own in answers.items() for ids in own]
    rollouts = [dataclasses.replace(rollout(i, None), written_N=ids_N) for i, ids_N in written]
    rng.shuffle(rollouts)
    several = [own for own in answers.values() if len(own) > 1]
    expected: dict[str, float] = {}
    for n in (1, 2, 4):
        shares: list[float] = []
        for own in several:
            seen: list[list[int]] = []
            total = 0
            for ids in own:
                for start in range(len(ids)):
                    gram = ids[start : start + n]
                    if len(gram) == n:
                        total += 1
                        if all(gram != other for other in seen):
                            seen.append(gram)
            if total:
                shares.append(len(seen) / total)
        expected[f"distinct_{n}"] = float(np.mean(shares))
    alike = [sum(all(ids != other for other in own[:i]) for i, ids in enumerate(own)) / len(own) for own in several]
    assert diversity(rollouts) == pytest.approx({"distinct": np.mean(alike), **expected})
    assert diversity([one for one in rollouts if one.task_id == 9])["distinct_2"] == 0.25
    assert diversity(rollouts[:1]) == {}


def send(evaluation: EvaluationRun, task_id: int, sample_index: int, reward: float) -> None:
    eval_id = next(o.task.eval_id for o in evaluation.tasks() if o.task.task_id == task_id)
    item = BatchItem(f"e-{task_id}-{sample_index}", task_id, sample_index, 3, "t", (), 3, (), True, "stop", reward, 1)
    ids, zeros = np.array([65, 66, 67], np.int32), np.zeros(3, np.float32)
    frames = (ids, zeros, np.array([0, 0, 1], np.uint8), np.zeros((0, 3), np.float32))
    evaluation.add(EvalResult(eval_id, (item,), 0, 0), frames)


def test_each_answer_to_a_prompt_is_waited_for_and_counted_once(small_tokenizer: PreTrainedTokenizerFast) -> None:
    config = TaskConfig(eval_greedy=1, eval_sampled=2, eval_samples=3, routes={})
    evaluation = EvaluationRun(config, PROMPTS, small_tokenizer, version=V40, seed=1)
    greedy, *sampled = (offer.task for offer in evaluation.tasks())
    assert (greedy.group_size, [task.group_size for task in sampled]) == (1, [3, 3])
    assert evaluation.result().missing == 7
    send(evaluation, greedy.task_id, 0, 1.0)
    for task, rewards in zip(sampled, ([1.0, 0.0, 0.0], [0.0, 0.0, 0.0]), strict=True):
        for index, reward in enumerate(rewards):
            assert not evaluation.done
            send(evaluation, task.task_id, index, reward)
            send(evaluation, task.task_id, index, 1.0)
    assert evaluation.done
    result = evaluation.result()
    assert (result.n_greedy, result.n_sampled, result.missing, result.duplicates) == (1, 6, 0, 6)
    assert {name: value for name, value in result.at_k.items() if "_at_" in name} == pytest.approx(
        {"avg_at_3": 1 / 6, "pass_at_2": 1 / 3, "pass_at_3": 0.5}
    )
    assert result.at_k["distinct"] == result.at_k["distinct_1"] == pytest.approx(1 / 3)  # all wrote the same token
    assert "avg@3 0.167, pass@2 0.333, pass@3 0.500" in describe(result)
    shown = [(sample.half, sample.ground_truth) for sample in result.samples]
    assert shown == [("greedy", "0"), *[("sampled", truth) for truth in "0101"]]  # other prompts before other answers


def learner(**sets: dict[str, Any]) -> LearnerConfig:
    return msgspec.convert({"tasks": {"eval_greedy": 2, "eval_sampled": 4}, "eval_sets": sets}, LearnerConfig)


def test_sets_have_limits_and_task_ids_of_their_own(small_tokenizer: PreTrainedTokenizerFast) -> None:
    config = learner(
        hard={"prompts": "h", "greedy": 1, "sampled": 3, "samples": 2, "max_new_tokens": 7, "max_turns": 2},
        wide={"prompts": "w", "sampled": 5},
    )
    offers = {
        name: EvaluationRun(
            config.eval_tasks(name), PROMPTS, small_tokenizer, version=V40, seed=1, plan=EvalPlan.of(config, name)
        ).tasks()
        for name in config.eval_names
    }
    assert {name: len(of) for name, of in offers.items()} == {"": 6, "hard": 4, "wide": 5}
    ids = [offer.task.task_id for of in offers.values() for offer in of]
    assert len(set(ids)) == len(ids)
    limits = {
        name: {(o.task.sampling.max_new_tokens, o.task.sampling.max_turns) for o in of} for name, of in offers.items()
    }
    assert limits == {"": {(96, 0)}, "hard": {(7, 2)}, "wide": {(96, 0)}}
    assert {offer.task.eval_id for offer in offers["hard"]} == {"000040-hard-greedy", "000040-hard-sampled"}


def test_sets_are_due_at_their_own_steps() -> None:
    config = learner(often={"prompts": "a", "every": 5}, rare={"prompts": "b", "every": 40}, same={"prompts": "c"})
    assert config.evaluated_at(20) == ("", "often", "same")
    assert (config.evaluated_at(5), config.evaluated_at(7)) == (("often",), ())
    assert config.evaluated_at(40) == config.eval_names == ("", "often", "rare", "same")
    assert msgspec.structs.replace(config, eval_every=0).evaluated_at(40) == ()


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("a", {"prompts": ""}, "prompts is empty"),
        ("a", {"prompts": "p", "sampled": 0}, "greedy and sampled are 0"),
        ("a/b", {"prompts": "p"}, "eval_sets: got the name 'a/b', expected letters"),
        ("a", {"prompts": "p", "sampled": MAX_EVAL_PROMPTS}, "all sets ask 1,000,004 prompts"),
    ],
)
def test_senseless_sets_are_refused(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LearnerConfig(tasks=TaskConfig(eval_greedy=2, eval_sampled=4), eval_sets={name: EvalSetConfig(**fields)})
