from __future__ import annotations

from typing import Any

import msgspec
import pytest

from stillhouse.buffer.config import BufferConfig


def test_defaults_are_asynchronous_distillation() -> None:
    config = BufferConfig()
    assert (config.max_staleness, config.batch_rollouts, config.release) == (4, 64, "deadline")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"advertise": "198.51.100.7:5555"}, "expected tcp://HOST:PORT"),
        ({"max_staleness": -1}, "max_staleness: got -1, expected int >= 0"),
        ({"batch_rollouts": 0}, "batch_rollouts: got 0, expected int >= 1"),
        ({"max_attempts": 1001}, "max_attempts: got 1001, expected int >= 1 and <= 1000"),
        ({"lease_s": 0.0}, "lease_s: got 0.0, expected float > 0"),
        ({"ticket_timeout_s": float("nan")}, "ticket_timeout_s: got nan"),
        ({"peer_timeout_s": 1.5, "heartbeat_s": 1.0}, "at least twice heartbeat_s"),
        ({"hedge_budget": 1.5}, "hedge_budget: got 1.5, expected float >= 0 and <= 1"),
        ({"hedge_multiple": float("nan")}, "hedge_multiple: got nan, expected float >= 0"),
        ({"max_segment_tokens": 10, "max_rollout_tokens": 5}, "at most max_rollout_tokens"),
    ],
)
def test_senseless_values_are_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        BufferConfig(**settings)


def test_unknown_keys_and_policies_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.convert({"max_stalenes": 1}, BufferConfig)
    with pytest.raises(msgspec.ValidationError, match="release"):
        msgspec.convert({"release": "sometimes"}, BufferConfig)


@pytest.mark.parametrize(
    ("settings", "encrypted"),
    [
        ({}, False),
        ({"encrypt": "on"}, True),
        ({"bind": "tcp://0.0.0.0:5555"}, True),
        ({"advertise": "tcp://198.51.100.7:5555"}, True),
        ({"bind": "tcp://10.0.0.1:5555", "allow_plain_network": True}, True),
        ({"bind": "tcp://10.0.0.1:5555", "encrypt": "off", "allow_plain_network": True}, False),
    ],
)
def test_links_that_other_machines_reach_are_encrypted(settings: dict[str, Any], encrypted: bool) -> None:
    assert BufferConfig(**settings).encrypted == encrypted


def test_no_encryption_on_a_network_must_be_said_twice() -> None:
    with pytest.raises(ValueError, match=r"buffer\.advertise \(tcp://198"):
        BufferConfig(advertise="tcp://198.51.100.7:5555", encrypt="off")
    with pytest.raises(ValueError, match="allow_plain_network"):
        BufferConfig(bind="tcp://*:5555", encrypt="off")
