"""Evaluation: which tasks go out, what the figures say of the results, and that nothing is counted twice."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from stillhouse.learner.evaluation.evaluation import EvalPrompt, EvaluationResult, EvaluationRun, render_eval_set
from stillhouse.learner.evaluation.figures import TagFigures, describe
from stillhouse.learner.prompts.config import TaskConfig
from stillhouse.learner.prompts.records import PromptRecord
from stillhouse.models.tokenizer import TokenizerError
from stillhouse.protocol.messages import BatchItem, EvalResult, Task, VersionSpan, WeightVersion

Arrays = tuple[np.ndarray, ...]
V40 = WeightVersion(0, 40)


def prompts(n: int) -> list[EvalPrompt]:
    return [EvalPrompt(np.array([65 + i, 66], dtype=np.int32), "t", str(i)) for i in range(n)]


@pytest.fixture
def evaluation(small_tokenizer: PreTrainedTokenizerFast) -> EvaluationRun:
    """Two greedy and three sampled rollouts at step 40."""
    config = TaskConfig(eval_greedy=2, eval_sampled=3, routes={"one": (), "two": ()}, max_new_tokens=9)
    return EvaluationRun(config, prompts(5), small_tokenizer, version=V40, seed=1)


def answer(
    task: Task,
    *,
    n: int = 2,
    reward: float | None = 1.0,
    kl: float = 0.0,
    spans: tuple[tuple[WeightVersion, int, int], ...] | None = None,
) -> tuple[BatchItem, Arrays]:
    """A rollout: two prompt tokens, `n` sampled ones ("C"), one of the environment ("!") after the first."""
    end = 3 + n
    mask = np.array([0, 0, 1, 0] + [1] * (n - 1), dtype=np.uint8)
    behaviour = np.where(mask, -0.5, 0.0).astype(np.float32)
    # Two teachers at kl - 1 and kl + 1 from the behaviour: their mean is at kl. Unsampled tokens hold anything.
    teachers = np.stack([np.where(mask, behaviour - kl + d, 99.0) for d in (-1.0, 1.0)]).astype(np.float32)
    item = BatchItem(
        rollout_id=f"eval-{task.task_id}-0-0",
        task_id=task.task_id,
        sample_index=0,
        group_size=1,
        tag=task.tag,
        teachers=task.teachers,
        end=end,
        spans=tuple(VersionSpan(v, a, b) for v, a, b in spans or ((V40, 2, end),)),
        final=True,
        finish_reason="stop",
        reward=reward,
        n_turns=1,
    )
    ids = np.array([65, 66, 67, 33] + [67] * (n - 1), dtype=np.int32)
    return item, (ids, behaviour, mask, teachers if task.teachers else np.zeros((0, end), dtype=np.float32))


def send(evaluation: EvaluationRun, eval_id: str, *answers: tuple[BatchItem, Arrays], failed: int = 0) -> None:
    arrays = tuple(array for _, frames in answers for array in frames)
    evaluation.add(EvalResult(eval_id, tuple(item for item, _ in answers), failed, 0), arrays)


def tasks_of(evaluation: EvaluationRun, eval_id: str) -> list[Task]:
    return [offer.task for offer in evaluation.tasks() if offer.task.eval_id == eval_id]


def finish(evaluation: EvaluationRun, **fields: Any) -> EvaluationResult:
    for eval_id in evaluation.eval_ids:
        send(evaluation, eval_id, *(answer(task, **fields) for task in tasks_of(evaluation, eval_id)))
    assert evaluation.done
    return evaluation.result()


# ------------------------------------------------------------------------------------------------ tasks


def test_the_halves_sample_differently_and_only_one_is_scored(evaluation: EvaluationRun) -> None:
    assert evaluation.eval_ids == ("000040-greedy", "000040-sampled")
    greedy, sampled = (tasks_of(evaluation, eval_id) for eval_id in evaluation.eval_ids)
    assert (len(greedy), len(sampled)) == (2, 3)
    for task in (*greedy, *sampled):
        assert (task.kind, task.group_size, task.sampling.max_new_tokens) == ("eval", 1, 9)
    assert {(t.sampling.temperature, t.teachers) for t in greedy} == {(0.0, ())}
    assert {(t.sampling.temperature, t.sampling.top_p, t.sampling.top_k, t.teachers) for t in sampled} == {
        (1.0, 1.0, 0, ("one", "two"))
    }
    assert [task.ground_truth for task in sampled] == ["0", "1", "2"]


def test_task_ids_never_meet_and_seeds_repeat_per_prompt(small_tokenizer: PreTrainedTokenizerFast) -> None:
    config = TaskConfig(eval_greedy=4, eval_sampled=5)
    versions = [WeightVersion(0, 0), V40, WeightVersion(0, 41), WeightVersion(1, 40), WeightVersion(2, 0)]
    evaluations = [EvaluationRun(config, prompts(5), small_tokenizer, version=v, seed=1) for v in versions]
    ids = [offer.task.task_id for evaluation in evaluations for offer in evaluation.tasks()]
    eval_ids = [eval_id for evaluation in evaluations for eval_id in evaluation.eval_ids]
    assert len(set(ids)) == len(ids) == 45
    assert len(set(eval_ids)) == len(eval_ids) == 10
    assert "e1-000040-greedy" in eval_ids
    assert len({tuple(offer.task.sampling.seed for offer in e.tasks()) for e in evaluations}) == 1


def test_fewer_prompts_than_asked_for_or_none_at_all(small_tokenizer: PreTrainedTokenizerFast) -> None:
    few = EvaluationRun(TaskConfig(eval_greedy=4, eval_sampled=0), prompts(3), small_tokenizer, version=V40, seed=1)
    assert few.eval_ids == ("000040-greedy",)
    assert len(few.tasks()) == 3
    none = EvaluationRun(TaskConfig(), [], small_tokenizer, version=V40, seed=1)
    assert none.done
    assert (none.tasks(), none.wanted(), none.result().accuracy_greedy) == ([], [], None)


# ------------------------------------------------------------------------------------------------ figures


def test_figures_by_tag_are_those_of_an_evaluation_of_the_tag_alone(small_tokenizer: PreTrainedTokenizerFast) -> None:
    """Tags with their own teachers, or none, and one of which nothing came back; a tag alone is not told twice."""
    config = TaskConfig(eval_greedy=3, eval_sampled=7, routes={"one": ("sums",), "two": ("sums", "lost")})
    tags = ["sums", "", "sums", "", "", "sums", "lost"]
    mixed = [EvalPrompt(p.ids, tag, p.ground_truth) for p, tag in zip(prompts(7), tags, strict=True)]
    rewards, kls, lengths = (
        [1.0, 0.0, 0.0, None, 1.0, 1.0, 1.0],
        [0.5, 0.0, 0.2, 0.0, 0.0, 0.1, 0.0],
        [1, 2, 3, 4, 1, 2, 3],
    )

    def answered(tag: str | None) -> EvaluationResult:
        evaluation = EvaluationRun(config, mixed, small_tokenizer, version=V40, seed=1)
        for eval_id in evaluation.eval_ids:
            for i, task in enumerate(tasks_of(evaluation, eval_id)):
                if task.tag != "lost" and tag in (None, task.tag):
                    send(evaluation, eval_id, answer(task, reward=rewards[i], kl=kls[i], n=lengths[i]))
        return evaluation.result()

    whole = answered(None)
    assert list(whole.tags) == ["(untagged)", "lost", "sums"]
    for name, tag in (("sums", "sums"), ("(untagged)", "")):
        alone = msgspec.to_builtins(answered(tag))
        assert {field: alone[field] for field in TagFigures.__struct_fields__} == msgspec.to_builtins(whole.tags[name])
    sums, untagged = whole.tags["sums"], whole.tags["(untagged)"]
    assert (sums.n_greedy, sums.n_sampled, sums.accuracy_sampled) == (2, 3, pytest.approx(2 / 3))
    assert sums.reverse_kl == pytest.approx((1 * 0.5 + 3 * 0.2 + 2 * 0.1) / 6, abs=1e-6)
    assert (untagged.accuracy_sampled, untagged.reverse_kl, untagged.n_sampled) == (0.5, None, 3)
    assert whole.tags["lost"] == TagFigures(n_greedy=0, n_sampled=0)
    assert describe(untagged) == "greedy 0.000 (of 1), sampled 0.500 (of 3)"
    assert describe(whole.tags["lost"]) == "nothing could be measured"
    one = EvaluationRun(config, mixed[:1], small_tokenizer, version=V40, seed=1)
    assert finish(one).tags == {}


def test_figures_by_environment_are_there_where_tags_do_not_say_the_same(
    small_tokenizer: PreTrainedTokenizerFast,
) -> None:
    config = TaskConfig(eval_greedy=0, eval_sampled=4, env="plain", routes={})

    def answered(*of: tuple[str, str]) -> EvaluationResult:
        given = [EvalPrompt(p.ids, tag, None, env=env) for p, (tag, env) in zip(prompts(4), of, strict=True)]
        evaluation = EvaluationRun(config, given, small_tokenizer, version=V40, seed=1)
        (eval_id,) = evaluation.eval_ids
        tasks = tasks_of(evaluation, eval_id)
        assert [task.env for task in tasks] == [env or "plain" for _, env in of]
        send(evaluation, eval_id, *(answer(task, reward=[1.0, 0.0, 0.25, 0.75][i]) for i, task in enumerate(tasks)))
        return evaluation.result()

    crossed = answered(("easy", "game"), ("hard", "game"), ("easy", ""), ("hard", ""))
    assert list(crossed.tags) == ["easy", "hard"] and list(crossed.environments) == ["game", "plain"]
    game, plain = crossed.environments.values()
    assert (game.reward_sampled, game.accuracy_sampled, game.n_sampled) == (0.5, 0.5, 2)
    assert (plain.reward_sampled, plain.accuracy_sampled, plain.n_sampled) == (0.5, 0.5, 2)
    assert (crossed.tags["easy"].reward_sampled, crossed.tags["hard"].reward_sampled) == (0.625, 0.375)
    by_name = answered(("game", "game"), ("game", "game"), ("", ""), ("", ""))
    assert list(by_name.tags) == ["(untagged)", "game"] and by_name.environments == {}
    assert answered(*[("easy", "game"), ("hard", "game")] * 2).environments == {}


def test_a_sample_s_prompt_is_what_the_student_read_before_it_wrote(small_tokenizer: PreTrainedTokenizerFast) -> None:
    """Also where its environment made the prompt, of another length than the row's."""
    config = TaskConfig(eval_greedy=1, eval_sampled=0, routes={})
    evaluation = EvaluationRun(config, prompts(1), small_tokenizer, version=V40, seed=1)
    (eval_id,) = evaluation.eval_ids
    item, (ids, behaviour, mask, _) = answer(tasks_of(evaluation, eval_id)[0], n=2)
    longer = np.concatenate([np.array([66, 66, 66], np.int32), ids])
    zeros, none = np.zeros(3, np.float32), np.zeros(3, np.uint8)
    frames = (
        longer,
        np.concatenate([zeros, behaviour]),
        np.concatenate([none, mask]),
        np.zeros((0, len(longer)), np.float32),
    )
    send(evaluation, eval_id, (msgspec.structs.replace(item, end=len(longer), spans=()), frames))
    (sample,) = evaluation.result().samples
    assert (sample.prompt, sample.completion) == ("cccbc", "dBd")


