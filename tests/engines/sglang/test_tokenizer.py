"""A running server's tokenizer is compared with the student's by the text of single ids."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

import pytest

from stillhouse import builtin
from stillhouse.engines.sglang.config import SGLangConfig
from stillhouse.engines.sglang.features import Features
from stillhouse.engines.sglang.tokenizer import COMPARED, compare_tokenizers, compared_ids
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.servers.attached import ask_servers
from stillhouse.models.tokenizer_file import FileTokenizer
from tests.launch.servers.test_attached import A

Serve = Callable[[Callable[[int], str] | None], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a server that writes an id so, or has no /detokenize (None); its url."""
    servers: list[ThreadingHTTPServer] = []

    def start(write: Callable[[int], str] | None) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.send_response(404 if write is None else 405)
                self.end_headers()

            def do_POST(self) -> None:
                body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert write is not None and body["skip_special_tokens"] is False
                reply = json.dumps({"text": [write(ids[0]) for ids in body["tokens"]]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def tokenizer() -> FileTokenizer:
    return FileTokenizer(builtin.STUDENT_DIR)


def test_the_same_tokenizer_differs_nowhere_and_another_one_where_it_does(
    serve: Serve, tokenizer: FileTokenizer
) -> None:
    def same(token_id: int) -> str:
        return tokenizer.decode([token_id], skip_special_tokens=False)

    def swapped(token_id: int) -> str:
        return same({40: 41, 41: 40}.get(token_id, token_id))

    assert compare_tokenizers(serve(same), SGLangConfig(), builtin.STUDENT_DIR) == []
    assert compare_tokenizers(serve(lambda i: f"{same(i)} "), SGLangConfig(), builtin.STUDENT_DIR) == []
    differing = compare_tokenizers(serve(swapped), SGLangConfig(), builtin.STUDENT_DIR)
    assert differing == [(40, same(40), same(41)), (41, same(41), same(40))]
    assert compare_tokenizers(serve(None), SGLangConfig(), builtin.STUDENT_DIR) is None


def test_a_teacher_on_a_running_server_with_another_tokenizer_is_refused(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    def probe(url: str, settings: SGLangConfig, *, api_key: str) -> Features:
        return A

    monkeypatch.setattr("stillhouse.engines.sglang.attached.probe_server", probe)
    url = serve(lambda i: chr(0x4E00 + i))
    models = {"student": str(builtin.STUDENT_DIR)}
    (told,) = ask_servers(build(RunConfig, {"models": models, "teacher": {"engine": "sglang", "urls": [url]}})).mistakes
    assert told.startswith(f"teacher.urls: {url} has another tokenizer than ") and "0 is '!'" in told


def test_of_a_large_vocabulary_some_ids_are_compared_everywhere_and_all_at_its_end() -> None:
    ids = compared_ids(range(151_669))
    assert COMPARED <= len(ids) <= COMPARED + 256 + 1
    assert max(b - a for a, b in pairwise(ids)) <= 38 and ids[-256:] == list(range(151_413, 151_669))
    assert compared_ids(range(320)) == list(range(320))
