"""Students on a real vLLM server: what they sample, and under which weights, as transformers computes it."""

# pyright: reportArgumentType=false
# Helpers of the tests of SGLang, which take any student on a server.

from __future__ import annotations

import itertools
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from stillhouse.engines.base import EngineLost, EngineMismatch
from stillhouse.engines.vllm.engine import VLLMEngine
from stillhouse.engines.vllm.weights import VLLMWeights
from stillhouse.protocol.messages import TopIdsWanted, WeightVersion
from stillhouse.weights.errors import GroupBroken
from stillhouse.weights.receiver import WeightReceiver
from stillhouse.weights.transports.servers import ServerGroup
from tests.patience import PATIENCE_S
from tests.sglang.conftest import STUDENT, TOLERANCE, Answer, Named, Reference, collect, generate, request, take
from tests.sglang.test_weight_push import V1, V2, WAIT_S, ReferenceOf, Run, wait_until
from tests.sglang.test_weight_swap import differences, prompt_of
from tests.vllm.conftest import VLLMServer, engine_on, start

V0 = WeightVersion(0, 0)
ENDS, END = [0, 20], 313
"""A prompt after which the student's likeliest token is the model's own end of text (eos_token_id)."""
_numbers = itertools.count()


@pytest.fixture
def engine(server: VLLMServer) -> Iterator[VLLMEngine]:
    """Of a run of its own, so that the server gets the student's weights again."""
    engine = engine_on(server, f"engine-{next(_numbers)}")
    weights = VLLMWeights(engine, student=str(STUDENT))
    weights.prepare()
    yield engine
    engine.close()


def test_log_probs_are_those_of_the_distribution_that_was_sampled_from(
    engine: VLLMEngine, student_reference: Reference
) -> None:
    """All at once, so that one batch has several temperatures."""
    temperatures = (0.0, 0.3, 1.0, 1.7)
    asked = [request(f"t{t}", prompt_of(i), 24, temperature=t) for i, t in enumerate(temperatures)]
    answers = generate(engine, asked)
    for i, (temperature, answer) in enumerate(zip(temperatures, answers.values(), strict=True)):
        expected = student_reference.of_tokens([*prompt_of(i), *answer.ids], len(prompt_of(i)), temperature)
        assert (answer.error, len(answer.ids), answer.finish_reason) == (None, 24, "length")
        assert max(abs(a - b) for a, b in zip(expected, answer.logprobs, strict=True)) < TOLERANCE
    assert answers["t0.0"].ids == student_reference.greedy(prompt_of(0), 24)


def test_a_stop_token_ends_an_answer_and_belongs_to_it_and_the_models_own_end_does_not_end_it(
    engine: VLLMEngine, student_reference: Reference
) -> None:
    greedy = student_reference.greedy(prompt_of(0), 8)
    answer = generate(engine, [request("stops", prompt_of(0), 8, temperature=0.0, stops=(greedy[5],))])["stops"]
    assert (answer.ids, answer.finish_reason) == (greedy[: greedy.index(greedy[5]) + 1], "stop")
    past_end = student_reference.greedy(ENDS, 4)
    assert past_end[0] == END and past_end[1] != END
    assert generate(engine, [request("on", ENDS, 4, temperature=0.0)])["on"].ids == past_end


def test_the_likeliest_tokens_are_reported_with_and_without_the_sampled_one_among_them(
    engine: VLLMEngine, student_reference: Reference
) -> None:
    wanted = TopIdsWanted(k=3, mass=1.0)
    answer = generate(engine, [request("top", prompt_of(1), 40, temperature=1.5, top_ids=wanted)])["top"]
    rows = student_reference.logprobs([*prompt_of(1), *answer.ids], len(prompt_of(1)), 1.5)
    assert answer.top_ids == rows.topk(3).indices.tolist()
    among = [token in top for token, top in zip(answer.ids, answer.top_ids, strict=True)]
    assert any(among) and not all(among)