def test_the_figures_of_a_whole_evaluation(evaluation: EvaluationRun) -> None:
    greedy, sampled = (tasks_of(evaluation, eval_id) for eval_id in evaluation.eval_ids)
    send(evaluation, "000040-greedy", answer(greedy[0], reward=1.0), answer(greedy[1], reward=0.25, n=4))
    send(evaluation, "000040-sampled", answer(sampled[0], reward=0.0, n=1, kl=0.6))
    assert not evaluation.done
    send(evaluation, "000040-sampled", answer(sampled[2], n=3, kl=0.2), answer(sampled[1], reward=0.0, n=2, kl=0.0))
    assert evaluation.done
    result = evaluation.result()
    assert result.reverse_kl == pytest.approx((1 * 0.6 + 3 * 0.2 + 2 * 0.0) / 6, abs=1e-6)
    assert (result.accuracy_greedy, result.accuracy_sampled) == (0.5, pytest.approx(1 / 3))
    assert (result.reward_greedy, result.reward_sampled) == (0.625, pytest.approx(1 / 3))
    assert (result.mean_length_greedy, result.mean_length_sampled) == (3.0, 2.0)
    assert (result.n_greedy, result.n_sampled, result.failed, result.missing, result.no_reward) == (2, 3, 0, 0, 0)
    assert (result.step, result.version_min, result.version_mean_step) == (40, V40, 40.0)


