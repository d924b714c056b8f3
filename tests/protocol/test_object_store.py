"""The store does what it says on a real server with the S3 API and on a folder, and says what is wrong otherwise."""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stillhouse.protocol.object_store import Store, StoreError, check_store_url
from tests.patience import PATIENCE_S
from tests.s3_server import BUCKET, Gate, Server, environment_of, object_named, s3_server


@pytest.fixture(autouse=True)
def nothing_leaks() -> None:
    """Not checked here: fsspec keeps one loop, and s3fs its connections, for as long as the process lives."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with s3_server() as made:
        yield made


def use(url: str, monkeypatch: pytest.MonkeyPatch, **more: str) -> None:
    for name, value in {**environment_of(url), **more}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(params=["s3", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    if request.param == "file":
        return Store(f"file://{tmp_path}/store")
    server: Server = request.getfixturevalue("server")
    use(server.url, monkeypatch)
    return Store(f"s3://{BUCKET}/{tmp_path.name}")


def test_what_is_put_can_be_listed_read_and_deleted(store: Store, tmp_path: Path) -> None:
    assert store.sizes() == {}
    (tmp_path / "file").write_bytes(bytes(range(256)) * 300)
    store.put(tmp_path / "file", "a/b/file")
    store.put_bytes("a/c", b"text")
    store.put_bytes("ab", b"x")
    assert store.sizes() == {"a/b/file": 76_800, "a/c": 4, "ab": 1}
    assert store.sizes("a") == {"a/b/file": 76_800, "a/c": 4} and store.sizes("nothing") == {}
    store.get("a/b/file", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "file").read_bytes()
    store.put_bytes("a/c", b"other text")
    assert store.read("a/c") == b"other text" and store.sizes("a")["a/c"] == 10
    store.delete(["a/b/file", "ab"])
    assert store.sizes() == {"a/c": 10}
    with pytest.raises(StoreError, match="no such object") as missing:
        store.read("ab")
    assert missing.value.errno == errno.ENOENT
    with pytest.raises(StoreError, match="no name of an object"):
        store.put_bytes("../outside", b"")


def test_objects_lie_where_other_tools_expect_them(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use(server.url, monkeypatch)
    Store(f"s3://{BUCKET}/deep/prefix/").put_bytes("x/y", b"z")
    assert object_named(server, "deep/prefix/x/y") == b"z"


@pytest.mark.parametrize(
    "url",
    ["", "/folder", "s3://", "gs://b", "file://host/folder", "file:relative", "s3://key:secret@bucket", "s3://b?x=1"],
)
def test_other_urls_are_refused_with_what_was_expected(url: str) -> None:
    with pytest.raises(ValueError, match="expected s3://BUCKET/PREFIX") as refused:
        check_store_url(url)
    assert "AWS_ACCESS_KEY_ID" in str(refused.value) and "secret" not in str(refused.value)


def test_a_server_that_is_away_is_named_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    use("http://127.0.0.1:9", monkeypatch)
    began_s = time.monotonic()
    with pytest.raises(StoreError, match=r"s3://runs/x: .*no answer from http://127.0.0.1:9"):
        Store("s3://runs/x").sizes()
    assert time.monotonic() - began_s < PATIENCE_S


def test_wrong_and_missing_credentials_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server(authenticates=True) as server:
        use(server.url, monkeypatch)
        with pytest.raises(StoreError, match=r"access was refused by .*AWS_SECRET_ACCESS_KEY"):
            Store(f"s3://{BUCKET}").put_bytes("x", b"")
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        with pytest.raises(StoreError, match=r"access was refused by .*AWS_SECRET_ACCESS_KEY"):
            Store(f"s3://{BUCKET}").put_bytes("x", b"")


def test_a_bucket_that_is_missing_is_named(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use(server.url, monkeypatch)
    with pytest.raises(StoreError, match="no such object or bucket"):
        Store("s3://other").put_bytes("x", b"")
    with pytest.raises(StoreError, match="no such object or bucket"):
        Store("s3://other/prefix").check()
    Store(f"s3://{BUCKET}/new-prefix").check()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(StoreError, match=r"pip install -e '\.\[s3\]'"):
        Store("s3://bucket")


def test_slow_answers_are_waited_for(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Gate(server) as gate:
        use(gate.url, monkeypatch)
        store = Store(f"s3://{BUCKET}/slow")
        gate.delay_s = 0.2
        (tmp_path / "file").write_bytes(b"0123456789" * 50_000)
        store.put(tmp_path / "file", "file")
        store.get("file", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "file").read_bytes()


def test_a_server_that_never_answers_is_given_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stillhouse.protocol.object_store.READ_TIMEOUT_S", 0.2)
    with Gate(server) as gate:
        use(gate.url, monkeypatch)
        gate.delay_s = 2.0
        with pytest.raises(StoreError, match="no answer from"):
            Store(f"s3://{BUCKET}/never").sizes()
