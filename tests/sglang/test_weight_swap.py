"""New weights in the middle of running requests: which weights sampled which token, by recomputing under both."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from stillhouse.engines.http.link import ServerLost
from stillhouse.engines.http.stream import Labels, StreamError
from stillhouse.engines.sglang.config import SGLangConfig, SwapMode
from stillhouse.engines.sglang.engine import SGLangEngine
from stillhouse.models.loading import load_causal_lm
from stillhouse.protocol.messages import WeightVersion
from stillhouse.sglang_server.servers import Servers, SGLangServer
from tests.patience import PATIENCE_S
from tests.sglang.conftest import READY_S, STUDENT, TOLERANCE, VOCAB, Answer, Reference, collect, request, take

LABELS = Labels("")
OLD, NEW = WeightVersion(0, 0), WeightVersion(0, 1)


@pytest.fixture(scope="package")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that differs from the student's in every tensor."""
    path = tmp_path_factory.mktemp("weights") / "other"
    model = load_causal_lm(STUDENT, device="cpu", dtype="float32", attention="sdpa")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(STUDENT).save_pretrained(path)  # pyright: ignore[reportUnknownMemberType]
    return path


@pytest.fixture
def own_student(servers: Servers) -> Iterator[SGLangServer]:
    server = servers.start("swapped", STUDENT)
    servers.wait_ready([server], READY_S)
    yield server
    servers.stop(server, grace_s=0.0)


def prompt_of(i: int) -> list[int]:
    """A long beginning in common, which the prefix cache holds under the old weights when the last ones start."""
    return [*range(65, 95), i]


def update_from_disk(
    server: SGLangServer, path: Path, version: WeightVersion, *, flush_cache: bool = True, labels: Labels = LABELS
) -> None:
    body = {
        "model_path": str(path),
        "weight_version": labels.of(version),
        "flush_cache": flush_cache,
        "abort_all_requests": False,
    }
    reply = post(server, "/update_weights_from_disk", body)
    assert reply["success"], reply


