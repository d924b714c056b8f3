"""A stand-in of the hub's API on loopback: the routes that `huggingface_hub` calls for a push, and no others."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

TOKEN = "hf_of_the_test"
OWNER = "someone"


@dataclass
class Hub:
    url: str
    private: dict[str, bool] = field(default_factory=dict[str, bool])
    """By repository."""
    objects: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """What came over LFS, by sha256."""
    commits: list[dict[str, bytes]] = field(default_factory=list[dict[str, bytes]])
    """Files of each commit."""
    takes_uploads: bool = True
    refused: list[str] = field(default_factory=list[str])
    """Requests that no route was for, or without the token."""


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self._body()
        path = urlsplit(self.path).path
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            self.hub.refused.append(self.path)
            self._answer(401, {"error": "Invalid credentials\x1b[31m in Authorization header"})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            assert json.loads(body)["content"].startswith("---\n")
            self._answer(200, {"errors": [], "warnings": []})
        else:
            self._of_repository(path, body)

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization'] or OWNER}/{asked['name']}"
        known = name in self.hub.private
        self.hub.private.setdefault(name, asked.get("visibility") == "private")
        self._answer(409 if known else 200, {"url": f"{self.hub.url}/{name}"})

    def _of_repository(self, path: str, body: bytes) -> None:
        for name in self.hub.private:
            if path == f"/api/models/{name}/preupload/main":
                files = [
                    {
                        "path": one["path"],
                        "uploadMode": "lfs" if one["path"].endswith(".safetensors") else "regular",
                        "shouldIgnore": False,
                    }
                    for one in json.loads(body)["files"]
                ]
                return self._answer(200, {"files": files})
            if path == f"/{name}.git/info/lfs/objects/batch":
                asked = json.loads(body)
                assert asked["operation"] == "upload" and asked["hash_algo"] == "sha256"
                upload = [
                    one | {"actions": {"upload": {"href": f"{self.hub.url}/lfs/{one['oid']}"}}}
                    for one in asked["objects"]
                ]
                return self._answer(200, {"transfer": "basic", "objects": upload})
            if path == f"/api/models/{name}/commit/main":
                self._commit([json.loads(line) for line in body.splitlines()])
                return self._answer(200, {"commitUrl": f"{self.hub.url}/{name}/commit/1", "commitOid": "1"})
        self.hub.refused.append(self.path)
        return self._answer(404, {"error": "no such route"})

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        files: dict[str, bytes] = {}
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                assert line["key"] == "lfsFile" and value["size"] == len(self.hub.objects[value["oid"]])
                files[value["path"]] = self.hub.objects[value["oid"]]
        self.hub.commits.append(files)

    def do_PUT(self) -> None:
        body = self._body()
        oid = self.path.removeprefix("/lfs/")
        if not self.hub.takes_uploads:
            return self._answer(403, {"error": "over quota"})
        if hashlib.sha256(body).hexdigest() != oid:
            self.hub.refused.append(self.path)
            return self._answer(400, {"error": "not what was announced"})
        self.hub.objects[oid] = body
        return self._answer(200, {})

    def do_GET(self) -> None:
        self.hub.refused.append(self.path)
        self._answer(404 if self.headers.get("authorization") == f"Bearer {TOKEN}" else 401, {"error": "no"})

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(self.headers["content-length"] or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def stand_in_hub() -> Generator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub = _Handler.hub = Hub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
