"""A LoRA student on real SGLang servers that are sent its adapters alone: which version sampled which token, by
recomputing with the merged student."""

from __future__ import annotations

import itertools
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from stillhouse.engines.config import ServerConfig, WorkerSettings
from stillhouse.engines.http.link import ServerLost
from stillhouse.engines.provider import AdapterFacts
from stillhouse.engines.sglang.adapters import ServerAdapters
from stillhouse.engines.sglang.config import SwapMode
from stillhouse.engines.sglang.engine import SGLangEngine
from stillhouse.engines.sglang.provider import SERVERS
from stillhouse.engines.sglang.requests import generate_body
from stillhouse.learner.config import LoraConfig
from stillhouse.learner.step.lora import Adapters
from stillhouse.models.loading import load_causal_lm
from stillhouse.protocol.messages import Membership, WeightPlan, WeightVersion
from stillhouse.sglang_server.servers import Servers, SGLangServer
from stillhouse.weights.errors import Interrupted
from stillhouse.weights.publisher import Publisher
from stillhouse.weights.receiver import WeightReceiver
from stillhouse.weights.roster import GroupMembers
from stillhouse.weights.server_checks import LearnerCanary
from stillhouse.weights.staged_weights import tensor_of
from tests.patience import PATIENCE_S
from tests.sglang.conftest import (
    READY_S,
    STUDENT,
    TOLERANCE,
    VOCAB,
    Answer,
    collect,
    generate,
    request,
    take,
)
from tests.sglang.test_weight_push import CONFIG, SGLANG, WAIT_S, ReferenceOf, failure_of, wait_until
from tests.sglang.test_weight_swap import prompt_of

RANK = 8
V1, V2, V3 = (WeightVersion(0, step) for step in (1, 2, 3))
ATTEMPTS = 5
_numbers = itertools.count()


def start(servers: Servers, name: str) -> SGLangServer:
    """With the arguments that the launcher gives it."""
    query = AdapterFacts(rank=RANK, targets=(), model_type="qwen3", asked=False, facts=())
    settings = SERVERS.with_adapters(WorkerSettings(server=ServerConfig(device="cpu")), query)
    assert isinstance(settings, ServerConfig)
    server = servers.start(name, STUDENT, settings.args)
    servers.wait_ready([server], READY_S)
    return server


@pytest.fixture(scope="package")
def server(servers: Servers) -> SGLangServer:
    return start(servers, "adapters")


class MisledAdapters(ServerAdapters):
    """Has its server load another file than the one that was checked."""

    other: Path | None = None

    def _load(self, name: str, folder: str, deadline_s: float, interrupted: Interrupted) -> None:
        super()._load(name, folder if self.other is None else str(self.other), deadline_s, interrupted)


class Actor:
    def __init__(self, server: SGLangServer, run_id: str, mode: SwapMode, copies: Path) -> None:
        self.incarnation = f"incarnation-{next(_numbers)}"
        config = msgspec.structs.replace(SGLANG, update_mode=mode, stream_tokens=2, control_timeout_s=10.0)
        self.engine = SGLangEngine(server.url, config, vocab_size=VOCAB, run_id=run_id)
        self.weights = MisledAdapters(self.engine, student=str(STUDENT), folder=copies)
        self.receiver = WeightReceiver(self.weights, name="actor-0")
        self.receiver.start()

    def close(self) -> None:
        self.receiver.close()
        self.engine.close()


