"""Whom the learner sends weights to, by configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from stillhouse.actors.config import ActorConfig
from stillhouse.engines.config import EngineConfig, ServerConfig
from stillhouse.engines.registry import find_engine
from stillhouse.weights.config import WeightsConfig
from stillhouse.weights.roster import GroupMembers


def members_of(actor: ActorConfig, weights: WeightsConfig, student: str) -> GroupMembers:
    return find_engine(actor.engine).members(actor, weights, student)


def on_servers(server: ServerConfig) -> ActorConfig:
    return ActorConfig(engine="sglang", server=server, torch=EngineConfig(device="cpu"))


def test_embedded_engines_have_a_rank_each() -> None:
    actor = ActorConfig(engine="torch", server=ServerConfig(device="cuda", tp=2))
    assert members_of(actor, WeightsConfig(), "") == GroupMembers(dtype="float32")
    on_gpu = ActorConfig(engine="torch", torch=EngineConfig(device="cuda:1"))
    assert members_of(on_gpu, WeightsConfig(), "").dtype == "bfloat16"
    half = ActorConfig(engine="torch", torch=EngineConfig(dtype="bfloat16"))
    assert members_of(half, WeightsConfig(), "").dtype == "bfloat16"


@pytest.mark.parametrize(
    "server", [ServerConfig(device="cpu"), ServerConfig(device="cpu", tp=2), ServerConfig(device="cuda")]
)
def test_servers_are_checked_against_the_snapshot_file(server: ServerConfig) -> None:
    expected = GroupMembers(kind="servers", ranks_each=server.tp, check_by="reload")
    assert members_of(on_servers(server), WeightsConfig(), "") == expected


@pytest.mark.parametrize(
    ("written", "fields", "dtype"),
    [
        ({"dtype": "bfloat16"}, {}, "bfloat16"),
        ({"torch_dtype": "float16"}, {}, "float16"),
        ({"text_config": {"torch_dtype": "bfloat16"}}, {}, "bfloat16"),
        ({"dtype": "float32"}, {}, "keep"),  # SGLang makes float16 of it, by its own rounding
        ({}, {}, "keep"),
        (None, {}, "keep"),  # a name of the hub
        ({"dtype": "bfloat16"}, {"urls": ("http://h:1",)}, "keep"),  # somebody else's server
    ],
)
def test_servers_hold_what_the_students_checkpoint_says(
    tmp_path: Path, written: dict[str, Any] | None, fields: dict[str, Any], dtype: str
) -> None:
    if written is not None:
        (tmp_path / "config.json").write_text(json.dumps(written))
    actor = ActorConfig(engine="sglang", server=ServerConfig(device="cuda"), **fields)
    assert members_of(actor, WeightsConfig(), str(tmp_path)).dtype == dtype


@pytest.mark.parametrize("verify", ["reload", "off"])
def test_or_as_configured(verify: Literal["reload", "off"]) -> None:
    members = members_of(on_servers(ServerConfig(device="cuda", tp=2)), WeightsConfig(verify=verify), "")
    assert members.check_by == verify
