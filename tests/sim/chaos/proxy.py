"""A proxy between the workers of a run and its buffer that breaks links on demand.

    python -m tests.sim.chaos.proxy --control SOCKET --listen 127.0.0.1 --upstream 127.0.0.1:PORT [--tap FILE]

Says its ZeroMQ endpoint in its first line, then does as the commands on the control socket say
(tests.sim.chaos.commands). One asyncio loop; per connection two pumps that pass message by message, so that what is
delayed, torn or changed is a whole known message; a peer is known from its Hello on. TCP stays TCP: an end of one side,
or a reset, ends both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import socket
import struct
import time
from collections import Counter, deque
from pathlib import Path
from random import Random

import msgspec

from tests.patience import PATIENCE_S
from tests.sim.chaos.commands import ALL, Break, Command, Direction, Look, Meddle, Seen, Weather
from tests.sim.chaos.meddling import Passed, meddle
from tests.sim.chaos.tap import Tap
from tests.sim.chaos.zmtp import GREETING_BYTES, NotZmtp, Unit, is_message, mechanism, read_unit, wire_bytes

CONNECT_WAIT_S = PATIENCE_S
"""Seconds that a worker's connection waits for a buffer that does not listen yet."""
STEP_S = 0.02
READ_LIMIT_BYTES = 1 << 20


