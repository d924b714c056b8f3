"""Callers share one loop, one memory and one log: none can take them from the others, with a key or without."""

from __future__ import annotations

import gzip
import json
import logging
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from transformers import PreTrainedTokenizerBase

from stillhouse.actors.agent import Endpoint
from stillhouse.actors.endpoint import text_work
from stillhouse.actors.envs.base import TextTokenizer
from stillhouse.engines.base import Int32s
from tests.actors.endpoint.served import actor, call, chat
from tests.patience import PATIENCE_S

HI = {"messages": [{"role": "user", "content": "hi"}]}


@contextmanager
def connected(endpoint: Endpoint) -> Generator[socket.socket]:
    where = urlsplit(endpoint.base_url)
    with socket.create_connection((where.hostname or "", where.port or 0), timeout=PATIENCE_S) as client:
        yield client


def everything(client: socket.socket) -> bytes:
    """What comes until the other side hangs up."""
    parts: list[bytes] = []
    try:
        while part := client.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


NOT_READ = ["chat_template", "tokenize", "return_dict", "continue_final_message", "messages", "tools", "bos_token", "x"]


@pytest.mark.parametrize("name", NOT_READ)
def test_callers_give_only_what_the_runs_template_reads(tokenizer: TextTokenizer, name: str) -> None:
    with actor(tokenizer) as one:
        endpoint = one.begin(0).endpoint
        reply = chat(endpoint, "hi", chat_template_kwargs={name: "{{ 1//0 }}"})
        assert (reply.status, reply.code) == (400, "invalid_request") and repr(name) in reply.text
        assert not one.engine.requests
        assert chat(endpoint, "hi", chat_template_kwargs={name: None}).status == 200


