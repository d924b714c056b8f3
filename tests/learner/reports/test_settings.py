"""The table of a run's settings: what it shows, and what it hides."""

from __future__ import annotations

from typing import Any

import msgspec

from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.learner.reports.settings import MAIN, all_settings, compared_settings


def config(plain: dict[str, Any]) -> RunConfig:
    return build(RunConfig, plain)


def test_it_has_the_main_keys_and_those_that_differ_from_their_defaults() -> None:
    default = compared_settings(RunConfig())
    assert list(default) == [key for key in all_settings(RunConfig()) if key in MAIN]
    assert set(default) == set(MAIN), "each key of MAIN is a key of the configuration"
    changed = config({"learner": {"lr": 1e-3, "frozen": True, "betas": [0.9, 0.95]}, "launch": {"max_restarts": 7}})
    more = compared_settings(changed)
    assert more["learner.lr"] == 1e-3 and default["learner.lr"] == 1e-5
    expected = {"learner.frozen": True, "learner.betas": "0.9, 0.95", "launch.max_restarts": 7}
    assert {key: more[key] for key in more.keys() - default.keys()} == expected


def test_every_key_of_the_configuration_is_in_the_whole_table() -> None:
    def keys(value: Any, key: str) -> list[str]:
        if not isinstance(value, dict):
            return [] if value is None else [key]
        return [name for part, one in value.items() for name in keys(one, f"{key}.{part}" if key else part)]

    run = config({"pools": {"math": {"model": "builtin"}}, "teachers": 1})
    assert sorted(all_settings(run)) == sorted(keys(msgspec.to_builtins(run), ""))
    assert compared_settings(run)["pools.math.model"] == "builtin"


def test_what_may_be_a_secret_is_hidden() -> None:
    options = {
        "api_key": "sk-1",
        "judge": {"Authorization": "Bearer x"},
        "max_tokens": 5,
        "url": "http://me:pw@host/v1",
    }
    run = config({"actor": {"environments": {"mine": {"name": "single_turn", "options": options}}}})
    shown = all_settings(run)
    at = "actor.environments.mine.options."
    assert {key.removeprefix(at): shown[key] for key in shown if key.startswith(at)} == {
        "api_key": "(hidden)",
        "judge.Authorization": "(hidden)",
        "max_tokens": 5,
        "url": "http://(hidden)@host/v1",
    }
    assert not any(secret in str(shown) for secret in ("sk-1", "Bearer", "pw"))
