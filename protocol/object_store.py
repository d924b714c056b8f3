"""A place for files that every host of a run reaches, where hosts share no folder (the key `store`): a bucket of a
server that speaks the S3 API, or a folder that is mounted everywhere. The files' bytes are moved by fsspec and s3fs.

Credentials and the server's address are found by s3fs as by any AWS tool: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
AWS_ENDPOINT_URL and so on in the environment, or the files in ~/.aws. They are in no configuration of a run.

An object appears whole or not at all, and everything that is written can be listed and read at once. Nothing is
renamed. Whatever fails raises StoreError, an OSError. Every request has a limit, so no call waits forever.
"""

# Why it is so: docs/decisions/store.md

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import posixpath
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlsplit

from stillhouse.protocol.atomic_file import not_a_link, sync, write_atomic

CONNECT_TIMEOUT_S: Final = 10
READ_TIMEOUT_S: Final = 30
"""Longest time without a byte from the server."""
ATTEMPTS: Final = 2
"""Requests that botocore makes; s3fs asks it up to 5 times, also after an answer with one of TRY_AGAIN."""
TRY_AGAIN: Final = (500, 502, 503, 504)
CLOCK: Final = "RequestTimeTooSkewed"
"""The error of a server whose clock is more than 15 minutes from that of this host."""
FULL: Final = 507
"""The status of a server whose disks are full."""
EXAMPLE: Final = "s3://BUCKET/PREFIX"


class StoreError(OSError):
    """The store cannot be used, or lacks an object; the message says why."""

    def __init__(self, text: str, number: int = errno.EIO) -> None:
        super().__init__(number, text)

    def __str__(self) -> str:
        return str(self.strerror)


def check_store_url(url: str) -> None:
    """Raises ValueError unless this names a place that is supported."""
    parts = urlsplit(url)
    if parts.scheme == "s3" and parts.netloc and "@" not in parts.netloc and not parts.query:
        return
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        return
    user, at, host = parts.netloc.rpartition("@")
    shown = url.replace(user + at + host, f"***@{host}", 1) if at else url  # it may be a secret
    raise ValueError(
        f"got {shown!r}, expected {EXAMPLE}, or file:///FOLDER for a folder that all hosts see; credentials and the "
        "server's address belong into the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL)"
    )


def variables() -> dict[str, str]:
    """What of this process's environment says where the server is and gives access to it. Some of it is secret."""
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


