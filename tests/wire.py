"""The buffer's end of the wire for tests of workers: one that does as the test says, and the real one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self, TypeVar

import msgspec
import numpy as np

import stillhouse.buffer.server
from stillhouse.buffer.config import BufferConfig
from stillhouse.buffer.server import BufferAddress
from stillhouse.protocol import messages as m
from stillhouse.protocol.client import Client
from stillhouse.protocol.server import PeerServer
from stillhouse.protocol.server_events import Event, FromPeer, PeerUp
from tests.patience import PATIENCE_S, Limit

RUN, VOCAB = "run-1", "ab" * 32
WAIT_S = PATIENCE_S
"""How long a test waits for what must come."""

Array = np.ndarray[Any, Any]
MessageT = TypeVar("MessageT", bound=m.Message)


class Got(NamedTuple, Generic[MessageT]):
    message: MessageT
    arrays: tuple[Array, ...]


def acknowledgement(message: m.Message) -> m.Message | None:
    """What a buffer that likes everything says."""
    match message:
        case m.Segment(rollout_id=rollout_id, index=index):
            return m.SegmentAck(rollout_id, index, "accepted")
        case m.RolloutFailed(rollout_id=rollout_id):
            return m.RolloutFailedAck(rollout_id)
        case m.Scores(leases=leases) | m.ScoreFailed(leases=leases):
            return m.ScoresAck(leases, ("accepted",) * len(leases), (None,) * len(leases))
        case m.Heartbeat():
            return m.HeartbeatReply(m.WeightVersion(0, 0))
        case _:
            return None


class ScriptedBuffer:
    """A Server in a thread. It acknowledges what it gets (`answer`), and sends what it is told to."""

    def __init__(
        self,
        answer: Callable[[m.Message], m.Message | None] = acknowledgement,
        *,
        bind: str = "tcp://127.0.0.1:0",
        peer_timeout_s: float = PATIENCE_S,
    ) -> None:
        self._server = PeerServer(
            bind, run_id=RUN, vocab_fingerprint=VOCAB, heartbeat_s=0.05, peer_timeout_s=peer_timeout_s
        )
        self.address = self._server.address
        self._answer = answer
        self._events: list[Event] = []
        self._to_send: list[tuple[m.Role, str, m.Message, Sequence[Array]]] = []
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="buffer")
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        while not self._ended:
            events = self._server.poll(0.005)
            with self._changed:
                self._events += events
                to_send, self._to_send = self._to_send, []
                self._changed.notify_all()
            for event in events:
                if isinstance(event, FromPeer) and (reply := self._answer(event.received.message)) is not None:
                    self._server.send(event.role, event.name, reply)
            for role, name, message, arrays in to_send:
                self._server.send(role, name, message, arrays)
        self._server.close(linger_s=0.2)

    def send(self, message: m.Message, arrays: Sequence[Array] = (), *, to: tuple[m.Role, str]) -> None:
        with self._changed:
            self._to_send.append((*to, message, arrays))

    @property
    def events(self) -> list[Event]:
        """All so far."""
        with self._changed:
            return list(self._events)

    def got(self, kind: type[MessageT]) -> list[Got[MessageT]]:
        """All that came of this kind so far."""
        with self._changed:
            return self._got(kind)

    def _got(self, kind: type[MessageT]) -> list[Got[MessageT]]:
        received = [event.received for event in self._events if isinstance(event, FromPeer)]
        return [Got(r.message, r.arrays) for r in received if isinstance(r.message, kind)]

    def expect(self, kind: type[MessageT], n: int = 1) -> list[Got[MessageT]]:
        """All that came of this kind, once there are `n`."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._got(kind)) >= n, WAIT_S), (
                f"{len(self._got(kind))} {kind.__name__} came, expected {n}"
            )
            return self._got(kind)

    def expect_peers(self, n: int = 1) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: sum(isinstance(e, PeerUp) for e in self._events) >= n, WAIT_S)

    def close(self) -> None:
        self._ended = True
        self._thread.join()


@contextmanager
def connected(
    address: str, role: m.Role, pool: str = "", *, vocab: str = VOCAB, incarnation: str = "first", **settings: Any
) -> Generator[Client]:
    """A client of this role, named `<role>-0`."""
    hello = m.Hello(role, f"{role}-0", incarnation, RUN, "" if role == "launcher" else vocab, pool)
    with Client(address, hello, connect_timeout_s=WAIT_S, **settings) as client:
        client.connect()
        yield client


@contextmanager
def real_buffer(config: BufferConfig, run_dir: Path) -> Generator[tuple[str, Future[int]]]:
    """The buffer's whole process in a thread: its address, and its exit code to come. It ends when the run does, and
    everybody has left; or when the test fails."""
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(
            stillhouse.buffer.server.main, config=config, run_id=RUN, run_dir=run_dir, vocab_fingerprint=VOCAB
        )
        address = _address(run_dir, ended)
        try:
            yield address, ended
        except BaseException:
            with connected(address, "learner", incarnation="undertaker") as learner:
                learner.send(m.RunFinished(False, "the test failed"))
            raise


def _address(run_dir: Path, ended: Future[int]) -> str:
    file, limit = run_dir / "buffer.json", Limit()
    while not file.exists():
        assert not limit.passed and not ended.done(), f"no buffer.json: {ended}"
        time.sleep(0.005)
    return msgspec.json.decode(file.read_bytes(), type=BufferAddress).address


def receive(client: Client, kind: type[MessageT]) -> Got[MessageT]:
    """The next message of this kind; others are passed over."""
    limit = Limit()
    while not limit.passed:
        received = client.recv(0.1)
        if received is not None and isinstance(received.message, kind):
            return Got(received.message, received.arrays)
    raise AssertionError(f"no {kind.__name__} came")


@contextmanager
def running(work: Callable[[], object]) -> Generator[Future[Any]]:
    """`work` in a thread; what it raised is raised here at the end, unless the test looked at it."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(work)
