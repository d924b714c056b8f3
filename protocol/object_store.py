"""A place for files that every host of a run reaches, where hosts share no folder (the key `store`): a bucket of a
server that speaks the S3 API, or a folder that is mounted everywhere. The files' bytes are moved by fsspec and s3fs.

Credentials and the server's address are found by s3fs as by any AWS tool: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
AWS_ENDPOINT_URL and so on in the environment, or the files in ~/.aws. They are in no configuration of a run.

An object appears whole or not at all, and everything that is written can be listed and read at once. Nothing is
renamed. Whatever fails raises StoreError, an OSError. Every request has a limit, so no call waits forever.
"""

from __future__ import annotations

import errno
import os
import posixpath
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

CONNECT_TIMEOUT_S: Final = 10
READ_TIMEOUT_S: Final = 30
"""Longest time without a byte from the server."""
ATTEMPTS: Final = 2
"""Requests that botocore makes; s3fs asks it up to 5 times."""
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
    raise ValueError(
        f"got {url!r}, expected {EXAMPLE}, or file:///FOLDER for a folder that all hosts see; credentials and the "
        "server's address belong into the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL)"
    )


class Store:
    """Objects by their names below one URL. From any thread."""

    def __init__(self, url: str) -> None:
        """Connects when it is first used. Raises ValueError for another kind of URL, StoreError if a package is
        missing."""
        check_store_url(url)
        self.url = url.rstrip("/")
        self._errors: tuple[type[Exception], ...] = (OSError, TimeoutError, ValueError)
        self._fs: Any = self._local() if url.startswith("file:") else self._s3()
        self._root: str = self._fs._strip_protocol(self.url).rstrip("/")

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def url_of(self, name: str) -> str:
        return f"{self.url}/{name}"

    def check(self) -> None:
        """That the bucket can be reached and read with these credentials."""
        with self._told("the objects could not be listed"):
            if self.url.startswith("s3:"):
                self._fs.call_s3("list_objects_v2", Bucket=urlsplit(self.url).netloc, MaxKeys=1)

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

    def sizes(self, under: str = "") -> dict[str, int]:
        """Bytes of every object whose name begins with the folder `under`, by name, in the names' order."""
        path = self._path(under) if under else self._root
        with self._told("the objects could not be listed"):
            found: dict[str, dict[str, Any]] = self._fs.find(path, detail=True)
        return {name[len(self._root) + 1 :]: int(entry["size"]) for name, entry in sorted(found.items())}

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
        except ImportError as error:
            raise StoreError(
                f"{self.url}: a package is not installed that this needs ({error}); pip install 'stillhouse[s3]'"
            ) from error
        self._errors = (*self._errors, BotoCoreError, ClientError, HttpError)
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


def _reason(error: Exception) -> str:
    text = str(error) or type(error).__name__
    named = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    kind, server = type(error).__name__, named or "AWS (AWS_ENDPOINT_URL is not set)"
    if isinstance(error, PermissionError) or "Credential" in kind:
        return f"access was refused by {server}: {text}; see AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of this host"
    if isinstance(error, FileNotFoundError):
        return f"there is no such object or bucket at {server}: {text}"
    if "Connect" in kind or "Timeout" in kind:
        return f"no answer from {server}: {text}"
    return text
