"""A server with the S3 API on loopback (moto), in a process of its own, behind a gate that can be slow or shut."""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import Any, Final

import pytest

from tests.patience import PATIENCE_S, Limit

BUCKET: Final = "runs"
KEYS: Final = {"AWS_ACCESS_KEY_ID": "stillhouse", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}

MAKE: Final = """
import sys, time, urllib.request
while True:
    try:
        urllib.request.urlopen(urllib.request.Request(sys.argv[1], method="PUT"), timeout=5)
        break
    except OSError:
        time.sleep(0.05)
"""


class Server:
    """moto's server. Its objects are gone with it."""

    def __init__(self, host: str = "127.0.0.1", *, command: tuple[str, ...] = (), authenticates: bool = False) -> None:
        """`command`: put before it, to run it on another host. `authenticates`: refuse all keys after the first
        request, which makes the bucket."""
        self.host, self.port = host, _free_port()
        self.url = f"http://{host}:{self.port}"
        more = {"INITIAL_NO_AUTH_ACTION_COUNT": "1"} if authenticates else {}
        self._process = subprocess.Popen(
            [*command, sys.executable, "-m", "moto.server", "-H", host, "-p", str(self.port)],
            env={**os.environ, **more},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._command = command

    def until_ready(self) -> None:
        """And has its bucket: one process asks again and again, where the server is."""
        limit = Limit(PATIENCE_S)
        with subprocess.Popen([*self._command, sys.executable, "-c", MAKE, f"{self.url}/{BUCKET}"]) as asking:
            while asking.poll() is None:
                if self._process.poll() is not None or limit.passed:
                    asking.kill()
                time.sleep(0.02)
        assert asking.returncode == 0, "moto did not start"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE_S)


@contextmanager
def s3_server(
    host: str = "127.0.0.1", *, command: tuple[str, ...] = (), authenticates: bool = False
) -> Generator[Server]:
    """With an empty bucket."""
    pytest.importorskip("moto", reason="the extra dev installs moto")
    pytest.importorskip("s3fs", reason="the extra s3 installs s3fs")
    server = Server(host, command=command, authenticates=authenticates)
    try:
        server.until_ready()
        yield server
    finally:
        server.kill()


def environment_of(url: str) -> Mapping[str, str]:
    """What a process needs to reach the server at this address, and no other."""
    nowhere = {"AWS_CONFIG_FILE": "/nowhere", "AWS_SHARED_CREDENTIALS_FILE": "/nowhere"}
    return {**KEYS, **nowhere, "AWS_EC2_METADATA_DISABLED": "true", "AWS_ENDPOINT_URL": url}


@contextmanager
def _client(server: Server) -> Generator[Any]:
    """boto3's view of the bucket."""
    import boto3

    with closing(
        boto3.client("s3", endpoint_url=server.url, aws_access_key_id="stillhouse", aws_secret_access_key="secret")
    ) as client:
        yield client


def object_names(server: Server, prefix: str = "") -> list[str]:
    with _client(server) as client:
        return [one["Key"] for one in client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])]


def objects(server: Server, prefix: str = "") -> dict[str, bytes]:
    """All whose names begin so, by name. What is deleted meanwhile is left out."""
    read: dict[str, bytes] = {}
    with _client(server) as client:
        for one in client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", []):
            with suppress(client.exceptions.NoSuchKey):
                read[one["Key"]] = client.get_object(Bucket=BUCKET, Key=one["Key"])["Body"].read()
    return read


def object_named(server: Server, name: str) -> bytes:
    """One object, while others come and go."""
    with _client(server) as client:
        return client.get_object(Bucket=BUCKET, Key=name)["Body"].read()


def overwrite(server: Server, name: str, content: bytes | None) -> None:
    """None: delete it."""
    with _client(server) as client:
        if content is None:
            client.delete_object(Bucket=BUCKET, Key=name)
        else:
            client.put_object(Bucket=BUCKET, Key=name, Body=content)


class Gate:
    """A port that passes bytes on to the server's. Used in a `with` block."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.delay_s = 0.0
        """Before each piece of at most 64 kB of an answer."""
        self.shut_after_bytes: int | None = None
        """How many bytes of requests still pass. Then all connections end, and no other is taken. None: no limit."""
        self.when_shut: Callable[[], None] = lambda: None
        """Called then, once."""
        self.hides: tuple[bytes, ...] = ()
        """Headers of requests that the server does not get to see."""
        self.loses_answers_to: list[bytes] = []
        """Beginnings of requests. The connection ends in place of the answer to the next one of each."""
        self._losing = set[socket.socket]()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._over = False

    @property
    def is_shut(self) -> bool:
        return self.shut_after_bytes is not None and self.shut_after_bytes <= 0

    def __enter__(self) -> Gate:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._thread.join(PATIENCE_S)
        self._listener.close()

    def _run(self) -> None:
        others: dict[socket.socket, socket.socket] = {}
        clients = set[socket.socket]()

        def end(one: socket.socket) -> None:
            for end_ in (one, others.pop(one)):
                selector.unregister(end_)
                end_.close()
                clients.discard(end_)
                others.pop(end_, None)

        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._over:
                for key, _ in selector.select(0.05):
                    source = key.fileobj
                    assert isinstance(source, socket.socket)
                    if source is self._listener:
                        client, _ = source.accept()
                        onward = socket.create_connection((self._server.host, self._server.port), PATIENCE_S)
                        clients.add(client)
                        others |= {client: onward, onward: client}
                        for one in (client, onward):
                            selector.register(one, selectors.EVENT_READ)
                    elif source in others and not self._pass_on(source, others[source], source in clients):
                        end(source)
                    if self.is_shut and self._listener.fileno() >= 0:
                        selector.unregister(self._listener)
                        self._listener.close()
                        for one in list(clients):
                            end(one)
            for one in list(clients):
                end(one)

    def _changed(self, data: bytes, to: socket.socket) -> bytes:
        """A piece of a request."""
        for header in self.hides:
            data = data.replace(header, b"X" + header[1:])
        for beginning in [one for one in self.loses_answers_to if data.startswith(one)]:
            self.loses_answers_to.remove(beginning)
            self._losing.add(to)
        return data

    def _pass_on(self, source: socket.socket, to: socket.socket, is_request: bool) -> bool:
        """False: this connection is over."""
        with suppress(OSError):
            data = source.recv(1 << 16)
            if is_request:
                data = self._changed(data, to)
            elif source in self._losing and data:
                self._losing.discard(source)
                return False
            if is_request and self.shut_after_bytes is not None:
                data = data[: self.shut_after_bytes]
                self.shut_after_bytes -= len(data)
                if self.is_shut:
                    self.when_shut()
            if not is_request and self.delay_s:
                time.sleep(self.delay_s)
            to.sendall(data)
            return bool(data) and not self.is_shut
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]
