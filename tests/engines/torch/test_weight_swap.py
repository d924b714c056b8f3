from __future__ import annotations

import threading
import time
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from stillhouse.engines.base import GenerationRequest
from stillhouse.engines.torch.engine import TorchEngine
from stillhouse.protocol.messages import WeightVersion
from tests.engines.torch.generation import (
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

V0, V1, V2 = WeightVersion(0, 0), WeightVersion(0, 1), WeightVersion(1, 2)

both_decoders = pytest.mark.parametrize("fused", [True, False])


def weights_of(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def swap_after(engine: TorchEngine, steps: int, requests: Iterable[GenerationRequest], seed: int) -> dict[str, Output]:
    """Run `requests` with the weights of `seed` staged, as V1, after some steps."""
    outputs: dict[str, Output] = {}
    for request in requests:
        engine.submit(request)
    for _ in range(steps):
        poll_into(engine, outputs)
    engine.stage_weights(V1, weights_of(make_model("qwen3", seed)))
    assert engine.version == V0
    poll_into(engine, outputs)
    assert engine.version == V1
    return run(engine, outputs=outputs)


@torch.no_grad()
def logprobs_over_kept_cache(
    old: PreTrainedModel, new: PreTrainedModel, request: GenerationRequest, output: Output
) -> Tensor:
    """Of the tokens sampled under V1: the new model reads keys and values that the old one left. [n]"""
    n_old = output.versions.count(V0)
    if not n_old:
        return true_logprobs(new, request, output.ids)
    sequence = torch.tensor([request.prompt_ids.tolist() + output.ids])
    first_fed = len(request.prompt_ids) + n_old - 1
    cache = DynamicCache(config=old.config)
    old(input_ids=sequence[:, :first_fed], past_key_values=cache, use_cache=True)
    logits = new(input_ids=sequence[:, first_fed:-1], past_key_values=cache, use_cache=True).logits[0]
    return logits.log_softmax(-1).gather(1, sequence[0, first_fed + 1 :, None])[:, 0]


@both_decoders
def test_in_place_keeps_the_cache_and_tells_the_versions_apart(fused: bool) -> None:
    old, new = make_model("qwen3", 0), make_model("qwen3", 1)
    requests = make_requests(4, new_tokens=14, stops=())
    outputs = swap_after(make_engine(fused=fused, update_mode="in_place"), 6, requests, seed=1)
    for request in requests:
        output = outputs[request.request_id]
        n_old = output.versions.count(V0)
        assert n_old == (6 if request.request_id != "r3" else 0)
        assert output.versions == [V0] * n_old + [V1] * (len(output.ids) - n_old)
        before = true_logprobs(old, request, output.ids)[:n_old]
        after = logprobs_over_kept_cache(old, new, request, output)
        torch.testing.assert_close(torch.tensor(output.logprobs), torch.cat((before, after)), atol=1e-4, rtol=0)


@both_decoders
def test_retract_recomputes_the_cache_under_the_new_weights(fused: bool) -> None:
    old, new = make_model("qwen3", 0), make_model("qwen3", 1)
    requests = make_requests(5, new_tokens=14, stops=())
    engine = make_engine(fused=fused, update_mode="retract", prefill_tokens_per_step=10 if fused else 4096)
    outputs = swap_after(engine, 6, requests, seed=1)
    for request in requests:
        output = outputs[request.request_id]
        n_old = output.versions.count(V0)
        expected = torch.cat(
            (true_logprobs(old, request, output.ids)[:n_old], true_logprobs(new, request, output.ids)[n_old:])
        )
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-4, rtol=0)
    n_old = [outputs[request.request_id].versions.count(V0) for request in requests]
    past = [len(request.prompt_ids) + n - 1 for request, n in zip(requests, n_old, strict=True) if n]
    assert len(past) == 3
    assert engine.stats.extra["retracted_tokens_total"] == sum(past)


def test_versions_are_true_whenever_weights_arrive() -> None:
    """Another thread stages four versions while rollouts run: each token's log-prob is that of its version."""
    models = {WeightVersion(0, step): make_model("qwen3", step) for step in range(5)}
    engine = make_engine(update_mode="retract", max_concurrent=4)
    stepped = threading.Semaphore(0)

    def stage_all() -> None:
        for version, model in list(models.items())[1:]:
            for _ in range(5):
                stepped.acquire()
            engine.stage_weights(version, weights_of(model))

    stager = threading.Thread(target=stage_all)
    stager.start()
    requests = make_requests(7, new_tokens=16)
    outputs: dict[str, Output] = {}
    for request in requests:
        engine.submit(request)
    while engine.stats.running or engine.stats.queued:
        poll_into(engine, outputs)
        stepped.release()
        time.sleep(0.005)  # on a busy machine the other thread gets its turn
    stager.join()
    seen = {version for output in outputs.values() for version in output.versions}
    assert len(seen) >= 3
    for request in requests:
        output = outputs[request.request_id]
        by_version = {version: true_logprobs(model, request, output.ids) for version, model in models.items()}
        expected = torch.stack([by_version[version][index] for index, version in enumerate(output.versions)])
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-4, rtol=0)


