"""The launcher's choice between adapters alone and merged weights, and its reasons."""

from __future__ import annotations

from typing import Any

import pytest

from stillhouse import builtin
from stillhouse.engines.provider import ServerFacts
from stillhouse.launch.checks.adapters import AdaptersChosen, choose_adapters
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build

SERVER = {"engine": "sglang", "server": {"device": "cpu"}}
LORA = {"lora": {"rank": 8}}


def chosen(
    actor: dict[str, Any] | None = None,
    weights: dict[str, Any] | None = None,
    facts: tuple[ServerFacts, ...] = (),
    **learner: Any,
) -> AdaptersChosen:
    plain: dict[str, Any] = {
        "actor": SERVER | (actor or {}),
        "learner": {**LORA, **learner},
        "weights": weights or {},
        "models": {"student": str(builtin.STUDENT_DIR), "teacher": str(builtin.TEACHER_DIR)},
    }
    return choose_adapters(build(RunConfig, plain), facts)


def test_servers_on_a_cpu_get_the_arguments_for_adapters_and_a_second_look_changes_nothing() -> None:
    mine = ("--log-level", "debug")
    config, text, mistakes = chosen({"server": {"device": "cpu", "args": mine}})
    assert (config.weights.adapters, config.weights.transport, mistakes) == ("on", "wire", ())
    assert "its adapters" in text
    args = config.actor.server.args
    assert args[:3] == ("--enable-lora", "--max-lora-rank", "8") and args[-2:] == mine
    assert choose_adapters(config, ()).config == config, "as when a run is resumed from its config.yaml"


@pytest.mark.parametrize("weights", [{"host": "10.0.0.7"}, {"host": "10.0.0.7", "allow_plain_network": True}])
def test_they_go_by_wire(weights: dict[str, Any]) -> None:
    for asked in ("auto", "on"):
        config, _, mistakes = chosen(None, {**weights, "adapters": asked})
        assert (config.weights.adapters, config.weights.transport, mistakes) == ("on", "wire", ())
        assert choose_adapters(config, ()).config == config, "as in a join, which has the run's config.yaml"


@pytest.mark.parametrize(
    ("actor", "weights", "learner", "reason"),
    [
        ({"engine": "torch"}, {}, {}, "take whole weights"),
        ({"sglang": {"update_mode": "in_place"}}, {}, {}, "update_mode is in_place"),
        ({"sglang": {"update_mode": "retract"}}, {}, {}, "update_mode is retract"),
        ({"server": {"device": "cpu", "args": ["--enable-lora", "--max-lora-rank", "4"]}}, {}, {}, "rank 4 at most"),
        ({}, {"transport": "collective"}, {}, "weights.transport is collective"),
        ({}, {"verify": "reload"}, {}, "weights.verify is reload"),
        ({}, {"backend": "nccl"}, {}, "weights.backend is nccl"),
        ({}, {}, {"ranks": 2}, "learner.ranks = 2"),
        ({}, {}, {"lora": {"rank": 8, "targets": ["c_attn"]}}, "layers c_attn"),
    ],
)
def test_what_stands_in_the_way_is_said_and_is_an_error_where_adapters_were_asked_for(
    actor: dict[str, Any], weights: dict[str, Any], learner: dict[str, Any], reason: str
) -> None:
    config, text, mistakes = chosen(actor, weights, **learner)
    assert config.weights.adapters == "off" and reason in text and not mistakes
    assert config.weights.transport == weights.get("transport", "auto")
    (mistake,) = chosen(actor, {**weights, "adapters": "on"}, **learner).mistakes
    assert reason in mistake and "weights.adapters: got on" in mistake


def test_on_gpus_they_are_sent_only_where_they_were_asked_for() -> None:
    on_gpu = {"server": {"device": "cuda"}}
    assert "never tried on GPUs" in chosen(on_gpu).text
    config, _, mistakes = chosen(on_gpu, {"adapters": "on"})
    assert config.weights.adapters == "on" and "--lora-backend" not in config.actor.server.args and not mistakes


def test_running_servers_are_sent_what_all_of_them_load() -> None:
    def servers(*ranks: int) -> tuple[ServerFacts, ...]:
        return tuple(ServerFacts(device="cpu", tp=1, text="", adapter_rank=rank) for rank in ranks)

    attached = {"urls": ["http://a:1", "http://b:1"]}
    config, _, mistakes = chosen(attached, facts=servers(8, 16))
    assert config.weights.adapters == "on" and config.actor.server.args == () and not mistakes
    assert "rank 0 at most" in chosen(attached, facts=servers(8, 0)).text


def test_a_run_without_adapters_says_nothing_of_them_unless_a_setting_needs_them() -> None:
    off = chosen(lora={"rank": 0})
    assert (off.config.weights.adapters, off.text, off.mistakes) == ("off", "", ())
    for rank, weights in ((0, {}), (8, {"adapters": "off"})):
        (mistake,) = chosen({"sglang": {"update_mode": "keep"}}, weights, lora={"rank": rank}).mistakes
        assert mistake.startswith("actor.sglang.update_mode: got keep, which needs adapters alone")
