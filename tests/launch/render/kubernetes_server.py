"""A small server of the Kubernetes API on loopback, enough for the real kubectl: it keeps objects, and runs the pods of
Jobs as processes of this machine. It knows nothing of the code that makes manifests."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self
from urllib.parse import parse_qs, urlsplit

from tests.launch.render.pods import Manifest, Pod
from tests.patience import PATIENCE_S

KINDS = {
    "v1": {"configmaps": "ConfigMap", "secrets": "Secret", "services": "Service", "pods": "Pod"}
    | {"persistentvolumeclaims": "PersistentVolumeClaim"},
    "batch/v1": {"jobs": "Job"},
}
PATH = re.compile(
    r"/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+/v1))(?:/namespaces/default)?"
    r"/(?P<kind>\w+)(?:/(?P<name>[\w.-]+))?(?P<log>/log)?"
)


class ApiServer:
    """Serves while it is open. `folder`: volumes and logs of the pods. `check`: called with every object that comes."""

    def __init__(self, folder: Path, check: Callable[[Manifest], None]) -> None:
        self.folder, self.check = folder, check
        self.objects: dict[tuple[str, str], Manifest] = {}
        self.pods: dict[str, Pod] = {}
        self.started = 0
        self.changed = threading.Condition()
        handler = type("Bound", (Handler,), {"api": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._serving = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._watching = threading.Thread(target=self._watch_pods)
        self._open = True

    @property
    def options(self) -> str:
        """For kubectl."""
        return f"--server=http://127.0.0.1:{self._server.server_port} --namespace=default"

    def __enter__(self) -> Self:
        self._serving.start()
        self._watching.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.changed:
            self._open = False
            self.changed.notify_all()
        self._watching.join(PATIENCE_S)
        self._server.shutdown()
        self._serving.join(PATIENCE_S)
        self._server.server_close()
        for pod in self.pods.values():
            pod.end()

    def named(self, kind: str, name: str) -> Manifest:
        return self.objects[kind, name]

    def phases(self, part: str = "") -> list[str]:
        """Phases of the pods of one part of the run, or of all."""
        with self.changed:
            pods = [one for (kind, _), one in self.objects.items() if kind == "Pod"]
            return [one["status"]["phase"] for one in pods if part in ("", _labels(one)["part"])]

    def create(self, made: Manifest) -> None:
        """A new object; of a Job, the pods start."""
        with self.changed:
            self.objects[made["kind"], made["metadata"]["name"]] = made
            if made["kind"] == "Job":
                name = made["metadata"]["name"]
                made["spec"]["selector"] = {"matchLabels": {"job-name": name}}
                for index in range(made["spec"]["completions"]):
                    self.started += 1
                    self._start(made, index, f"{name}-{index}-{self.started:05}")

    def _start(self, job: Manifest, index: int, name: str) -> None:
        template = job["spec"]["template"]
        labels = {**template["metadata"]["labels"], "job-name": job["metadata"]["name"]}
        own = self.folder / name
        own.mkdir()
        self.pods[name] = Pod(self.named, job["metadata"]["name"], index, self.folder, own)
        self.objects["Pod", name] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "default", "uid": name, "labels": labels},
            "spec": template["spec"],
            "status": {"phase": "Running"},
        }

    def delete(self, kind: str, name: str, *, foreground: bool) -> None:
        """Delete an object; the pods of a Job are ended as a kubelet ends them. `foreground`: the Job goes last."""
        with self.changed:
            if kind == "Job":
                for pod in self._pods_of(name):
                    self.pods[pod].process.send_signal(signal.SIGTERM)
                    self.objects["Pod", pod]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            if foreground and kind == "Job":
                self.objects[kind, name]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            else:
                del self.objects[kind, name]
            self.changed.notify_all()

    def _pods_of(self, job: str) -> list[str]:
        return [n for (kind, n), one in self.objects.items() if kind == "Pod" and _labels(one)["job-name"] == job]

    def _watch_pods(self) -> None:
        """As the control loops of a cluster: phases of pods that have ended, and Jobs whose last pod has gone."""
        with self.changed:
            while self._open:
                for name, pod in self.pods.items():
                    if ("Pod", name) in self.objects and (code := pod.process.poll()) is not None:
                        one = self.objects["Pod", name]
                        one["status"]["phase"] = "Failed" if code else "Succeeded"
                        if "deletionTimestamp" in one["metadata"]:
                            del self.objects["Pod", name]
                for kind, name in list(self.objects):
                    leaving = "deletionTimestamp" in self.objects[kind, name]["metadata"]
                    if kind == "Job" and leaving and not self._pods_of(name):
                        del self.objects[kind, name]
                self.changed.notify_all()
                self.changed.wait(0.05)

    def wait_until_gone(self, kind: str, name: str) -> Manifest:
        """Returns the object as it was last, when it is gone or the server closes."""
        with self.changed:
            last = self.objects.get((kind, name), {})
            while self._open and (kind, name) in self.objects:
                self.changed.wait(0.2)
            return last


class Handler(BaseHTTPRequestHandler):
    api: ClassVar[ApiServer]
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: it would go to the console of the tests."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if (answer := _discovery(url.path)) is not None:
            self._send(200, answer)
        elif (found := PATH.fullmatch(url.path)) is None:
            self._send(404, _not_found(url.path))
        elif found["log"]:
            self._send_text(self.api.pods[found["name"]].log.read_text())
        elif found["name"]:
            one = self.api.objects.get((_kind(found), found["name"]))
            self._send(404, _not_found(found["name"])) if one is None else self._send(200, one)
        elif query.get("watch"):
            name = query["fieldSelector"].removeprefix("metadata.name=")
            self._send(200, {"type": "DELETED", "object": self.api.wait_until_gone(_kind(found), name)})
        else:
            version = found["core"] or found["group"]
            with self.api.changed:
                items = list(self._listed(_kind(found), query))
            self._send(200, {"apiVersion": version, "kind": f"{_kind(found)}List", "metadata": {}, "items": items})

    def _listed(self, kind: str, query: dict[str, str]) -> Iterator[Manifest]:
        labels = dict(one.split("=") for one in query.get("labelSelector", "").split(",") if one)
        name = query.get("fieldSelector", "").removeprefix("metadata.name=")
        for (its_kind, its_name), one in self.api.objects.items():
            if its_kind == kind and name in ("", its_name) and labels.items() <= _labels(one).items():
                yield one

    def do_POST(self) -> None:
        made = self._body()
        self.api.check(json.loads(json.dumps(made)))
        made["metadata"] |= {"namespace": "default", "uid": made["metadata"]["name"], "resourceVersion": "1"}
        self.api.create(made)
        self._send(201, made)

    def do_DELETE(self) -> None:
        found = PATH.fullmatch(urlsplit(self.path).path)
        assert found is not None
        asked = self._body()
        self.api.delete(_kind(found), found["name"], foreground=asked.get("propagationPolicy") == "Foreground")
        self._send(200, {"apiVersion": "v1", "kind": "Status", "status": "Success"})

    def _body(self) -> Manifest:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")

    def _send(self, code: int, answer: Manifest) -> None:
        self._send_bytes(code, json.dumps(answer).encode(), "application/json")

    def _send_text(self, text: str) -> None:
        self._send_bytes(200, text.encode(), "text/plain")

    def _send_bytes(self, code: int, content: bytes, kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _kind(found: re.Match[str]) -> str:
    return KINDS[found["core"] or found["group"]][found["kind"]]


def _labels(one: Manifest) -> dict[str, str]:
    return one["metadata"].get("labels", {})


def _not_found(what: str) -> Manifest:
    failed = {"apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}
    return {**failed, "message": f"{what} not found"}


def _discovery(path: str) -> Manifest | None:
    """What kubectl asks first: which kinds there are, and that the server checks fields by itself."""
    if path == "/version":
        return {"major": "1", "minor": "31", "gitVersion": "v1.31.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(v) for v in KINDS if "/" in v]}
    version = path.removeprefix("/apis/").removeprefix("/api/")
    if version in KINDS and path.startswith(("/api/", "/apis/")):
        return {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": version,
            "resources": _resources(version),
        }
    if path == "/openapi/v3":
        return {"paths": {_openapi(version): {"serverRelativeURL": f"/openapi/v3/{version}"} for version in KINDS}}
    version = path.removeprefix("/openapi/v3/")
    return _schema(version) if version in KINDS else None


def _group(version: str) -> Manifest:
    one = {"groupVersion": version, "version": "v1"}
    return {"name": version.split("/")[0], "versions": [one], "preferredVersion": one}


def _resources(version: str) -> list[Manifest]:
    verbs = ["create", "delete", "get", "list", "patch", "watch"]
    return [
        {"name": plural, "singularName": kind.lower(), "namespaced": True}
        | {"kind": kind, "verbs": verbs, "categories": ["all"] if kind in ("Job", "Pod", "Service") else []}
        for plural, kind in KINDS[version].items()
    ]


def _openapi(version: str) -> str:
    return f"apis/{version}" if "/" in version else f"api/{version}"


def _schema(version: str) -> Manifest:
    """Only that PATCH has the parameter fieldValidation: kubectl then leaves the validation to the server."""
    group = version.split("/")[0] if "/" in version else ""
    paths: dict[str, Any] = {
        f"/{_openapi(version)}/namespaces/{{namespace}}/{plural}/{{name}}": {
            "patch": {
                "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
                "x-kubernetes-group-version-kind": {"group": group, "version": "v1", "kind": kind},
                "responses": {},
            }
        }
        for plural, kind in KINDS[version].items()
    }
    return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "v1.31.0"}, "paths": paths}