@both_decoders
@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
def test_a_swap_reaches_every_parameter(kind: str, fused: bool) -> None:
    """Tied and untied heads, biases, joined projections, head norms."""
    engine = make_engine(kind, fused=fused)
    new = make_model(kind, 1)
    engine.stage_weights(V1, weights_of(new))
    requests = make_requests(3, new_tokens=6)
    assert_true(new, requests, run(engine, requests))


def test_prompts_cached_before_a_swap_are_not_shared_with_requests_after_it() -> None:
    first, second = make_requests(3)[2], make_requests(3)[2]
    engine = make_engine(update_mode="in_place")
    engine.submit(first)
    engine.poll(0.0)
    engine.stage_weights(V1, weights_of(make_model("qwen3", 1)))
    later = GenerationRequest("later", second.prompt_ids, second.sampling, 9, ())
    outputs = run(engine, [later])
    assert_true(make_model("qwen3", 1), [later], outputs)


def test_a_newer_staging_replaces_one_that_waits_and_an_older_one_is_left_aside() -> None:
    engine = make_engine(version=V0)
    engine.stage_weights(V1, weights_of(make_model("qwen3", 1)))
    engine.stage_weights(V2, weights_of(make_model("qwen3", 2)))
    engine.stage_weights(V1, weights_of(make_model("qwen3", 1)))
    engine.poll(0.0)
    engine.stage_weights(V1, weights_of(make_model("qwen3", 1)))
    engine.poll(0.0)
    assert engine.version == V2
    assert engine.stats.weight_swaps_total == 1
    assert engine.stats.extra["stale_stagings_total"] == 2
    requests = make_requests(2)
    assert_true(make_model("qwen3", 2), requests, run(engine, requests))


def test_staged_memory_may_be_reused_at_once() -> None:
    engine = make_engine()
    buffers = [(name, tensor.clone()) for name, tensor in weights_of(make_model("qwen3", 1))]
    engine.stage_weights(V1, buffers)
    for _, tensor in buffers:
        tensor.fill_(float("nan"))
    requests = make_requests(2)
    assert_true(make_model("qwen3", 1), requests, run(engine, requests))


@pytest.mark.parametrize("case", ["missing", "unknown", "shape", "twice"])
def test_weights_that_do_not_fit_are_refused_by_name_and_nothing_changes(case: str) -> None:
    engine = make_engine()
    weights = weights_of(make_model("qwen3", 1))
    name, tensor = weights[3]
    wrong, message = {
        "missing": (weights[:3] + weights[4:], f"{name} is missing"),
        "unknown": ([*weights, ("lm_head.weight", weights[0][1])], "lm_head.weight is not a parameter"),
        "shape": ([*weights[:3], (name, tensor[:-1]), *weights[4:]], f"{name} has shape"),
        "twice": ([*weights, (name, tensor)], f"{name} came twice"),
    }[case]
    with pytest.raises(ValueError, match=message):
        engine.stage_weights(V1, wrong)
    requests = make_requests(2)
    assert_true(make_model("qwen3", 0), requests, run(engine, requests))
    assert engine.version == V0
