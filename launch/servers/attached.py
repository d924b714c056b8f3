"""Asks running SGLang servers, which the user names by `urls`, what they are before anything starts; and describes what
the servers of a run can do."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from engines.config import ServerConfig
from engines.provider import EngineRole
from engines.sglang.config import ServerLinkConfig
from engines.sglang.features import Features, probe_server, why_unfit
from engines.sglang.http import RequestRefused, ServerUnavailable
from engines.sglang.stream import StreamError
from engines.sglang.tokenizer import compare_tokenizers
from launch.config.run import RunConfig
from launch.runfolder import SERVERS
from launch.servers.plan import count, server_config, server_groups, urls_of, with_server

PROBE_TIMEOUT_S: Final = 20.0
"""For a server that should be there; the configured connect timeout where that is shorter."""
AT_ONCE: Final = 16
NAMES_SHOWN: Final = 8
log = logging.getLogger(__name__)


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
    for key, role, first, own in server_groups(config):
        urls = urls_of(own, role)
        if not urls:
            continue
        if len(urls) != count(own, role):
            mistakes.append(
                f"{role}s: got {count(own, role)} with {len(urls)} {key}.urls, expected the same number of both: "
                f"each {role} has a server of its own (leave --{role}s out, and there are as many as urls)"
            )
            continue
        features, wrong = _ask(own, key, role)
        mistakes += wrong
        if features:
            told = [*_one_kind(role, urls, features), *_other_tokenizers(own, key, role)]
            mistakes += told
            if not told:  # of teachers, which need not be alike, the first one's
                config = with_server(config, key, _filled(server_config(own, role), features[0]))
            found += [(f"{role}-{first + i}", server) for i, server in enumerate(features)]
    return Attached(config, found, mistakes)


def _ask(config: RunConfig, key: str, role: EngineRole) -> tuple[list[Features], list[str]]:
    """(features of all, or none; what went wrong). `key`: where their settings stand."""
    settings = _settings(config, role)
    name, secret = settings.api_key_env, _secret(settings)
    if name and not secret:
        return [], [f"{key}.sglang.api_key_env: the environment has no {name}, expected the bearer key of {key}.urls"]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(_ask_one, urls_of(config, role), repeat(settings), repeat(secret)))
    wrong = [f"{key}.urls: {answer}" for answer in answers if isinstance(answer, str)]
    features = [answer for answer in answers if isinstance(answer, Features)]
    if role == "actor" and not wrong:
        unfit = [
            (url, why_unfit(one, config.actor.sglang)) for url, one in zip(urls_of(config, role), features, strict=True)
        ]
        wrong = [f"{key}.urls: {url}: {why}" for url, why in unfit if why]
    return ([] if wrong else features), wrong


def _ask_one(url: str, settings: ServerLinkConfig, key: str) -> Features | str:
    try:
        return probe_server(url, settings, api_key=key)
    except (ServerUnavailable, RequestRefused) as error:
        hint = "" if key else "; a server that wants a bearer key gets it by sglang.api_key_env"
        return f"{url} cannot be used as an SGLang server: {error}{hint}"
    except (StreamError, msgspec.DecodeError) as error:
        return f"{url} does not answer like an SGLang server: {error}"


def _other_tokenizers(config: RunConfig, key: str, role: EngineRole) -> list[str]:
    """Servers that mean other text by the student's ids. `models.student`: a folder, else nothing is asked."""
    student, settings = Path(config.models.student), _settings(config, role)
    if not (student / "tokenizer.json").is_file():
        return []
    mistakes: list[str] = []
    for url in urls_of(config, role):
        try:
            differing = compare_tokenizers(url, settings, student, api_key=_secret(settings))
        except (ServerUnavailable, RequestRefused, msgspec.DecodeError) as error:
            log.warning("%s.urls: the tokenizer of %s cannot be compared with the student's: %s", key, url, error)
            continue
        if differing is None:
            log.warning("%s.urls: %s does not say which tokenizer it has; it is taken for the student's", key, url)
        elif differing:
            named = ", ".join(
                f"{i} is {ours!r} for the student and {theirs!r} there" for i, ours, theirs in differing[:3]
            )
            mistakes.append(
                f"{key}.urls: {url} has another tokenizer than the student in {student}: {len(differing)} of the ids "
                f"compared stand for other text, first {named}; expected a server with the student's tokenizer"
            )
    return mistakes


def _settings(config: RunConfig, role: EngineRole) -> ServerLinkConfig:
    """With a short wait: the server should be there."""
    settings = config.actor.sglang if role == "actor" else config.teacher.sglang
    short = min(settings.connect_timeout_s, PROBE_TIMEOUT_S)
    return msgspec.structs.replace(settings, connect_timeout_s=short)


def _secret(settings: ServerLinkConfig) -> str:
    """The bearer key; empty where none is configured, or where the environment has none."""
    return os.environ.get(settings.api_key_env, "") if settings.api_key_env else ""


def _one_kind(role: EngineRole, urls: tuple[str, ...], features: list[Features]) -> list[str]:
    """The servers of the actors are ranks of one weight group: laid out by one tp, on one kind of device."""
    kinds = {(server.device, server.tp_size) for server in features}
    if role != "actor" or len(kinds) == 1:
        return []
    told = ", ".join(
        f"{url} is on {server.device} with tp {server.tp_size}" for url, server in zip(urls, features, strict=True)
    )
    return [f"actor.urls: {told}; expected the same of all, for they take the weights together"]


def _filled(settings: ServerConfig, server: Features) -> ServerConfig:
    return msgspec.structs.replace(settings, device=server.device, tp=server.tp_size)


class ServerSeen(msgspec.Struct, frozen=True):
    """`servers/<worker>.json`."""

    url: str
    features: Features


def features_of_run(run_dir: Path) -> str:
    """The servers that a run folder lists, for the status; empty if no worker has one."""
    found: list[tuple[str, Features]] = []
    for file in sorted((run_dir / SERVERS).glob("*.json")):
        try:
            found.append((file.stem, msgspec.json.decode(file.read_bytes(), type=ServerSeen).features))
        except (OSError, msgspec.DecodeError) as error:
            log.warning("%s cannot be read: %s", file, error)
    return grouped(found)


def grouped(servers: Iterable[tuple[str, Features]]) -> str:
    """One table for each kind of server. Servers that differ only in the label of their weights are of one kind."""
    kinds: defaultdict[Features, list[tuple[str, Features]]] = defaultdict(list)
    for name, features in servers:
        kinds[msgspec.structs.replace(features, weights_label="")].append((name, features))
    tables: list[str] = []
    for same in kinds.values():
        names = [name for name, _ in same]
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        labels = dict.fromkeys(features.weights_label for _, features in same)
        features = msgspec.structs.replace(same[0][1], weights_label=", ".join(list(labels)[:NAMES_SHOWN]))
        tables.append(f"server of {', '.join(names[:NAMES_SHOWN])}{more}:\n{features.table()}")
    return "\n".join(tables)
