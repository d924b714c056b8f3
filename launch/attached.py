"""Running SGLang servers that the user names by `urls`: asked what they are before anything starts."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Final, NamedTuple

import msgspec

from engines.sglang_config import ServerConfig, SGLangConfig
from engines.sglang_features import Features, probe_server
from engines.sglang_http import RequestRefused, ServerUnavailable
from engines.sglang_stream import StreamError
from launch.config import RunConfig
from launch.server_plan import SERVED_ROLES, ServedRole, count, urls_of, uses_sglang

PROBE_TIMEOUT_S: Final = 20.0
"""For a server that should be there; the configured connect timeout where that is shorter."""
AT_ONCE: Final = 16


class Attached(NamedTuple):
    """What was found."""

    config: RunConfig
    """`server.device` and `server.tp` as the servers say."""
    features: list[tuple[str, Features]]
    """(worker, what its server can do)."""
    mistakes: list[str]


def ask_servers(config: RunConfig) -> Attached:
    """Probe all servers that `urls` name, side by side."""
    found: list[tuple[str, Features]] = []
    mistakes: list[str] = []
    for role in SERVED_ROLES:
        urls = urls_of(config, role)
        if not urls or not uses_sglang(config, role):
            continue
        if len(urls) != count(config, role):
            mistakes.append(
                f"{role}s: got {count(config, role)} with {len(urls)} {role}.urls, expected the same number of both: "
                f"each {role} has a server of its own (leave --{role}s out, and there are as many as urls)"
            )
            continue
        features, wrong = _ask(config, role, urls)
        mistakes += wrong
        if features:
            told = _one_kind(role, urls, features)
            mistakes += told
            config = config if told else _filled(config, role, features[0])
            found += [(f"{role}-{i}", server) for i, server in enumerate(features)]
    return Attached(config, found, mistakes)


def _ask(config: RunConfig, role: ServedRole, urls: tuple[str, ...]) -> tuple[list[Features], list[str]]:
    """(features of all, or none; what went wrong)."""
    settings = config.actor.sglang if role == "actor" else config.teacher.sglang
    name = settings.api_key_env
    key = os.environ.get(name, "") if name else ""
    if name and not key:
        return [], [f"{role}.sglang.api_key_env: the environment has no {name}, expected the bearer key of {role}.urls"]
    short = min(settings.connect_timeout_s, PROBE_TIMEOUT_S)
    settings = msgspec.structs.replace(settings, connect_timeout_s=short)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(_ask_one, urls, repeat(settings), repeat(key)))
    wrong = [f"{role}.urls: {answer}" for answer in answers if isinstance(answer, str)]
    return ([] if wrong else [answer for answer in answers if isinstance(answer, Features)]), wrong


def _ask_one(url: str, settings: SGLangConfig, key: str) -> Features | str:
    try:
        return probe_server(url, settings, api_key=key)
    except (ServerUnavailable, RequestRefused) as error:
        hint = "" if key else "; a server that wants a bearer key gets it by sglang.api_key_env"
        return f"{url} cannot be used as an SGLang server: {error}{hint}"
    except (StreamError, msgspec.DecodeError) as error:
        return f"{url} does not answer like an SGLang server: {error}"


def _one_kind(role: ServedRole, urls: tuple[str, ...], features: list[Features]) -> list[str]:
    """The servers of the actors are ranks of one weight group: laid out by one tp, on one kind of device."""
    kinds = {(server.device, server.tp_size) for server in features}
    if role != "actor" or len(kinds) == 1:
        return []
    told = ", ".join(
        f"{url} is on {server.device} with tp {server.tp_size}" for url, server in zip(urls, features, strict=True)
    )
    return [f"actor.urls: {told}; expected the same of all, for they take the weights together"]


def _filled(config: RunConfig, role: ServedRole, server: Features) -> RunConfig:
    """Of teachers, which need not be alike, the first one's."""
    replace = msgspec.structs.replace
    if role == "actor":
        filled = _with(config.actor.server, server)
        return replace(config, actor=replace(config.actor, server=filled))
    return replace(config, teacher=replace(config.teacher, server=_with(config.teacher.server, server)))


def _with(settings: ServerConfig, server: Features) -> ServerConfig:
    return msgspec.structs.replace(settings, device=server.device, tp=server.tp_size)
