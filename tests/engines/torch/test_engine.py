from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from stillhouse.engines.base import GenerationRequest
from stillhouse.engines.config import EngineConfig
from stillhouse.engines.torch.engine import TorchEngine
from stillhouse.engines.torch.slots import RowWindow, row_windows
from stillhouse.protocol.messages import Sampling, WeightVersion
from tests.engines.torch.generation import (
    CONTEXT,
    NEVER,
    VOCAB,
    Output,
    assert_true,
    make_engine,
    make_model,
    make_requests,
    poll_into,
    run,
)

torch.set_num_threads(1)

both_decoders = pytest.mark.parametrize("fused", [True, False])


@both_decoders
def test_greedy_tokens_are_those_of_generate(fused: bool) -> None:
    model = make_model("qwen3")
    stops = (3, 11, 20)
    requests = make_requests(6, new_tokens=16, stops=stops, temperature=0.0)
    outputs = run(make_engine(fused=fused), requests)
    reasons: set[str | None] = set()
    for request in requests:
        generator: Any = model
        expected = generator.generate(
            input_ids=torch.from_numpy(request.prompt_ids.astype(np.int64))[None],
            attention_mask=torch.ones(1, len(request.prompt_ids), dtype=torch.int64),
            max_new_tokens=request.max_new_tokens,
            do_sample=False,
            eos_token_id=list(stops),
            pad_token_id=0,
        )[0, len(request.prompt_ids) :]
        output = outputs[request.request_id]
        assert output.ids == expected.tolist()
        assert output.finish_reason == ("stop" if output.ids[-1] in stops else "length")
        reasons.add(output.finish_reason)
    assert reasons == {"stop", "length"}
    assert_true(model, requests, outputs)


@pytest.mark.parametrize(
    ("sampling", "fused"),
    [
        ({}, True),
        ({"temperature": 0.7}, True),
        ({"top_k": 8}, True),
        ({"top_p": 0.7}, True),
        ({"temperature": 0.7, "top_k": 20, "top_p": 0.9}, False),
    ],
)
def test_logprobs_are_those_of_a_full_recompute(sampling: dict[str, Any], fused: bool) -> None:
    """Prompts of 1 to 14 tokens and 7 requests through 3 slots: rows end, are refilled and move."""
    requests = make_requests(7, new_tokens=8, **sampling)
    outputs = run(make_engine(fused=fused), requests)
    assert_true(make_model("qwen3"), requests, outputs)


def test_rows_with_different_settings_share_a_batch() -> None:
    settings: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.0}, {"top_k": 3}, {"temperature": 1.7, "top_p": 0.6})
    requests = [
        replace(request, sampling=Sampling(seed=index, **settings[index % 4]))
        for index, request in enumerate(make_requests(12))
    ]
    assert_true(make_model("qwen3"), requests, run(make_engine(max_concurrent=5), requests))


def test_the_same_seed_gives_the_same_tokens_in_any_company() -> None:
    requests, single = make_requests(6, new_tokens=12), make_engine()
    alone = [run(single, [request])[request.request_id].ids for request in requests]
    for slots in (2, 6):
        together = run(make_engine(max_concurrent=slots), reversed(requests))
        assert [together[request.request_id].ids for request in requests] == alone


def test_other_seeds_give_other_tokens() -> None:
    first = make_requests(1, new_tokens=20)[0]
    second = replace(first, request_id="other", sampling=Sampling(seed=99))
    outputs = run(make_engine(), [first, second])
    assert outputs["r0"].ids != outputs["other"].ids


def test_a_rollout_cut_in_two_goes_on_with_the_same_random_numbers() -> None:
    whole = make_requests(1, new_tokens=24, stops=())[0]
    ids = run(make_engine(), [whole])["r0"].ids
    first = run(make_engine(), [replace(whole, max_new_tokens=7)])["r0"].ids
    prompt = np.concatenate((whole.prompt_ids, np.array(first, np.int32)))
    rest = replace(whole, prompt_ids=prompt, max_new_tokens=17, sample_offset=7)
    assert first + run(make_engine(), [rest])["r0"].ids == ids


def test_a_rollout_longer_than_the_first_cells_of_its_slot_keeps_its_past() -> None:
    requests = make_requests(3, new_tokens=130, stops=())
    outputs = run(make_engine(max_concurrent=3), requests)
    assert min(len(output.ids) for output in outputs.values()) >= 130
    assert_true(make_model("qwen3"), requests, outputs)