class Store:
    """Objects by their names below one URL. From any thread."""

    def __init__(self, url: str) -> None:
        """Connects when it is first used. Raises ValueError for another kind of URL, StoreError if a package is
        missing."""
        check_store_url(url)
        self.url = url.rstrip("/")
        self._s3_bucket = urlsplit(url).netloc if url.startswith("s3:") else ""
        self._errors: tuple[type[Exception], ...] = (OSError, TimeoutError, ValueError)
        self._fs: Any = self._s3() if self._s3_bucket else self._local()
        self._root: str = self._fs._strip_protocol(self.url).rstrip("/")

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def url_of(self, name: str) -> str:
        return f"{self.url}/{name}"

    def check(self) -> None:
        """That the bucket can be reached and read with these credentials."""
        with self._told("the objects could not be listed"):
            if self._s3_bucket:
                self._fs.call_s3("list_objects_v2", Bucket=self._s3_bucket, MaxKeys=1)

    def put(self, file: Path, name: str) -> None:
        with self._told(f"{name} could not be written"):
            self._fs.put_file(str(file), self._path(name))

    def put_bytes(self, name: str, content: bytes) -> None:
        with self._told(f"{name} could not be written"):
            self._fs.pipe_file(self._path(name), content)

    def get(self, name: str, file: Path) -> None:
        with self._told(f"{name} could not be read"):
            self._fs.get_file(self._path(name), str(file))

    def read(self, name: str) -> bytes:
        with self._told(f"{name} could not be read"):
            return self._fs.cat_file(self._path(name))

    def read_tagged(self, name: str) -> tuple[bytes, str]:
        """The content and its tag, for `put_if`; both empty where there is no such object."""
        path = self._path(name)
        try:
            with self._told(f"{name} could not be read"):
                if not self._s3_bucket:
                    content: bytes = self._fs.cat_file(path)
                    return content, _digest(content)
                # The tag first. If the object changes in between, the tag is of the former one, and `put_if` refuses.
                tag = str(self._fs.info(path)["ETag"])
                return self._fs.cat_file(path), tag
        except StoreError as error:
            if error.errno != errno.ENOENT:
                raise
            return b"", ""

    def put_if(self, name: str, content: bytes, tag: str) -> bool:
        """Put the object only if it still has this tag, or, without a tag, if there is none. False: it was not put,
        because that is not so. Of several that try this at once, one succeeds. (Where the reply is lost and the request
        is made again, it may have been put in spite of False; the reader can tell by the content.)"""
        path = self._path(name)
        with self._told(f"{name} could not be written"):
            if not self._s3_bucket:
                return self._put_file_if(Path(path), content, tag)
            condition = {"IfMatch": tag} if tag else {"IfNoneMatch": "*"}
            key = path.removeprefix(f"{self._s3_bucket}/")
            try:
                self._fs.call_s3("put_object", Bucket=self._s3_bucket, Key=key, Body=content, **condition)
            except self._errors as error:
                if _http_status(error) in (409, 412) or (tag and isinstance(error, FileNotFoundError)):
                    return False
                raise
            return True

    def _put_file_if(self, file: Path, content: bytes, tag: str) -> bool:
        """On a folder: under a lock that ends with its holder, on this host or another."""
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file.with_name(f".{file.name}.lock"), "ab", opener=not_a_link) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (_digest(file.read_bytes()) if file.exists() else "") != tag:
                return False
            write_atomic(file, content)
            sync(file.parent)
            return True

    def sizes(self, under: str = "") -> dict[str, int]:
        """Bytes of every object whose name begins with the folder `under`, by name, in the names' order."""
        path = self._path(under) if under else self._root
        with self._told("the objects could not be listed"):
            found: dict[str, dict[str, Any]] = self._fs.find(path, detail=True)
        names = {name[len(self._root) + 1 :]: int(entry["size"]) for name, entry in sorted(found.items())}
        return {name: size for name, size in names.items() if not name.rpartition("/")[2].startswith(".")}

    def delete(self, names: Iterable[str]) -> None:
        """In this order, one by one."""
        for name in names:
            with self._told(f"{name} could not be deleted"):
                self._fs.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        if posixpath.normpath(name) != name or name.startswith(("/", "..")):
            raise StoreError(f"{self.url}: {name!r} is no name of an object", errno.EINVAL)
        return f"{self._root}/{name}"

    def _local(self) -> Any:
        from fsspec.implementations.local import LocalFileSystem

        return LocalFileSystem(auto_mkdir=True, skip_instance_cache=True)

    def _s3(self) -> Any:
        try:
            import s3fs  # pyright: ignore[reportMissingImports]
            from aiohttp import ClientError as HttpError
            from botocore.exceptions import BotoCoreError, ClientError  # pyright: ignore[reportMissingImports]
            from s3fs.core import set_custom_error_handler  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise StoreError(
                f"{self.url}: a package is not installed that this needs ({error}); pip install -e '.[s3]'"
            ) from error
        self._errors = (*self._errors, BotoCoreError, ClientError, HttpError)
        set_custom_error_handler(_try_again)
        limits = {
            "connect_timeout": CONNECT_TIMEOUT_S,
            "read_timeout": READ_TIMEOUT_S,
            "retries": {"mode": "standard", "total_max_attempts": ATTEMPTS},
        }
        return s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True, config_kwargs=limits)

    @contextmanager
    def _told(self, what: str) -> Generator[None]:
        try:
            yield
        except StoreError:
            raise
        except self._errors as error:
            number = errno.ENOENT if isinstance(error, FileNotFoundError) else errno.EIO
            raise StoreError(f"{self.url}: {what}: {_reason(error)}", number) from error


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _answer(error: BaseException | None) -> dict[str, Any]:
    """The server's answer; empty if it gave none. s3fs hides it behind an error of its own."""
    while error is not None:
        response: Any = getattr(error, "response", None)
        if isinstance(response, dict):
            return cast(dict[str, Any], response)
        error = error.__cause__
    return {}


def _http_status(error: BaseException) -> int:
    """0 without an answer."""
    return int(_answer(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _try_again(error: BaseException) -> bool:
    return _http_status(error) in TRY_AGAIN


def _reason(error: Exception) -> str:
    text = str(error) or type(error).__name__
    named = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    kind, server = type(error).__name__, named or "AWS (AWS_ENDPOINT_URL is not set)"
    if _answer(error).get("Error", {}).get("Code") == CLOCK:
        return f"{server} refused the request for its time: {text}; set the clock of this host (or of the server)"
    if isinstance(error, PermissionError) or "Credential" in kind:
        return f"access was refused by {server}: {text}; see AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of this host"
    if _http_status(error) == FULL:
        return f"{server} has no room: {text}; free some there, or keep fewer checkpoints (learner.keep_checkpoints)"
    if isinstance(error, FileNotFoundError):
        return f"there is no such object or bucket at {server}: {text}"
    if "Connect" in kind or "Timeout" in kind:
        return f"no answer from {server}: {text}"
    return text
