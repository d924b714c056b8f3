"""Links that end anywhere: in a bundle, between a segment and its acknowledgement, in a batch. What was sent is counted
in a plain dict by those who sent it, and each of it is there once at the end."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Final, Self

import msgspec
import pytest

import stillhouse.protocol.link
from stillhouse.buffer.config import BufferConfig
from stillhouse.protocol.bundle import bundled
from stillhouse.protocol.codec import Frame
from tests.patience import PATIENCE_S
from tests.sim.synthetic_run import BufferProcess, Shape, SyntheticRun

SHAPE: Final = Shape(n_tasks=150, group_size=2, segments=5, segment_tokens=6)
CUT_AFTER: Final = (1_000, 30_000)
"""Bytes of both directions after which a connection ends: before its Welcome is read, or after some bundles."""
OF_CUT_LINKS: Final = {"not_hello_first", "failed_handshake"}
"""What the buffer refuses of connections that have not said Hello again."""


class CuttingProxy:
    """Passes bytes on between clients and the buffer, and ends each connection somewhere."""

    def __init__(self, upstream: str, rng: Random) -> None:
        host, _, port = upstream.removeprefix("tcp://").rpartition(":")
        self._upstream, self._rng = (host, int(port)), rng
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.cut = 0
        self.gentle = False
        """Cut no more."""
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                down, _ = self._listener.accept()
                try:
                    up = socket.create_connection(self._upstream, PATIENCE_S)
                    up.settimeout(None)
                except OSError:  # the buffer is dead just now
                    down.close()
                    continue
                link = Link(self, down, up, self._rng.randint(*CUT_AFTER), reset=self._rng.random() < 0.5)
                link.start()


class Link:
    """One connection."""

    def __init__(
        self, proxy: CuttingProxy, down: socket.socket, up: socket.socket, budget: int, *, reset: bool
    ) -> None:
        self._proxy, self._sockets, self._left, self._reset = proxy, (down, up), budget, reset
        self._lock, self._pumps = threading.Lock(), 2

    def start(self) -> None:
        for source, sink in (self._sockets, self._sockets[::-1]):
            threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                with self._lock:
                    passed = data if self._proxy.gentle else data[: self._left]
                    self._left -= len(passed)
                sink.sendall(passed)
                if len(passed) < len(data):
                    self._proxy.cut += 1
                    break
        self._end()

    def _end(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # also ends the other pump
        with self._lock:
            self._pumps -= 1
            if self._pumps:
                return
        for one in self._sockets:
            with one:
                if self._reset:  # what the other side has not read is lost
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("kills", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_nothing_is_lost_or_repeated_when_links_are_cut_anywhere(
    tmp_path: Path, kills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: Counter[int] = Counter()

    def counted(messages: Sequence[list[Frame]]) -> list[Frame]:
        sizes[len(messages)] += 1
        return bundled(messages)

    monkeypatch.setattr(stillhouse.protocol.link, "bundled", counted)
    config = BufferConfig(heartbeat_s=0.1, peer_timeout_s=PATIENCE_S, max_staleness=2, batch_rollouts=8)
    process, rng = BufferProcess(config, tmp_path), Random(kills)
    try:
        with CuttingProxy(process.start(), rng) as proxy:
            run = SyntheticRun(proxy.address, SHAPE, config, seed=kills)
            run.start()
            for _ in range(kills):
                time.sleep(rng.uniform(0.1, 0.6))
                if run.finished or not process.kill():
                    break
                process.start()
            while not run.finished and proxy.cut < 60:
                time.sleep(0.05)
            proxy.gentle = True
            run.join()
            assert process.wait() == 0
        assert proxy.cut > 10 and max(sizes) > 4, f"{proxy.cut} cuts, {sizes}"
        final = process.final()
        rejected = {code: n for code, n in final.ledger.rejected.items() if code not in OF_CUT_LINKS}
        run.account.check(
            SHAPE, msgspec.structs.replace(final, ledger=msgspec.structs.replace(final.ledger, rejected=rejected))
        )
    finally:
        process.close()