def test_versions_are_weighed_by_sampled_tokens(evaluation: EvaluationRun) -> None:
    older, newer = WeightVersion(0, 39), WeightVersion(0, 45)
    # Offsets 2 and 4.. are sampled, 3 is the environment's; the span of version 30 holds no sampled token.
    spans = ((WeightVersion(0, 30), 0, 2), (older, 2, 4), (newer, 4, 6))
    result = finish(evaluation, n=3, spans=spans)
    assert result.version_min == older
    assert result.version_mean_step == pytest.approx((39 + 2 * 45) / 3)


def test_without_teacher_or_reward_there_is_no_figure_rather_than_a_zero(
    small_tokenizer: PreTrainedTokenizerFast,
) -> None:
    config = TaskConfig(eval_greedy=2, eval_sampled=2, routes={})
    result = finish(EvaluationRun(config, prompts(2), small_tokenizer, version=V40, seed=1), reward=None)
    assert (result.reverse_kl, result.accuracy_greedy, result.accuracy_sampled, result.no_reward) == (
        None,
        None,
        None,
        4,
    )


def test_failed_rollouts_complete_the_evaluation_without_counting_as_wrong(evaluation: EvaluationRun) -> None:
    greedy, sampled = (tasks_of(evaluation, eval_id) for eval_id in evaluation.eval_ids)
    send(evaluation, "000040-greedy", answer(greedy[1]), failed=1)
    send(evaluation, "000040-sampled", answer(sampled[0]), failed=2)
    assert evaluation.done
    result = evaluation.result()
    assert (result.accuracy_greedy, result.n_greedy, result.failed, result.missing) == (1.0, 1, 3, 0)