class Run:
    """A publisher of adapters, and one actor."""

    def __init__(self, folder: Path) -> None:
        self.id = f"lora-{next(_numbers)}"
        self.folder, self.copies = folder / "weights", folder / "copies"
        torch.manual_seed(0)
        self.model = load_causal_lm(STUDENT, device="cpu", dtype="float32", attention="packed")
        self.adapters = Adapters(self.model, LoraConfig(rank=RANK, alpha=16.0), base=str(STUDENT))
        self.published: list[WeightVersion] = []
        self.actor: Actor | None = None
        self.publisher = Publisher(
            msgspec.structs.replace(CONFIG, transport="wire"),
            snapshot_dir=self.folder,
            post_plan=self.post_plan,
            published=lambda version, _: self.published.append(version),
            members=GroupMembers(kind="adapters", check_by="canary", adapter_config=self.adapters.config_text()),
            canary=LearnerCanary(self.model, vocab_tokens=VOCAB, bfloat16=False, sent="keep"),
        )

    @property
    def engine(self) -> SGLangEngine:
        assert self.actor is not None
        return self.actor.engine

    def join(self, server: SGLangServer, mode: SwapMode = "abort") -> Actor:
        if self.actor is not None:
            self.actor.close()
        self.actor = Actor(server, self.id, mode, self.copies)
        self.publisher.membership(Membership(("actor-0",), (self.actor.incarnation,)))
        assert self.publisher.wait_idle(WAIT_S)
        return self.actor

    def post_plan(self, plan: WeightPlan) -> None:
        assert self.actor is not None and plan.backend == "wire"
        self.actor.receiver.handle_plan(plan)

    def set(self, version: WeightVersion) -> None:
        generator = torch.Generator().manual_seed(version.step)
        with torch.no_grad():
            for tensor in self.adapters.tensors().values():
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))

    def publish(self, version: WeightVersion) -> None:
        self.set(version)
        self.publisher.publish(version, self.adapters.tensors().items())

    def deliver(self, version: WeightVersion) -> None:
        self.publish(version)
        assert self.publisher.wait_idle(WAIT_S)
        assert self.published[-1] == version and self.engine.version == version

    def merged(self, version: WeightVersion) -> ReferenceOf:
        """The slow way: base and adapter added, without adapters in the forward pass."""
        self.set(version)
        return ReferenceOf([(name, tensor_of(weight)) for name, weight in self.adapters.published()])

    def worst(self, answer: Answer, prompt: list[int]) -> float:
        """Largest difference of a log-prob from that of the merged student of the version that its token has."""
        ids, worst = [*prompt, *answer.ids], 0.0
        assert sum(span.end - span.start for span in answer.spans) == len(answer.ids) == len(answer.logprobs)
        under = {
            version: self.merged(version).of_tokens(ids, len(prompt))
            for version in {span.version for span in answer.spans}
        }
        for span in answer.spans:
            expected = under[span.version]
            of_span = zip(expected[span.start : span.end], answer.logprobs[span.start : span.end], strict=True)
            worst = max(worst, *(abs(a - b) for a, b in of_span))
        return worst

    def close(self) -> None:
        self.publisher.close()
        if self.actor is not None:
            self.actor.close()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    def endless(*args: Any) -> dict[str, Any]:
        body = generate_body(*args)
        body["sampling_params"]["ignore_eos"] = True
        return body

    monkeypatch.setattr("stillhouse.engines.sglang.engine.generate_body", endless)
    run = Run(tmp_path)
    yield run
    run.close()


def names_on(server: SGLangServer) -> set[str]:
    with urllib.request.urlopen(f"{server.url}/v1/models", timeout=PATIENCE_S) as reply:
        return {model["id"] for model in json.loads(reply.read())["data"]}


def label_of(server: SGLangServer) -> str:
    with urllib.request.urlopen(f"{server.url}/model_info", timeout=PATIENCE_S) as reply:
        return json.loads(reply.read())["weight_version"]


def begin(engine: SGLangEngine, names: list[str], n: int, answers: dict[str, Answer]) -> None:
    """Requests that all have tokens when this returns."""
    for i, name in enumerate(names):
        answers[name] = Answer()
        engine.submit(request(name, prompt_of(i), n))
    while not all(len(answers[name].ids) >= 4 for name in names):
        take(engine, answers, 0.1)


def test_a_version_that_comes_while_requests_run_cuts_them_and_every_token_has_its_own(
    run: Run, server: SGLangServer
) -> None:
    run.join(server)
    run.deliver(V1)
    answers: dict[str, Answer] = {}
    begin(run.engine, ["a", "b", "c"], 900, answers)
    run.deliver(V2)
    take(run.engine, answers, 0.0)
    collect(run.engine, answers)
    assert [len(answer.ids) for answer in answers.values()] == [900] * 3
    for answer in answers.values():
        assert list(dict.fromkeys(span.version for span in answer.spans)) == [V1, V2]
        assert [span.version for span in answer.spans] == sorted(span.version for span in answer.spans)
    assert max(run.worst(answer, prompt_of(i)) for i, answer in enumerate(answers.values())) < TOLERANCE
    assert run.engine.stats.extra["restarted_requests_total"] == 3
    assert label_of(server) == "default", "the student below the adapters was left alone"
    files = sum(spec.numel() * 4 for spec in run.adapters.tensors().values())
    assert run.publisher.stats.broadcast_bytes == files


