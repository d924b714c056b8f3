"""The learner's loop over the wire: steps, checkpoints and evaluations of the same moment, stalls, the end of the run.

The trainer, the task stream and the publisher are real; the buffer is real, or does as the test says; rollouts and
grades are made up."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

import stillhouse.learner.feed
import stillhouse.learner.loop
import stillhouse.learner.steps
from stillhouse.buffer.config import BufferConfig
from stillhouse.learner.checkpoints.writer import CheckpointWriter, Write
from stillhouse.learner.config import LearnerConfig, UntilConfig
from stillhouse.learner.evaluation.evaluation import EvaluationRun, render_eval_set
from stillhouse.learner.evaluation.until import StopRule
from stillhouse.learner.feed import LearnerStalled
from stillhouse.learner.inbox import RunStopped, StopAsked, StopRequest
from stillhouse.learner.loop import LearnerLoop, LearnerParts
from stillhouse.learner.prompts.config import TaskConfig
from stillhouse.learner.prompts.tasks import TaskStream, load_prompts
from stillhouse.learner.reports.metrics import MetricsWriter, read_metrics
from stillhouse.learner.reports.progress import AccountFile, AccountWriter, LearnerProgress
from stillhouse.learner.step.train_step import Trainer
from stillhouse.protocol import messages as m
from stillhouse.protocol.client import Client
from stillhouse.protocol.server_events import FromPeer
from stillhouse.weights.config import WeightsConfig
from stillhouse.weights.publisher import Publisher
from tests.learner.conftest import tiny_student
from tests.patience import PATIENCE_S
from tests.wire import WAIT_S, Got, ScriptedBuffer, acknowledgement, connected, real_buffer, receive, running

LEARNER: tuple[m.Role, str] = ("learner", "learner-0")
V0, V1, V2 = (m.WeightVersion(0, step) for step in range(3))
PUBLISH = WeightsConfig(join_timeout_s=0.3, answer_grace_s=0.1, join_window_s=0.0, rejoin_delay_s=60.0)
"""The made-up actor never joins the weight group: the learner goes on without it after 0.3 s."""
BUFFER = BufferConfig(heartbeat_s=0.1, peer_timeout_s=PATIENCE_S, max_staleness=1, batch_rollouts=2, release="rollout")
TASKS = TaskConfig(group_size=1, max_new_tokens=4, eval_share=0.2, eval_greedy=2, eval_sampled=2)
NONE = m.LedgerCounts(0, 0, {}, {}, 0, 0)
LEDGER = m.Ledger(NONE, NONE, NONE, {}, NONE)


@dataclass
class Saved:
    """What a checkpoint would hold."""

    version: m.WeightVersion
    snapshot: m.Snapshot
    stream: dict[str, Any]
    steps_done: int


def _set() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@dataclass
class Learner:
    """A loop and its parts."""

    loop: LearnerLoop
    trainer: Trainer
    client: Client
    folder: Path
    stop: StopRequest
    saved: list[Saved] = field(default_factory=list[Saved])
    no_room_at: set[int] = field(default_factory=set[int])
    """Steps whose checkpoint finds the disk full."""
    may_write: threading.Event = field(default_factory=_set)
    """Cleared: the disk takes its time."""


Learning = Callable[..., Any]


@pytest.fixture
def learning(
    small_tokenizer: PreTrainedTokenizerFast, write_rows: Callable[[Sequence[dict[str, Any]]], Path], tmp_path: Path
) -> Learning:
    """`with learning(address, steps=n, **settings of the learner)`: a learner connected to that buffer."""
    rows = write_rows([{"prompt": f"{i}+1=", "ground_truth": str(i + 1), "tag": "sum"} for i in range(20)])

    @contextmanager
    def make(address: str, *, steps: int, **settings: Any) -> Generator[Learner]:
        tasks = msgspec.structs.replace(TASKS, prompts=str(rows), group_size=settings.pop("group_size", 1))
        defaults: dict[str, Any] = {"eval_every": 0, "checkpoint_every": 0, "warmup_steps": 0, "device": "cpu"}
        fetch_ahead, limit = settings.pop("fetch_ahead", True), settings.pop("max_equal_batches", 0)
        config = LearnerConfig(tasks=tasks, **(defaults | settings))
        prompts = load_prompts(tasks)
        stream = TaskStream(tasks, small_tokenizer, prompts, seed=1)
        evaluated = render_eval_set(prompts.evaluation, small_tokenizer, tasks).prompts
        trainer = Trainer(tiny_student(vocab=len(small_tokenizer)), config, total_steps=steps)
        with ExitStack() as stack:
            client = stack.enter_context(connected(address, "learner"))
            metrics = stack.enter_context(MetricsWriter(tmp_path))
            publisher = stack.enter_context(
                Publisher(
                    PUBLISH,
                    snapshot_dir=tmp_path / "weights",
                    post_plan=lambda plan: client.send(m.PostWeightPlan(plan=plan)),
                    published=lambda version, _: client.send(m.VersionPublished(version=version)),
                )
            )

            def evaluation(version: m.WeightVersion, name: str) -> EvaluationRun:
                return EvaluationRun(tasks, evaluated, small_tokenizer, version=version, seed=1)

            def stage(version: m.WeightVersion, snapshot: m.Snapshot | None) -> Write:
                assert snapshot is not None
                staged = Saved(version, snapshot, stream.state(), trainer.steps_done)

                def write() -> Path:
                    made.may_write.wait(WAIT_S)
                    if version.step in made.no_room_at:
                        raise OSError(28, "No space left on device")
                    made.saved.append(staged)
                    return tmp_path / f"step_{version.step}"

                return write

            stop = StopRequest()
            progress = LearnerProgress()
            account = AccountWriter(AccountFile(tmp_path, metrics.unwritten), progress, publisher, tmp_path)
            checkpoints = stack.enter_context(CheckpointWriter(stage, progress, saved=lambda _: None))
            parts = LearnerParts(
                client=client,
                trainer=trainer,
                stream=stream,
                publisher=publisher,
                metrics=metrics,
                make_evaluation=evaluation,
                checkpoints=checkpoints,
                account=account,
                config=config,
                version=V0,
                parent=V0,
                steps=steps,
                stop=stop,
                fetch_ahead=fetch_ahead,
                max_equal_batches=limit,
            )
            made = Learner(LearnerLoop(parts), trainer, client, tmp_path, stop)
            yield made

    return make


def everything(_: m.Ticket) -> bool:
    return True


def play_crowd(address: str, stop: threading.Event, takes: Callable[[m.Ticket], bool]) -> None:
    """An actor and a teacher in one: four made-up tokens for each ticket that `takes` likes, and a grade for each."""
    random, seq, tickets, items = np.random.default_rng(0), 0, 0, 0
    with connected(address, "actor") as actor, connected(address, "teacher", "default") as teacher:
        while not stop.is_set():
            seq += 1
            actor.send(m.TicketCredit(50, seq, tickets))
            teacher.send(m.ScoreCredit(100_000, seq, items))
            received = actor.recv(0.01)
            if received is not None and isinstance(received.message, m.Shutdown):
                return
            if received is not None and isinstance(received.message, m.Tickets):
                tickets += len(received.message.tickets)
                for ticket, prompt in zip(received.message.tickets, received.arrays, strict=True):
                    if takes(ticket):
                        actor.send(*made_up(ticket, prompt, random))
            received = teacher.recv(0.01)
            if received is not None and isinstance(received.message, m.ScoreWork):
                items += len(received.message.items)
                for item in received.message.items:
                    teacher.send(m.Scores((item.lease_id,)), [np.full(item.end - item.start, -1.0, np.float32)])


def made_up(
    ticket: m.Ticket, prompt: np.ndarray[Any, Any], random: np.random.Generator
) -> tuple[m.Segment, list[np.ndarray[Any, Any]]]:
    n, end = len(prompt), len(prompt) + 4
    mask = (np.arange(end) >= n).astype(np.uint8)
    ids = np.concatenate([prompt, random.integers(0, 200, 4)]).astype(np.int32)
    spans = (m.VersionSpan(ticket.min_version, n, end),)
    segment = m.Segment(ticket.rollout_id, 0, 0, end, spans, True, "stop", 1.0)
    return segment, [ids, np.where(mask, -0.5, 0.0).astype(np.float32), mask]


@contextmanager
def crowd(address: str, takes: Callable[[m.Ticket], bool] = everything) -> Generator[None]:
    """It plays until Shutdown, or until the test is through with it."""
    stop = threading.Event()
    with running(lambda: play_crowd(address, stop, takes)) as played:
        try:
            yield
        finally:
            stop.set()
        played.result(WAIT_S)


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    threads = set(threading.enumerate())
    yield
    left = {thread for thread in threading.enumerate() if thread not in threads}
    assert not left, f"threads left running: {left}"


# ------------------------------------------------------------------------------------------------- the real buffer


def gauges(folder: Path) -> dict[str, float]:
    """The learner's last, as the buffer had them when the run was over."""
    final = msgspec.json.decode((folder / "ledger.json").read_bytes(), type=m.Snapshot)
    (stats,) = [peer.stats for peer in final.peers if peer.role == "learner"]
    return stats