def test_what_the_server_would_do_otherwise_is_refused(engine: VLLMEngine) -> None:
    for temperature in (0.001, 2.5):
        with pytest.raises(ValueError, match=r"expected 0 \(greedy\) or a number from 0\.01 to 2"):
            engine.submit(request("t", [1, 2], temperature=temperature))
    with pytest.raises(ValueError, match="on vLLM students are sampled from whole distributions"):
        engine.submit(request("cut", [1, 2], top_k=5))
    with pytest.raises(ValueError, match="the server takes up to 1023"):
        engine.submit(request("long", [1] * 1024))


def test_an_aborted_request_ends_with_the_tokens_that_it_has(engine: VLLMEngine, student_reference: Reference) -> None:
    answers = {"r": Answer()}
    engine.submit(request("r", prompt_of(2), 900))
    while len(answers["r"].ids) < 5:
        take(engine, answers, 0.1)
    engine.abort("r")
    collect(engine, answers)
    answer = answers["r"]
    assert answer.finish_reason == "aborted" and 5 <= len(answer.ids) < 900
    expected = student_reference.of_tokens([*prompt_of(2), *answer.ids], len(prompt_of(2)))
    assert max(abs(a - b) for a, b in zip(expected, answer.logprobs, strict=True)) < TOLERANCE


