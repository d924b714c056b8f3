"""Pods of rendered Jobs, as processes: what a kubelet would mount and set, with folders of this machine."""

from __future__ import annotations

import base64
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from tests.launch.render.test_slurm import ROOT
from tests.patience import PATIENCE_S

Manifest: TypeAlias = dict[str, Any]
Named: TypeAlias = Callable[[str, str], Manifest]
"""The object of a kind and a name."""


class Pod:
    """One pod of a Job, as a process: mounts are folders, the Service is on loopback. `shared` has the volume, `own`
    what belongs to this pod alone."""

    def __init__(self, named: Named, job: str, index: int, shared: Path, own: Path) -> None:
        spec = named("Job", job)["spec"]["template"]["spec"]
        container = spec["containers"][0]
        places = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        folders = dict(_volumes(named, spec, shared, own))
        self._places = {places[name]: path for name, path in folders.items()} | {"/tmp": own / "tmp"}
        environment = {"POD_IP": "127.0.0.1", "JOB_COMPLETION_INDEX": str(index), "OMP_NUM_THREADS": "1"}
        for variable in container["env"]:
            if "value" in variable:
                environment[variable["name"]] = self._here(variable["value"])
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        command = [self._here(word) for word in container["command"]]
        self.log = own / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **environment, "PATH": path, "PYTHONPATH": str(ROOT)},
                cwd=own,
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


def _volumes(named: Named, spec: Manifest, shared: Path, own: Path) -> Iterator[tuple[str, Path]]:
    (own / "tmp").mkdir(parents=True)
    for volume in spec["volumes"]:
        if "configMap" in volume:
            data: Mapping[str, str] = named("ConfigMap", volume["configMap"]["name"])["data"]
            yield volume["name"], _files(own / "config", {k: v.encode() for k, v in data.items()}, shared)
        elif "secret" in volume:
            coded = named("Secret", volume["secret"]["secretName"])["data"]
            yield volume["name"], _files(own / "secret", {k: base64.b64decode(v) for k, v in coded.items()}, shared)
        elif "persistentVolumeClaim" in volume:
            (shared / "volume").mkdir(exist_ok=True)
            yield volume["name"], shared / "volume"


def _files(folder: Path, content: Mapping[str, bytes], shared: Path) -> Path:
    """As a kubelet mounts them: links to files that the group may read."""
    (folder / "..data").mkdir(parents=True)
    for name, written in content.items():
        written = written.replace(b"/runs/record", f"{shared}/volume/record".encode())
        if name == "join.json":
            written = written.replace(b"tcp://big:", b"tcp://127.0.0.1:")
        (folder / "..data" / name).write_bytes(written)
        (folder / "..data" / name).chmod(0o440)
        (folder / name).symlink_to(Path("..data") / name)
    return folder
