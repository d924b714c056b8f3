"""The experts that the embedded engine reports: those of transformers' own forward over the whole sequence, under the
weights that each token was sampled from."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import PreTrainedModel

from stillhouse.engines.base import GenerationDelta, GenerationRequest
from stillhouse.engines.torch.engine import TorchEngine
from stillhouse.protocol.messages import ExpertShape, WeightVersion
from tests.engines.torch.generation import make_engine, make_model, make_requests

SHAPE = ExpertShape((0, 1), 4, 2)
Ids = npt.NDArray[np.uint16]


@torch.no_grad()
def true_sets(model: PreTrainedModel, ids: list[int]) -> list[list[set[int]]]:
    """By token after the first, by layer: what the routers choose at the token before it."""
    of_layers = model(input_ids=torch.tensor([ids]), use_cache=False, output_router_logits=True).router_logits
    return [[set(of_layer[at].topk(2).indices.tolist()) for of_layer in of_layers] for at in range(len(ids) - 1)]


class Told:
    """All that an engine reported of one request."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request, self.ids = request, list[int]()
        self.prompt: list[Ids] = []
        self.rows: list[Ids] = []
        self.versions: list[WeightVersion] = []

    def add(self, delta: GenerationDelta) -> None:
        assert delta.error is None
        self.ids += delta.token_ids.tolist()
        self.versions += [span.version for span in delta.spans for _ in range(span.start, span.end)]
        if delta.prompt_experts is not None:
            assert not self.prompt and not self.rows
            self.prompt += list(delta.prompt_experts)
        if delta.experts is not None:
            assert len(delta.experts) == len(delta.token_ids)
            self.rows += list(delta.experts)

    @property
    def sets(self) -> list[list[set[int]]]:
        assert len(self.rows) == len(self.ids)
        return [[set(one_K.tolist()) for one_K in row_LK] for row_LK in (*self.prompt, *self.rows)]


def run(engine: TorchEngine, requests: list[GenerationRequest], swap: Any = None) -> dict[str, Told]:
    told = {request.request_id: Told(request) for request in requests}
    for request in requests:
        engine.submit(request)
    while engine.stats.running or engine.stats.queued:
        for delta in engine.poll(0.0):
            told[delta.request_id].add(delta)
        if swap is not None and engine.stats.decode_steps_total == 5:
            swap()
    for delta in engine.poll(0.0):
        told[delta.request_id].add(delta)
    return told


def asking(n: int, **more: Any) -> list[GenerationRequest]:
    return make_requests(n, experts=SHAPE, **more)


@pytest.mark.parametrize("kind", ["qwen3-moe", "gpt-oss"])
def test_each_token_has_the_choices_of_a_plain_forward(kind: str) -> None:
    """Prompts of one to many tokens, more of them than slots, two of them alike."""
    engine, model, requests = make_engine(kind), make_model(kind), asking(7)
    requests.insert(2, GenerationRequest("again", requests[1].prompt_ids, requests[6].sampling, 9, ()))
    if kind == "gpt-oss":
        model.set_attn_implementation("eager")
    for one in run(engine, requests).values():
        prompt = one.request.prompt_ids.tolist()
        assert len(one.prompt) == len(prompt) - 1 and one.sets == true_sets(model, [*prompt, *one.ids])
    assert engine.stats.extra["shared_prefill_tokens_total"]


def test_a_cache_of_transformers_own_is_recorded_too() -> None:
    engine, model, requests = make_engine("qwen3.5-moe"), make_model("qwen3.5-moe"), asking(4, new_tokens=6)
    for one in run(engine, requests).values():
        assert one.sets == true_sets(model, [*one.request.prompt_ids.tolist(), *one.ids])


def test_prompts_that_were_filled_before_anybody_asked_are_filled_again() -> None:
    engine, model = make_engine("qwen3-moe"), make_model("qwen3-moe")
    (plain,) = make_requests(1, new_tokens=30, seed=4)
    plain = GenerationRequest("plain", np.arange(9, dtype=np.int32), plain.sampling, 30, ())
    engine.submit(plain)
    engine.poll(0.0)
    (asked,) = asking(1, seed=5)
    told = Told(GenerationRequest("asked", plain.prompt_ids, asked.sampling, 6, ()))
    engine.submit(told.request)
    while engine.stats.running or engine.stats.queued:
        for delta in engine.poll(0.0):
            assert delta.request_id == "asked" or delta.experts is None
            if delta.request_id == "asked":
                told.add(delta)
    assert told.sets == true_sets(model, [*plain.prompt_ids.tolist(), *told.ids])


def test_only_what_is_not_known_of_a_prompt_is_told() -> None:
    engine, model, (first,) = make_engine("qwen3-moe"), make_model("qwen3-moe"), asking(1)
    prompt = np.arange(12, dtype=np.int32)
    (one,) = run(engine, [GenerationRequest("turn", prompt, first.sampling, 5, (), experts_from=8)]).values()
    assert len(one.prompt) == 4 and one.sets == true_sets(model, [*prompt.tolist(), *one.ids])[7:]
    (one,) = run(engine, [GenerationRequest("turn", prompt, first.sampling, 5, (), experts_from=12)]).values()
    assert not one.prompt and one.sets == true_sets(model, [*prompt.tolist(), *one.ids])[11:]


def test_after_new_weights_the_tokens_before_keep_what_they_were_sampled_from() -> None:
    """With `retract` all keys and values are those of the new weights, and so is every later choice."""
    engine = make_engine("qwen3-moe", update_mode="retract")
    old, new, requests = make_model("qwen3-moe"), make_model("qwen3-moe", seed=1), asking(3, new_tokens=14)
    told = run(engine, requests, lambda: engine.stage_weights(WeightVersion(0, 1), new.named_parameters()))
    for one in told.values():
        ids, n_prompt = [*one.request.prompt_ids.tolist(), *one.ids], len(one.request.prompt_ids)
        n_old = n_prompt - 1 + one.versions.count(WeightVersion(0, 0))
        assert n_prompt - 1 < n_old < len(ids) - 1
        assert one.sets == true_sets(old, ids)[:n_old] + true_sets(new, ids)[n_old:]


def test_routers_that_are_not_the_models_are_refused() -> None:
    (request,) = make_requests(1, experts=ExpertShape((0, 1), 8, 2))
    with pytest.raises(ValueError, match=r"experts=8.*model has.*experts=4"):
        make_engine("qwen3-moe").submit(request)
    with pytest.raises(ValueError, match="expected a mixture of experts"):
        make_engine("qwen3").submit(request)
