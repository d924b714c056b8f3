"""HTTP to a completions API: rate limits, tries, a bound on what is read, and a key that no text shows.

All requests of one call of `Link.run` have one deadline. A status of 429 (or 503 with Retry-After) makes all of them
wait as long as the API says.
"""

from __future__ import annotations

import asyncio
import email.utils
import os
import time
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

import aiohttp
import msgspec

from stillhouse.engines.api.replies import Unusable
from stillhouse.engines.backoff import backoffs
from stillhouse.engines.base import EngineMismatch

T = TypeVar("T")
_FIRST_WAIT_S: Final = 0.2
_LONGEST_WAIT_S: Final = 10.0
_AGAIN: Final = frozenset({408, 409, 425, 429})
_NEVER: Final = frozenset({401, 402, 403, 404, 405})
"""The key, the account, the address or the model is wrong, for every request."""
_SHOWN: Final = 300


class NotServed(Exception):
    """The API will refuse every request: its key, the account, its address or the model is wrong."""


class Link:
    """One API. Used from one thread."""

    def __init__(self, url: str, key_env: str) -> None:
        """Raises EngineMismatch where the variable is not set, or no key."""
        self._url = url.rstrip("/")
        self._key = os.environ.get(key_env, "") if key_env else ""
        if key_env and not (self._key.isascii() and self._key.isprintable() and self._key.strip() == self._key != ""):
            raise EngineMismatch(
                f"api.key_env: the environment variable {key_env} has no key; expected printable ASCII without blanks "
                "around it"
            )
        self._runner = asyncio.Runner()
        self._session: aiohttp.ClientSession | None = None
        self._quiet_until_s = 0.0
        self.requests_total = 0
        self.waits_total = 0
        """Tries after a failed one."""

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def close(self) -> None:
        """Idempotent."""
        if self._session is not None:
            self._runner.run(self._session.close())
            self._session = None
        self._runner.close()

    async def get(self, path: str, deadline_s: float) -> bytes:
        """As `post`."""
        return await self._ask("GET", path, None, deadline_s, 16 << 20)

    async def post(self, path: str, body: Any, *, deadline_s: float, most_bytes: int, sending: Any = None) -> bytes:
        """POST until it succeeds, is refused, or the clock (time.monotonic) passes `deadline_s`. `sending` is called
        before each try with True, and with False where the try surely cost nothing. Raises Unusable, or NotServed."""
        return await self._ask("POST", path, msgspec.json.encode(body), deadline_s, most_bytes, sending)

    async def _ask(
        self, method: str, path: str, payload: bytes | None, deadline_s: float, most_bytes: int, sending: Any = None
    ) -> bytes:
        said = "no time was left for it"
        for wait_s in backoffs(_FIRST_WAIT_S, _LONGEST_WAIT_S):
            pause_s = max(0.0, self._quiet_until_s - time.monotonic())
            if time.monotonic() + pause_s >= deadline_s:
                raise Unusable("unavailable", said)
            await asyncio.sleep(pause_s)
            if sending is not None:
                sending(True)
            self.requests_total += 1
            try:
                status, text, after_s = await self._once(method, path, payload, deadline_s, most_bytes)
            except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
                said = self._hidden(f"{type(error).__name__}: {error}")
            else:
                if status == 200:
                    return text
                if sending is not None:
                    sending(False)
                said = f"HTTP {status}: {self._hidden(text[: 4 * _SHOWN].decode(errors='replace'))}"
                if status in _NEVER:
                    raise NotServed(f"{self._url}{path}: {said}")
                if status not in _AGAIN and status < 500:
                    raise Unusable("refused", said)
                if after_s is not None:
                    self._quiet_until_s = max(self._quiet_until_s, time.monotonic() + after_s)
            self.waits_total += 1
            await asyncio.sleep(min(wait_s, max(0.0, deadline_s - time.monotonic())))
        raise AssertionError("backoffs() ended")

    async def _once(
        self, method: str, path: str, payload: bytes | None, deadline_s: float, most_bytes: int
    ) -> tuple[int, bytes, float | None]:
        """(status, body, seconds to wait by Retry-After). No redirects: the key is for this address only."""
        if self._session is None:
            headers = {"Content-Type": "application/json"}
            if self._key:
                headers["Authorization"] = f"Bearer {self._key}"
            self._session = aiohttp.ClientSession(headers=headers, cookie_jar=aiohttp.DummyCookieJar())
        limit = aiohttp.ClientTimeout(total=max(0.001, deadline_s - time.monotonic()))
        async with self._session.request(
            method, self._url + path, data=payload, timeout=limit, allow_redirects=False
        ) as reply:
            read = bytearray()
            async for part in reply.content.iter_any():
                read += part
                if len(read) > most_bytes:
                    raise Unusable("malformed", f"it has more than {most_bytes} bytes")
            return reply.status, bytes(read), _seconds(reply.headers.get("Retry-After"))

    def _hidden(self, text: str) -> str:
        """Without the key, which some APIs repeat in their errors, and at most `_SHOWN` characters."""
        return (text.replace(self._key, "***") if self._key else text)[:_SHOWN]


def _seconds(after: str | None) -> float | None:
    """Read Retry-After: a number of seconds, or a date (RFC 9110). None: there is none that can be read."""
    if after is None:
        return None
    try:
        wait_s = float(after)
    except ValueError:
        try:
            wait_s = email.utils.parsedate_to_datetime(after).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    return min(max(wait_s, 0.0), 3600.0) if wait_s == wait_s else None
