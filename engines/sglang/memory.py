"""The memory of an SGLang server on a device that it shares in turns (`launch.share = turns`).

    release    what runs is over -> POST /flush_cache until the server is idle -> /release_memory_occupation
    resume     /resume_memory_occupation: weights, and the KV cache unless only new weights are to come

A server is away from its start on, where the launcher releases it, except in turns of its worker. The worker ends with
a server whose state it does not know, and the launcher ends the server of a worker that died. So this process always
knows what is away, as it must: a server that is not idle, or is to resume what it has, ends itself (an assertion and a
KeyError in `SchedulerWeightUpdaterManager`, 0.5.17 and 0.5.23).

CUDA graphs stay, and weights are kept in host memory meanwhile (`SGLangServers.turns_args`). A server on a CPU has the
routes, and frees nothing.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Final

from stillhouse.engines.config import ServerLinkConfig
from stillhouse.engines.http.link import RequestRefused, ServerLost, ServerUnavailable
from stillhouse.engines.sglang.http import SGLangLink
from stillhouse.tracing import events

WEIGHTS: Final = "weights"
CACHE: Final = "kv_cache"


class ServerMemory:
    """For one thread at a time."""

    def __init__(self, server: SGLangLink, *, away: bool) -> None:
        """`away`: the launcher has released it."""
        self._server = server
        self._away = {WEIGHTS, CACHE} if away else set[str]()

    @classmethod
    def at_home(cls, server: SGLangLink, *, away: bool) -> ServerMemory:
        """Wait for the server, and take its memory again. Raises ServerUnavailable and ServerLost; the link is then
        closed."""
        memory = cls(server, away=away)
        try:
            if away:
                server.run(server.wait_until_up(), timeout_s=2 * server.config.connect_timeout_s)
                memory.resume()
        except BaseException:
            server.close()
            raise
        return memory

    @property
    def limit_s(self) -> float:
        """Longest time of one move; the first one also makes room in host memory."""
        return self._server.config.start_timeout_s + self._server.config.stall_timeout_s

    def release(self) -> None:
        """No request of this process is at the server. Idempotent. Raises ServerLost."""
        tags = sorted({WEIGHTS, CACHE} - self._away)
        if CACHE in tags:
            self._do(self._server.flush_cache())
        if tags:
            self._post("release", tags)
            self._away.update(tags)

    def resume(self, *, weights_only: bool = False) -> None:
        """In this order, because new weights are to be there before anything is computed from them. Idempotent. Raises
        ServerLost."""
        for tag in (WEIGHTS,) if weights_only else (WEIGHTS, CACHE):
            if tag in self._away:
                self._post("resume", [tag])
                self._away.remove(tag)

    def _post(self, verb: str, tags: list[str]) -> None:
        with events.span("memory", verb, tags=" ".join(tags)):
            self._do(self._server.post(f"/{verb}_memory_occupation", {"tags": tags}, timeout_s=self.limit_s))

    def _do(self, call: Coroutine[Any, Any, object]) -> None:
        try:
            self._server.run(call, timeout_s=self.limit_s)
        except (RequestRefused, ServerUnavailable) as error:
            self._server.declare_lost(f"its memory did not move: {error}")
            raise ServerLost(f"{self._server.url}: its memory did not move: {error}") from error


def release_started(url: str, api_key: str, certificate: str) -> None:
    """Release a server that has just started. Raises ServerLost."""
    link = SGLangLink(url, ServerLinkConfig(ca_file=certificate), api_key=api_key)
    try:
        ServerMemory(link, away=False).release()
    finally:
        link.close()