class Connection:
    """One worker's link. `name` is empty until its Hello was read."""

    def __init__(
        self,
        down: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        up: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self.worker_reader, self.worker_writer = down
        self.buffer_reader, self.buffer_writer = up
        self.name = ""

    def end(self, *, reset: bool) -> None:
        for writer in (self.worker_writer, self.buffer_writer):
            plain: socket.socket | None = writer.get_extra_info("socket")
            if reset and plain is not None:
                with contextlib.suppress(OSError):
                    plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort() if reset else writer.close()


class ProxyServer:
    """All connections, and what is to be done to them."""

    def __init__(self, upstream: tuple[str, int], tap: Tap) -> None:
        self._upstream = upstream
        self._tap = tap
        self._connections: set[Connection] = set()
        self._weather: dict[str, tuple[float, Weather]] = {}
        self._meddles: dict[tuple[str, Direction], deque[Meddle]] = {}
        self._meddled = Counter[str]()
        self._mechanisms = Counter[str]()
        self._errors: list[str] = []
        self._accepted = 0
        self._rng = Random(0)
        self._commands = msgspec.json.Decoder(Command)

    # ---------------------------------------------------------------------------------------------- commands

    async def command_line(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):  # the proxy ends, or its owner has
            while line := await reader.readline():
                self._obey(self._commands.decode(line))
                writer.write(msgspec.json.encode(self._seen()) + b"\n")
                await writer.drain()
        writer.close()

    def _obey(self, command: Command) -> None:
        match command:
            case Break(name, reset):
                for connection in tuple(self._connections):
                    if name in (ALL, connection.name):
                        connection.end(reset=reset)
            case Weather():
                self._weather[command.name] = (time.monotonic() + command.seconds, command)
            case Meddle():
                queue = self._meddles.setdefault((command.name, command.direction), deque())
                queue.extend([command] * command.count)
            case Look():
                pass

    def _seen(self) -> Seen:
        return Seen(
            connections=dict(Counter(connection.name or "unknown" for connection in self._connections)),
            accepted_total=self._accepted,
            useful_s=dict(self._tap.useful_s),
            meddled=dict(self._meddled),
            mechanisms=dict(self._mechanisms),
            errors=tuple(self._errors),
        )

    # ------------------------------------------------------------------------------------------- connections

    async def accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A worker connects; ends with its link, or with the proxy."""
        self._accepted += 1
        with contextlib.suppress(asyncio.CancelledError):
            upstream = await self._connect()
            if upstream is not None:
                await self._carry(Connection((reader, writer), upstream))
        writer.close()

    async def _carry(self, connection: Connection) -> None:
        self._connections.add(connection)
        pumps = [asyncio.create_task(self._pump(connection, direction)) for direction in ("up", "down")]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            connection.end(reset=False)
            for pump in pumps:
                pump.cancel()
            for result in await asyncio.gather(*pumps, return_exceptions=True):
                if isinstance(result, Exception):
                    self._errors.append(f"{connection.name or 'unknown'}: {result!r}")
            self._connections.discard(connection)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        deadline_s = time.monotonic() + CONNECT_WAIT_S
        while time.monotonic() < deadline_s:
            with contextlib.suppress(OSError):
                host, port = self._upstream
                return await asyncio.open_connection(host, port, limit=READ_LIMIT_BYTES)
            await asyncio.sleep(STEP_S)
        return None

    async def _pump(self, connection: Connection, direction: Direction) -> None:
        reader = connection.worker_reader if direction == "up" else connection.buffer_reader
        writer = connection.buffer_writer if direction == "up" else connection.worker_writer
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, NotZmtp, TimeoutError):
            greeting = await self._greeting(reader, writer)
            if direction == "up":
                self._mechanisms[mechanism(greeting)] += 1
            while True:
                unit = await read_unit(reader)
                known = bool(connection.name)
                if direction == "up" and not connection.name and is_message(unit):
                    connection.name = self._tap.name_of(unit)
                await self._delayed(connection)
                # A Hello stays as it is: who is refused at the door is refused for good, and rightly ends the run.
                passed = self._changed(connection, direction, unit) if known else Passed(wire_bytes(unit))
                await self._write(connection, writer, passed.data)
                if passed.cut:
                    return
                if is_message(unit) and connection.name:
                    self._tap.passed(connection.name, unit)

    async def _greeting(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """Piece by piece: each side waits for the first bytes of the other before it sends the rest."""
        greeting = b""
        while len(greeting) < GREETING_BYTES:
            piece = await reader.read(GREETING_BYTES - len(greeting))
            if not piece:
                raise asyncio.IncompleteReadError(greeting, GREETING_BYTES)
            writer.write(piece)
            greeting += piece
        return greeting

    # ------------------------------------------------------------------------------------------------- faults

    def _weather_of(self, connection: Connection) -> list[Weather]:
        now_s = time.monotonic()
        both = (self._weather.get(name) for name in (ALL, connection.name))
        return [weather for entry in both if entry is not None for until_s, weather in (entry,) if now_s < until_s]

    async def _delayed(self, connection: Connection) -> None:
        """While it is black, and then as long as the weather says."""
        while any(weather.blackhole for weather in self._weather_of(connection)):
            await asyncio.sleep(STEP_S)
        delay_s = sum(weather.delay_s for weather in self._weather_of(connection))
        if delay_s:
            await asyncio.sleep(delay_s * self._rng.uniform(0.5, 1.5))

    async def _write(self, connection: Connection, writer: asyncio.StreamWriter, data: bytes) -> None:
        rates = [weather.bytes_per_s for weather in self._weather_of(connection) if weather.bytes_per_s]
        if not rates:
            writer.write(data)
            await writer.drain()
            return
        piece = max(1, int(min(rates) * STEP_S))
        for start in range(0, len(data), piece):
            writer.write(data[start : start + piece])
            await writer.drain()
            if self._weather_of(connection):  # else the rest goes at once
                await asyncio.sleep(STEP_S)

    def _changed(self, connection: Connection, direction: Direction, unit: Unit) -> Passed:
        queue = self._meddles.get((connection.name, direction))
        if not queue or not is_message(unit):
            return Passed(wire_bytes(unit))
        command = queue.popleft()
        self._meddled[command.kind] += 1
        return meddle(command.kind, unit, Random(f"{command.seed}-{len(queue)}"))


async def serve(control: Path, listen: str, upstream: tuple[str, int], tap: Tap) -> None:
    proxy = ProxyServer(upstream, tap)
    links = await asyncio.start_server(proxy.accepted, listen, 0, limit=READ_LIMIT_BYTES)
    port = links.sockets[0].getsockname()[1]
    commands = await asyncio.start_unix_server(proxy.command_line, control)
    print(f"tcp://{listen}:{port}", flush=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    links.close()
    commands.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--control", type=Path, required=True)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--upstream", required=True)
    parser.add_argument("--tap", type=Path)
    args = parser.parse_args()
    host, _, port = args.upstream.rpartition(":")
    with contextlib.closing(Tap(args.tap)) as tap:
        asyncio.run(serve(args.control, args.listen, (host, int(port)), tap))


if __name__ == "__main__":
    main()
