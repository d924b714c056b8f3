"""Asks the servers of environments and judges once before a start: whether something listens at their address."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, cast
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from stillhouse.actors.envs.registry import UnknownEnvironment, find_environment
from stillhouse.launch.checks.finding import Case, Finding, Impossible
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.errors import ConfigError

WAIT_S: Final = 5.0
JUDGE: Final = "start the judge's server before the run"
PORTS: Final = {"http": 80, "https": 443}


class EnvironmentServer(NamedTuple):
    """A server that an environment needs."""

    key: str
    """Where the configuration names it."""
    address: str
    start: str
    """How to start it."""


def check_environment_servers(config: RunConfig) -> None:
    """Raises ConfigError with all servers at whose address nothing listens."""
    if silent := [one for one in _asked(config) if one.status == "failed"]:
        raise ConfigError(*(one.text() for one in silent))


def environment_servers(case: Case) -> Iterator[Finding]:
    """Whether something listens at each address."""
    if not (findings := list(_asked(case.config))):
        raise Impossible("no environment and no judge of this run is on a server that this machine must reach")
    yield from findings


def _asked(config: RunConfig) -> Iterator[Finding]:
    """Nothing is asked where the actors of the run are on other machines."""
    if config.launch.backend != "local" or not config.actors:
        return
    for one in _servers(config):
        error, at = _silent(one.address), _shown(one.address)
        yield Finding(
            check="environment servers",
            subject=one.key,
            status="failed" if error else "ok",
            measured=f"nothing answers at {at} ({error})" if error else f"something listens at {at}",
            advice=one.start,
        )


def _servers(config: RunConfig) -> Iterator[EnvironmentServer]:
    """Those that the environments of the run name, by an option that the environment's `server` tells, and judges."""
    for name, environment in config.environments.items():
        key, options = f"actor.environments.{name}.options", environment.options
        try:
            declared: object = getattr(find_environment(environment.name), "server", None)
        except UnknownEnvironment:
            continue
        match declared:
            case (str(option), str(start)) if isinstance(options.get(option), str) and options[option]:
                yield EnvironmentServer(f"{key}.{option}", options[option], f"start it before the run: {start}")
            case _:
                pass
        match options:
            case {"reward": "judge", "reward_options": Mapping() as of_judge}:
                url = cast("Mapping[str, Any]", of_judge).get("base_url")
                yield EnvironmentServer(f"{key}.reward_options.base_url", str(url), JUDGE)
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
