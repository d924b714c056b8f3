"""`wake` ends a wait for messages: the worker has something else to do. With `only`, two threads wait for their own."""
# pyright: reportPrivateUsage=false

from __future__ import annotations

import threading

from stillhouse.protocol.client import Client
from stillhouse.protocol.messages import BatchTrainedAck, Hello, Message, Shutdown, TasksAck, WeightVersion
from stillhouse.protocol.server import PeerServer
from tests.patience import PATIENCE_S
from tests.wire import WAIT_S, ScriptedBuffer, connected, running


def test_wake_ends_the_present_wait_or_the_next_one_once() -> None:
    server = PeerServer(
        "tcp://127.0.0.1:*", run_id="r", vocab_fingerprint="f", heartbeat_s=1.0, peer_timeout_s=PATIENCE_S
    )
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            server.poll(0.02)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        hello = Hello(role="actor", name="actor-0", incarnation="i", run_id="r", vocab_fingerprint="f")
        with Client(server.address, hello) as client:
            client.connect()
            client.wake()
            assert client.recv(60.0) is None  # the test's own timeout would end a wait that nobody ended
            waker = threading.Timer(0.05, client.wake)
            waker.start()
            assert client.recv(60.0) is None
            waker.join()
            assert client.recv(0.01) is None
    finally:
        stop.set()
        thread.join()
        server.close()


def test_a_thread_may_wait_for_one_kind_of_message_and_leaves_the_others_in_their_order() -> None:
    sent = [TasksAck((), "train", 1), BatchTrainedAck(1, WeightVersion(0, 1)), TasksAck((), "train", 2)]

    def acknowledges(message: Message) -> bool:
        return isinstance(message, BatchTrainedAck)

    with ScriptedBuffer() as peer, connected(peer.address, "learner") as client:
        client.wake()
        assert client.recv(0.01, only=acknowledges) is None
        assert client._woken, "that was for the thread that takes all messages"
        assert client.recv(WAIT_S) is None
        with running(lambda: client.recv(WAIT_S, only=acknowledges)) as found:
            for message in sent:
                peer.send(message, to=("learner", "learner-0"))
            received = found.result(WAIT_S)
            assert received is not None and received.message == sent[1]
        others = [client.recv(WAIT_S), client.recv(WAIT_S)]
        assert [one and one.message for one in others] == [sent[0], sent[2]]
        assert client.recv(0.01, only=acknowledges) is None
        peer.send(Shutdown(True, "done"), to=("learner", "learner-0"))
        assert client.recv(0.01, only=acknowledges) is None
        last = client.recv(WAIT_S)
        assert last is not None and last.message == Shutdown(True, "done")