@both_decoders
def test_long_and_short_rows_attend_in_blocks_of_their_own(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two grow beyond 64 tokens beside short ones, and change their class and their row."""
    n_blocks: list[int] = []

    def noted(lengths_R: np.ndarray, max_context: int) -> list[RowWindow]:
        blocks = row_windows(lengths_R, max_context)
        n_blocks.append(len(blocks))
        return blocks

    monkeypatch.setattr("stillhouse.engines.torch.step.row_windows", noted)
    random, lengths = np.random.default_rng(0), (3, 4, 60, 5, 2, 6, 58, 3, 4, 5, 6, 7)
    requests = [
        GenerationRequest(f"r{i}", random.integers(0, VOCAB, n).astype(np.int32), Sampling(seed=i), 12, ())
        for i, n in enumerate(lengths)
    ]
    assert_true(make_model("qwen3"), requests, run(make_engine(fused=fused, max_concurrent=len(lengths)), requests))
    assert {1, 2} <= set(n_blocks)


def test_a_request_ends_where_the_context_ends() -> None:
    request = replace(make_requests(3, stops=())[2], max_new_tokens=1000)
    output = run(make_engine(max_context=20), [request])[request.request_id]
    assert len(request.prompt_ids) + len(output.ids) == 20
    assert output.finish_reason == "length"


def test_a_sampled_stop_token_is_part_of_the_output() -> None:
    free = run(make_engine(), [make_requests(1, new_tokens=20, stops=())[0]])["r0"].ids
    stop = next(token for index, token in enumerate(free) if index >= 5 and token not in free[:index])
    output = run(make_engine(), [make_requests(1, new_tokens=20, stops=(stop,))[0]])["r0"]
    assert output.ids == free[: free.index(stop) + 1]
    assert output.finish_reason == "stop"


# ------------------------------------------------------------------------------------------------- prefill


def group(n: int, prompt: np.ndarray) -> list[GenerationRequest]:
    return [GenerationRequest(f"g{i}", prompt, Sampling(seed=i), 9 + i, NEVER) for i in range(n)]


@both_decoders
def test_a_group_pays_for_its_prompt_once(fused: bool) -> None:
    """Members that join later copy the prompt from one that runs."""
    prompt = np.arange(11, dtype=np.int32)
    requests = [*group(8, prompt), *make_requests(3)]
    engine = make_engine(fused=fused, max_concurrent=5)
    outputs = run(engine, requests)
    assert_true(make_model("qwen3"), requests, outputs)
    others = sum(len(request.prompt_ids) - 1 for request in requests[8:])
    assert engine.stats.extra["prefill_tokens_total"] == 10 + others
    assert engine.stats.extra["shared_prefill_tokens_total"] == 70


@pytest.mark.parametrize("budget", [1, 12])
def test_prompts_wait_for_the_prefill_budget(budget: int) -> None:
    requests = make_requests(9)
    outputs = run(make_engine(max_concurrent=9, prefill_tokens_per_step=budget), requests)
    assert_true(make_model("qwen3"), requests, outputs)


def test_prompts_of_very_different_lengths_join_in_one_step() -> None:
    random = np.random.default_rng(1)
    requests = [
        GenerationRequest(f"r{n}", random.integers(0, VOCAB, n).astype(np.int32), Sampling(seed=n), 5, ())
        for n in (1, 2, 60, 3, 59, 25, 120, 24, 9)
    ]
    engine = make_engine(max_concurrent=9)
    assert_true(make_model("qwen3"), requests, run(engine, requests))
    assert engine.stats.decode_steps_total == 5


# --------------------------------------------------------------------------------------------- the interface


def test_deltas_come_every_few_steps_and_at_once_at_the_end() -> None:
    engine = make_engine()
    engine.submit(make_requests(1, new_tokens=18, stops=())[0])
    assert [[len(delta.token_ids) for delta in engine.poll(0.0)] for _ in range(18)] == [
        *[[]] * 7,
        [8],
        *[[]] * 7,
        [8],
        *([], [2]),
    ]


def test_an_aborted_request_hands_out_what_it_has_and_disturbs_no_other() -> None:
    requests = make_requests(5, new_tokens=20)
    undisturbed = run(make_engine(max_concurrent=2), requests)
    engine = make_engine(max_concurrent=2)
    outputs: dict[str, Output] = {}
    for request in requests:
        engine.submit(request)
    for _ in range(6):
        poll_into(engine, outputs)
    for request_id in ("r0", "r3", "nobody"):
        engine.abort(request_id)
    run(engine, outputs=outputs)
    assert outputs["r0"].finish_reason == outputs["r3"].finish_reason == "aborted"
    assert outputs["r0"].ids == undisturbed["r0"].ids[:6]
    assert outputs["r3"].ids == []
    for request_id in ("r1", "r2", "r4"):
        assert outputs[request_id].ids == undisturbed[request_id].ids
    engine.abort("r0")
    assert engine.poll(0.0) == []


def test_a_request_id_is_free_again_when_its_request_ended() -> None:
    engine = make_engine()
    request = make_requests(1)[0]
    assert run(engine, [request])["r0"].ids == run(engine, [request])["r0"].ids


def bad(**changes: Any) -> GenerationRequest:
    return replace(make_requests(4)[3], request_id="bad", **changes)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (bad(prompt_ids=np.zeros(0, np.int32)), "at least one token"),
        (bad(prompt_ids=np.array([1, VOCAB, 2], np.int32)), f"id {VOCAB} is outside"),
        (bad(prompt_ids=np.array([1, -1], np.int32)), "id -1 is outside"),
        (bad(prompt_ids=np.zeros(CONTEXT, np.int32)), "leaves no room"),
        (bad(max_new_tokens=0), "max_new_tokens 0"),
        (bad(sampling=Sampling(top_p=0.0)), "top_p"),
        (replace(bad(), request_id="r0"), "'r0' is in use"),
    ],
)
def test_a_request_that_cannot_run_is_refused_by_name(request_: GenerationRequest, message: str) -> None:
    engine = make_engine()
    requests = make_requests(1)
    engine.submit(requests[0])
    with pytest.raises(ValueError, match=message):
        engine.submit(request_)
    assert set(run(engine)) == {"r0"}


def test_the_longest_prompt_that_leaves_room_for_a_token_gets_it() -> None:
    request = bad(prompt_ids=np.zeros(CONTEXT - 1, np.int32))
    assert len(run(make_engine(), [request])["bad"].ids) == 1


def test_poll_waits_for_weights_when_there_is_nothing_to_decode() -> None:
    engine = make_engine()
    assert engine.poll(0.01) == []
    tensors = [(name, parameter.detach()) for name, parameter in make_model("qwen3", 1).named_parameters()]
    stager = threading.Timer(0.05, engine.stage_weights, (WeightVersion(0, 1), tensors))
    stager.start()
    assert engine.poll(60.0) == []
    stager.join()
    assert engine.version == WeightVersion(0, 1)


def test_stats_count_what_was_done() -> None:
    engine = make_engine(max_concurrent=3)
    requests = make_requests(5)
    for request in requests:
        engine.submit(request)
    engine.poll(0.0)
    stats = engine.stats
    assert (stats.running, stats.queued, stats.free_slots) == (3, 2, 0)
    outputs = run(engine)
    stats = engine.stats
    assert stats.sampled_tokens_total == sum(len(output.ids) for output in outputs.values())
    assert stats.busy_s_total > 0
    assert (stats.running, stats.queued, stats.free_slots) == (0, 0, 3)


def test_logits_that_are_not_numbers_end_the_request_and_spoil_no_later_one() -> None:
    engine = make_engine()
    good = [(name, parameter.detach().clone()) for name, parameter in make_model("qwen3").named_parameters()]
    engine.stage_weights(WeightVersion(0, 1), [(name, tensor * float("nan")) for name, tensor in good])
    broken = run(engine, group(4, np.arange(14, dtype=np.int32)))
    assert all(output.finish_reason == "error" and output.ids == [] for output in broken.values())
    assert "not finite under weights 0.1" in str(broken["g0"].error)
    assert engine.stats.sampled_tokens_total == 0
    engine.stage_weights(WeightVersion(0, 2), good)
    requests = make_requests(4)
    assert_true(make_model("qwen3"), requests, run(engine, requests))


def test_a_closed_engine_says_so() -> None:
    engine = make_engine()
    engine.submit(make_requests(1)[0])
    engine.close()
    engine.close()
    for call in (lambda: engine.poll(0.0), lambda: engine.submit(make_requests(1)[0])):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_a_context_beyond_the_models_is_refused() -> None:
    with pytest.raises(ValueError, match=f"context window is {CONTEXT}"):
        TorchEngine(make_model("qwen3"), EngineConfig(max_context=CONTEXT + 1, device="cpu"))


@pytest.mark.parametrize(
    "settings",
    [
        {"max_concurrent": 0},
        {"max_context": 1},
        {"prefill_tokens_per_step": 0},
        {"device": ""},
    ],
)
def test_senseless_settings_are_refused(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ValueError, match=name):
        EngineConfig(**settings)
