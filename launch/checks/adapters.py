"""Decides whether the learner sends adapters alone, which the actors' servers load, or merged weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from stillhouse.engines.config import ServerConfig
from stillhouse.engines.provider import AdapterFacts, ServerFacts
from stillhouse.launch.checks.model_files import model_type
from stillhouse.launch.config.pools import engine_of
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.servers.plan import with_server

replace = msgspec.structs.replace


class AdaptersChosen(NamedTuple):
    config: RunConfig
    """`weights.adapters` is on or off. on: with `weights.transport` wire, and servers' arguments with which
    they load adapters."""
    text: str = ""
    """One line to print; empty: the run has no adapters."""
    mistakes: tuple[str, ...] = ()


def choose_adapters(config: RunConfig, facts: Sequence[ServerFacts]) -> AdaptersChosen:
    """`config`: models are folders, no engine is auto, `server.device` is cpu or cuda. `facts`: of running servers of
    the actors."""
    asked = config.weights.adapters
    server = _server(config, facts) if asked != "off" else "as configured"
    if not isinstance(server, str):
        config = with_server(config, "actor", server)
        weights = replace(config.weights, adapters="on", transport="wire")
        return AdaptersChosen(replace(config, weights=weights), "each version is its adapters, which servers load")
    mistakes: list[str] = []
    if asked == "on":
        mistakes.append(f"weights.adapters: got on, but {server}; expected auto or off, which sends merged weights")
    elif needing := engine_of(config, "actor").needs_adapters(config.actor):
        mistakes.append(f"{needing}, which needs adapters alone on servers (weights.adapters), but {server}")
    text = f"each version is merged with its adapters ({server})" if config.learner.lora.rank else ""
    return AdaptersChosen(replace(config, weights=replace(config.weights, adapters="off")), text, tuple(mistakes))


def _server(config: RunConfig, facts: Sequence[ServerFacts]) -> ServerConfig | str:
    """The settings of the actors' servers, or the reason for merged weights."""
    weights, lora = config.weights, config.learner.lora
    if not lora.rank:
        return "learner.lora.rank is 0"
    if lora.quantize != "none":
        return "servers would add them to the student's own weights, not to those that the learner has in 4 bits"
    if weights.transport not in ("auto", "wire"):
        return f"weights.transport is {weights.transport}, and adapters are files; expected auto or wire"
    if weights.backend == "nccl":
        return "weights.backend is nccl, and adapters are files"
    if weights.verify == "reload":
        return "weights.verify is reload, which compares whole weights"
    if config.learner.ranks > 1:
        return f"each of learner.ranks = {config.learner.ranks} has a part of the adapters"
    student = Path(config.models.student)
    query = AdapterFacts(
        rank=lora.rank,
        targets=lora.targets,
        model_type=model_type(student) if (student / "config.json").is_file() else "",
        asked=weights.adapters == "on",
        facts=tuple(facts),
    )
    return engine_of(config, "actor").with_adapters(config.actor, query)
