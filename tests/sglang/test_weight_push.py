"""Weights from a real publisher to real SGLang servers: who has which (by recomputing log-probs), who is left out."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import stillhouse.weights.snapshot
from stillhouse.engines.http.link import ServerLost
from stillhouse.engines.sglang.config import SGLangConfig, SwapMode
from stillhouse.engines.sglang.engine import SGLangEngine
from stillhouse.engines.sglang.weights import ServerWeights
from stillhouse.models.loading import load_causal_lm
from stillhouse.protocol.messages import Membership, WeightPlan, WeightVersion
from stillhouse.sglang_server.servers import Servers, SGLangServer
from stillhouse.weights.buckets import WholeTensors
from stillhouse.weights.checkpoint_names import checkpoint_pieces
from stillhouse.weights.config import WeightsConfig, sent_dtype
from stillhouse.weights.errors import GroupBroken, Interrupted
from stillhouse.weights.manifest import WeightBucket, WeightManifest
from stillhouse.weights.publisher import Publisher
from stillhouse.weights.receiver import WeightReceiver, WeightReceiverFailed
from stillhouse.weights.roster import CheckBy, GroupMembers
from stillhouse.weights.server_checks import LearnerCanary
from tests.patience import PATIENCE_S
from tests.sglang.conftest import (
    STUDENT,
    TOLERANCE,
    VOCAB,
    Answer,
    Named,
    Reference,
    collect,
    generate,
    request,
    start,
    take,
)
from tests.sglang.test_weight_swap import differences, post, prompt_of

WAIT_S = PATIENCE_S
CONFIG = WeightsConfig(
    bucket_bytes=200_000,
    join_timeout_s=PATIENCE_S,
    broadcast_timeout_s=PATIENCE_S,
    answer_grace_s=1.0,
    join_window_s=0.05,
    rejoin_delay_s=0.3,
)
"""Five buckets per version."""
SGLANG = SGLangConfig(max_concurrent=8, control_timeout_s=2.0)
V0, V1, V2, V3 = (WeightVersion(0, step) for step in range(4))
_run_numbers = itertools.count()


def changed(student: Named, step: int) -> Named:
    """Other weights, in every tensor."""
    generator = torch.Generator().manual_seed(step)
    return [(name, tensor + 0.05 * torch.randn(tensor.shape, generator=generator)) for name, tensor in student]


class ReferenceOf(Reference):
    """The slow way, under weights that are in no file."""

    def __init__(self, named: Named, path: Path = STUDENT) -> None:
        super().__init__(path)
        parameters = dict(self._model.named_parameters())
        with torch.no_grad():
            for name, tensor in named:
                parameters[name].copy_(tensor)


class SaboteurWeights(ServerWeights):
    """Does something else instead of asking for a certain bucket."""

    saboteur: Callable[[], None] | None = None
    at_bucket = 2
    _n_asked = 0

    def _call(self, path: str, body: dict[str, Any], deadline_s: float, interrupted: Interrupted) -> None:
        if path == "/update_weights_from_distributed" and self.saboteur is not None:
            self._n_asked += 1
            if self._n_asked == self.at_bucket:
                act, self.saboteur = self.saboteur, None
                act()
        super()._call(path, body, deadline_s, interrupted)


class ForgetfulWeights(SaboteurWeights):
    """The server is sent some tensors under names that it passes over in silence. It keeps the old ones."""

    forgets: str | None = None
    """Which, as a regular expression."""

    def _update(self, bucket: WeightBucket, label: dict[str, str], *, last: bool) -> dict[str, Any]:
        body = super()._update(bucket, label, last=last)
        if self.forgets is None:
            return body
        names = [f"{name}.rotary_emb.inv_freq" if re.search(self.forgets, name) else name for name in body["names"]]
        return body | {"names": names}


class Actor:
    """What an actor has of the weight path: an engine, and a receiver beside it."""

    def __init__(
        self, name: str, server: SGLangServer, run_id: str, mode: SwapMode = "abort", *, path: Path = STUDENT
    ) -> None:
        config = msgspec.structs.replace(SGLANG, update_mode=mode)
        self.name = name
        self.incarnation = f"incarnation-{next(_run_numbers)}"
        self.engine = SGLangEngine(server.url, config, vocab_size=VOCAB, run_id=run_id)
        self.weights = ForgetfulWeights(self.engine, student=str(path), ours=True)
        self.receiver = WeightReceiver(self.weights, name=name)
        self.receiver.start()

    @property
    def stats(self) -> dict[str, float]:
        return self.receiver.stats

    def close(self) -> None:
        self.receiver.close()
        self.engine.close()


class Run:
    """A publisher and its actors. Stands for the buffer, too: it passes plans on."""

    def __init__(self, folder: Path, student: Named, path: Path = STUDENT) -> None:
        """`student`: the weights in `path`, where servers have them from."""
        self.path = path
        self.id = f"run-{next(_run_numbers)}"
        self.folder = folder / "weights"
        self.student = student
        self.model = load_causal_lm(path, device="cpu", dtype="float32", attention="packed")
        self.actors: dict[str, Actor] = {}
        self.plans: list[WeightPlan] = []
        self.published: list[WeightVersion] = []
        self.publisher: Publisher

    def start(self, servers: Sequence[SGLangServer], *, check_by: CheckBy = "reload", **changes: Any) -> Publisher:
        """A publisher, and an actor for each server."""
        sent = sent_dtype(changes.get("dtype", CONFIG.dtype), "keep")
        self.publisher = Publisher(
            msgspec.structs.replace(CONFIG, **changes),
            snapshot_dir=self.folder,
            post_plan=self.post_plan,
            published=lambda version, _: self.published.append(version),
            members=GroupMembers(kind="servers", check_by=check_by, pieces=checkpoint_pieces(self.model, self.student)),
            canary=LearnerCanary(self.model, vocab_tokens=VOCAB, bfloat16=False, sent=sent),
        )
        if servers:
            self.join(servers)
        return self.publisher

    def join(self, servers: Sequence[SGLangServer], mode: SwapMode = "abort") -> None:
        """Returns when they are in the group."""
        for server in servers:
            name = f"actor-{len(self.actors)}"
            self.actors[name] = Actor(name, server, self.id, mode, path=self.path)
        self.say_who_is_there()
        assert self.publisher.wait_idle(WAIT_S)

    def say_who_is_there(self) -> None:
        incarnations = tuple(actor.incarnation for actor in self.actors.values())
        self.publisher.membership(Membership(tuple(self.actors), incarnations))

    def post_plan(self, plan: WeightPlan) -> None:
        self.plans.append(plan)
        for name in plan.members:
            self.actors[name].receiver.handle_plan(plan)

    def weights(self, version: WeightVersion) -> Named:
        return changed(self.student, version.step) if version.step else self.student

    def publish(self, version: WeightVersion) -> None:
        named = self.weights(version)
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, tensor in named:
                parameters[name].copy_(tensor)
        self.publisher.publish(version, named)

    def delivered(self, version: WeightVersion, *names: str) -> None:
        """These actors (default: all) answer under this version, as transformers does."""
        reference = ReferenceOf(self.weights(version), self.path)
        for name in names or self.actors:
            engine = self.actors[name].engine
            wait_until(lambda engine=engine: engine.version == version and engine.weights_known)
            assert worst_difference(engine, version, reference) < TOLERANCE

    def close(self) -> None:
        self.publisher.close()
        for actor in self.actors.values():
            actor.close()


@pytest.fixture
def run(tmp_path: Path, student_weights: Named) -> Iterator[Run]:
    run = Run(tmp_path, student_weights)
    yield run
    run.close()


def wait_until(met: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not met():
        assert time.monotonic() < deadline_s, "it never came to that"
        time.sleep(0.01)


def worst_difference(engine: SGLangEngine, version: WeightVersion, reference: Reference) -> float:
    """Of two new requests, all of whose tokens must carry this version."""
    answers = generate(engine, [request(f"{version}-{i}", prompt_of(i), 12) for i in range(2)])
    worst = 0.0
    for i, answer in enumerate(answers.values()):
        assert answer.error is None and {span.version for span in answer.spans} == {version}
        expected = reference.of_tokens([*prompt_of(i), *answer.ids], len(prompt_of(i)))
        worst = max(worst, *(abs(a - b) for a, b in zip(expected, answer.logprobs, strict=True)))
    return worst


def checksums_work(server: SGLangServer) -> bool:
    """That of 0.5.17 needs CUDA."""
    try:
        post(server, "/weights_checker", {"action": "checksum"})
    except urllib.error.HTTPError as error:
        assert "CUDA" in error.read().decode()
        return False
    return True


@pytest.fixture
def can_check(three: list[SGLangServer]) -> bool:
    return checksums_work(three[0])


@pytest.fixture
def checked(can_check: bool) -> None:
    if not can_check:
        pytest.skip("this SGLang has checksums with CUDA only")


@pytest.mark.parametrize("n_servers", [1, 3])
def test_each_server_answers_under_the_version_that_was_published(
    run: Run, three: list[SGLangServer], n_servers: int, can_check: bool, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = run.start(three[:n_servers])
    for version in (V1, V2):
        run.publish(version)
        assert publisher.wait_idle(WAIT_S)
        run.delivered(version)
    stats = publisher.stats
    assert run.published == [V1, V2]
    assert (stats.members, stats.check_requests_total, stats.dropped_total) == (n_servers, 1, {})
    for actor in run.actors.values():
        made, skipped = actor.stats["weight_checks_total"], actor.stats["weight_checks_skipped_total"]
        assert (made, skipped) == ((1, 0) if can_check else (0, 1))
        assert actor.stats["weight_canaries_total"] == 1
    assert ("verified by the canary prompt only" in caplog.text) is not can_check


@pytest.mark.parametrize("mode", ["retract", "abort", "in_place"], indirect=True)
def test_a_push_in_the_middle_of_requests_and_every_token_has_the_version_that_sampled_it(
    mode: SwapMode, run: Run, three: list[SGLangServer]
) -> None:
    run.start([])
    run.join(three[:1], mode)
    engine = run.actors["actor-0"].engine
    wait_until(lambda: engine.weights_known)
    answers: dict[str, Answer] = {}

    def submit(n: int) -> None:
        for i in range(len(answers), len(answers) + n):
            answers[f"r{i}"] = Answer()
            engine.submit(request(f"r{i}", prompt_of(i), 400 - 20 * (i % 8)))  # so that not all begin at one moment

    submit(8)
    while not all(len(answer.ids) >= 4 or answer.finish_reason for answer in answers.values()):
        take(engine, answers, 0.1)
    run.publish(V1)
    while not run.publisher.wait_idle(0.01):  # eight are always under way, and others wait, should this thread be late
        take(engine, answers, 0.02)
        submit(24 - sum(answer.finish_reason is None for answer in answers.values()))
    n_before = len(answers)
    submit(4)
    collect(engine, answers)

    old, new = ReferenceOf(run.weights(V0)), ReferenceOf(run.weights(V1))
    n_crossed = 0
    for i, answer in enumerate(answers.values()):
        assert answer.error is None
        versions = [version for version, _ in itertools.groupby(span.version for span in answer.spans)]
        assert versions in ([V0], [V1], [V0, V1])
        n_crossed += len(versions) == 2
        for version, difference in differences(answer, prompt_of(i), old, new):
            if mode == "in_place" and version == V1 and i < n_before:
                continue  # over the old weights' cache, also if it waited until then: no recompute gives these
            assert difference < TOLERANCE
    assert n_crossed >= 2  # of eight that were under way


def test_a_server_killed_inside_a_broadcast_is_left_out_and_the_others_get_the_version_without_it(
    run: Run, servers: Servers, three: list[SGLangServer]
) -> None:
    (victim,) = start(servers, "push-killed")
    publisher = run.start([three[0], victim, three[1]])
    run.publish(V1)
    assert publisher.wait_idle(WAIT_S)
    run.actors["actor-1"].weights.saboteur = lambda: os.killpg(victim.pid, signal.SIGKILL)
    run.publish(V2)
    wait_until(lambda: bool(publisher.stats.dropped_total))
    run.publish(V3)  # does not wait for the group to be made
    assert publisher.wait_idle(WAIT_S)
    run.delivered(V3, "actor-0", "actor-2")
    wait_until(lambda: "no_ready" in publisher.stats.dropped_total)  # it was tried once more
    # Whether its actor or the learner's own end of the broken connection is the first to say so, is a race.
    assert publisher.stats.dropped_total.keys() <= {"refused", "no_ready"}
    wait_until(lambda: run.plans[-1].members == ("actor-0", "actor-2"))
    assert all({"actor-0", "actor-2"} <= set(plan.members) for plan in run.plans)


def test_a_server_that_hangs_is_lost_and_who_hung_behind_it_comes_back_when_it_is_gone(
    run: Run, servers: Servers, three: list[SGLangServer]
) -> None:
    """The bytes for the third server go through the first: it hangs, too, as long as that lives."""
    (victim,) = start(servers, "push-stopped")
    publisher = run.start([victim, three[0], three[1]], broadcast_timeout_s=2.0, join_timeout_s=2.0)
    run.publish(V1)
    assert publisher.wait_idle(WAIT_S)
    hangs = run.actors["actor-0"]
    hangs.weights.saboteur = lambda: os.killpg(victim.pid, signal.SIGSTOP)
    version = publish_until_sabotaged(run, hangs)
    run.delivered(version, "actor-1")
    wait_until(lambda: failure_of(hangs.receiver) is not None)
    assert isinstance(failure_of(hangs.receiver), ServerLost)
    with pytest.raises(ServerLost):
        hangs.engine.poll(0.0)
    servers.stop(victim, grace_s=0.0)  # as the launcher does when the actor has left
    gone = run.actors.pop("actor-0")
    run.say_who_is_there()
    run.delivered(version, "actor-1", "actor-2")
    assert publisher.stats.dropped_total.keys() >= {"stuck"}
    gone.close()


def publish_until_sabotaged(run: Run, actor: Actor) -> WeightVersion:
    """The version whose broadcast it came to. On a busy machine servers may miss the deadline to pause, and a version
    comes to all of them by its files."""
    for step in range(2, 10):
        run.publish(WeightVersion(0, step))
        while actor.weights.saboteur is not None and not run.publisher.wait_idle(0.1):
            pass
        if actor.weights.saboteur is None:
            return WeightVersion(0, step)
    raise AssertionError("no broadcast came as far")


def failure_of(receiver: WeightReceiver) -> BaseException | None:
    try:
        receiver.raise_if_failed()
    except WeightReceiverFailed as failed:
        return failed.__cause__
    return None


def test_an_actor_takes_its_server_out_of_the_group_that_a_former_actor_left_it_in(
    run: Run, three: list[SGLangServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    run.start(three[:2])
    former = run.actors.pop("actor-0")
    monkeypatch.setattr(former.weights, "leave", lambda: None)  # it dies
    former.close()
    run.actors["actor-0"] = Actor("actor-0", three[0], run.id)
    run.say_who_is_there()
    assert run.publisher.wait_idle(WAIT_S)
    with pytest.raises(urllib.error.HTTPError, match="400"):
        post(three[0], "/destroy_weights_update_group", {"group_name": run.plans[0].group_name})
    run.publish(V1)
    run.delivered(V1)


def test_a_late_server_takes_the_newest_version_by_broadcast_and_proves_it(run: Run, three: list[SGLangServer]) -> None:
    publisher = run.start(three[:1])
    run.publish(V1)
    assert publisher.wait_idle(WAIT_S)
    run.join(three[1:2])
    run.delivered(V1)
    assert run.published == [V1] and publisher.stats.broadcasts_total == 2
    assert [actor.stats["weight_canaries_total"] for actor in run.actors.values()] == [2, 1]
    run.publish(V2)
    run.delivered(V2)


def test_after_half_an_update_a_server_waits_for_a_whole_one(run: Run, three: list[SGLangServer]) -> None:
    publisher = run.start(three[:2])
    run.publish(V1)
    assert publisher.wait_idle(WAIT_S)
    actor = run.actors["actor-0"]
    seen: list[WeightVersion | None] = []

    def lose_touch() -> None:
        seen.append(actor.weights.version)
        raise GroupBroken("as if the connection to the server was cut")

    actor.weights.saboteur = lose_touch
    run.publish(V2)
    run.delivered(V2)
    assert seen == [None]
    assert publisher.wait_idle(WAIT_S)
    assert actor.stats["weight_groups_broken_total"] == 1


@pytest.mark.parametrize(
    ("mode", "forgets"),
    [
        ("abort", r"layers\.1\.mlp\.down_proj"),
        ("in_place", r"^model\.norm"),
        ("retract", r"_proj\."),  # as if an adapter's changes never arrived
    ],
    indirect=["mode"],
)
def test_a_server_that_keeps_old_weights_is_found_within_verify_every_versions(
    mode: SwapMode,
    run: Run,
    three: list[SGLangServer],
    forgets: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The update itself says that all went well."""
    publisher = run.start([], verify_every=2, rejoin_delay_s=60.0)
    run.join(three[:2], mode)
    run.publish(V1)
    assert publisher.wait_idle(WAIT_S) and run.published == [V1]
    victim = run.actors["actor-0"]
    victim.weights.forgets = forgets
    answers = {f"r{i}": Answer() for i in range(4)}
    for i in range(4):
        victim.engine.submit(request(f"r{i}", prompt_of(i), 300))
    run.publish(V2)
    assert publisher.wait_idle(WAIT_S)
    assert publisher.stats.dropped_total == {}, "not looked at yet"
    run.publish(V3)
    wait_until(lambda: publisher.stats.dropped_total == {"wrong_weights": 1})
    wait_until(lambda: failure_of(victim.receiver) is not None)
    assert isinstance(failure_of(victim.receiver), ServerLost)
    assert "version 0.3: 31 log-probs of a canary prompt" in caplog.text
    with contextlib.suppress(ServerLost):
        while victim.weights.version is None:  # it takes nothing more, and answers nothing under this version
            take(victim.engine, answers, 0.1)
    assert V3 not in {span.version for answer in answers.values() for span in answer.spans}
    label = json.loads(urllib.request.urlopen(f"{three[0].url}/model_info", timeout=WAIT_S).read())["weight_version"]
    assert victim.engine.labels.parse(label) is None, "a successor does not take it for this version either"
    run.delivered(V3, "actor-1")
    assert run.actors["actor-1"].stats["weight_canaries_total"] == 2


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("other_file", [False, True])
def test_loaded_from_the_file_a_version_must_have_the_same_checksums(
    run: Run, three: list[SGLangServer], other_file: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = stillhouse.weights.snapshot.write_content

    def write_other(
        folder: Path, version: WeightVersion, manifest: WeightManifest, content: object, *, keep: int
    ) -> Any:
        return write(folder, version, manifest, WholeTensors(changed(run.weights(version), 9)), keep=keep)

    if other_file:
        monkeypatch.setattr(stillhouse.weights.snapshot, "write_content", write_other)
    publisher = run.start(three[:1], rejoin_delay_s=60.0)
    run.publish(V1)
    if other_file:
        wait_until(lambda: publisher.stats.dropped_total == {"wrong_weights": 1})
    else:
        run.delivered(V1)
        wait_until(lambda: publisher.stats.check_requests_total == 1)
        assert run.actors["actor-0"].stats["weight_checks_total"] == 1


def test_weights_are_sent_in_another_dtype(run: Run, three: list[SGLangServer]) -> None:
    publisher = run.start(three[:1], dtype="bfloat16")
    run.publish(V1)
    assert publisher.wait_idle(WAIT_S)
    rounded = [(name, tensor.bfloat16().float()) for name, tensor in run.weights(V1)]
    assert worst_difference(run.actors["actor-0"].engine, V1, ReferenceOf(rounded)) < TOLERANCE
    assert publisher.stats.broadcast_bytes == sum(tensor.nbytes // 2 for _, tensor in rounded)