def post(server: SGLangServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    asked = urllib.request.Request(
        f"{server.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=PATIENCE_S) as reply:
        return json.loads(reply.read())


def swap_in_the_middle(server: SGLangServer, path: Path, mode: SwapMode) -> tuple[SGLangEngine, dict[str, Answer], int]:
    """Eight requests that all have a few tokens when new weights come, and four that begin after them. Also: how
    many of the eight had not ended when the weights came."""
    engine = SGLangEngine(
        server.url, SGLangConfig(max_concurrent=8, update_mode=mode, stream_tokens=2), vocab_size=VOCAB
    )
    answers = {f"r{i}": Answer() for i in range(12)}
    for i in range(8):
        engine.submit(request(f"r{i}", prompt_of(i), 400))
    while not all(len(answers[f"r{i}"].ids) >= 2 or answers[f"r{i}"].finish_reason for i in range(8)):
        take(engine, answers, 0.1)
    engine.pause(20.0)
    take(engine, answers, 0.0)
    n_open = sum(answers[f"r{i}"].finish_reason is None for i in range(8))
    update_from_disk(server, path, NEW, flush_cache=mode != "in_place")  # refused while requests hold their cache
    engine.resume(NEW, 20.0)
    for i in range(8, 12):
        engine.submit(request(f"r{i}", prompt_of(i), 400))
    collect(engine, answers)
    return engine, answers, n_open


def differences(answer: Answer, prompt: list[int], old: Reference, new: Reference) -> list[tuple[WeightVersion, float]]:
    """Per token: its version, and how far its log-prob is from that of a full recompute under this version."""
    ids = [*prompt, *answer.ids]
    under = {OLD: old.of_tokens(ids, len(prompt)), NEW: new.of_tokens(ids, len(prompt))}
    return [
        (span.version, abs(under[span.version][i] - answer.logprobs[i]))
        for span in answer.spans
        for i in range(span.start, span.end)
    ]


@pytest.mark.parametrize("mode", ["abort", "retract"], indirect=True)
def test_every_token_was_sampled_under_the_weights_it_says(
    own_student: SGLangServer, other_weights: Path, student_reference: Reference, mode: SwapMode
) -> None:
    engine, answers, n_open = swap_in_the_middle(own_student, other_weights, mode)
    new_reference = Reference(other_weights)
    found = [
        differences(answer, prompt_of(i), student_reference, new_reference) for i, answer in enumerate(answers.values())
    ]
    stats = engine.stats
    engine.close()

    assert [answer.error for answer in answers.values() if answer.error] == []
    assert engine.version == NEW and stats.weight_swaps_total == 1
    assert [len(rows) for rows in found] == [len(answer.ids) for answer in answers.values()]
    assert max(difference for rows in found for _, difference in rows) < TOLERANCE
    n_crossed = sum({version for version, _ in rows} == {OLD, NEW} for rows in found)
    if mode == "abort":
        assert n_crossed == n_open > 0
        assert stats.extra["restarted_requests_total"] == n_open
    else:
        assert 1 <= n_crossed <= n_open  # a retracting server stops a little later: some may have ended by then


def test_in_place_each_answer_goes_from_the_old_weights_to_the_new_ones(
    own_student: SGLangServer, other_weights: Path, student_reference: Reference
) -> None:
    """Behind the swap the KV cache is still the old one's, so log-probs are those of no full recompute."""
    engine, answers, n_open = swap_in_the_middle(own_student, other_weights, "in_place")
    engine.close()
    new_reference = Reference(other_weights)

    n_crossed = 0
    for i, answer in enumerate(answers.values()):
        assert answer.error is None
        versions = [span.version for span in answer.spans]
        assert versions == sorted(versions)
        rows = differences(answer, prompt_of(i), student_reference, new_reference)
        assert max((difference for version, difference in rows if version == OLD), default=0.0) < TOLERANCE
        n_crossed += len(set(versions)) == 2
        if set(versions) == {NEW}:
            assert max(difference for _, difference in rows) < TOLERANCE
    assert n_crossed == n_open > 0


def test_requests_submitted_during_a_pause_are_sampled_under_the_new_weights(
    own_student: SGLangServer, other_weights: Path
) -> None:
    engine = SGLangEngine(own_student.url, SGLangConfig(), vocab_size=VOCAB)
    answers = {"a": Answer()}
    engine.pause(10.0)
    engine.submit(request("a", [65, 66], 10))
    assert engine.poll(0.3) == []
    update_from_disk(own_student, other_weights, NEW)
    engine.resume(NEW, 10.0)
    collect(engine, answers)
    engine.close()

    assert {span.version for span in answers["a"].spans} == {NEW}
    assert np.isfinite(answers["a"].logprobs).all()


def test_a_resume_without_the_new_weights_is_refused_and_waiting_requests_fail_in_time(
    own_student: SGLangServer,
) -> None:
    config = SGLangConfig(pause_timeout_s=1.0)
    engine = SGLangEngine(own_student.url, config, vocab_size=VOCAB)
    answers = {"a": Answer()}
    engine.pause(10.0)
    engine.submit(request("a", [65, 66], 10))
    with pytest.raises(StreamError, match=r"expected .0\.1."):
        engine.resume(NEW, 10.0)
    collect(engine, answers)
    engine.resume(OLD, 10.0)
    engine.close()

    assert answers["a"].finish_reason == "error" and "pause_timeout_s" in (answers["a"].error or "")


@pytest.mark.usefixtures("retracts")
def test_a_successor_of_one_who_died_in_an_update_sends_nothing_before_whole_weights_have_come(
    own_student: SGLangServer, other_weights: Path
) -> None:
    """Nobody knows how much of the update has arrived, and the server is still paused."""
    paused = SGLangConfig(update_mode="retract")
    dead = SGLangEngine(own_student.url, paused, vocab_size=VOCAB, run_id="run-1")
    dead.submit(request("left", [65, 66], 900))
    while not dead.poll(0.1):
        pass
    dead.pause(10.0)
    dead.close()
    engine = SGLangEngine(own_student.url, SGLangConfig(), vocab_size=VOCAB, run_id="run-1")
    engine.abort_leftovers()
    answers = {"a": Answer()}
    engine.submit(request("a", [65, 66], 10))

    assert not engine.weights_known and engine.version == OLD
    assert engine.poll(0.3) == []
    engine.pause(10.0)
    update_from_disk(own_student, other_weights, NEW, labels=engine.labels)  # flushes: nothing is left running
    engine.resume(NEW, 10.0)
    collect(engine, answers)
    assert engine.weights_known
    assert {span.version for span in answers["a"].spans} == {NEW}
    engine.close()


def test_weights_of_another_run_are_not_taken_for_ours(own_student: SGLangServer, other_weights: Path) -> None:
    update_from_disk(own_student, other_weights, NEW, labels=Labels("run-1"))
    engine = SGLangEngine(own_student.url, SGLangConfig(), vocab_size=VOCAB, run_id="run-2")
    assert not engine.weights_known
    engine.close()


@pytest.mark.parametrize("label", ["default", "run-2/0.5"])
def test_a_server_that_another_one_has_replaced_is_lost(
    own_student: SGLangServer, other_weights: Path, label: str
) -> None:
    """Started again by somebody, or taken by another run: seen at the next health check."""
    update_from_disk(own_student, other_weights, NEW, labels=Labels("run-1"))
    config = SGLangConfig(health_every_s=0.05)
    woken = threading.Event()
    engine = SGLangEngine(own_student.url, config, vocab_size=VOCAB, run_id="run-1", on_output=woken.set)
    assert engine.poll(0.0) == [] and engine.version == NEW
    post(own_student, "/update_weight_version", {"new_version": label, "abort_all_requests": False})

    assert woken.wait(PATIENCE_S)
    with pytest.raises(ServerLost, match="not the same server"):
        engine.poll(0.0)
    engine.close()


@pytest.mark.parametrize("mode", ["abort", "in_place"], indirect=True)
def test_tokens_behind_a_swap_are_handed_on_while_their_request_still_runs(
    own_student: SGLangServer, other_weights: Path, mode: SwapMode
) -> None:
    engine = SGLangEngine(own_student.url, SGLangConfig(update_mode=mode, stream_tokens=2), vocab_size=VOCAB)
    name = "long"
    engine.submit(request(name, [100, 65], 900))
    versions: list[WeightVersion] = []
    step, n_swaps = 0, 0
    while n_swaps < 6:
        for delta in engine.poll(1.0):
            versions += [span.version for span in delta.spans]
            if delta.finish_reason is not None:  # it ended by chance: another one takes its place
                name = f"{name}+"
                engine.submit(request(name, [100 + len(name), 65], 900))  # nothing in common
        if versions and versions[-1] == WeightVersion(0, step):
            step, n_swaps = step + 1, n_swaps + 1
            engine.pause(10.0)
            update_from_disk(own_student, other_weights, WeightVersion(0, step), flush_cache=mode != "in_place")
            engine.resume(WeightVersion(0, step), 10.0)
    restarts, cached = (engine.stats.extra[key] for key in ("restarted_requests_total", "prompt_tokens_cached_total"))
    engine.close()

    assert restarts > 0
    assert (cached > 0) == (mode == "in_place")
