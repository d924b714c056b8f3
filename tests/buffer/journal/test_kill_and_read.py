"""A real buffer is killed at random moments. A reader that shares no code with it finds in its files whatever it had
acknowledged, byte for byte."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from random import Random

import pytest

from stillhouse.buffer.config import BufferConfig
from stillhouse.protocol import messages as m
from stillhouse.protocol.client import Client
from stillhouse.protocol.codec import Array
from stillhouse.protocol.flow import AckKey
from stillhouse.protocol.outbox import ClientOutbox
from tests.buffer.journal.reader import Found, Tokens, read
from tests.patience import PATIENCE_S, eventually
from tests.sim.synthetic_run import BufferProcess, Shape, SyntheticRun

STALENESS = 1_000
"""Nothing is masked as stale: what the learner did not get must be held."""


class Watched:
    """What clients have sent, and what they were told to have arrived."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: dict[tuple[str, int], tuple[int, Tokens]] = {}
        """Start and tokens, by rollout and index."""
        self.acknowledged: set[tuple[str, int]] = set()
        send, note = Client.send, ClientOutbox.acknowledged

        def watched_send(client: Client, message: m.Message, arrays: Iterable[Array] = ()) -> None:
            arrays = list(arrays)
            if isinstance(message, m.Segment):
                tokens = Tokens(*(array.tobytes() for array in arrays[:3]))
                self.sent[message.rollout_id, message.index] = message.start, tokens
            send(client, message, arrays)

        def watched_note(outbox: ClientOutbox, keys: Iterable[AckKey]) -> None:
            keys = frozenset(keys)
            self.acknowledged |= {(str(key[1]), int(str(key[2]))) for key in keys if key[0] == "segment"}
            note(outbox, keys)

        monkeypatch.setattr(Client, "send", watched_send)
        monkeypatch.setattr(ClientOutbox, "acknowledged", watched_note)

    def lost(self, found: Found, acknowledged: set[tuple[str, int]], trained: set[str]) -> list[tuple[str, int]]:
        """Segments of rollouts of which the learner has nothing that are not in the journal as they were sent."""
        held = [key for key in sorted(acknowledged) if key[0] not in trained]
        return [key for key in held if not found.covers(key[0], *self.sent[key])]


@pytest.mark.parametrize(("seed", "segment_tokens"), [(1, 300), pytest.param(2, 20, marks=pytest.mark.slow)])
def test_whatever_was_acknowledged_is_in_the_files_of_a_killed_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, segment_tokens: int
) -> None:
    config = BufferConfig(
        heartbeat_s=0.2, peer_timeout_s=PATIENCE_S, max_staleness=STALENESS, batch_rollouts=16, journal_log_mb=1
    )
    watched, rng = Watched(monkeypatch), Random(seed)
    shape = Shape(n_tasks=150, group_size=2, segments=4, segment_tokens=segment_tokens, capacity=32, step_s=0.2)
    process = BufferProcess(config, tmp_path)
    n_held = n_imaged = 0
    try:
        run = SyntheticRun(process.start(), shape, config, seed=seed)
        run.start()
        while not run.finished and process.starts <= 5:
            enough = len(watched.acknowledged) + rng.randrange(50, 400)
            eventually(lambda enough=enough: run.finished or len(watched.acknowledged) >= enough, "segments")
            if segment_tokens >= 300:  # a MiB of log comes soon
                eventually(lambda: run.finished or any((tmp_path / "journal").glob("image-*")), "an image")
            acknowledged = set(watched.acknowledged)
            if not process.kill():
                break
            if (tmp_path / "ledger.json").exists():  # the run was over
                process.start()
                break
            found = read(tmp_path / "journal")
            with run.account.lock:
                trained = {rollout_id for rollout_id, _ in run.account.trained}
            assert watched.lost(found, acknowledged, trained) == []
            assert found.referred <= found.blobs, "nothing that is needed is deleted"
            n_held += len({key for key in acknowledged if key[0] not in trained})
            n_imaged += len(found.in_image)
            process.start()
        run.join()
        assert process.wait() == 0
        run.account.check(shape, process.final())
    finally:
        process.close()
    assert n_held > 50, "hardly anything was held when it was killed"
    assert segment_tokens < 300 or n_imaged > 20, "hardly anything was in an image"
