"""Memory of a server that takes turns, against an HTTP server that ends where SGLang's scheduler does."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from stillhouse.engines.config import ServerLinkConfig
from stillhouse.engines.http.link import ServerLost
from stillhouse.engines.sglang.http import SGLangLink
from stillhouse.engines.sglang.memory import CACHE, WEIGHTS, ServerMemory, release_started
from tests.patience import eventually
from tests.sim.weights.fake_server import Body, FakeServer, Refused

FLUSH, RELEASE, RESUME = "/flush_cache", "/release_memory_occupation", "/resume_memory_occupation"
SHORT = ServerLinkConfig(start_timeout_s=0.5, stall_timeout_s=0.5, control_timeout_s=0.5)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer({})
    yield server
    server.close()


@pytest.fixture
def link(server: FakeServer) -> Iterator[SGLangLink]:
    link = SGLangLink(server.url, SHORT)
    yield link
    link.close()


def calls(server: FakeServer) -> list[tuple[str, list[str]]]:
    return [(path, body.get("tags", [])) for path, body in server.calls]


def test_weights_come_back_before_the_cache_and_each_only_once(server: FakeServer, link: SGLangLink) -> None:
    release_started(server.url, "", "")
    memory = ServerMemory(link, away=True)
    memory.release()
    assert calls(server) == [(FLUSH, []), (RELEASE, [CACHE, WEIGHTS])], "it was away"
    del server.calls[:]
    for _ in range(2):
        memory.resume(weights_only=True)
    assert server.away == {CACHE}
    for _ in range(2):
        memory.release()  # new weights have come
    for _ in range(2):
        memory.resume()
    assert calls(server) == [
        (RESUME, [WEIGHTS]),
        (RELEASE, [WEIGHTS]),
        (RESUME, [WEIGHTS]),
        (RESUME, [CACHE]),
    ]
    assert not server.away and not server.lost


def test_a_server_that_is_still_busy_is_waited_for(server: FakeServer, link: SGLangLink) -> None:
    server.running = 1
    memory = ServerMemory(link, away=False)
    release = threading.Thread(target=memory.release)
    release.start()
    eventually(lambda: len(server.calls) >= 2, "a second call")
    assert {path for path, _ in calls(server)} == {FLUSH}
    server.running = 0
    release.join()
    assert server.away == {CACHE, WEIGHTS} and not server.lost


@pytest.mark.parametrize("verb", [RELEASE, RESUME])
@pytest.mark.parametrize("how", ["refuses", "hangs", "dies"])
def test_a_server_whose_memory_did_not_move_is_lost(server: FakeServer, link: SGLangLink, verb: str, how: str) -> None:
    def refuse(_: Body) -> None:
        raise Refused("no memory")

    def hang(_: Body) -> None:
        server.closing.wait()

    memory = ServerMemory(link, away=False)
    if verb == RESUME:
        memory.release()
    if how == "dies":
        server.close()
    else:
        server.before[verb] = refuse if how == "refuses" else hang
    with pytest.raises(ServerLost, match="its memory did not move"):
        memory.release() if verb == RELEASE else memory.resume()
    with pytest.raises(ServerLost):
        link.raise_if_lost()


def test_a_busy_server_that_does_not_end_is_lost_not_killed(server: FakeServer, link: SGLangLink) -> None:
    server.running = 1
    with pytest.raises(ServerLost, match="no result within 1 s"):
        ServerMemory(link, away=False).release()
    assert not server.lost, "a server that is not idle would have ended"


@pytest.mark.parametrize("wrong", [(RESUME, WEIGHTS), (RELEASE, CACHE)])
def test_the_server_that_is_tested_against_ends_where_the_real_one_does(
    server: FakeServer, link: SGLangLink, wrong: tuple[str, str]
) -> None:
    """Otherwise the tests above would show nothing."""
    path, tag = wrong
    server.away = {CACHE}
    link.spawn(_ignore(link, path, tag))
    eventually(lambda: server.lost, "the end of the server")


async def _ignore(link: SGLangLink, path: str, tag: str) -> None:
    try:
        await link.post(path, {"tags": [tag]})
    except RuntimeError:
        return