def test_a_checkpoint_without_room_is_counted_and_training_goes_on_to_the_next(
    learning: Learning, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with real_buffer(BUFFER, tmp_path) as (address, ended):
        with learning(address, steps=4, checkpoint_every=1) as made, crowd(address):
            made.no_room_at = {1, 2}
            made.loop.run()
        assert ended.result(WAIT_S) == 0
    assert [saved.version.step for saved in made.saved] == [3, 4] and made.loop.version.step == 4
    assert made.loop.progress.checkpoints_failed == 2
    assert "the checkpoint of step 2 could not be written: [Errno 28] No space left" in caplog.text
    assert "(2 failed so far)" in caplog.text
    assert gauges(tmp_path)["checkpoints_failed_total"] == 2.0


def test_steps_go_on_while_a_checkpoint_is_written_and_the_next_is_put_off_until_it_is_done(
    learning: Learning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Due after steps 2, 4 and 6; the one of step 2 is written until step 5 is under way."""
    with real_buffer(BUFFER, tmp_path) as (address, ended):
        with learning(address, steps=8, checkpoint_every=2) as made, crowd(address):
            made.may_write.clear()
            step = stillhouse.learner.steps.finite_step

            def freed_in_the_fifth(*arguments: Any) -> Any:
                if made.trainer.steps_done == 4:
                    assert made.saved == [], "nobody waited for it"
                    made.may_write.set()
                    (thread,) = (one for one in threading.enumerate() if one.name == "checkpoint")
                    thread.join(WAIT_S)
                return step(*arguments)

            monkeypatch.setattr(stillhouse.learner.steps, "finite_step", freed_in_the_fifth)
            made.loop.run()
        assert ended.result(WAIT_S) == 0
    assert [saved.version.step for saved in made.saved] == [2, 5, 6, 8]
    assert all(saved.steps_done == saved.snapshot.version.step == saved.version.step for saved in made.saved)
    assert made.loop.progress.checkpoints_put_off == 1 == gauges(tmp_path)["checkpoints_put_off_total"]
    assert made.loop.progress.checkpoint == tmp_path / "step_8"
    assert "the checkpoint of step 2 is still being written" in caplog.text


def test_without_room_for_the_last_checkpoint_the_run_has_failed_and_says_why(
    learning: Learning, tmp_path: Path
) -> None:
    expected = "4 steps done, but the last checkpoint could not be written: .*No space left on device; free some space"
    with real_buffer(BUFFER, tmp_path) as (address, ended):
        with learning(address, steps=4, checkpoint_every=2) as made, crowd(address):
            made.no_room_at = {4}
            with pytest.raises(RunStopped, match=expected) as stopped:
                made.loop.run()
        assert ended.result(WAIT_S) == 1
    assert not stopped.value.shutdown.ok and [saved.version.step for saved in made.saved] == [2]


@pytest.mark.parametrize("publish_every", [1, 2])
def test_it_ends_in_order_when_its_evaluations_say_so(
    learning: Learning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, publish_every: int
) -> None:
    """Every answer earns 1, so no evaluation is better than the first. The batch that was asked for ahead is not
    trained, and is accounted for."""
    finished: list[m.RunFinished] = []
    send = Client.send

    def sent(self: Client, message: Any, *frames: Any) -> None:
        finished.extend([message] if isinstance(message, m.RunFinished) else [])
        send(self, message, *frames)

    monkeypatch.setattr(Client, "send", sent)
    with real_buffer(BUFFER, tmp_path) as (address, ended):
        with learning(address, steps=500, eval_every=2, publish_every=publish_every) as made, crowd(address):
            made.loop.progress.rule = StopRule(UntilConfig(plateau=1))
            made.loop.run()
        assert ended.result(WAIT_S) == 0
    step = made.loop.version.step
    assert 2 < step < 500 and step % publish_every == 0 and [saved.version.step for saved in made.saved] == [step]
    assert finished[0].ok and f"{step} steps done, as eval/accuracy_sampled was not better" in finished[0].reason
    assert made.loop.progress.evaluations[-1].step == step, "it was evaluated once more"
    assert msgspec.json.decode((tmp_path / "ledger.json").read_bytes(), type=m.Snapshot).ledger.balanced


def test_asked_to_leave_in_a_step_it_finishes_it_and_leaves_a_checkpoint_of_it(
    learning: Learning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with real_buffer(BUFFER, tmp_path) as (address, ended):
        with learning(address, steps=50) as made, crowd(address):
            asked_at: list[int] = []
            step = stillhouse.learner.steps.finite_step

            def asked_in_the_third(*arguments: Any) -> Any:
                if made.trainer.steps_done == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
                    asked_at.append(made.trainer.steps_done)
                return step(*arguments)

            monkeypatch.setattr(stillhouse.learner.steps, "finite_step", asked_in_the_third)
            with made.stop, pytest.raises(StopAsked):
                made.loop.run()
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, "a second SIGTERM must not cut the leaving"
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            made.client.send(m.RunFinished(False, "stopped"))
            receive(made.client, m.Shutdown)
        assert ended.result(WAIT_S) != 0
    assert asked_at == [2] and made.loop.version.step == 3
    (saved,) = made.saved
    assert (saved.version.step, saved.steps_done, saved.snapshot.version.step) == (3, 3, 3)
    assert saved.snapshot.ledger.rollouts.trained == 2 * 3, "the buffer had it in its books"


@pytest.mark.parametrize("eval_every", [0, 1])
def test_asked_to_leave_before_its_first_step_it_leaves_at_once_without_a_checkpoint(
    learning: Learning, tmp_path: Path, eval_every: int
) -> None:
    """Whether it waits for a batch or for an evaluation."""
    with real_buffer(BUFFER, tmp_path) as (address, ended):
        with learning(address, steps=5, eval_every=eval_every) as made:
            made.stop.count = 1
            with pytest.raises(StopAsked):
                made.loop.run()
            made.client.send(m.RunFinished(False, "stopped"))
            receive(made.client, m.Shutdown)
        assert ended.result(WAIT_S) != 0
    assert made.saved == []


def test_steps_run_and_all_that_was_trained_is_in_the_books(
    learning: Learning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published: list[int] = []
    publish = Publisher.publish

    def noted(self: Publisher, version: m.WeightVersion, *args: Any) -> Any:
        published.append(version.step)
        return publish(self, version, *args)

    monkeypatch.setattr(Publisher, "publish", noted)
    with real_buffer(BUFFER, tmp_path) as (address, ended):
        with learning(address, steps=4, checkpoint_every=2, publish_every=3) as made, crowd(address):
            before = [p.detach().clone() for p in made.trainer.model.parameters()]
            made.loop.run()
        assert ended.result(WAIT_S) == 0
    assert (made.loop.version, made.trainer.steps_done) == (m.WeightVersion(0, 4), 4)
    assert published[-2:] == [3, 4] and not {1, 2} & set(published), "the last one too"
    assert any(not torch.equal(a, b) for a, b in zip(before, made.trainer.model.parameters(), strict=True))
    progress = made.loop.progress
    assert progress.tokens_trained == 4 * 2 * 4 and progress.evaluations == []
    rows = [row for row in read_metrics(tmp_path) if row["kind"] == "step"]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    # Model, task stream and ledger of a checkpoint speak of one and the same step.
    assert [saved.version.step for saved in made.saved] == [2, 4]
    for saved in made.saved:
        step = saved.version.step
        assert saved.steps_done == step and saved.snapshot.version == saved.version
        ledger = saved.snapshot.ledger
        assert ledger.balanced and ledger.rejected == {}
        assert (ledger.rollouts.trained, ledger.tokens.trained) == (2 * step, 2 * 4 * step)
        outstanding = {offer["task"]["task_id"] for offer in saved.stream["outstanding"]}
        assert len(outstanding) == saved.stream["next_task_id"] - 2 * step


def test_an_evaluation_that_does_not_come_is_given_up_and_the_run_goes_on(learning: Learning, tmp_path: Path) -> None:
    def takes(ticket: m.Ticket) -> bool:
        return ticket.kind == "train" or ticket.sampling.temperature == 0.0

    with real_buffer(BUFFER, tmp_path) as (address, ended):
        with learning(address, steps=1, eval_every=1, stall_timeout_s=1.5) as made, crowd(address, takes):
            made.loop.run()
        assert ended.result(WAIT_S) == 0
    evaluations = made.loop.progress.evaluations
    assert [(r.step, r.n_greedy, r.n_sampled, r.missing) for r in evaluations] == [(0, 2, 0, 2), (1, 2, 0, 2)]
    assert made.trainer.steps_done == 1


def test_a_streak_of_equal_rewards_ends_the_run_with_a_checkpoint(
    learning: Learning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewards of a group differ in the first tasks only; all made-up rollouts get 1, and here some get 0."""
    monkeypatch.setattr(stillhouse.learner.feed, "LOOK_EVERY_S", 0.05)
    by_itself = made_up

    def rewarded(ticket: m.Ticket, *arguments: Any) -> Any:
        message, arrays = by_itself(ticket, *arguments)
        differs = ticket.task_id < 3 and ticket.sample_index == 1
        return msgspec.structs.replace(message, reward=0.0 if differs else 1.0), arrays

    monkeypatch.setattr("tests.learner.test_loop.made_up", rewarded)
    config = msgspec.structs.replace(BUFFER, dynamic_sampling=2)
    with real_buffer(config, tmp_path) as (address, ended):
        said = r"dropped \d+ batches of rollouts in a row at step 3.*fewer than buffer.dynamic_sampling = 2"
        with learning(address, steps=50, group_size=2, max_equal_batches=2) as made, crowd(address):
            with pytest.raises(RunStopped, match=said):
                made.loop.run()
            assert made.saved, "before the buffer ended the run"
        assert ended.result(WAIT_S) == 1
    (saved,) = made.saved
    assert (saved.version.step, saved.steps_done) == (3, 3) and made.loop.version.step == 3
    ledger = saved.snapshot.ledger
    assert ledger.balanced and ledger.rollouts.dropped["equal_rewards"] >= 4 and ledger.rollouts.trained == 6


def test_a_stall_says_what_the_buffer_holds(
    learning: Learning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stillhouse.learner.feed, "LOOK_EVERY_S", 0.05)
    with real_buffer(BUFFER, tmp_path) as (address, ended):
        with learning(address, steps=1, stall_timeout_s=1.0) as made:
            with pytest.raises(LearnerStalled, match=r"no batch for step 0 .* holds .*tasks_queued \d+.*learner-0"):
                made.loop.run()
            made.client.send(m.RunFinished(False, "stalled"))
            assert not receive(made.client, m.Shutdown).message.ok
        assert ended.result(WAIT_S) != 0


# ------------------------------------------------------------------------------------------------ a scripted buffer


def snapshot(time_s: float) -> m.Snapshot:
    return m.Snapshot(time_s, "running", "", V0, V0, LEDGER, {}, {}, 4, ())


def batch(batch_id: int, version: m.WeightVersion) -> tuple[m.Batch, list[np.ndarray[Any, Any]]]:
    """One rollout of six tokens, four of them to train."""
    item = m.BatchItem(f"train-{batch_id}-0-0", batch_id, 0, 1, "sum", ("default",), 6, (), True, "stop", 1.0, 1)
    frames: list[np.ndarray[Any, Any]] = [
        np.arange(10, 16, dtype=np.int32),
        np.full(6, -0.5, np.float32),
        np.array([0, 0, 1, 1, 1, 1], np.uint8),
        np.full((1, 6), -1.0, np.float32),
    ]
    return m.Batch(batch_id, version, (item,), {0: 4}, (), snapshot(0.0)), frames


def acknowledge_tasks(message: m.Message) -> m.Message | None:
    if isinstance(message, m.TasksOffered):
        return m.TasksAck(tuple(task.task_id for task in message.tasks), "train", 0)
    return acknowledgement(message)


@contextmanager
def scripted(learning: Learning, **settings: Any) -> Generator[tuple[ScriptedBuffer, Learner, Future[Any]]]:
    """A learner that runs against a buffer that the test plays."""
    with (
        ScriptedBuffer(acknowledge_tasks) as peer,
        learning(peer.address, **settings) as made,
        running(made.loop.run) as ran,
    ):
        yield peer, made, ran


def has_trained_one(peer: ScriptedBuffer) -> None:
    peer.expect(m.BatchWanted)
    peer.send(*batch(1, V0), to=LEARNER)
    peer.expect(m.BatchTrained)


def acknowledge_tasks_and_show(message: m.Message) -> m.Message | None:
    """A waiting learner asks for snapshots, too: which of the questions is the last one's is not to be seen."""
    return snapshot(1.0) if isinstance(message, m.SnapshotWanted) else acknowledge_tasks(message)


def test_a_batch_is_asked_for_until_it_comes_and_trained_once_if_it_comes_twice(
    learning: Learning, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stillhouse.learner.feed, "ASK_AGAIN_S", 0.02)
    with (
        ScriptedBuffer(acknowledge_tasks_and_show) as peer,
        learning(peer.address, steps=2) as made,
        running(made.loop.run) as ran,
    ):
        wanted: list[Got[m.BatchWanted]] = peer.expect(m.BatchWanted, 3)
        assert {got.message.version for got in wanted} == {V0}
        for _ in range(3):
            peer.send(*batch(1, V0), to=LEARNER)
        peer.expect(m.BatchTrained)
        peer.send(*batch(1, V0), to=LEARNER)
        peer.expect(m.BatchWanted, len(peer.got(m.BatchWanted)) + 5)  # it waits on, for the batch of the next step
        peer.send(*batch(2, V1), to=LEARNER)
        trained = peer.expect(m.BatchTrained, 2)
        assert [(got.message.batch_id, got.message.version) for got in trained] == [(1, V1), (2, V2)]
        peer.send(m.BatchTrainedAck(2, V2), to=LEARNER)
        assert peer.expect(m.RunFinished)[0].message.ok
        peer.send(m.Shutdown(True, "done"), to=LEARNER)
        ran.result(WAIT_S)
    assert made.trainer.steps_done == 2 and made.loop.progress.tokens_trained == 8


def test_the_next_batch_is_asked_for_and_packed_while_one_trains(
    learning: Learning, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_step, go_on, packed = threading.Event(), threading.Event(), threading.Event()
    step = stillhouse.learner.steps.finite_step

    def held_up(*arguments: Any) -> Any:
        in_step.set()
        assert go_on.wait(WAIT_S)
        return step(*arguments)

    monkeypatch.setattr(stillhouse.learner.steps, "finite_step", held_up)
    with ScriptedBuffer(acknowledge_tasks_and_show) as peer, learning(peer.address, steps=3) as made:
        ahead, taken = made.trainer._ahead, list[tuple[int, bool]]()
        make, take = ahead.make, ahead.take

        def make_and_say(items: Any, at: int) -> None:
            make(items, at)
            packed.set()

        def take_and_note(items: Any, at: int) -> Any:
            found = take(items, at)
            taken.append((at, found is not None))
            return found

        monkeypatch.setattr(ahead, "make", make_and_say)
        monkeypatch.setattr(ahead, "take", take_and_note)
        with running(made.loop.run) as ran:
            peer.expect(m.BatchWanted)
            peer.send(*batch(1, V0), to=LEARNER)
            assert in_step.wait(WAIT_S)
            while (asked := peer.got(m.BatchWanted)[-1].message.version) == V0:
                time.sleep(0.01)
            peer.send(*batch(2, V1), to=LEARNER)
            assert asked == V1 and packed.wait(WAIT_S)
            assert not peer.got(m.BatchTrained), "the first step is still under way"
            go_on.set()
            peer.expect(m.BatchTrained, 2)
            peer.send(*batch(3, V2), to=LEARNER)
            peer.expect(m.BatchTrained, 3)
            peer.send(m.BatchTrainedAck(3, m.WeightVersion(0, 3)), to=LEARNER)
            peer.expect(m.RunFinished)
            peer.send(m.Shutdown(True, "done"), to=LEARNER)
            ran.result(WAIT_S)
        assert max(got.message.version for got in peer.got(m.BatchWanted)) == V2, "none is wanted after the last step"
    assert taken[:2] == [(0, False), (1, True)] and made.trainer.steps_done == 3


def test_without_staleness_no_batch_is_asked_for_ahead(learning: Learning) -> None:
    with scripted(learning, steps=2, fetch_ahead=False) as (peer, _, ran):
        has_trained_one(peer)
        peer.send(m.Shutdown(False, "enough"), to=LEARNER)
        with pytest.raises(RunStopped):
            ran.result(WAIT_S)
        said = [event.received.message for event in peer.events if isinstance(event, FromPeer)]
    trained_at = next(i for i, message in enumerate(said) if isinstance(message, m.BatchTrained))
    assert {one.version for one in said[:trained_at] if isinstance(one, m.BatchWanted)} == {V0}


def test_absurd_batches_are_left_out_and_told_and_so_many_in_a_row_end_the_run(
    learning: Learning, tmp_path: Path
) -> None:
    with scripted(learning, steps=9) as (peer, made, ran):
        for step, absurd in enumerate((True, False, True, True, True)):
            peer.expect(m.BatchWanted, step + 1)
            message, frames = batch(step + 1, m.WeightVersion(0, step))
            frames[3][:] = -1e38 if absurd else -1.0
            peer.send(message, frames, to=LEARNER)
        finished = peer.expect(m.RunFinished)[0]
        # On a busy machine a message comes once more before it is acknowledged.
        masked = {got.message.version.step: len(got.message.masked) for got in peer.got(m.BatchTrained)}
        assert masked == {1: 1, 2: 0, 3: 1, 4: 1, 5: 1}
        assert not finished.message.ok and "3 steps in a row" in finished.message.reason
        peer.send(m.Shutdown(False, finished.message.reason), to=LEARNER)
        with pytest.raises(RunStopped, match="3 steps in a row"):
            ran.result(WAIT_S)
    assert (made.loop.progress.tokens_trained, made.loop.progress.steps_skipped) == (4, 4)
    rows = [row for row in read_metrics(tmp_path) if row["kind"] == "step"]
    assert [(row["train/tokens"], row["train/items_nonfinite"]) for row in rows] == [(0, 1), (4, 0), (0, 1), (0, 1)]


@pytest.mark.parametrize("asked", [True, False])
def test_an_alarm_ends_the_run_with_a_checkpoint_if_it_is_to(learning: Learning, asked: bool) -> None:
    """Seventeen steps, of which the last seven are of a teacher from which the student is far."""
    limit = 17
    with (
        ScriptedBuffer(acknowledge_tasks_and_show) as peer,
        learning(peer.address, steps=limit, stop_on_alarm=asked, lr=1e-9, fetch_ahead=False) as made,
        running(made.loop.run) as ran,
    ):
        for steps in range(1, limit + 1):
            before = m.WeightVersion(0, steps - 1)
            while not peer.got(m.RunFinished):
                if any(got.message.version == before for got in peer.got(m.BatchWanted)):
                    break
                time.sleep(0.005)
            if peer.got(m.RunFinished):
                break
            message, frames = batch(steps, before)
            frames[3][:] = -6.0 if steps <= 10 else -40.0
            peer.send(message, frames, to=LEARNER)
            peer.expect(m.BatchTrained, steps)
            peer.send(m.BatchTrainedAck(steps, m.WeightVersion(0, steps)), to=LEARNER)
        finished = peer.expect(m.RunFinished)[0].message
        peer.send(m.Shutdown(finished.ok, finished.reason), to=LEARNER)
        if asked:
            with pytest.raises(RunStopped, match="alarm reverse_kl: the student leaves its teacher since step 11"):
                ran.result(WAIT_S)
        else:
            ran.result(WAIT_S)
    account = made.loop.progress.account()
    assert account["stopped_by_alarm"] is asked and finished.ok is not asked
    assert made.saved[-1].steps_done == (15 if asked else 17)
    assert [alarm["name"] for alarm in account["alarms"]] == ["reverse_kl"]


@pytest.mark.parametrize(("grade", "doubted"), [(-1.0, False), (-5.5, True)])
def test_a_teacher_that_finds_all_tokens_alike_is_doubted(
    grade: float, doubted: bool, learning: Learning, caplog: pytest.LogCaptureFixture
) -> None:
    """As one does that was started on random weights."""
    with scripted(learning, steps=9) as (peer, made, ran):
        assert -math.log(made.trainer.model.config.vocab_size) * 0.9 > -5.5
        peer.expect(m.BatchWanted)
        message, frames = batch(1, m.WeightVersion(0, 0))
        frames[3][:] = grade
        peer.send(message, frames, to=LEARNER)
        peer.expect(m.BatchTrained)
        peer.send(m.Shutdown(True, "done"), to=LEARNER)
        with pytest.raises(RunStopped):
            ran.result(WAIT_S)
    assert ("is it the right checkpoint, fully loaded?" in caplog.text) == doubted


def test_a_checkpoint_waits_for_the_acknowledgement_and_takes_a_snapshot_of_after_it(
    learning: Learning, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stillhouse.learner.feed, "LOOK_EVERY_S", 3600.0)
    with scripted(learning, steps=1) as (peer, made, ran):
        has_trained_one(peer)
        peer.send(snapshot(1.0), to=LEARNER)  # of before the batch counted as trained
        assert len(peer.got(m.SnapshotWanted)) == 1 and made.saved == [], "the one at the start"
        peer.send(m.BatchTrainedAck(1, V1), to=LEARNER)
        peer.expect(m.SnapshotWanted, 2)
        assert made.saved == []
        peer.send(snapshot(2.0), to=LEARNER)
        peer.expect(m.RunFinished)
        peer.send(m.Shutdown(True, "done"), to=LEARNER)
        ran.result(WAIT_S)
    (saved,) = made.saved
    assert (saved.version, saved.steps_done, saved.snapshot.time_s) == (V1, 1, 2.0)


@pytest.mark.parametrize("acknowledged", [False, True])
def test_without_an_answer_there_is_no_checkpoint_but_an_error(learning: Learning, acknowledged: bool) -> None:
    expected = "did not answer with its snapshot" if acknowledged else "did not acknowledge batch 1"
    with scripted(learning, steps=1, stall_timeout_s=1.0) as (peer, made, ran):
        has_trained_one(peer)
        if acknowledged:
            peer.send(m.BatchTrainedAck(1, V1), to=LEARNER)
        with pytest.raises(LearnerStalled, match=expected):
            ran.result(WAIT_S)
        assert made.saved == []


def test_a_finished_learner_leaves_when_its_launcher_says_that_no_answer_will_come(
    learning: Learning, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher has heard of the end, and the buffer was killed."""
    monkeypatch.setattr(stillhouse.learner.loop, "GOODBYE_S", 3600.0)
    with scripted(learning, steps=1) as (peer, made, ran):
        has_trained_one(peer)
        peer.send(m.BatchTrainedAck(1, V1), to=LEARNER)
        peer.expect(m.SnapshotWanted, 2)
        peer.send(snapshot(2.0), to=LEARNER)
        assert peer.expect(m.RunFinished)[0].message.ok
        made.stop.count = 1
        ran.result(WAIT_S)
    assert len(made.saved) == 1


def test_shutdown_stops_the_loop_wherever_it_waits(learning: Learning) -> None:
    with scripted(learning, steps=2) as (peer, made, ran):
        has_trained_one(peer)
        peer.send(m.Shutdown(False, "an actor keeps dying"), to=LEARNER)
        with pytest.raises(RunStopped, match="an actor keeps dying"):
            ran.result(WAIT_S)
    assert made.loop.version == V1 and made.saved == []


def test_a_stream_that_ended_is_an_error_and_not_a_step(learning: Learning) -> None:
    with scripted(learning, steps=1) as (peer, made, ran):
        peer.expect(m.BatchWanted)
        peer.send(m.Batch(0, V0, (), {}, (), snapshot(0.0)), to=LEARNER)
        with pytest.raises(LearnerStalled, match="nothing is left to train"):
            ran.result(WAIT_S)
    assert made.trainer.steps_done == 0 and not peer.got(m.BatchTrained)
