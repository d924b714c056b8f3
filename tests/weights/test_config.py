"""Senseless settings of weight transport are refused with what was got and what was expected."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.patience import PATIENCE_S
from weights.config import WeightsConfig
from weights.group_operations import choose_backend


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("host", "", "host is empty"),
        ("store_port", 70_000, "store_port = 70000"),
        ("bucket_bytes", 1_000, "bucket_bytes = 1000; expected a multiple of 64, or 0"),
        ("bucket_bytes", -64, "bucket_bytes = -64"),
        ("join_timeout_s", 0.0, "join_timeout_s = 0.0"),
        ("broadcast_timeout_s", float("inf"), "broadcast_timeout_s = inf"),
        ("join_window_s", -1.0, "join_window_s = -1.0"),
        ("rejoin_delay_max_s", 1.0, "rejoin_delay_max_s = 1.0; expected at least rejoin_delay_s = 5.0"),
        ("keep_snapshots", 0, "keep_snapshots = 0"),
    ],
)
def test_senseless_values_are_refused(field: str, value: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        WeightsConfig(**{field: value})


def test_a_backend_that_cannot_be_had_is_refused_and_what_nobody_decided_is_gloo() -> None:
    """NCCL takes one rank per GPU, and who hosts the group does not know where the others are."""
    for device in ("cpu", "cuda"):
        assert choose_backend("auto", torch.device(device)) == "gloo"
        assert choose_backend("gloo", torch.device(device)) == "gloo"
    with pytest.raises(ValueError, match="set backend to gloo"):
        choose_backend("nccl", torch.device("cpu"))


def test_settings_and_roster_load_without_torch() -> None:
    code = "import sys, weights.config, weights.roster; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=PATIENCE_S).returncode == 0


def test_weights_go_over_a_network_in_plain_text_only_where_that_is_said() -> None:
    with pytest.raises(ValueError, match="allow_plain_network"):
        WeightsConfig(host="10.0.0.1")
    assert WeightsConfig(host="10.0.0.1", allow_plain_network=True).host == "10.0.0.1"
