"""Rendered manifests: they fit the schemas of Kubernetes, and their containers, started as a kubelet would start them,
make a whole run whose record is audited."""

from __future__ import annotations

import base64
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.audit.run import audit
from tests.launch.render.test_slurm import ROOT, render
from tests.patience import PATIENCE_S, RUN_PATIENCE_S, eventually

TOPOLOGY = """\
steps = 12
actors = 3
teachers = 1
learner = { lr = 3e-4, eval_every = 0, record = "/runs/record" }
weights = { allow_plain_network = true }
buffer = { batch_rollouts = 16, encrypt = "on" }
actor = { engine = "torch" }
teacher = { engine = "torch" }
cluster = { port = PORT, actors = { each = 2, gpus = 4 }, teachers = { each = 1 } }
"""

Manifest = dict[str, Any]


class Rendered:
    def __init__(self, folder: Path, *arguments: str, port: int = 5555) -> None:
        file, self.private = folder / "topology.toml", folder / "private"
        file.write_text(TOPOLOGY.replace("PORT", str(port)))
        words = ("k8s", "--name", "big", "--image", "registry/stillhouse:1", "--private", str(self.private))
        text = render(*words, "--config", str(file), *arguments)
        self.manifests: list[Manifest] = list(yaml.safe_load_all(text))
        self.secrets: list[Manifest] = list(yaml.safe_load_all((self.private / "secrets.yaml").read_text()))

    def named(self, kind: str, name: str) -> Manifest:
        every = [*self.manifests, *self.secrets]
        return next(one for one in every if one["kind"] == kind and one["metadata"]["name"] == name)


@pytest.mark.parametrize("more", [(), ("--learner.ranks=4", "--learner.hosts=2")])
def test_manifests_fit_the_schemas(tmp_path: Path, more: tuple[str, ...]) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    rendered = Rendered(tmp_path, *more)
    for manifest in [*rendered.manifests, *rendered.secrets]:
        validate.validate(manifest, "1.31", strict=True)
    broken = rendered.named("Job", "big-actors")
    broken["spec"]["template"]["spec"]["containers"][0]["imag"] = "x"
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, "1.31", strict=True)


def test_each_group_gets_its_own_keys_and_no_others(tmp_path: Path) -> None:
    rendered = Rendered(tmp_path)
    of = {one["metadata"]["name"]: set(one["data"]) for one in rendered.secrets}
    assert "learner.key_secret" in of["big-keys-run"]
    assert of["big-keys-actors"] == {"server.key", "learner.key", "joiner.key_secret", "actor.key_secret"}
    assert of["big-keys-teachers"] == {"server.key", "learner.key", "joiner.key_secret", "teacher.key_secret"}
    assert (rendered.private / "secrets.yaml").stat().st_mode & 0o777 == 0o600
    public = yaml.safe_dump_all(rendered.manifests)
    for key in (rendered.private / "keys").glob("*.key_secret"):
        assert "secret-key" in key.read_text()
        secret = key.read_text().split('secret-key = "')[1].split('"')[0]
        assert secret not in public, "a secret is in the manifests that others may read"
    again = Rendered(tmp_path)
    assert again.secrets == rendered.secrets, "the keys of a run that is there are kept"


def test_ranks_on_further_hosts_share_the_volume(tmp_path: Path) -> None:
    rendered = Rendered(tmp_path, "--learner.ranks=4", "--learner.hosts=2")
    claim = rendered.named("PersistentVolumeClaim", "big-runs")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    mounts = rendered.named("Job", "big-ranks")["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert "/runs" in [mount["mountPath"] for mount in mounts]


def test_engines_must_be_chosen(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"actor\.engine: got auto"):
        Rendered(tmp_path, "--actor.engine", "auto")


class Pod:
    """One pod of a Job, as a process: mounts are folders, the Service is on loopback."""

    def __init__(self, rendered: Rendered, job: str, index: int, folder: Path) -> None:
        spec = rendered.named("Job", job)["spec"]["template"]["spec"]
        container = spec["containers"][0]
        places = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        folders = dict(_volumes(rendered, spec, folder, folder / f"{job}-{index}"))
        self._places = {places[name]: path for name, path in folders.items()} | {"/tmp": folder / f"{job}-{index}/tmp"}
        environment = {"POD_IP": "127.0.0.1", "JOB_COMPLETION_INDEX": str(index), "OMP_NUM_THREADS": "1"}
        for variable in container["env"]:
            if "value" in variable:
                environment[variable["name"]] = self._here(variable["value"].replace("tcp://big:", "tcp://127.0.0.1:"))
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        command = [self._here(word) for word in container["command"]]
        self.log = folder / f"{job}-{index}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **environment, "PATH": path, "PYTHONPATH": str(ROOT)},
                cwd=folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _here(self, text: str) -> str:
        """With the paths of the container replaced by those of the folders here."""
        places = "|".join(map(re.escape, self._places))
        return re.sub(rf"(?<![\w/])({places})(?=[/\s\"]|$)", lambda found: str(self._places[found[1]]), text)

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE_S)


def _volumes(rendered: Rendered, spec: Manifest, shared: Path, own: Path) -> Iterator[tuple[str, Path]]:
    (own / "tmp").mkdir(parents=True)
    for volume in spec["volumes"]:
        if "configMap" in volume:
            data: Mapping[str, str] = rendered.named("ConfigMap", volume["configMap"]["name"])["data"]
            yield volume["name"], _files(own / "config", {k: v.encode() for k, v in data.items()}, shared)
        elif "secret" in volume:
            coded = rendered.named("Secret", volume["secret"]["secretName"])["data"]
            yield volume["name"], _files(own / "secret", {k: base64.b64decode(v) for k, v in coded.items()}, shared)
        elif "persistentVolumeClaim" in volume:
            (shared / "volume").mkdir(exist_ok=True)
            yield volume["name"], shared / "volume"


def _files(folder: Path, content: Mapping[str, bytes], shared: Path) -> Path:
    """As a kubelet mounts them: links to files that the group may read."""
    (folder / "..data").mkdir(parents=True)
    for name, written in content.items():
        (folder / "..data" / name).write_bytes(written.replace(b"/runs/record", f"{shared}/volume/record".encode()))
        (folder / "..data" / name).chmod(0o440)
        (folder / name).symlink_to(Path("..data") / name)
    return folder


@pytest.mark.slow
def test_the_containers_make_a_whole_run(tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    rendered = Rendered(tmp_path, port=port)
    pods = [Pod(rendered, "big-actors", index, tmp_path) for index in range(2)]
    pods += [Pod(rendered, "big-teachers", 0, tmp_path), Pod(rendered, "big-run", 0, tmp_path)]
    try:
        run = pods[-1]
        eventually(lambda: run.process.poll() is not None, lambda: run.log.read_text(), RUN_PATIENCE_S)
        assert run.process.returncode == 0, run.log.read_text()
        for pod in pods:
            eventually(lambda pod=pod: pod.process.poll() is not None, lambda pod=pod: pod.log.read_text())
            assert pod.process.returncode == 0, pod.log.read_text()
    finally:
        for pod in pods:
            pod.end()
    report = audit(tmp_path / "volume" / "big")
    assert report.clean, str(report)
