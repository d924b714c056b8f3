"""The files of a run on Kubernetes: its manifests, and what belongs to its owner alone, the keys and their Secrets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from stillhouse.engines.registry import AUTO
from stillhouse.launch.checks.preflight import replace
from stillhouse.launch.config.files import config_text
from stillhouse.launch.config.pools import teacher_pools
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.errors import ConfigError
from stillhouse.launch.render.kubernetes import KubernetesRun, manifests, secrets
from stillhouse.launch.stored_run import groups_with_store
from stillhouse.launch.topology import HostGroup
from stillhouse.protocol.atomic_file import write_atomic
from stillhouse.protocol.keys import KEYS, make_keys

SECRETS: Final = "secrets.yaml"


def kubernetes_files(config: RunConfig, groups: Sequence[HostGroup], name: str, private: Path) -> str:
    """Make the keys of the run in `private`, where there are none yet, and their Secrets. Returns the manifests, which
    anybody may read. Raises ConfigError, and OSError if `private` cannot be written."""
    expect_name(name)
    if not config.cluster.image:
        raise ConfigError("cluster.image: got none, expected a container image in which `stillhouse` can be called")
    _refuse_undecided(config, groups)
    run = KubernetesRun(
        name=name,
        image=config.cluster.image,
        config=config_text(_at_service(config, groups, name)),
        groups=tuple(groups),
        port=config.cluster.port,
        shards=config.buffer.shards,
        storage_gib=config.cluster.volume_gib,
        stored=groups_with_store(config, groups) if config.store else None,
    )
    private.mkdir(parents=True, mode=0o700, exist_ok=True)
    make_keys(private / KEYS)
    file = private / SECRETS
    file.touch(mode=0o600)
    write_atomic(file, secrets(run, private / KEYS).encode())
    file.chmod(0o600)
    return manifests(run)


def expect_name(name: str) -> None:
    """Raise ConfigError for a name that Kubernetes does not accept."""
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name):
        raise ConfigError(
            f"--name: got {name!r}, expected up to 40 lower-case letters, digits and dashes, the first a letter"
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
        raise ConfigError(*(f"{key}: got {AUTO}, expected torch or sglang, the same on all hosts" for key in undecided))
