"""A whole run over the wire without a model: actors, teachers and a learner as threads with real clients.

Everything they know of what they sent and got is in `Account`, and `Account.check` compares it with the buffer's last
word: each segment that was sent is there once, no token was trained twice, none past the bound. The buffer is a
process of its own (`BufferProcess`) that may be killed and started again while they work.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.context import SpawnProcess
from pathlib import Path
from random import Random

import msgspec
import numpy as np

import stillhouse.buffer.server
from stillhouse.buffer.config import BufferConfig
from stillhouse.buffer.server import BufferAddress
from stillhouse.protocol import messages as m
from stillhouse.protocol.client import Client
from stillhouse.protocol.codec import Array, Received
from stillhouse.protocol.messages import WeightVersion

RUN, VOCAB = "run-1", "ab" * 32
WAIT_S = 60.0
N_PROMPT = 4


@dataclass(frozen=True)
class Shape:
    """Size and timing of the run."""

    n_tasks: int = 40
    group_size: int = 2
    segments: int = 3
    """Per rollout."""
    segment_tokens: int = 8
    n_actors: int = 2
    n_teachers: int = 2
    capacity: int = 8
    """Rollouts of one actor at a time."""
    pause_s: float = 0.0
    """Pause of an actor after each segment, seconds."""
    step_s: float = 0.0
    """Time that the learner needs for a batch, seconds."""

    @property
    def n_segments(self) -> int:
        return self.n_tasks * self.group_size * self.segments


@dataclass
class Account:
    """Everything that the peers know, under one lock."""

    sampled: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])
    """Sampled tokens of each segment sent."""
    versions: dict[tuple[str, int], WeightVersion] = field(default_factory=dict[tuple[str, int], WeightVersion])
    """Version of each sampled token, by rollout and offset."""
    trained: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])
    """Number of times that each token was trained."""
    stale: list[str] = field(default_factory=list[str])
    cancelled: list[str] = field(default_factory=list[str])
    complaints: list[str] = field(default_factory=list[str])
    expired: set[int] = field(default_factory=set[int])
    """Leases that were over when their scores came."""
    steps: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self, shape: Shape, final: m.Snapshot) -> None:
        """Raises AssertionError when the buffer's last word is not what happened."""
        ledger = final.ledger
        assert not self.complaints and not self.stale and not self.cancelled, (
            self.complaints[:3],
            self.stale[:3],
            self.cancelled[:3],
        )
        rejected = set(ledger.rejected) - {
            "failed_handshake"
        }  # strangers, who tried our port for a former one of theirs
        assert ledger.balanced and not rejected, ledger
        hedges = final.queues["hedges_sent_total"]
        assert len(self.expired) <= hedges, f"{len(self.expired)} scores came too late, and {hedges} items were hedged"
        n_rollouts = shape.n_tasks * shape.group_size
        rollouts = {rollout_id for rollout_id, _ in self.sampled}
        assert len(rollouts) == n_rollouts, f"{len(rollouts)} rollouts were begun, expected {n_rollouts}"
        assert len(self.sampled) == shape.n_segments == ledger.segments.accepted, ledger.segments
        assert sum(self.sampled.values()) == ledger.tokens.accepted, ledger.tokens
        assert not ledger.tokens.dropped, ledger.tokens
        assert set(self.trained.values()) <= {1}, "a token was trained twice"
        masked = sum(ledger.tokens.masked.values())
        assert len(self.trained) == ledger.tokens.trained == ledger.tokens.accepted - masked, ledger.tokens