def test_versions_go_on_while_old_requests_keep_theirs_and_only_unused_ones_are_unloaded(
    run: Run, server: SGLangServer
) -> None:
    """Each request is under one version. Three versions come meanwhile, and nobody waits for the first one."""
    actor = run.join(server, "keep")
    run.deliver(V1)
    for attempt in range(ATTEMPTS):
        versions = [WeightVersion(0, V1.step + 3 * attempt + i) for i in range(4)]
        answers: dict[str, Answer] = {}
        begin(run.engine, ["old-0", "old-1"], 900, answers)
        for version in versions[1:]:
            run.deliver(version)
        take(run.engine, answers, 0.0)
        if not any(answer.finish_reason for answer in answers.values()):
            break
        collect(run.engine, answers)  # on a busy machine the server may write 900 tokens before
    else:
        raise AssertionError(f"{ATTEMPTS} times the old requests ended before three versions were there")
    assert run.engine.labels.of(versions[0]) in names_on(server)
    answers |= {f"new-{i}": Answer() for i in range(2)}
    for i in range(2):
        run.engine.submit(request(f"new-{i}", prompt_of(i), 40))
    collect(run.engine, answers)
    old, newest = versions[0], versions[-1]
    assert [{span.version for span in answer.spans} for answer in answers.values()] == [
        {old},
        {old},
        {newest},
        {newest},
    ]
    assert max(run.worst(answer, prompt_of(i % 2)) for i, answer in enumerate(answers.values())) < TOLERANCE
    for more in (1, 2):
        run.deliver(WeightVersion(0, newest.step + more))
    ours = {run.engine.labels.of(version) for version in versions}
    wait_until(lambda: not ours & (names_on(server) - {run.engine.labels.of(newest)}))
    assert actor.receiver.stats["adapter_unloads_failed_total"] == 0


def test_a_file_that_is_not_the_learners_is_found_before_any_request_uses_it(
    run: Run, servers: Servers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is another one than that whose sha256 was checked, and the server loads it without an error: only the canary
    shows it."""
    server = start(servers, "misled")
    actor = run.join(server)
    run.deliver(V1)
    actor.weights.other = run.copies / str(V1)
    answers: dict[str, Answer] = {}
    begin(run.engine, ["a"], 300, answers)
    run.publish(V2)
    wait_until(lambda: failure_of(actor.receiver) is not None)
    assert isinstance(failure_of(actor.receiver), ServerLost) and "canary prompt" in caplog.text
    wait_until(lambda: run.publisher.stats.dropped_total == {"wrong_weights": 1})  # it hears a little later
    assert {span.version for span in answers["a"].spans} == {V1} and run.engine.version == V1
    servers.stop(server, grace_s=0.0)
    # Its owner starts it again, and the worker, too. It gets the newest version.
    server = start(servers, "misled")
    actor = run.join(server)
    wait_until(lambda: actor.engine.version == V2)
    (answer,) = generate(actor.engine, [request("b", prompt_of(0), 12)]).values()
    assert {span.version for span in answer.spans} == {V2} and run.worst(answer, prompt_of(0)) < TOLERANCE
    servers.stop(server, grace_s=0.0)


def test_a_restarted_actor_finds_the_version_on_its_server_and_unloads_what_its_former_self_left(
    run: Run, server: SGLangServer
) -> None:
    run.join(server)
    run.deliver(V1)
    run.deliver(V2)
    actor = run.join(server)  # a new engine and sink; the server has both versions
    wait_until(lambda: actor.engine.version == V2)
    assert actor.receiver.stats["adapters_loaded_total"] == 0
    (answer,) = generate(actor.engine, [request("b", prompt_of(0), 12)]).values()
    assert {span.version for span in answer.spans} == {V2} and run.worst(answer, prompt_of(0)) < TOLERANCE
    run.deliver(V3)
    wait_until(lambda: actor.engine.labels.of(V1) not in names_on(server))
