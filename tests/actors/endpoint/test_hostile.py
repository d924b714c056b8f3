"""Clients that mean harm, or break off at a bad moment: typed errors, and nothing that is only said to be done."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import pytest

from stillhouse.actors.envs.base import TextTokenizer
from tests.actors.endpoint.served import actor, call, chat, trained
from tests.actors.in_hand import STOP
from tests.patience import PATIENCE_S, Limit

DEEP = 900
"""Levels that JSON readers follow and JSON writers do not."""
ODD: list[tuple[bytes, int, str]] = [
    (b'{"messages":[{"role":"user","content":"\xff"}]}', 400, "invalid_json"),
    (b'{"messages":[{"role":"user","content":"\\ud800"}]}', 400, "invalid_json"),
    (
        b'{"messages":[{"role":"user","content":"x"}],"tools":[{"a":' + b"[" * DEEP + b"]" * DEEP + b"}]}",
        400,
        "invalid_request",
    ),
]


@pytest.mark.parametrize(("body", "status", "code"), ODD, ids=["utf-8", "surrogate", "depth"])
def test_bytes_that_no_sdk_sends_are_refused_by_type(
    tokenizer: TextTokenizer, caplog: pytest.LogCaptureFixture, body: bytes, status: int, code: str
) -> None:
    with actor(tokenizer) as one, caplog.at_level(logging.ERROR):
        episode = one.begin(0)
        reply = call(episode.endpoint, "v1/chat/completions", body)
        assert (reply.status, reply.code) == (status, code)
        assert not one.engine.requests and not caplog.records, "no client can fill the log"


def test_arguments_of_any_depth_are_the_students_own_text(tokenizer: TextTokenizer) -> None:
    deep = {"function": {"name": "f", "arguments": "[" * 50_000}}
    with actor(tokenizer) as one:
        episode = one.begin(0)
        reply = chat(episode.endpoint, "x", {"role": "assistant", "tool_calls": [deep]}, "y")
        assert reply.status == 200


@pytest.mark.parametrize("path", ["models", "chat/completions"])
def test_a_key_of_any_bytes_is_a_wrong_key(tokenizer: TextTokenizer, path: str) -> None:
    with actor(tokenizer) as one:
        url = urlsplit(one.begin(0).endpoint.base_url)
        connection = http.client.HTTPConnection(url.netloc, timeout=PATIENCE_S)
        method = "GET" if path == "models" else "POST"
        connection.request(method, f"{url.path}/{path}", b"", {"Authorization": b"Bearer \xff\xfe"})
        reply = connection.getresponse()
        assert reply.status == 401 and json.load(reply)["error"]["code"] == "invalid_api_key"
        connection.close()


def test_rewards_whose_sum_is_not_finite_leave_the_rollout_unscored(tokenizer: TextTokenizer) -> None:
    """The buffer would refuse a segment with such a reward, and the rollout would be lost."""
    with actor(tokenizer) as one:
        episode = one.begin(0)
        chat(episode.endpoint, "hello")
        assert call(episode.endpoint, "v1/reward", {"reward": 1e308}).status == 200
        assert call(episode.endpoint, "v1/reward", {"reward": 1e308}).status == 200
        one.finish(episode)
        assert one.hand.whole("train-0-0-0")[0][-1].reward is None and one.hand.failures == {}
        assert one.hand.rollouts.counts["env_reward_out_of_range_total"] == 1


def test_a_reward_that_comes_too_late_is_refused(tokenizer: TextTokenizer) -> None:
    """Its headers came in time, its body did not."""
    with actor(tokenizer) as one:
        episode = one.begin(0)
        chat(episode.endpoint, "hello")
        url = urlsplit(episode.endpoint.base_url)
        connection = http.client.HTTPConnection(url.netloc, timeout=PATIENCE_S)
        connection.putrequest("POST", f"{url.path}/reward")
        body = b'{"reward": 1.0}'
        headers = {"Authorization": f"Bearer {episode.endpoint.api_key}", "Content-Length": str(len(body))}
        for name, value in {**headers, "Expect": "100-continue"}.items():
            connection.putheader(name, value)
        connection.endheaders()
        assert connection.sock.recv(12) == b"HTTP/1.1 100", "the server has begun with this request"
        connection.sock.recv(100)
        one.finish(episode)
        connection.send(body)
        reply = connection.getresponse()
        assert reply.status == 410 and json.load(reply)["error"]["code"] == "session_closed"
        assert one.hand.whole("train-0-0-0")[0][-1].reward is None
        connection.close()


def test_a_stream_whose_episode_ends_says_so_in_an_event(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stillhouse.actors.endpoint.streams.BEAT_S", 0.05)
    replies: list[Any] = []
    with actor(tokenizer, lambda _: None) as one:
        episode = one.begin(0)
        asking = threading.Thread(target=lambda: replies.append(chat(episode.endpoint, "hello", stream=True)))
        asking.start()
        one.until(lambda: len(one.engine.requests) == 1)
        time.sleep(0.5)  # several beats
        episode.end()
        asking.join(PATIENCE_S)
    (reply,) = replies
    events = [event for event in reply.text.split("\n\n") if event]
    assert reply.status == 200 and events[0] == ": still generating"
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "session_closed"


def test_what_would_change_the_student_s_words_is_counted_and_said_once(
    tokenizer: TextTokenizer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stillhouse.actors.endpoint.server._SAID", set[str]())
    with actor(tokenizer) as one:
        episode = one.begin(0)
        for said in ("hello", "again"):
            fields: dict[str, Any] = {"response_format": {"type": "json_object"}, "tool_choice": "required"}
            assert chat(episode.endpoint, said, **fields).status == 200
        one.finish(episode)
        counts = one.hand.rollouts.counts
        assert counts["env_endpoint_overruled_response_format_total"] == 2
        assert counts["env_endpoint_overruled_tool_choice_total"] == 2
        assert trained(one, 0) == [10, STOP, 10, STOP]
        assert sum("response_format" in record.getMessage() for record in caplog.records) == 1


HALF = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthor"


def test_connections_that_send_no_whole_head_are_ended(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that goes on dripping, and one that has had its answer."""
    monkeypatch.setattr("stillhouse.actors.endpoint.connections.IDLE_S", 0.2)
    with actor(tokenizer) as one:
        endpoint = one.begin(0).endpoint
        where = urlsplit(endpoint.base_url)
        whole = f"GET {where.path}/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {endpoint.api_key}\r\n\r\n"
        for sent in (b"", HALF, whole.encode()):
            with socket.create_connection((where.hostname or "", where.port or 0), timeout=PATIENCE_S) as client:
                client.sendall(sent)
                if sent == whole.encode():
                    assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
                assert client.recv(1) == b"", "the server has hung up"
        with socket.create_connection((where.hostname or "", where.port or 0), timeout=PATIENCE_S) as client:
            limit = Limit()
            with pytest.raises(OSError):  # of the socket: the loop itself ends without one
                while not limit.passed:
                    client.sendall(b"G")
                    time.sleep(0.02)
        assert chat(endpoint, "hello").status == 200


def test_connections_are_limited_in_number(tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stillhouse.actors.endpoint.connections.MAX_CONNECTIONS", 2)
    with actor(tokenizer) as one:
        endpoint = one.begin(0).endpoint
        where = urlsplit(endpoint.base_url)
        kept = [http.client.HTTPConnection(where.netloc, timeout=PATIENCE_S) for _ in range(2)]
        for each in kept:
            each.request("GET", f"{where.path}/models", headers={"Authorization": f"Bearer {endpoint.api_key}"})
            assert each.getresponse().read()
        refused = call(endpoint, "v1/models")
        assert (refused.status, refused.code) == (503, "too_many_connections")
        kept[0].close()
        limit = Limit()
        while call(endpoint, "v1/models").status != 200:
            assert not limit.passed
            time.sleep(0.02)
        kept[1].close()
        assert chat(endpoint, "hello").status == 200