@pytest.mark.parametrize("path", ["/health", "/collective_rpc", "/update_weights", "/v1/models"])
def test_every_route_wants_the_key(server: VLLMServer, path: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{server.url}{path}", timeout=PATIENCE_S)
    with refused.value as answer:  # else its socket stays open
        assert answer.code == 401
    assert server.api_key not in server.log.read_text(encoding="utf-8")


class Actor:
    """What an actor has of the weight path: an engine, and a receiver beside it."""

    def __init__(self, name: str, server: VLLMServer, run_id: str) -> None:
        self.name, self.incarnation = name, f"incarnation-{next(_numbers)}"
        self.engine = engine_on(server, run_id)
        self.weights = VLLMWeights(self.engine, student=str(STUDENT))
        self.receiver = WeightReceiver(self.weights, name=name)
        self.receiver.start()

    @property
    def stats(self) -> dict[str, float]:
        return self.receiver.stats

    def close(self) -> None:
        self.receiver.close()
        self.engine.close()


class VLLMRun(Run):
    def join(self, servers: Sequence[VLLMServer]) -> None:  # type: ignore[override]
        for server in servers:
            name = f"actor-{len(self.actors)}"
            self.actors[name] = Actor(name, server, self.id)  # type: ignore[assignment]
        self.say_who_is_there()
        assert self.publisher.wait_idle(WAIT_S)


@pytest.fixture
def run(tmp_path: Path, student_weights: Named) -> Iterator[VLLMRun]:
    run = VLLMRun(tmp_path, student_weights)
    yield run
    run.close()


@pytest.mark.parametrize("transport", ["collective", "wire"])
def test_the_server_answers_under_the_version_that_was_published(
    run: VLLMRun, server: VLLMServer, transport: str
) -> None:
    publisher = run.start([], check_by="canary", transport=transport)
    run.join([server])
    for version in (V1, V2):
        run.publish(version)
        assert publisher.wait_idle(WAIT_S)
        run.delivered(version)
    assert (run.published, publisher.stats.dropped_total) == ([V1, V2], {})
    assert run.actors["actor-0"].stats["weight_canaries_total"] == 1


def test_hollow_checksums_of_a_cpu_are_not_taken_for_a_proof(
    run: VLLMRun, server: VLLMServer, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = run.start([], check_by="reload")
    run.join([server])
    run.publish(V1)
    assert publisher.wait_idle(WAIT_S)
    run.delivered(V1)
    stats = run.actors["actor-0"].stats
    assert (stats["weight_checks_total"], stats["weight_checks_skipped_total"]) == (0, 1)
    assert "its weights are verified by the canary prompt only: the server's checksums leave out tensors" in caplog.text


def test_a_push_in_the_middle_of_requests_and_every_token_has_the_version_that_sampled_it(
    run: VLLMRun, server: VLLMServer
) -> None:
    run.start([], check_by="canary")
    run.join([server])
    engine = run.actors["actor-0"].engine
    wait_until(lambda: engine.weights_known)
    answers = {f"r{i}": Answer() for i in range(8)}
    for i in range(8):
        engine.submit(request(f"r{i}", prompt_of(i), 200 + 20 * i))
    while not all(len(answer.ids) >= 4 for answer in answers.values()):
        take(engine, answers, 0.1)
    run.publish(V1)
    collect(engine, answers)
    assert run.publisher.wait_idle(WAIT_S)
    old, new = ReferenceOf(run.weights(V0)), ReferenceOf(run.weights(V1))
    crossed = 0
    for i, answer in enumerate(answers.values()):
        assert (answer.error, answer.finish_reason, len(answer.ids)) == (None, "length", 200 + 20 * i)
        crossed += {span.version for span in answer.spans} == {V0, V1}
        assert all(difference < TOLERANCE for _, difference in differences(answer, prompt_of(i), old, new))
    assert crossed >= 2


def test_what_a_push_that_broke_off_has_left_is_never_sampled_from_and_the_server_takes_the_next_one(
    run: VLLMRun, server: VLLMServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner's end closes after two buckets of five."""
    publisher = run.start([], check_by="canary")
    run.join([server])
    engine = run.actors["actor-0"].engine
    wait_until(lambda: engine.weights_known)
    answers = {"long": Answer()}
    engine.submit(request("long", prompt_of(3), 900))
    while len(answers["long"].ids) < 4:
        take(engine, answers, 0.1)
    start, started = ServerGroup._start, itertools.count()  # pyright: ignore[reportPrivateUsage]

    def break_off(group: ServerGroup, tensor: torch.Tensor, deadline_s: float) -> None:
        if next(started) == 2:
            raise GroupBroken("broken off by a test")
        start(group, tensor, deadline_s)

    monkeypatch.setattr(ServerGroup, "_start", break_off)
    run.publish(V1)
    collect(engine, answers)
    run.delivered(V1)
    answer, old, new = answers["long"], ReferenceOf(run.weights(V0)), ReferenceOf(run.weights(V1))
    assert (answer.error, len(answer.ids), {span.version for span in answer.spans}) == (None, 900, {V0, V1})
    assert all(difference < TOLERANCE for _, difference in differences(answer, prompt_of(3), old, new))
    assert (publisher.stats.failed_groups_total, publisher.stats.rebuilds_total) == (1, 2)
    run.publish(V2)
    assert publisher.wait_idle(WAIT_S)
    run.delivered(V2)


def test_a_server_that_dies_is_lost_and_leaves_no_process(tmp_path: Path) -> None:
    """Its process alone is killed, not the group, as when the launcher is killed."""
    server = start(tmp_path)
    engine = engine_on(server, control_timeout_s=1.0, health_every_s=0.1, start_timeout_s=1.0, stall_timeout_s=5.0)
    children = _descendants(server.process.pid)
    assert len(children) >= 2  # vLLM's engine, and a worker
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()
    with pytest.raises(EngineLost):
        _poll_for(engine, PATIENCE_S)
    engine.close()
    wait_until(lambda: not any(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children if _exists(pid)))


def test_a_server_whose_log_probs_are_not_of_what_it_samples_is_refused(tmp_path: Path) -> None:
    server = start(tmp_path, "--logprobs-mode", "raw_logprobs")
    try:
        with pytest.raises(EngineMismatch, match="expected those of the distribution that is sampled from"):
            engine_on(server)
    finally:
        server.kill()


def _poll_for(engine: VLLMEngine, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        engine.poll(0.1)


def _exists(pid: int) -> bool:
    return Path(f"/proc/{pid}/cmdline").exists()


def _descendants(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8")
    return [each for child in map(int, text.split()) for each in (child, *_descendants(child))]
