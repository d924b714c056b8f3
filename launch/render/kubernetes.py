"""Kubernetes manifests of a run: a Job for the run, and an Indexed Job for each group of other hosts.

Only the run's pod has the volume with the run's folder. Pods of actors and teachers join by the name of a Service, with
the configuration from a ConfigMap and keys from a Secret. Further ranks of the learner write checkpoints, so they
mount the volume too, which must then allow several writers."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from stillhouse.engines.registry import AUTO, BUILT_IN
from stillhouse.launch.checks.preflight import replace
from stillhouse.launch.config.files import config_text
from stillhouse.launch.config.pools import teacher_pools
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.errors import ConfigError
from stillhouse.launch.render.template import render_template
from stillhouse.launch.topology import REJOIN_S, HostGroup, flags_of_the_run
from stillhouse.protocol.atomic_file import write_atomic
from stillhouse.protocol.keys import KEYS, make_keys

SECRETS: Final = "secrets.yaml"
GRACE_S: Final = 180
"""Seconds that a pod has to end after SIGTERM: a learner finishes its step and writes a checkpoint."""
RETRIES: Final = 20
"""Pods of one Job that may fail before the Job does; evicted ones are not counted."""
COPY_KEYS: Final = 'mkdir -p -m 700 "$KEYS" && cp /secret/* "$KEYS" && chmod 600 "$KEYS"/*'
"""A Secret is mounted as links, and readable for the pod's group; the programs accept neither."""
NEEDED: Final[Mapping[str, tuple[str, ...]]] = {
    "actors": ("server.key", "learner.key", "joiner.key_secret", "actor.key_secret"),
    "teachers": ("server.key", "learner.key", "joiner.key_secret", "teacher.key_secret"),
}
"""Keys by group; the run has all of them."""


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

    @property
    def has_ranks(self) -> bool:
        return any(group.name == "ranks" for group in self.groups)

    def joins_by_address(self, group: HostGroup) -> bool:
        return group.name in NEEDED


def kubernetes_files(config: RunConfig, groups: Sequence[HostGroup], name: str, private: Path) -> str:
    """Make the keys of the run in `private`, where there are none yet, and their Secrets. Returns the manifests, which
    anybody may read. Raises ConfigError, and OSError if `private` cannot be written."""
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name):
        raise ConfigError(
            f"--name: got {name!r}, expected up to 40 lower-case letters, digits and dashes, the first a letter"
        )
    if not config.cluster.image:
        raise ConfigError(
            "cluster.image: got none, expected a container image in which `stillhouse` can be called "
            "(docker/Dockerfile makes one)"
        )
    _refuse_undecided(config, groups)
    run = KubernetesRun(
        name=name,
        image=config.cluster.image,
        config=config_text(_at_service(config, groups, name)),
        groups=tuple(groups),
        port=config.cluster.port,
        storage_gib=config.cluster.volume_gib,
    )
    private.mkdir(parents=True, mode=0o700, exist_ok=True)
    make_keys(private / KEYS)
    file = private / SECRETS
    file.touch(mode=0o600)
    write_atomic(file, _secrets(run, private / KEYS).encode())
    file.chmod(0o600)
    return render_template(
        "kubernetes.yaml.j2",
        run=run,
        no_workers=flags_of_the_run(groups),
        copy_keys=COPY_KEYS,
        rejoin_s=REJOIN_S,
        retries=RETRIES,
        grace_s=GRACE_S,
    )


def _secrets(run: KubernetesRun, keys: Path) -> str:
    """The Secrets, as one file: of the run, and of each group that joins by address. `keys`: folder with all keys."""
    files = tuple(sorted(file.name for file in keys.iterdir()))
    owned = {"run": files} | {group.name: NEEDED[group.name] for group in run.groups if run.joins_by_address(group)}
    return yaml.safe_dump_all(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": f"{run.name}-keys-{owner}", "labels": {"app": run.name}},
            "type": "Opaque",
            "data": {name: base64.b64encode((keys / name).read_bytes()).decode() for name in names},
        }
        for owner, names in owned.items()
    )


def _at_service(config: RunConfig, groups: Sequence[HostGroup], name: str) -> RunConfig:
    """The configuration with the addresses by which the other pods know the run; it replaces them by its pod's own."""
    if len(groups) == 1:
        return config
    return replace(
        config,
        buffer=replace(config.buffer, bind=f"tcp://{name}:{config.cluster.port}"),
        weights=replace(config.weights, host=name),
    )


def _refuse_undecided(config: RunConfig, groups: Sequence[HostGroup]) -> None:
    """Raise ConfigError where hosts would choose engines by themselves, each what it finds."""
    on_own_hosts = {(group.name, group.pool) for group in groups}
    engines = {
        f"{pool.key}.engine": pool.config.teacher.engine
        for pool in teacher_pools(config)
        if ("teachers", pool.name if config.pools else "") in on_own_hosts
    }
    if ("actors", "") in on_own_hosts:
        engines["actor.engine"] = config.actor.engine
    undecided = [key for key, engine in engines.items() if engine == AUTO]
    if undecided:
        known = " or ".join(BUILT_IN)
        raise ConfigError(*(f"{key}: got {AUTO}, expected {known}, the same on all hosts" for key in undecided))