# ------------------------------------------------------------------------------------------------ messages


def test_a_result_that_comes_twice_counts_once(evaluation: EvaluationRun) -> None:
    first, second = tasks_of(evaluation, "000040-greedy")
    send(evaluation, "000040-greedy", answer(first, reward=1.0))
    send(evaluation, "000040-greedy", answer(first, reward=0.0), answer(second, reward=1.0))
    result = evaluation.result()
    assert (result.accuracy_greedy, result.n_greedy, result.duplicates) == (1.0, 2, 1)


def test_results_of_another_evaluation_are_refused(evaluation: EvaluationRun) -> None:
    task = tasks_of(evaluation, "000040-sampled")[0]
    with pytest.raises(ValueError, match="result of evaluation '000039-greedy'"):
        send(evaluation, "000039-greedy")
    with pytest.raises(ValueError, match="is not one of evaluation '000040-greedy'"):
        send(evaluation, "000040-greedy", answer(task))
    with pytest.raises(ValueError, match="1 items need 4 frames, got 0"):
        evaluation.add(EvalResult("000040-sampled", (answer(task)[0],), 0, 0), ())
    assert evaluation.result().missing == 5


def test_samples_are_the_first_prompts_of_each_half(small_tokenizer: PreTrainedTokenizerFast) -> None:
    config = TaskConfig(eval_greedy=6, eval_sampled=6)
    evaluation = EvaluationRun(config, prompts(6), small_tokenizer, version=V40, seed=1)
    for eval_id in evaluation.eval_ids:
        for task in reversed(tasks_of(evaluation, eval_id)):
            send(evaluation, eval_id, answer(task, n=2))
    samples = evaluation.result().samples
    shown = [(half, str(number)) for half in ("greedy", "sampled") for number in range(4)]
    assert [(s.half, s.ground_truth) for s in samples] == shown
    expected = [small_tokenizer.decode(ids) for ids in ([65, 66], [67, 33, 67])]
    assert [samples[0].prompt, samples[0].completion] == expected
    assert (samples[0].reward, samples[0].finish_reason) == (1.0, "stop")


# ------------------------------------------------------------------------------------------------ prompts, teacher


def test_the_evaluation_set_is_rendered_and_long_prompts_are_counted(small_tokenizer: PreTrainedTokenizerFast) -> None:
    records = [PromptRecord(i, text, None, "t", "x") for i, text in enumerate(["a", "b" * 90, "c"])]
    rendered = render_eval_set(records, small_tokenizer, TaskConfig(max_prompt_tokens=60))
    assert rendered.dropped == 1
    assert ["user\na" in small_tokenizer.decode(rendered.prompts[0].ids.tolist()), len(rendered.prompts)] == [True, 2]
    with pytest.raises(TokenizerError, match="evaluation prompt, row 0: messages need a chat template"):
        turns = ({"role": "user", "content": "a"},)
        render_eval_set([PromptRecord(0, None, turns)], small_tokenizer, TaskConfig(chat_template="off"))
