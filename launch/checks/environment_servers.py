"""Asks the servers of environments and judges once before a start: whether something listens at their address."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, cast
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from stillhouse.actors.envs.registry import UnknownEnvironment, find_environment
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.errors import ConfigError

WAIT_S: Final = 5.0
PORTS: Final = {"http": 80, "https": 443}


class Server(NamedTuple):
    """A server that an environment needs."""

    key: str
    """Where the configuration names it."""
    address: str
    start: str
    """How to start it."""


def check_environment_servers(config: RunConfig) -> None:
    """Raises ConfigError with all servers at whose address nothing listens."""
    if mistakes := silent_servers(config):
        raise ConfigError(*mistakes)


def silent_servers(config: RunConfig) -> list[str]:
    """A line for each server at whose address nothing listens. Nothing is asked where the actors of the run are on
    other machines."""
    if config.launch.backend != "local" or not config.actors:
        return []
    return [
        f"{one.key}: nothing answers at {_shown(one.address)} ({error}); {one.start}"
        for one in _servers(config)
        if (error := _silent(one.address))
    ]


def _servers(config: RunConfig) -> Iterator[Server]:
    """Those that the environments of the run name, by an option that the environment's `server` tells, and judges."""
    for name, environment in config.environments.items():
        key, options = f"actor.environments.{name}.options", environment.options
        try:
            declared: object = getattr(find_environment(environment.name), "server", None)
        except UnknownEnvironment:
            continue
        match declared:
            case (str(option), str(start)) if isinstance(options.get(option), str) and options[option]:
                yield Server(f"{key}.{option}", options[option], f"start it before the run: {start}")
            case _:
                pass
        match options:
            case {"reward": "judge", "reward_options": Mapping() as of_judge}:
                url = cast("Mapping[str, Any]", of_judge).get("base_url")
                yield Server(f"{key}.reward_options.base_url", str(url), "start the judge's server before the run")
            case _:
                pass


def _silent(address: str) -> str | None:
    """Why no connection comes about, or None. What goes through a proxy is not asked."""
    parts = urlsplit(address)
    if parts.scheme == "ipc":
        return None if Path(address.removeprefix("ipc://")).exists() else "there is no such socket"
    host = parts.hostname
    if host is None or (parts.scheme in getproxies() and not proxy_bypass(host)):
        return None
    try:
        with socket.create_connection((host, parts.port or PORTS.get(parts.scheme, 80)), WAIT_S):
            return None
    except (OSError, ValueError) as error:
        return str(error)


def _shown(address: str) -> str:
    """The address without a name and password."""
    netloc = urlsplit(address).netloc
    return address.partition("?")[0].replace(netloc, netloc.rpartition("@")[2], 1)
