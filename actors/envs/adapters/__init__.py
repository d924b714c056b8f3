"""Environments of other packages, on our contract. Each module here is the environment of its name
(`actors.envs.registry`): it imports its package, and is imported only when named. What they share is in `shared`."""

from __future__ import annotations

import os


def address(url: str, url_env: str) -> str:
    """The server's URL, given itself or as the name of an environment variable, which may have credentials in it.
    Raises ValueError for both, and for a variable that is not set; the value is in no message."""
    if url and url_env:
        raise ValueError("url and url_env: got both, expected one")
    if url_env and not os.environ.get(url_env):
        raise ValueError(f"url_env: the environment variable {url_env!r:.80} is not set, expected a URL in it")
    return os.environ[url_env] if url_env else url
