"""Generation on a real SGLang server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from stillhouse.engines.base import EngineMismatch
from stillhouse.engines.http.link import ServerLost, ServerUnavailable
from stillhouse.engines.http.stream import StreamError
from stillhouse.engines.sglang.config import SGLangConfig
from stillhouse.engines.sglang.engine import SGLangEngine
from stillhouse.models.tokenizer import load_tokenizer, stop_token_ids
from stillhouse.protocol.messages import Sampling, TopIdsWanted, VersionSpan, WeightVersion
from stillhouse.sglang_server.servers import SERVER_ARGS, Servers, SGLangServer
from tests.engines.sglang.test_features import TRIED
from tests.patience import PATIENCE_S
from tests.sglang.conftest import (
    READY_S,
    STUDENT,
    TOLERANCE,
    VOCAB,
    Answer,
    Reference,
    collect,
    generate,
    request,
    take,
)

PROMPT = [65, 66, 67, 68]
START = WeightVersion(0, 0)


def test_greedy_answers_are_those_of_transformers(engine: SGLangEngine, student_reference: Reference) -> None:
    answer = generate(engine, [request("a", PROMPT, 24, temperature=0.0)])["a"]

    assert answer.ids == student_reference.greedy(PROMPT, len(answer.ids))
    assert answer.logprobs == pytest.approx(student_reference.of_tokens([*PROMPT, *answer.ids], 4), abs=TOLERANCE)
    assert answer.spans and answer.spans[0].start == 0 and answer.spans[-1].end == len(answer.ids)


def test_defaults_of_a_server_change_nothing_or_are_refused(engine: SGLangEngine, servers: Servers) -> None:
    defaults = {"ignore_eos": True, "top_k": 2, "min_new_tokens": 12, "n": 2}, {"regex": "[a-z]+"}
    started = [
        servers.start(name, STUDENT, ["--preferred-sampling-params", json.dumps(one)])
        for name, one in zip(("neutral", "refused"), defaults, strict=True)
    ]
    servers.wait_ready(started, READY_S)
    tokenizer = load_tokenizer(STUDENT)
    ids, stops = tokenizer.encode("user\n780+128=\nassistant\n"), stop_token_ids(STUDENT, tokenizer)
    asked = [request("a", ids, 24, temperature=0.0, stops=stops)]
    other = SGLangEngine(started[0].url, SGLangConfig(), vocab_size=VOCAB)
    plain, answer = generate(engine, asked)["a"], generate(other, asked)["a"]
    other.close()
    assert answer.ids == plain.ids and answer.finish_reason == plain.finish_reason == "stop" and len(answer.ids) < 12
    with pytest.raises(StreamError, match="preferred-sampling-params sets regex"):
        SGLangEngine(started[1].url, SGLangConfig(), vocab_size=VOCAB)


@pytest.mark.parametrize(
    "settings",
    [{"top_k": 5}, {"top_k": 40, "top_p": 0.3}, {"temperature": 0.7, "top_k": 30, "top_p": 0.5, "min_p": 0.2}],
)
def test_what_is_sampled_from_comes_with_the_logprobs_among_it(
    engine: SGLangEngine, student_reference: Reference, settings: dict[str, Any]
) -> None:
    prompts = {f"r{i}": [65 + i, 66, 67 + 2 * i] for i in range(6)}
    answers = generate(engine, [request(name, p, 20, kept=True, **settings) for name, p in prompts.items()])
    sizes = list[int]()
    for name, prompt in prompts.items():
        answer = answers[name]
        assert answer.ids and len(answer.top_ids) == len(answer.ids)
        whole_nV = student_reference.logprobs([*prompt, *answer.ids], 3, settings.get("temperature", 1.0))
        for of_all_V, token, kept, said in zip(whole_nV, answer.ids, answer.top_ids, answer.logprobs, strict=True):
            assert kept == sorted(set(kept)) and token in kept and len(kept) <= settings["top_k"]
            assert said == pytest.approx(float(of_all_V[token] - of_all_V[kept].logsumexp(0)), abs=TOLERANCE)
            likeliest = of_all_V.topk(len(kept)).indices.tolist()
            assert set(kept) == set(likeliest) or len(kept) > 1  # but for ties
            sizes.append(len(kept))
    assert len(set(sizes)) > 1 or settings == {"top_k": 5}


@pytest.mark.parametrize(("temperature", "mass"), [(1.0, 1.0), (1.0, 0.8), (0.6, 0.95)])
def test_the_likeliest_tokens_at_each_place_are_those_of_transformers(
    engine: SGLangEngine, student_reference: Reference, temperature: float, mass: float
) -> None:
    wanted = TopIdsWanted(6, mass)
    prompts = {f"r{i}": [65 + i, 66, 67 + 2 * i] for i in range(6)}
    answers = generate(
        engine, [request(name, p, 20, temperature=temperature, top_ids=wanted) for name, p in prompts.items()]
    )
    n_sets = n_different = 0
    for name, prompt in prompts.items():
        answer = answers[name]
        assert len(answer.top_ids) == len(answer.ids) > 0
        rows = student_reference.logprobs([*prompt, *answer.ids], len(prompt), temperature)
        for row, ids in zip(rows, answer.top_ids, strict=True):
            order = row.argsort(descending=True).tolist()
            slow: list[int] = []
            covered = 0.0
            while covered < mass and len(slow) < wanted.k:
                slow.append(order[len(slow)])
                covered += float(row[slow[-1]].exp())
            n_sets += 1
            n_different += ids != slow
    assert n_different <= 0.02 * n_sets  # equals may change places, and a sum may fall on the mass


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_logprobs_are_those_of_the_distribution_sampled_from(
    engine: SGLangEngine, student_reference: Reference, temperature: float
) -> None:
    rng = np.random.default_rng(3)
    prompts = {f"r{i}": rng.integers(0, 256, 1 + 3 * i).tolist() for i in range(20)}
    answers = generate(
        engine, [request(name, ids, 5 + len(ids), temperature=temperature) for name, ids in prompts.items()]
    )

    for name, prompt in prompts.items():
        answer = answers[name]
        expected = student_reference.of_tokens([*prompt, *answer.ids], len(prompt), temperature)
        assert answer.finish_reason in ("length", "stop")
        assert answer.logprobs == pytest.approx(expected, abs=TOLERANCE)
        assert {span.version for span in answer.spans} == {START}


def test_a_server_with_cumulative_streams_gives_the_same(servers: Servers, student_reference: Reference) -> None:
    base_args = [arg for arg in SERVER_ARGS if arg != "--incremental-streaming-output"]
    server = servers.start("cumulative", STUDENT, base_args=base_args)
    servers.wait_ready([server], READY_S)
    engine = SGLangEngine(server.url, SGLangConfig(), vocab_size=VOCAB)

    answers = generate(engine, [request(f"r{i}", [*PROMPT, i], 20) for i in range(8)])
    engine.close()
    servers.stop(server, grace_s=0.0)

    assert not engine.features.incremental_stream
    for i in range(8):
        answer = answers[f"r{i}"]
        expected = student_reference.of_tokens([*PROMPT, i, *answer.ids], 5)
        assert answer.logprobs == pytest.approx(expected, abs=TOLERANCE)


def test_features_are_found_out_and_can_be_read(engine: SGLangEngine) -> None:
    features = engine.features

    assert features.incremental_stream and features.pausing and features.greedy_logprobs_at_one
    assert features.logprob_temperature == "as_sampled"
    assert features.max_context == 1024
    assert "incremental" in features.table()


def test_log_probs_at_temperature_one_are_recognised_and_other_temperatures_refused(
    servers: Servers, tmp_path: Path
) -> None:
    """A server started with SGLANG_RETURN_ORIGINAL_LOGPROB reports log-probs of another distribution."""
    with Servers(tmp_path, environment={"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}) as originals:
        server = originals.start("original", STUDENT)
        originals.wait_ready([server], READY_S)
        engine = SGLangEngine(server.url, SGLangConfig(), vocab_size=VOCAB)

        assert engine.features.logprob_temperature == "one"
        with pytest.raises(ValueError, match="temperature"):
            engine.submit(request("a", PROMPT, temperature=0.5))
        engine.close()


def test_a_stop_token_ends_the_answer_and_is_part_of_it(engine: SGLangEngine, student_reference: Reference) -> None:
    greedy = student_reference.greedy([70, 71, 72], 12)
    stop = greedy[-1]
    answer = generate(engine, [request("a", [70, 71, 72], 40, temperature=0.0, stops=(stop,))])["a"]

    assert answer.finish_reason == "stop"
    assert answer.ids == greedy[: greedy.index(stop) + 1]


def test_an_answer_ends_at_the_context_window(engine: SGLangEngine) -> None:
    prompt = [65 + i % 26 for i in range(engine.features.max_prompt)]
    answer = generate(engine, [request("a", prompt, 50)])["a"]

    assert answer.finish_reason in ("length", "stop")
    assert len(answer.ids) <= engine.max_context - len(prompt)


def test_an_aborted_request_ends_soon_and_the_others_go_on(engine: SGLangEngine) -> None:
    answers = {"long": Answer(), "short": Answer()}
    engine.submit(request("long", PROMPT, 900))
    engine.submit(request("short", PROMPT, 20))
    while not answers["long"].ids:
        take(engine, answers, 0.1)
    engine.abort("long")
    engine.abort("nobody")
    collect(engine, answers)

    assert answers["long"].finish_reason in ("aborted", "stop")
    assert len(answers["long"].ids) < 900
    assert answers["short"].finish_reason in ("length", "stop")
    assert sum(span.end - span.start for span in answers["long"].spans) == len(answers["long"].ids)


def test_a_request_that_waits_for_its_turn_can_be_aborted(student: SGLangServer) -> None:
    engine = SGLangEngine(student.url, SGLangConfig(max_concurrent=1), vocab_size=VOCAB)
    answers = {"first": Answer(), "second": Answer()}
    engine.submit(request("first", PROMPT, 60))
    engine.submit(request("second", PROMPT, 60))
    engine.abort("second")
    collect(engine, answers)
    engine.close()

    assert answers["second"].finish_reason == "aborted" and not answers["second"].ids
    assert answers["first"].finish_reason in ("length", "stop")


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (request("x", [1, VOCAB]), "outside the vocabulary"),
        (request("x", [-1]), "outside the vocabulary"),
        (request("x", []), "at least one token"),
        (request("x", [1] * 1020), "prompt of 1020 tokens"),
        (request("x", [1], 0), "at least 1"),
        (request("x", [1], temperature=float("nan")), "temperature"),
        (request("x", [1], stops=(VOCAB,)), "stop token"),
    ],
)
def test_what_would_hurt_the_server_is_refused_before_it_is_sent(engine: SGLangEngine, bad: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        engine.submit(bad)  # pyright: ignore[reportArgumentType]
    assert generate(engine, [request("x", PROMPT, 3)])["x"].error is None  # the name is free, the server is well


def test_sampling_whose_logprobs_the_server_cannot_give_is_refused(engine: SGLangEngine) -> None:
    for sampling in (Sampling(top_p=0.9), Sampling(top_k=5), Sampling(min_p=0.1)):
        base = request("x", PROMPT)
        with pytest.raises(ValueError, match="top_p"):
            engine.submit(type(base)("x", base.prompt_ids, sampling, 4, ()))


def test_a_server_that_falls_silent_costs_its_requests_and_comes_back(servers: Servers) -> None:
    """Stopped with SIGSTOP: connections stay open and nothing is ever said, like a machine that swaps."""
    server = servers.start("silent", STUDENT)
    servers.wait_ready([server], READY_S)
    config = SGLangConfig(stall_timeout_s=1.0, control_timeout_s=0.5, health_every_s=0.1, start_timeout_s=PATIENCE_S)
    engine = SGLangEngine(server.url, config, vocab_size=VOCAB)
    answers = {f"r{i}": Answer() for i in range(4)}
    for name in answers:
        engine.submit(request(name, PROMPT, 900))
    while not all(answer.ids for answer in answers.values()):
        take(engine, answers, 0.1)
    os.killpg(server.pid, signal.SIGSTOP)
    try:
        collect(engine, answers)
        while not engine.stats.extra["breaker_open"]:
            time.sleep(0.05)
        engine.submit(request("later", PROMPT, 5))
        assert engine.poll(0.3) == []
    finally:
        os.killpg(server.pid, signal.SIGCONT)
    later = {"later": Answer()}
    collect(engine, later)
    engine.close()
    servers.stop(server, grace_s=0.0)

    assert all(answer.finish_reason in ("error", "stop") for answer in answers.values())
    assert any(answer.error and "stall_timeout_s" in answer.error for answer in answers.values())
    assert later["later"].error is None and later["later"].ids


def test_a_server_that_answers_questions_but_samples_nothing_is_lost(servers: Servers) -> None:
    """Its scheduler hangs; the process that speaks HTTP is well."""
    server = servers.start("hung", STUDENT)
    servers.wait_ready([server], READY_S)
    # The questions at the start have stall_timeout_s too, and a busy machine needs a second for a first token.
    config = SGLangConfig(stall_timeout_s=4.0, start_timeout_s=5.0, health_every_s=0.1)
    engine = SGLangEngine(server.url, config, vocab_size=VOCAB)
    schedulers = [p for p in psutil.Process(server.pid).children(recursive=True) if "schedul" in p.name()]
    assert len(schedulers) == 1
    schedulers[0].suspend()
    engine.submit(request("a", PROMPT, 5))
    with pytest.raises(ServerLost, match="no token of any request"):
        while True:
            for delta in engine.poll(0.1):
                assert delta.finish_reason == "error"
                engine.submit(request("a", PROMPT, 5))
    engine.close()
    schedulers[0].resume()
    servers.stop(server, grace_s=0.0)


def test_a_killed_server_gives_errors_not_silence_and_its_successor_is_found(servers: Servers) -> None:
    server = servers.start("doomed", STUDENT)
    servers.wait_ready([server], READY_S)
    config = SGLangConfig(health_every_s=0.1, start_timeout_s=PATIENCE_S)
    engine = SGLangEngine(server.url, config, vocab_size=VOCAB)
    answers = {f"r{i}": Answer() for i in range(8)}
    for name in answers:
        engine.submit(request(name, PROMPT, 900))
    while not all(answer.ids for answer in answers.values()):
        take(engine, answers, 0.1)
    os.killpg(server.pid, signal.SIGKILL)
    collect(engine, answers)
    engine.submit(request("next", PROMPT, 5))
    while servers.exit_code(server) is None:
        time.sleep(0.05)
    successor = servers.start("doomed", STUDENT, port=server.port)
    following = {"next": Answer()}
    collect(engine, following)
    engine.close()
    servers.stop(successor, grace_s=0.0)

    assert {answer.finish_reason for answer in answers.values()} <= {"error", "stop"}
    assert any(answer.error and "ServerUnavailable" in answer.error for answer in answers.values())
    for answer in answers.values():
        assert sum(span.end - span.start for span in answer.spans) == len(answer.ids)
    assert servers.exit_code(server) == -signal.SIGKILL
    assert following["next"].error is None and following["next"].ids


def test_a_server_that_is_not_there_is_reported_in_time() -> None:
    config = SGLangConfig(connect_timeout_s=0.5)
    with pytest.raises(ServerUnavailable, match=r"127\.0\.0\.1:1"):
        SGLangEngine("http://127.0.0.1:1", config, vocab_size=VOCAB)


def test_nothing_of_it_imports_torch() -> None:
    code = (
        "import sys, stillhouse.engines.sglang.engine\n"
        "import stillhouse.engines.sglang.scorer, stillhouse.sglang_server.servers\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


def test_a_server_that_does_not_say_which_weights_sampled_a_token_is_refused_where_requests_stay(
    student: SGLangServer, engine: SGLangEngine
) -> None:
    retract = SGLangConfig(update_mode="retract")
    version = engine.features.version
    assert version in TRIED, "a version that nobody tried: add what it can do"
    assert engine.features.version_spans is TRIED[version]
    if TRIED[version]:
        SGLangEngine(student.url, retract, vocab_size=VOCAB).close()
    else:
        with pytest.raises(EngineMismatch, match=rf"SGLang {version} .*use abort"):
            SGLangEngine(student.url, retract, vocab_size=VOCAB)
    assert generate(engine, [request("a", PROMPT, 8)])["a"].error is None


@pytest.mark.usefixtures("retracts")
def test_the_health_check_does_not_lie_while_generation_is_paused(servers: Servers) -> None:
    server = servers.start("paused", STUDENT)
    servers.wait_ready([server], READY_S)
    engine = SGLangEngine(server.url, SGLangConfig(health_every_s=0.05, update_mode="retract"), vocab_size=VOCAB)
    answers = {"a": Answer()}
    engine.submit(request("a", PROMPT, 300))
    while not answers["a"].ids:
        take(engine, answers, 0.1)
    engine.pause(10.0)
    time.sleep(0.5)
    assert not engine.stats.extra["breaker_open"]
    with urllib.request.urlopen(f"{server.url}/model_info", timeout=1.0) as reply:
        assert reply.status == 200
    engine.resume(START, 10.0)
    collect(engine, answers)
    engine.close()
    servers.stop(server, grace_s=0.0)

    assert answers["a"].finish_reason in ("length", "stop")
    assert answers["a"].spans == [VersionSpan(START, 0, len(answers["a"].ids))] or {
        span.version for span in answers["a"].spans
    } == {START}