class SyntheticRun:
    """Start with `start`, wait with `join`; then `account` is complete."""

    def __init__(
        self,
        address: str,
        shape: Shape,
        config: BufferConfig,
        *,
        seed: int = 0,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`address`: of the buffer. `at_end` is called when everything is trained, before the buffer is informed."""
        self._at_end = at_end
        self._address = address
        self._shape = shape
        self._config = config
        self._seed = seed
        self.account = Account()
        self.broadcast = WeightVersion(0, 0)
        self._threads = [
            *[self._thread(self._actor, i) for i in range(shape.n_actors)],
            *[self._thread(self._teacher, i) for i in range(shape.n_teachers)],
        ]
        self._learner_thread = self._thread(self._learner, 0)

    def start(self) -> None:
        for thread in (*self._threads, self._learner_thread):
            thread.start()

    @property
    def finished(self) -> bool:
        return not self._learner_thread.is_alive()

    def join(self) -> None:
        for thread in (self._learner_thread, *self._threads):
            thread.join(WAIT_S)
            assert not thread.is_alive(), f"{thread.name} hangs; {self.account.complaints}"

    def _thread(self, work: Callable[[int], None], index: int) -> threading.Thread:
        def guarded() -> None:
            try:
                work(index)
            except Exception as error:
                self.account.complaints.append(f"{work.__name__} {index}: {error!r}")

        return threading.Thread(target=guarded, name=f"{work.__name__}-{index}")

    def _client(self, role: m.Role, index: int, pool: str = "") -> Client:
        hello = m.Hello(role, f"{role}-{index}", f"{role}-{index}-first", RUN, VOCAB, pool)
        client = Client(self._address, hello, connect_timeout_s=WAIT_S, resend_s=1.0)
        client.connect()
        return client

    # ---------------------------------------------------------------------------------------------------- actor

    def _actor(self, index: int) -> None:
        rng = Random(f"{self._seed}/{index}")
        with self._client("actor", index) as client:
            seq = received_total = 0
            waiting: list[tuple[m.Ticket, Array]] = []
            client.send(m.TicketCredit(self._shape.capacity, seq, received_total))
            while True:
                received = client.recv(0.0 if any(t.min_version <= self.broadcast for t, _ in waiting) else 0.02)
                match received:
                    case Received(m.Tickets() as tickets, prompts):
                        received_total += len(tickets.tickets)
                        waiting += zip(tickets.tickets, prompts, strict=True)
                        continue
                    case Received(m.Shutdown()):
                        return
                    case Received(m.CancelRollout() | m.SegmentAck() as message):
                        self.account.cancelled.append(f"{message}")
                    case _:
                        pass
                able = [pair for pair in waiting if pair[0].min_version <= self.broadcast]
                if able:
                    waiting.remove(able[0])
                    self._roll(client, rng, *able[0])
                    seq += 1
                    client.send(m.TicketCredit(self._shape.capacity - len(waiting), seq, received_total))

    def _roll(self, client: Client, rng: Random, ticket: m.Ticket, prompt: Array) -> None:
        length = 0
        for index in range(self._shape.segments):
            n_prompt = len(prompt) if index == 0 else 0
            n = n_prompt + self._shape.segment_tokens
            ids = np.concatenate([prompt[:n_prompt], np.full(n - n_prompt, rng.randrange(50), np.int32)])
            mask = np.ones(n, np.uint8)
            mask[:n_prompt] = 0
            version = self.broadcast
            span = m.VersionSpan(version, length + n_prompt, length + n)
            final = index == self._shape.segments - 1
            segment = m.Segment(ticket.rollout_id, index, length, length + n, (span,), final, "stop" if final else None)
            with self.account.lock:
                self.account.sampled[ticket.rollout_id, index] = n - n_prompt
                for at in range(span.start, span.end):
                    self.account.versions[ticket.rollout_id, at] = version
            client.send(segment, (ids.astype(np.int32), np.where(mask, -0.5, 0.0).astype(np.float32), mask))
            length += n
            if self._shape.pause_s:
                time.sleep(self._shape.pause_s * rng.random())

    # -------------------------------------------------------------------------------------------------- teacher

    def _teacher(self, index: int) -> None:
        with self._client("teacher", index, "default") as client:
            seq = received_total = 0
            credit = 64 * self._shape.segment_tokens * self._shape.segments
            client.send(m.ScoreCredit(credit, seq, received_total))
            while True:
                match client.recv(0.1):
                    case Received(m.ScoreWork() as work):
                        scores = [np.full(item.end - item.start, -0.25, np.float32) for item in work.items]
                        client.send(m.Scores(tuple(item.lease_id for item in work.items)), scores)
                        received_total += len(work.items)
                        seq += 1
                        client.send(m.ScoreCredit(credit, seq, received_total))
                    case Received(m.Shutdown()):
                        return
                    case Received(m.ScoresAck() as ack):
                        if "rejected" in ack.statuses:
                            self.account.complaints.append(f"{ack}")
                        listed = zip(ack.leases, ack.statuses, strict=True)
                        self.account.expired.update(lease for lease, status in listed if status == "expired")
                    case _:
                        pass

    # -------------------------------------------------------------------------------------------------- learner

    def _learner(self, _: int) -> None:
        shape = self._shape
        tasks = iter(range(shape.n_tasks))
        with self._client("learner", 0) as client:
            version = WeightVersion(0, 0)
            client.send(m.BatchWanted(version))
            while True:
                match client.recv(0.5):
                    case Received(m.TasksAck(tasks_wanted=wanted)) if wanted > 0:
                        self._offer(client, [i for _, i in zip(range(min(wanted, 16)), tasks, strict=False)])
                    case Received(m.Batch(batch_id=0)):
                        break
                    case Received(m.Batch() as batch, arrays) if batch.version == version:
                        version = WeightVersion(0, version.step + 1)
                        self._train(batch, arrays)
                        time.sleep(shape.step_s)
                        client.send(m.BatchTrained(batch.batch_id, version))
                        self.broadcast = version
                        client.send(m.VersionPublished(version))
                        client.send(m.BatchWanted(version))
                    case None:
                        client.send(m.BatchWanted(version))  # as often as it likes
                    case Received(m.Shutdown() as shutdown):
                        self.account.complaints.append(f"{shutdown}")
                        return
                    case _:
                        pass
            assert client.flush(WAIT_S)
            self._at_end()
            client.send(m.RunFinished(True, "done"))
            while not isinstance((got := client.recv(WAIT_S)) and got.message, m.Shutdown):
                assert got is not None, "no Shutdown came"

    def _offer(self, client: Client, ids: list[int]) -> None:
        tasks = tuple(
            m.Task(i, "train", self._shape.group_size, m.Sampling(max_new_tokens=1 << 20, seed=i)) for i in ids
        )
        prompts = [np.full(N_PROMPT, i % 50, np.int32) for i in ids]
        client.send(m.TasksOffered(tasks, last=not ids or ids[-1] == self._shape.n_tasks - 1), prompts)

    def _train(self, batch: m.Batch, arrays: tuple[Array, ...]) -> None:
        account = self.account
        with account.lock:
            account.steps += 1
            for i, item in enumerate(batch.items):
                for at in np.flatnonzero(arrays[4 * i + 2]):
                    token = (item.rollout_id, int(at))
                    account.trained[token] += 1
                    if batch.version.step - account.versions[token].step > self._config.max_staleness:
                        account.stale.append(f"{token} of {account.versions[token]} in {batch.version}")


class BufferProcess:
    """The buffer, killed and started again as often as one likes, in one folder."""

    def __init__(self, config: BufferConfig, run_dir: Path) -> None:
        self._config = config
        self._run_dir = run_dir
        self._process: SpawnProcess | None = None
        self.starts = 0

    def start(self, *, disk_full: bool = False) -> str:
        """Start the buffer and return its address once it listens. With `disk_full` it cannot write the address."""
        self._process = multiprocessing.get_context("spawn").Process(target=_main, args=(self._config, self._run_dir))
        self._process.start()
        self.starts += 1
        deadline_s = time.monotonic() + WAIT_S
        while (listed := self._listed()) is None or (not disk_full and listed.pid != self._process.pid):
            if self._process.exitcode == 0 and listed is not None:
                break  # the run was already over
            assert time.monotonic() < deadline_s and not self._process.exitcode, "the buffer does not listen"
            time.sleep(0.01)
        return listed.address

    @property
    def pid(self) -> int:
        assert self._process is not None and self._process.pid is not None
        return self._process.pid

    def kill(self) -> bool:
        """SIGKILL. False: it had ended before."""
        assert self._process is not None
        self._process.kill()
        self._process.join()
        return self._process.exitcode == -signal.SIGKILL

    def wait(self) -> int:
        """Wait for the buffer and return its exit code."""
        assert self._process is not None
        self._process.join(WAIT_S)
        assert self._process.exitcode is not None, "the buffer does not end"
        return self._process.exitcode

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process.close()

    def final(self) -> m.Snapshot:
        return msgspec.json.decode((self._run_dir / "ledger.json").read_bytes(), type=m.Snapshot)

    def _listed(self) -> BufferAddress | None:
        file = self._run_dir / "buffer.json"
        return msgspec.json.decode(file.read_bytes(), type=BufferAddress) if file.exists() else None


def _main(config: BufferConfig, run_dir: Path) -> None:
    sys.exit(stillhouse.buffer.server.main(config=config, run_id=RUN, run_dir=run_dir, vocab_fingerprint=VOCAB))
