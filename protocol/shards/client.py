"""The learner's and the launcher's end of the wire in a run whose buffer has several shards: one client for each, used
as if it were one (`protocol.shards.merger`).

Each client has its own session with its shard: what one shard has lost when it was killed is sent again to it alone.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self, TypeAlias

from stillhouse.protocol.client import Client, worker_hello
from stillhouse.protocol.codec import Array, Received
from stillhouse.protocol.context import RoleContext
from stillhouse.protocol.errors import LinkError
from stillhouse.protocol.keys import ClientKeys, run_client_keys
from stillhouse.protocol.messages import Hello, Message, WeightVersion, Welcome
from stillhouse.protocol.shards.division import SEPARATOR
from stillhouse.protocol.shards.merger import Merger


class ShardedClient:
    """Takes the place of a `Client`. `options`: as of each client."""

    def __init__(
        self, addresses: Sequence[str], hello: Hello, *, keys: ClientKeys | None = None, **options: Any
    ) -> None:
        self._changed = threading.Condition()
        """Shared by all clients, so that one wait is for any of them."""
        self._clients = [Client(one, hello, keys=keys, changed=self._changed, **options) for one in addresses]
        self._merger = Merger(len(addresses), waits_for_all=hello.role == "learner")
        self._inbox: deque[Received] = deque()
        self._woken = False

    def __repr__(self) -> str:
        return f"ShardedClient({self._clients}, {self._merger!r}, inbox={len(self._inbox)})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close("done" if error is None else f"{type(error).__name__}: {error}"[:500])

    @property
    def unacked(self) -> int:
        """As `Client.unacked`."""
        return sum(client.unacked for client in self._clients)

    @property
    def published(self) -> WeightVersion | None:
        """As `Client.published`, of the shard that knows the newest version."""
        return max((version for client in self._clients if (version := client.published) is not None), default=None)

    @property
    def connects_total(self) -> int:
        """As `Client.connects_total`, of all."""
        return sum(client.connects_total for client in self._clients)

    @property
    def waits_for_shards(self) -> bool:
        """Whether some shards have sent their share of a batch, and others have not."""
        with self._changed:
            return self._merger.waits_for_pieces

    def connect(self) -> Welcome:
        """As `Client.connect`. The Welcome names the newest version that any shard knows: a learner that died may have
        told only some of them of its last one."""
        welcomes = [client.connect() for client in self._clients]
        return max(welcomes, key=lambda welcome: welcome.version)

    def send(self, message: Message, arrays: Sequence[Array] = ()) -> None:
        """As `Client.send`."""
        with self._changed:
            for shard, part, frames in self._merger.outgoing(message, arrays):
                if shard not in self._merger.ended:
                    self._clients[shard].send(part, frames)

    def wake(self) -> None:
        """As `Client.wake`."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def recv(self, timeout_s: float, *, only: Callable[[Message], bool] | None = None) -> Received | None:
        """As `Client.recv`."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                failure = self._take_in()
                place = next((i for i, one in enumerate(self._inbox) if only is None or only(one.message)), None)
                if place is not None:
                    received = self._inbox[place]
                    del self._inbox[place]
                    return received
                if failure is not None:
                    raise failure
                if self._woken and only is None:
                    self._woken = False
                    return None
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return None
                self._changed.wait(left_s)

    def set_heartbeat(
        self, version: WeightVersion | None, stats: Mapping[str, float], *, at_once: bool = False
    ) -> None:
        """As `Client.set_heartbeat`."""
        for client in self._clients:
            client.set_heartbeat(version, stats, at_once=at_once)

    def flush(self, timeout_s: float) -> bool:
        """As `Client.flush`. Shards that have said that the run is over may be gone."""
        deadline_s = time.monotonic() + timeout_s
        arrived = True
        for shard, client in enumerate(self._clients):
            left_s = max(0.0, deadline_s - time.monotonic())
            if shard not in self._merger.ended:
                arrived &= client.flush(left_s)
                continue
            with suppress(LinkError):
                client.flush(left_s)
        return arrived

    def close(self, reason: str) -> None:
        """As `Client.close`: all leave at once."""
        threads = [threading.Thread(target=client.close, args=(reason,)) for client in self._clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _take_in(self) -> LinkError | None:
        """Read what all shards have sent. Returns the error of a link that failed; a shard that has said that the run
        is over may go before the others have said it."""
        failure = None
        for shard, client in enumerate(self._clients):
            try:
                while (received := client.recv(0.0)) is not None:
                    whole = self._merger.incoming(shard, received)
                    if whole is not None:
                        self._inbox.append(whole)
            except LinkError as error:
                failure = failure if shard in self._merger.ended else error
        return failure


AnyClient: TypeAlias = Client | ShardedClient
"""The end of a peer that talks to the whole buffer."""


def client_of_all(addresses: str, hello: Hello, *, keys: ClientKeys | None = None, **options: Any) -> AnyClient:
    """A client for the whole buffer, not connected yet. `addresses`: of its shards, in one text
    (`protocol.shards.division.all_addresses`)."""
    found = addresses.split(SEPARATOR)
    if len(found) == 1:
        return Client(found[0], hello, keys=keys, **options)
    return ShardedClient(found, hello, keys=keys, **options)


def learner_client(ctx: RoleContext[object], vocab_fingerprint: str) -> AnyClient:
    """A client for the learner's process, with its own keys, not connected yet. Raises KeysUnusable."""
    hello = worker_hello(ctx, vocab_fingerprint)
    keys = run_client_keys(ctx.run_dir, hello.role, hello.name)
    return client_of_all(ctx.buffer_address, hello, keys=keys, reconnect_timeout_s=ctx.buffer_away_s)
