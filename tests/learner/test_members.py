"""Whom the learner sends weights to, by configuration."""

from __future__ import annotations

import pytest

from actors.config import ActorConfig
from engines.config import EngineConfig
from engines.sglang_config import ServerConfig
from learner.members import EMBEDDED, CheckBy, Members
from learner.publish_config import PublishConfig
from learner.worker import members_of


def on_servers(server: ServerConfig) -> ActorConfig:
    return ActorConfig(engine="sglang", server=server, torch=EngineConfig(device="cpu"))


def test_embedded_engines_have_a_rank_each() -> None:
    actor = ActorConfig(engine="torch", server=ServerConfig(device="cuda", tp=2))
    assert members_of(actor, PublishConfig()) == EMBEDDED


@pytest.mark.parametrize(
    ("server", "check_by"),
    [
        (ServerConfig(device="cpu"), "expected"),
        (ServerConfig(device="cpu", tp=2), "reload"),
        (ServerConfig(device="cuda"), "reload"),
    ],
)
def test_checksums_are_foretold_only_where_they_can_be(server: ServerConfig, check_by: CheckBy) -> None:
    expected = Members(kind="servers", ranks_each=server.tp, check_by=check_by)
    assert members_of(on_servers(server), PublishConfig()) == expected


@pytest.mark.parametrize("verify", ["expected", "reload", "off"])
def test_or_as_configured(verify: CheckBy) -> None:
    members = members_of(on_servers(ServerConfig(device="cuda", tp=2)), PublishConfig(verify=verify))
    assert members.check_by == verify
