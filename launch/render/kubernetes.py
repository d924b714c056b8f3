"""Kubernetes manifests of a run: a Job for the run, and an Indexed Job for each group of other hosts.

Only the run's pod has the volume with the run's folder. Pods of actors and teachers join by the name of a Service, with
the configuration from a ConfigMap and keys from a Secret. Further ranks of the learner write checkpoints, so they
mount the volume too, which must then allow several writers."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from launch.config.cluster import HostConfig
from launch.render.hosts import REJOIN_S, HostGroup, none_beside_the_learner
from launch.render.yaml_text import yaml_text

GRACE_S: Final = 180
"""Seconds that a pod has to end after SIGTERM: a learner finishes its step and writes a checkpoint."""
RETRIES: Final = 20
"""Pods of one Job that may fail before the Job does; evicted ones are not counted."""
RUNS: Final = "/runs"
"""Where the volume is mounted."""
COPY_KEYS: Final = 'mkdir -p -m 700 "$KEYS" && cp /secret/* "$KEYS" && chmod 600 "$KEYS"/*'
"""A Secret is mounted as links, and readable for the pod's group; the programs accept neither."""
NEEDED: Final[Mapping[str, tuple[str, ...]]] = {
    "actors": ("server.key", "learner.key", "joiner.key_secret", "actor.key_secret"),
    "teachers": ("server.key", "learner.key", "joiner.key_secret", "teacher.key_secret"),
}
"""Keys by group; the run has all of them."""

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesRun:
    """What to render."""

    name: str
    image: str
    config: str
    """The resolved configuration, as YAML."""
    groups: tuple[HostGroup, ...]
    port: int
    storage_gib: int


def manifests(run: KubernetesRun) -> str:
    """All but the Secrets, as one file."""
    return yaml_text(_manifests(run))


def secrets(run: KubernetesRun, keys: Path) -> str:
    """The Secrets, as one file: of the run, and of each group that joins by address. `keys`: folder with all keys."""
    files = sorted(file.name for file in keys.iterdir())
    owned = {"run": files} | {group.name: NEEDED[group.name] for group in run.groups if group.name in NEEDED}
    return yaml_text(
        _secret(run, owner, {name: (keys / name).read_bytes() for name in names}) for owner, names in owned.items()
    )


def _manifests(run: KubernetesRun) -> Iterator[Manifest]:
    many = any(group.name == "ranks" for group in run.groups)
    yield {**_head("v1", "ConfigMap", run, "config"), "data": {"config.yaml": run.config}}
    yield {
        **_head("v1", "PersistentVolumeClaim", run, "runs"),
        "spec": {
            "accessModes": ["ReadWriteMany" if many else "ReadWriteOnce"],
            "resources": {"requests": {"storage": f"{run.storage_gib}Gi"}},
        },
    }
    yield {
        **_head("v1", "Service", run, ""),
        "spec": {
            "clusterIP": "None",
            "selector": _labels(run, "run"),
            "publishNotReadyAddresses": True,
            "ports": [{"name": "buffer", "port": run.port}],
        },
    }
    for group in run.groups:
        yield _job(run, group)


def _job(run: KubernetesRun, group: HostGroup) -> Manifest:
    hosts = len(group.workers)
    return {
        **_head("batch/v1", "Job", run, group.name),
        "spec": {
            "completionMode": "Indexed",
            "completions": hosts,
            "parallelism": hosts,
            "backoffLimit": RETRIES,
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    # A configuration that is wrong, or a ledger that does not balance, is not better the next time.
                    {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2, 3]}},
                ]
            },
            "template": {"metadata": {"labels": _labels(run, group.name)}, "spec": _pod(run, group)},
        },
    }


def _pod(run: KubernetesRun, group: HostGroup) -> Manifest:
    mounts = {"/config": "config", "/dev/shm": "memory"}
    volumes: list[Manifest] = [
        {"name": "config", "configMap": {"name": f"{run.name}-config"}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
    ]
    if group.name != "ranks":
        mounts["/secret"] = "secret"
        volumes.append({"name": "secret", "secret": {"secretName": f"{run.name}-keys-{group.name}"}})
    if group.name in ("run", "ranks"):
        mounts[RUNS] = "runs"
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": f"{run.name}-runs"}})
    container = {
        "name": group.name,
        "image": run.image,
        "command": ["bash", "-c", _run_script(run) if group.name == "run" else _join_script(group)],
        "env": _environment(run, group),
        "resources": {"limits": _resources(group.host)},
        "volumeMounts": [{"name": volume, "mountPath": path} for path, volume in mounts.items()],
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "containers": [container],
        "volumes": volumes,
    }


def _environment(run: KubernetesRun, group: HostGroup) -> list[Manifest]:
    if group.name == "run":
        own = {"RUN": f"{RUNS}/{run.name}", "KEYS": f"{RUNS}/{run.name}/keys", "PORT": str(run.port)}
    elif group.name == "ranks":
        own = {"RUN": f"{RUNS}/{run.name}"}
    else:
        own = {"RUN": f"tcp://{run.name}:{run.port}", "KEYS": "/tmp/keys", "JOINED": "/tmp/joined"}
    plain: list[Manifest] = [{"name": name, "value": value} for name, value in own.items()]
    if group.name == "run":
        return [*plain, {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    return plain  # Kubernetes itself gives each pod of an Indexed Job its JOB_COMPLETION_INDEX


def _run_script(run: KubernetesRun) -> str:
    return f"""\
{COPY_KEYS} || exit 1
[ -f "$RUN/run.json" ] && resume=--resume
exec stillhouse --run-dir "$RUN" $resume --config /config/config.yaml --launch.status plain \\
    --buffer.bind "tcp://$POD_IP:$PORT" --weights.host "$POD_IP"{none_beside_the_learner(run.groups)}
"""


def _join_script(group: HostGroup) -> str:
    how = "" if group.name == "ranks" else ' --config /config/config.yaml --keys "$KEYS" --dir "$JOINED"'
    copy = "" if group.name == "ranks" else f"{COPY_KEYS} || exit 1\n"
    return f"""\
{copy}shares=({" ".join(map(str, group.workers))})
trap 'kill -TERM $join 2> /dev/null; over=yes' TERM
while [ -z "$over" ]; do
    stillhouse join "$RUN"{how} \\
        {group.flag} "${{shares[JOB_COMPLETION_INDEX]}}" --name-prefix {group.name}-$JOB_COMPLETION_INDEX & join=$!
    wait $join; code=$?
    [ -n "$over" ] && wait $join
    # 1, 75: the run broke off, or cannot be joined yet.
    case $code in 1|75) sleep {REJOIN_S} ;; *) exit $code ;; esac
done
"""


def _resources(host: HostConfig) -> Manifest:
    gpus = {"nvidia.com/gpu": host.gpus} if host.gpus else {}
    return {"cpu": host.cpus, "memory": f"{host.memory_gib}Gi", **gpus}


def _secret(run: KubernetesRun, owner: str, files: Mapping[str, bytes]) -> Manifest:
    data = {name: base64.b64encode(content).decode() for name, content in files.items()}
    return {**_head("v1", "Secret", run, f"keys-{owner}"), "type": "Opaque", "data": data}


def _head(version: str, kind: str, run: KubernetesRun, part: str) -> Manifest:
    name = f"{run.name}-{part}" if part else run.name
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": {"app": run.name}}}


def _labels(run: KubernetesRun, part: str) -> Mapping[str, str]:
    return {"app": run.name, "part": part}
