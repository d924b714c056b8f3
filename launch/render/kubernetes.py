"""Kubernetes manifests of a run: a Job for the run, and an Indexed Job for each group of other hosts.

Only the run's pod has the volume with the run's folder. Pods of actors and teachers join by the name of a Service, with
the configuration from a ConfigMap and keys from a Secret. Further ranks of the learner write checkpoints, so they
mount the volume too, which must then allow several writers.

A run with a store (`store`) has no volume. Its folder is on the disk of its pod and goes with it: a new pod goes on
from the store. All other pods join by address. Those that read or write the store get the variables of a Secret that
the user makes (`<name>-store`), with the credentials and the server's address; this file has none of them."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stillhouse.launch.config.cluster import HostConfig
from stillhouse.launch.render.yaml_text import yaml_text
from stillhouse.launch.topology import REJOIN_S, GroupName, HostGroup, flags_of_the_run

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
    "ranks": ("server.key", "joiner.key_secret"),
}
"""Keys by group; the run has all of them. `ranks`: in a run with a store."""

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
    shards: int
    """How many processes the buffer has; they listen at as many ports in a row."""
    storage_gib: int
    """Size of the volume; it has none with a store."""
    stored: frozenset[GroupName] | None = None
    """Groups that read or write the run's store; None: it has no store."""

    def joins_by_address(self, group: HostGroup) -> bool:
        return group.name in ("actors", "teachers") or (group.name == "ranks" and self.stored is not None)


def manifests(run: KubernetesRun) -> str:
    """All but the Secrets, as one file."""
    return yaml_text(_manifests(run))


def secrets(run: KubernetesRun, keys: Path) -> str:
    """The Secrets, as one file: of the run, and of each group that joins by address. `keys`: folder with all keys."""
    files = sorted(file.name for file in keys.iterdir())
    owned = {"run": files} | {g.name: NEEDED[g.name] for g in run.groups if run.joins_by_address(g)}
    return yaml_text(
        _secret(run, owner, {name: (keys / name).read_bytes() for name in names}) for owner, names in owned.items()
    )


def _manifests(run: KubernetesRun) -> Iterator[Manifest]:
    many = any(group.name == "ranks" for group in run.groups)
    yield {**_head("v1", "ConfigMap", run, "config"), "data": {"config.yaml": run.config}}
    if run.stored is None:
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
            "ports": [
                {"name": f"buffer-{shard}" if shard else "buffer", "port": run.port + shard}
                for shard in range(run.shards)
            ],
        },
    }
    for group in run.groups:
        yield _job(run, group)


def _job(run: KubernetesRun, group: HostGroup) -> Manifest:
    hosts = len(group.workers)
    return {
        **_head("batch/v1", "Job", run, group.label),
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
            "template": {"metadata": {"labels": _labels(run, group.label)}, "spec": _pod(run, group)},
        },
    }


def _pod(run: KubernetesRun, group: HostGroup) -> Manifest:
    mounts = {"/config": "config", "/dev/shm": "memory"}
    volumes: list[Manifest] = [
        {"name": "config", "configMap": {"name": f"{run.name}-config"}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
    ]
    if group.name == "run" or run.joins_by_address(group):
        mounts["/secret"] = "secret"
        volumes.append({"name": "secret", "secret": {"secretName": f"{run.name}-keys-{group.name}"}})
    if not run.joins_by_address(group):
        mounts[RUNS] = "runs"
        claim = {"persistentVolumeClaim": {"claimName": f"{run.name}-runs"}}
        volumes.append({"name": "runs", **(claim if run.stored is None else {"emptyDir": {}})})
    container: Manifest = {
        "name": group.name,
        "image": run.image,
        "command": ["bash", "-c", _run_script(run) if group.name == "run" else _join_script(run, group)],
        "env": _environment(run, group),
        "resources": {"limits": _resources(group.host)},
        "volumeMounts": [{"name": volume, "mountPath": path} for path, volume in mounts.items()],
    }
    if run.stored is not None and group.name in run.stored:  # optional: a pod's own role may give it access
        container["envFrom"] = [{"secretRef": {"name": f"{run.name}-store", "optional": True}}]
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "containers": [container],
        "volumes": volumes,
    }


def _environment(run: KubernetesRun, group: HostGroup) -> list[Manifest]:
    if group.name == "run":
        own = {"RUN": f"{RUNS}/{run.name}", "KEYS": f"{RUNS}/{run.name}/keys", "PORT": str(run.port)}
    elif not run.joins_by_address(group):
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
exec stillhouse --run-dir "$RUN" --resume-or-start --config /config/config.yaml --launch.status plain \\
    --buffer.bind "tcp://$POD_IP:$PORT" --weights.host "$POD_IP"{flags_of_the_run(run.groups)}
"""


def _join_script(run: KubernetesRun, group: HostGroup) -> str:
    by_address = run.joins_by_address(group)
    how = ' --config /config/config.yaml --keys "$KEYS" --dir "$JOINED"' if by_address else ""
    copy = f"{COPY_KEYS} || exit 1\n" if by_address else ""
    return f"""\
{copy}shares=({" ".join(map(str, group.workers))})
trap 'kill -TERM $join 2> /dev/null; over=yes' TERM
while [ -z "$over" ]; do
    stillhouse join "$RUN"{how} \\
        {group.flag} "${{shares[JOB_COMPLETION_INDEX]}}" --name-prefix {group.label}-$JOB_COMPLETION_INDEX & join=$!
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
