"""A teacher mixed into what the student samples from: tokens and log-probs are those of the mixture, by full passes of
both models through transformers; rows without a share do not notice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stillhouse.engines.base import GenerationRequest
from stillhouse.engines.torch.sampling import NextToken, RowSampling, draw_uniforms
from stillhouse.protocol.messages import WeightVersion
from tests.engines.torch.generation import VOCAB, Output, assert_true, make_engine, make_model, make_requests, run


@torch.no_grad()
def of_mixture(
    student: PreTrainedModel, teacher: PreTrainedModel, request: GenerationRequest, ids: Sequence[int]
) -> Tensor:
    """[n] log-probs of the ids, by full forward passes."""
    n_prompt, share = len(request.prompt_ids), request.sampling.teacher_share
    full = torch.tensor([request.prompt_ids.tolist() + list(ids)])
    both = [
        (model(input_ids=full, use_cache=False).logits[0, n_prompt - 1 : -1].double() / request.sampling.temperature)
        .softmax(-1)
        .gather(1, torch.tensor(list(ids))[:, None])[:, 0]
        for model in (student, teacher)
    ]
    return ((1 - share) * both[0] + share * both[1]).log().float()


def assert_mixed(
    student: PreTrainedModel, teacher: PreTrainedModel, requests: Sequence[GenerationRequest], found: dict[str, Output]
) -> None:
    for request in requests:
        output = found[request.request_id]
        expected = of_mixture(student, teacher, request, output.ids)
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("student", "teacher", "temperature"), [("qwen3", "llama", 0.7), ("qwen3", "qwen3.5", 1.0)])
def test_logprobs_are_those_of_the_mixture(student: str, teacher: str, temperature: float) -> None:
    """6 requests through 3 slots: rows end, are refilled and move. The second teacher decodes over its own cache."""
    requests = make_requests(6, new_tokens=8, teacher_share=0.3, temperature=temperature)
    found = run(make_engine(student, teacher=make_model(teacher, 1)), requests)
    assert_mixed(make_model(student), make_model(teacher, 1), requests, found)


def test_rows_without_a_share_are_as_in_an_engine_without_a_teacher() -> None:
    requests = make_requests(5, new_tokens=8)
    mixed = [
        replace(r, request_id=f"m{i}", sampling=msgspec.structs.replace(r.sampling, teacher_share=0.5))
        for i, r in enumerate(requests)
    ]
    both = [one for pair in zip(requests, mixed, strict=True) for one in pair]
    found = run(make_engine(max_concurrent=5, teacher=make_model("qwen3", 1)), both)
    alone = run(make_engine(max_concurrent=5), requests)
    assert [found[r.request_id].ids for r in requests] == [alone[r.request_id].ids for r in requests]
    assert_true(make_model("qwen3"), requests, found)
    assert_mixed(make_model("qwen3"), make_model("qwen3", 1), mixed, found)
    assert any(found[m.request_id].ids != found[r.request_id].ids for r, m in zip(requests, mixed, strict=True))


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_new_weights_change_the_students_part_alone(mode: str) -> None:
    engine = make_engine(teacher=make_model("qwen3", 1), update_mode=mode)
    engine.stage_weights(WeightVersion(0, 1), make_model("qwen3", 7).named_parameters())
    requests = make_requests(4, teacher_share=0.4)
    assert_mixed(make_model("qwen3", 7), make_model("qwen3", 1), requests, run(engine, requests))


def test_it_comes_as_often_as_the_mixture_says() -> None:
    n, share = 20_000, 0.3
    generator = torch.Generator().manual_seed(0)
    student_V, teacher_V = torch.randn(2, 7, generator=generator) * 2
    rows = RowSampling(None, None, None, None, None, torch.full((n,), share))
    following = NextToken(student_V.expand(n, 7), rows, teacher_V.expand(n, 7))
    ids, logprobs = following.sample(torch.from_numpy(draw_uniforms(3, 0, n)))
    expected = (1 - share) * student_V.softmax(0) + share * teacher_V.softmax(0)
    torch.testing.assert_close(logprobs, expected.log()[ids])
    counts = torch.bincount(ids, minlength=7)
    assert ((counts - n * expected) ** 2 / (n * expected)).sum() < 27.9  # 0.9999 quantile, 6 degrees of freedom


def test_a_teacher_with_another_number_of_rows_is_mixed_by_ids() -> None:
    teacher = make_model("qwen3", 1)
    teacher.resize_token_embeddings(VOCAB + 8, mean_resizing=False)
    with torch.no_grad():
        teacher.get_input_embeddings().weight[VOCAB:] = 0.0  # pyright: ignore
    requests = make_requests(3, teacher_share=0.5)
    found = run(make_engine(teacher=teacher), requests)
    assert all(token < VOCAB for output in found.values() for token in output.ids)


def test_an_engine_without_a_teacher_refuses_a_share() -> None:
    with pytest.raises(ValueError, match="was started without a teacher"):
        make_engine().submit(make_requests(1, teacher_share=0.2)[0])
    with pytest.raises(ValueError, match="expected a number from 0"):
        make_engine(teacher=make_model("qwen3", 1)).submit(make_requests(1, teacher_share=1.2)[0])
