"""Engines over transformers' own caches keep the promises of those over the slot cache."""

from __future__ import annotations

import logging
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from stillhouse.engines.base import GenerationRequest
from stillhouse.engines.config import EngineConfig
from stillhouse.engines.torch.engine import TorchEngine
from stillhouse.engines.torch.kv_cache import UnsupportedModelError
from stillhouse.protocol.messages import Sampling, WeightVersion
from tests.engines.torch.generation import (
    NEVER,
    Output,
    assert_true,
    make_engine,
    make_model,
    make_requests,
    poll_into,
    run,
    true_logprobs,
)

torch.set_num_threads(1)

KINDS = ("qwen3.5", "lfm2", "falcon-h1", "bamba", "mamba", "bloom", pytest.param("qwen3-next", marks=pytest.mark.slow))
V1 = WeightVersion(0, 1)


def _group(n: int) -> list[GenerationRequest]:
    prompt = np.arange(11, dtype=np.int32)
    return [GenerationRequest(f"g{i}", prompt, Sampling(seed=i), 6 + i, NEVER) for i in range(n)]


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_those_of_a_full_recompute(kind: str) -> None:
    """Three samples of one prompt share their passes; as they end, prompts of 1 to 14 tokens join, and rows move."""
    requests = [*_group(3), *make_requests(4, new_tokens=4, temperature=0.8)]
    outputs = run(make_engine(kind), requests)
    assert_true(make_model(kind), requests, outputs)


def test_the_same_seed_gives_the_same_tokens_in_any_company() -> None:
    requests, single = [*_group(2), *make_requests(3, new_tokens=6)], make_engine("qwen3.5")
    alone = [run(single, [request])[request.request_id].ids for request in requests]
    for slots in (2, 5):
        together = run(make_engine("qwen3.5", max_concurrent=slots), reversed(requests))
        assert [together[request.request_id].ids for request in requests] == alone


def test_samples_of_one_prompt_share_their_passes_and_their_prompt() -> None:
    engine = make_engine("qwen3.5", max_concurrent=4)
    batches: list[int] = []

    def note(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batches.append(len(kwargs["input_ids"]))

    model = cast(Any, engine)._slots._model
    handle = model.model.register_forward_pre_hook(note, with_kwargs=True)
    outputs = run(engine, _group(4))
    handle.remove()
    assert batches[:6] == [1, 4, 4, 4, 4, 4], "the prompt, and one pass for all"
    assert batches[1:] == sorted(batches[1:], reverse=True), "never two passes for one step"
    assert len(batches) == 1 + max(len(output.ids) for output in outputs.values())
    assert engine.stats.extra["prefill_tokens_total"] == 10
    assert engine.stats.extra["shared_prefill_tokens_total"] == 30
    assert engine.stats.extra["kv_cache_bytes"] > 0


def test_a_prompt_that_runs_already_is_computed_again_for_one_that_joins_later() -> None:
    """The state of one that runs has gone on: its beginning is not in it."""
    engine, requests = make_engine("qwen3.5"), _group(2)
    outputs: dict[str, Output] = {}
    engine.submit(requests[0])
    for _ in range(4):
        poll_into(engine, outputs)
    run(engine, requests[1:], outputs)
    assert_true(make_model("qwen3.5"), requests, outputs)
    assert engine.stats.extra["shared_prefill_tokens_total"] == 0


@pytest.mark.parametrize(("kind", "mode"), [("qwen3.5", "in_place"), ("lfm2", "retract")])
def test_new_weights_in_the_middle(kind: str, mode: str) -> None:
    """In place, the state of the old weights goes on under the new ones; with retract, it is computed again."""
    old, new = make_model(kind, 0), make_model(kind, 1)
    requests = make_requests(3, new_tokens=9, stops=())
    engine = make_engine(kind, update_mode=mode)
    outputs: dict[str, Output] = {}
    for request in requests:
        engine.submit(request)
    for _ in range(6):
        poll_into(engine, outputs)
    engine.stage_weights(V1, [(name, parameter.detach()) for name, parameter in new.named_parameters()])
    run(engine, (), outputs)
    for request in requests:
        output = outputs[request.request_id]
        n_old = output.versions.count(WeightVersion(0, 0))
        assert n_old == 6
        after = true_logprobs(new, request, output.ids)[n_old:]
        if mode == "in_place":
            whole = torch.tensor([request.prompt_ids.tolist() + output.ids])
            fed, cache = len(request.prompt_ids) + n_old - 1, DynamicCache(config=old.config)
            with torch.no_grad():
                cast(Any, old)(input_ids=whole[:, :fed], past_key_values=cache, use_cache=True)
                each = [
                    cast(Any, new)(input_ids=whole[:, i : i + 1], past_key_values=cache, use_cache=True).logits[0, 0]
                    for i in range(fed, whole.shape[1] - 1)
                ]
            after = torch.stack(each).log_softmax(-1).gather(1, whole[0, fed + 1 :, None])[:, 0]
        expected = torch.cat((true_logprobs(old, request, output.ids)[:n_old], after))
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-4, rtol=0)


def test_an_aborted_request_disturbs_no_other() -> None:
    engine, requests = make_engine("qwen3.5", max_concurrent=4), _group(4)
    outputs: dict[str, Output] = {}
    for request in requests:
        engine.submit(request)
    for _ in range(3):
        poll_into(engine, outputs)
    engine.abort("g1")
    run(engine, make_requests(2, new_tokens=6), outputs)
    assert outputs.pop("g1").finish_reason == "aborted"
    others = [request for request in requests if request.request_id in outputs]
    assert_true(make_model("qwen3.5"), [*others, *make_requests(2, new_tokens=6)], outputs)


def test_logits_that_are_not_numbers_spoil_no_later_request() -> None:
    engine = make_engine("qwen3.5")
    good = [(name, parameter.detach().clone()) for name, parameter in make_model("qwen3.5").named_parameters()]
    engine.stage_weights(V1, [(name, tensor * float("nan")) for name, tensor in good])
    assert all(output.finish_reason == "error" for output in run(engine, _group(3)).values())
    engine.stage_weights(WeightVersion(0, 2), good)
    requests = [*make_requests(2, new_tokens=6), *_group(2)]
    assert_true(make_model("qwen3.5"), requests, run(engine, requests))


def test_rows_that_feel_one_another_are_decoded_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("qwen3.5")

    def leak(_module: Any, _inputs: Any, out: Tensor) -> Tensor:
        return out + 0.1 * (out.mean(dim=0, keepdim=True) - out)

    cast(Any, model).model.layers[0].mlp.register_forward_hook(leak)
    with caplog.at_level(logging.INFO):
        engine = TorchEngine(model, EngineConfig(max_concurrent=3, max_context=64, device="cpu"))
    assert "over transformers' own cache, one sequence at a time" in caplog.text
    requests = _group(3)
    assert_true(make_model("qwen3.5"), requests, run(engine, requests))


def test_what_its_own_cache_does_not_continue_is_refused_with_what_to_do() -> None:
    model = make_model("qwen3.5")

    def forget(_module: Any, _inputs: Any, out: Tensor) -> Tensor:
        return out + out[:, :1]  # of the first token of a call, not of the sequence

    cast(Any, model).model.layers[0].mlp.register_forward_hook(forget)
    with pytest.raises(UnsupportedModelError, match=r"differ from the plain .* expected actor.engine = sglang"):
        TorchEngine(model, EngineConfig(max_concurrent=3, max_context=64, device="cpu"))