class Held(TextTokenizer):
    """Reads the text `hold` only when it may."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer)
        self.may = threading.Event()
        self.reading = threading.Semaphore(0)

    def chat_prompt(self, messages: Any, tools: Any = None) -> Int32s:
        self._read(str(messages))
        return super().chat_prompt(messages, tools)

    def encode_prompt(self, text: str) -> Int32s:
        self._read(text)
        return super().encode_prompt(text)

    def _read(self, text: str) -> None:
        if "hold" in text:
            self.reading.release()
            assert self.may.wait(PATIENCE_S)


def test_long_work_on_one_callers_text_keeps_no_other_waiting(hf_tokenizer: PreTrainedTokenizerBase) -> None:
    """Also where it sends many requests: a session has one thread at a time."""
    tokenizer = Held(hf_tokenizer)
    replies: list[Any] = []
    with actor(tokenizer) as one:
        slow, other = one.begin(0), one.begin(1)
        asking = [
            threading.Thread(target=lambda: replies.append(chat(slow.endpoint, "hold", max_tokens=4))),
            *(
                threading.Thread(
                    target=lambda: replies.append(
                        call(slow.endpoint, "v1/completions", {"prompt": "hold", "max_tokens": 4})
                    )
                )
                for _ in range(7)
            ),
        ]
        for each in asking:
            each.start()
        assert tokenizer.reading.acquire(timeout=PATIENCE_S)
        assert chat(other.endpoint, "hi").status == 200
        assert not tokenizer.reading.acquire(blocking=False) and not replies
        tokenizer.may.set()
        for each in asking:
            each.join(PATIENCE_S)
        assert [reply.status for reply in replies] == [200] * 8, [
            reply.text for reply in replies if reply.status != 200
        ]


def test_text_that_takes_too_long_is_refused_and_holds_no_second_thread(
    hf_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_work, "WAIT_S", 0.05)
    tokenizer = Held(hf_tokenizer)
    with actor(tokenizer) as one:
        episode = one.begin(0)
        for _ in range(6):
            assert chat(episode.endpoint, "hold").code == "timeout"
        assert tokenizer.reading.acquire(timeout=PATIENCE_S) and not tokenizer.reading.acquire(blocking=False)
        tokenizer.may.set()


BIG: list[tuple[str, dict[str, Any] | bytes, str]] = [
    ("v1/completions", {"prompt": "ab " * 3_000_000}, "request_too_large"),
    ("v1/chat/completions", {"messages": [{"role": "user"}] * 9000}, "context_length_exceeded"),
    ("v1/chat/completions", {**HI, "tools": [{}] * 200_000}, "request_too_large"),
    ("v1/completions", {"prompt": [1] * 200_000}, "context_length_exceeded"),
    ("inference/v1/generate", {"token_ids": [1] * 200_000}, "context_length_exceeded"),
]


@pytest.mark.parametrize(("path", "body", "code"), BIG, ids=["text", "messages", "objects", "prompt", "ids"])
def test_what_no_context_holds_is_refused_before_any_work(
    tokenizer: TextTokenizer, path: str, body: dict[str, Any], code: str
) -> None:
    with actor(tokenizer) as one:  # its context has 100,000 tokens
        assert call(one.begin(0).endpoint, path, body).code == code
        assert not one.engine.requests


def test_a_packed_body_is_not_unpacked(tokenizer: TextTokenizer) -> None:
    with actor(tokenizer) as one:
        endpoint = one.begin(0).endpoint
        packed = gzip.compress(json.dumps(HI).encode())
        reply = call(endpoint, "v1/chat/completions", packed, headers={"Content-Encoding": "gzip"})
        assert (reply.status, reply.code) == (400, "invalid_json")


def test_all_that_have_shown_no_key_share_one_budget(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a key in the body, which ends it, as with a head that does not end."""
    monkeypatch.setattr("stillhouse.actors.endpoint.connections.STRANGERS_BYTES", 1 << 20)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Api-Key: model\r\nContent-Length: 9999999\r\n\r\n"
    with actor(tokenizer) as one:
        endpoint = one.begin(0).endpoint
        with connected(endpoint) as small, connected(endpoint) as large, connected(endpoint) as header:
            small.sendall(head + b"x" * 5000)
            large.sendall(head + b"x" * 700_000)
            header.sendall(b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: %s\r\n" % (i, b"x" * 8000) for i in range(60)))
            assert everything(large) == b"", "the one that sent most is cut"
            assert chat(endpoint, "x" * 90_000).status == 200, "what has a key is not counted"
            small.settimeout(0.05)
            with pytest.raises(TimeoutError):
                small.recv(1)
        assert any("without a key" in record.getMessage() for record in caplog.records)


def test_the_connection_of_a_wrong_key_ends(tokenizer: TextTokenizer) -> None:
    with actor(tokenizer) as one, connected(one.begin(0).endpoint) as client:
        for path in ("v1/models", "elsewhere"):
            with connected(one.begin(1 + len(path)).endpoint) as client:
                client.sendall(f"GET /{path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer no\r\n\r\n".encode())
                assert b"Connection: close" in everything(client)


def test_the_log_has_no_key_and_few_lines(tokenizer: TextTokenizer, caplog: pytest.LogCaptureFixture) -> None:
    with actor(tokenizer) as one, caplog.at_level(logging.DEBUG):
        endpoint = one.begin(0).endpoint
        odd = [
            f"POST /v1/models HTTP/1.1\r\nAuthorization: Bearer {endpoint.api_key}\r\nContent-Length: 2\n\n{{}}",
            f"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer {endpoint.api_key}\r\nX: \x00\r\n\r\n",
            f"{endpoint.api_key} / HTTP/1.1\r\n\r\n",
            "POST / HTTP/1.1\r\nX: " + "A" * 9000 + "\n\n",
        ]
        for i in range(40):
            with connected(endpoint) as client:
                client.sendall(odd[i % len(odd)].encode())
                everything(client)
        lines = [logging.Formatter().format(record) for record in caplog.records if record.name != "asyncio"]
        assert not any(endpoint.api_key in line or "AAAA" in line for line in lines)
        assert 0 < sum(map(len, lines)) < 4000
