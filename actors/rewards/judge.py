"""The reward `judge`: a model behind any OpenAI-compatible endpoint reads the response and writes a score.

A judge that cannot be reached, refuses, or writes no score leaves the response unscored, and is counted by cause."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from typing import Any, Final, NamedTuple, cast
from urllib.parse import urlsplit

import aiohttp

from stillhouse.actors.rewards.base import Answered, Reward, Verdict, unscored
from stillhouse.actors.rewards.pattern import BoundedPattern, positive
from stillhouse.actors.row_options import row_may_set

PROMPT: Final = """Judge a response to a task.

Task:
{prompt}

Expected answer:
{ground_truth}

Response:
{response}

How good is the response, from 0 (wrong) to 10 (right and complete)? End with the score in double brackets: [[5]]"""
SCORE_PATTERN: Final = r"\[\[\s*(-?\d+(?:\.\d+)?)\s*\]\]"
PLACES: Final = re.compile(r"\{(prompt|response|ground_truth)\}")
MAX_REPLY_BYTES: Final = 4 << 20
FIRST_PAUSE_S: Final = 0.2
"""Between the first try and the second; then twice as long each time."""
_NAMED: Final = set[str]()
"""Addresses that were logged as unreachable: those of the configuration."""
log = logging.getLogger(__name__)


class _Failed(Exception):
    """`reason`: what is counted. `again`: whether another try may help."""

    def __init__(self, reason: str, *, again: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.again = again


class _Endpoint(NamedTuple):
    """Where the judge is, and how it is asked."""

    url: str
    headers: dict[str, str]
    model: str
    max_tokens: int
    timeout_s: float
    tries: int

    async def ask(self, text: str) -> str:
        """What the judge writes. Raises _Failed."""
        message = {"role": "user", "content": text}
        body = {"model": self.model, "messages": [message], "temperature": 0.0, "max_tokens": self.max_tokens}
        failed, pause_s = _Failed("judge_timeout", again=False), FIRST_PAUSE_S
        try:
            async with asyncio.timeout(self.timeout_s), aiohttp.ClientSession(headers=self.headers) as session:
                for left in reversed(range(self.tries)):
                    try:
                        return await self._once(session, body)
                    except _Failed as error:
                        failed = error
                        if not (error.again and left):
                            raise
                    await asyncio.sleep(pause_s)
                    pause_s *= 2.0
        except TimeoutError:
            raise failed from None
        raise failed

    async def _once(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> str:
        limit = aiohttp.ClientTimeout(total=self.timeout_s / self.tries)
        try:
            # No redirects: the key is for this address only.
            async with session.post(self.url, json=body, timeout=limit, allow_redirects=False) as reply:
                if reply.status != 200:
                    busy = reply.status in (408, 429) or reply.status >= 500
                    raise _Failed("judge_error" if busy else "judge_refused", again=busy)
                read = b""
                async for part in reply.content.iter_any():
                    read += part
                    if len(read) > MAX_REPLY_BYTES:
                        raise _Failed("judge_garbage", again=False)
        except TimeoutError:
            raise _Failed("judge_timeout", again=True) from None
        except (aiohttp.ClientError, OSError) as error:
            if self.url not in _NAMED:  # once per address; the rest are counted
                _NAMED.add(self.url)
                log.warning("the judge at %s cannot be reached: %s", self.url, error)
            raise _Failed("judge_unreachable", again=True) from None
        return _content(read)


def _content(read: bytes) -> str:
    try:
        text = json.loads(read)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise _Failed("judge_garbage", again=True) from None
    if not isinstance(text, str):
        raise _Failed("judge_garbage", again=True)
    return text


@row_may_set("prompt")
def judge_reward(
    base_url: str,
    model: str,
    prompt: str = PROMPT,
    score_pattern: str = SCORE_PATTERN,
    lowest: float = 0.0,
    highest: float = 10.0,
    key_env: str = "",
    max_tokens: int = 1024,
    timeout_s: float = 24.0,
    tries: int = 3,
) -> Reward:
    """`base_url`: with `/v1`, as for OpenAI's clients. `prompt`: what the judge reads, with {response} and, where
    wanted, {prompt} and {ground_truth}. `score_pattern`: a regular expression with one group; its last match in what
    the judge writes is the score. A score of `lowest` is a reward of 0, `highest` one of 1. `key_env`: the name of the
    environment variable that holds the key. `timeout_s`: for all `tries` together."""
    if "{response}" not in prompt:
        raise ValueError("prompt: without {response} the judge does not see what it judges")
    if not lowest < highest:
        raise ValueError(f"lowest = {lowest!r} and highest = {highest!r}: expected lowest below highest")
    for option, number in (("max_tokens", max_tokens), ("tries", tries)):
        if type(number) is not int or number < 1:
            raise ValueError(f"{option}: got {number!r}, expected a whole number of at least 1")
    score = BoundedPattern(score_pattern, 1.0, option="score_pattern", groups=1)
    endpoint = _Endpoint(_url(base_url), _headers(key_env), model, max_tokens, positive("timeout_s", timeout_s), tries)

    async def judged(answered: Answered) -> Verdict:
        if answered.ground_truth is None and "{ground_truth}" in prompt:
            return unscored("no_ground_truth")
        values = {
            "prompt": answered.prompt,
            "response": answered.response,
            "ground_truth": answered.ground_truth or "",
        }
        # In one pass, so that no {ground_truth} of the student's is filled in.
        text = PLACES.sub(lambda place: values[place[1]], prompt)
        try:
            written = await endpoint.ask(text)
            number = float(cast(str, await score.last_group(written)))
        except _Failed as failed:
            return unscored(failed.reason)
        except (TypeError, ValueError, TimeoutError):
            return unscored("judge_unparsable")
        if not lowest <= number <= highest:
            return unscored("judge_out_of_range")
        return Verdict((number - lowest) / (highest - lowest))

    return judged


def _url(base_url: str) -> str:
    """Raises ValueError for anything but http(s)://host/..."""
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
        shown = base_url if "@" not in base_url else "an address with a password"
        raise ValueError(f"base_url: got {shown!r}, expected http(s)://HOST:PORT/v1; a key goes by key_env")
    return base_url.rstrip("/") + "/chat/completions"


def _headers(key_env: str) -> dict[str, str]:
    if not key_env:
        return {}
    key = os.environ.get(key_env, "")
    if not key:
        raise ValueError(
            f"key_env: the environment variable {key_env!r:.80} is not set, expected the judge's key in it"
        )
    return {"Authorization": f"Bearer {key}"}
