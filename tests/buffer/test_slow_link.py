"""A learner behind a slow link gets each batch once, over one connection; after a cut it comes again."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from stillhouse.buffer.config import BufferConfig
from stillhouse.protocol import messages as m
from stillhouse.protocol.client import Client
from stillhouse.protocol.context import ExitCode
from tests.slow_link import SlowLink, slow_link
from tests.wire import WAIT_S, connected, real_buffer, receive

START = m.WeightVersion(0, 0)
TOKENS = 16_000
"""Of each rollout: a batch of two is some 290 kB."""
CONFIG = BufferConfig(heartbeat_s=0.1, peer_timeout_s=20.0, max_staleness=0, batch_rollouts=2)
PROMPT = 5
REPEATS = 12


@contextmanager
def far_learner(config: BufferConfig, run_dir: Path, bytes_per_s: int) -> Generator[tuple[Client, SlowLink]]:
    """A learner at the end of a slow link, and a buffer that has a whole batch for it. The run has ended well after."""
    with real_buffer(config, run_dir) as (address, ended):
        with (
            slow_link(address, bytes_per_s) as link,
            connected(link.address, "learner") as learner,
            connected(address, "actor") as actor,
        ):
            task = m.Task(0, "train", 2, m.Sampling(max_new_tokens=TOKENS), teachers=())
            learner.send(m.TasksOffered((task,)), (np.array([PROMPT], np.int32),))
            actor.send(m.TicketCredit(2, 0, 0))
            tickets: list[m.Ticket] = []
            while len(tickets) < 2:
                tickets += receive(actor, m.Tickets).message.tickets
            for ticket in tickets:
                write(actor, ticket.rollout_id)
            assert actor.flush(WAIT_S)
            yield learner, link
            link.bytes_per_s = 100_000_000
            learner.send(m.RunFinished(True, "enough"))
            receive(learner, m.Shutdown)
        assert ended.result(WAIT_S) == ExitCode.OK


def write(actor: Client, rollout_id: str) -> None:
    spans = (m.VersionSpan(START, 1, TOKENS),)
    mask = np.ones(TOKENS, np.uint8)
    mask[0] = 0
    ids = np.full(TOKENS, PROMPT, np.int32)
    logprobs = np.where(mask, -0.5, 0.0).astype(np.float32)
    actor.send(m.Segment(rollout_id, 0, 0, TOKENS, spans, True, "stop"), (ids, logprobs, mask))


def batches_until_trained(learner: Client, link: SlowLink) -> int:
    """Ask again and again, take the batch, say that it is trained; how many copies came before the buffer's answer."""
    learner.send(m.BatchWanted(START))
    n, batch, deadline_s = 0, None, time.monotonic() + WAIT_S
    asked = 1
    while time.monotonic() < deadline_s:
        received = learner.recv(0.05)
        if asked < REPEATS:
            learner.send(m.BatchWanted(START))
            asked += 1
        match received.message if received is not None else None:
            case m.Batch() as batch:
                n += 1
                if n == 1:
                    learner.send(m.BatchTrained(batch.batch_id, m.WeightVersion(0, 1)))
            case m.BatchTrainedAck():
                return n
            case _:
                pass
    raise AssertionError(f"no answer to BatchTrained after {n} batches and {link.passed_bytes} bytes")


def test_a_batch_that_takes_longer_than_the_learner_waits_is_sent_once(tmp_path: Path) -> None:
    with far_learner(CONFIG, tmp_path, 300_000) as (learner, link):
        assert batches_until_trained(learner, link) == 1


def test_a_batch_that_was_cut_off_comes_again_over_a_new_connection(tmp_path: Path) -> None:
    with far_learner(CONFIG, tmp_path, 300_000) as (learner, link):
        learner.send(m.BatchWanted(START))
        deadline_s = time.monotonic() + WAIT_S
        while link.passed_bytes < 100_000 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        link.cut()
        assert batches_until_trained(learner, link) == 1
        assert learner.connects_total == 2


def test_a_batch_that_takes_longer_than_the_learner_bears_silence_needs_no_new_connection(tmp_path: Path) -> None:
    """While it comes nothing else can: half a peer timeout of that once began the batch again, without an end."""
    config = BufferConfig(heartbeat_s=0.1, peer_timeout_s=2.0, max_staleness=0, batch_rollouts=2)
    with far_learner(config, tmp_path, 120_000) as (learner, link):
        assert batches_until_trained(learner, link) == 1
        assert link.accepted == 1 and learner.connects_total == 1
