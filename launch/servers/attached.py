"""Servers that run: those that the user names by `urls`, asked before anything starts, and what workers found out."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from stillhouse.engines.provider import SERVERS, EngineRole, ServerFacts, ServerRecord
from stillhouse.launch.config.pools import WorkerGroup
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.servers.plan import server_groups, with_server
from stillhouse.teachers.config import TeacherConfig

NAMES_SHOWN: Final = 8
log = logging.getLogger(__name__)


class Attached(NamedTuple):
    """What was found out about running servers."""

    config: RunConfig
    """With `server.device` and `server.tp` as the servers report them."""
    servers: list[tuple[str, ServerFacts]]
    """(worker, its server)."""
    mistakes: list[str]


def ask_servers(config: RunConfig) -> Attached:
    """Ask all running servers that `urls` name."""
    found: list[tuple[str, ServerFacts]] = []
    mistakes: list[str] = []
    for group in server_groups(config):
        key, role, settings = group.key, group.role, group.settings
        urls = settings.urls
        if not urls:
            continue
        if len(urls) != group.n:
            mistakes.append(
                f"{role}s: got {group.n} with {len(urls)} {key}.urls, expected the same number of both: each "
                f"{role} needs its own server (without --{role}s there is one {role} per url)"
            )
            continue
        facts, wrong = group.servers.ask(key, role, settings, _tokens_of(group))
        wrong += _unlike(role, urls, facts)
        mistakes += wrong
        if facts and not wrong:  # teachers' servers may differ; the configuration gets the first one's values
            server = msgspec.structs.replace(settings.server, device=facts[0].device, tp=facts[0].tp)
            config = with_server(config, key, server)
        found += zip(group.workers, facts, strict=False)
    return Attached(config, found, mistakes)


def _tokens_of(group: WorkerGroup) -> str:
    """The model whose token ids a server gets."""
    own = isinstance(group.settings, TeacherConfig) and group.settings.tokenizer == "other"
    return group.model if own else group.config.models.student


def _unlike(role: EngineRole, urls: Sequence[str], facts: Sequence[ServerFacts]) -> list[str]:
    """Servers of actors are ranks of one weight group, so they need the same tp and kind of device."""
    if role != "actor" or len({(server.device, server.tp) for server in facts}) <= 1:
        return []
    listed = ", ".join(
        f"{url} is on {server.device} with tp {server.tp}" for url, server in zip(urls, facts, strict=True)
    )
    return [f"actor.urls: {listed}; expected the same for all, because they receive weights together"]


def features_of_run(run_dir: Path) -> str:
    """The servers that a run folder lists, for the status; empty if no worker has one."""
    found: list[tuple[str, ServerFacts]] = []
    for file in sorted((run_dir / SERVERS).glob("*.json")):
        try:
            found.append((file.stem, msgspec.json.decode(file.read_bytes(), type=ServerRecord).facts))
        except (OSError, msgspec.DecodeError) as error:
            log.warning("%s cannot be read: %s", file, error)
    return grouped(found)


def grouped(servers: Iterable[tuple[str, ServerFacts]]) -> str:
    """One table for each kind of server. Servers that differ only in the label of their weights are of one kind."""
    kinds: defaultdict[ServerFacts, list[tuple[str, str]]] = defaultdict(list)
    for name, facts in servers:
        kinds[msgspec.structs.replace(facts, label="")].append((name, facts.label))
    tables: list[str] = []
    for facts, same in kinds.items():
        names = [name for name, _ in same]
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        labels = ", ".join(list(dict.fromkeys(label for _, label in same if label))[:NAMES_SHOWN])
        weights = f" (weights {labels})" if labels else ""
        tables.append(f"server of {', '.join(names[:NAMES_SHOWN])}{more}{weights}:\n{facts.text}")
    return "\n".join(tables)
