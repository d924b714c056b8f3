"""Senseless settings of weight transport are refused, and what `auto` means is decided from the machine."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, Literal

import msgspec
import pytest
import torch

from stillhouse.weights.config import (
    PublishDtype,
    Staging,
    WeightsConfig,
    bucket_size,
    sent_dtype,
    server_dtype,
    staged_in,
)
from stillhouse.weights.group_operations import choose_backend
from tests.patience import PATIENCE_S


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("host", "", "host is empty"),
        ("store_port", 70_000, "store_port: got 70000, expected int >= 0 and <= 65535"),
        ("bucket_bytes", 1_000, "bucket_bytes: got 1000, expected int >= 0 and a multiple of 64"),
        ("bucket_bytes", -64, "bucket_bytes: got -64"),
        ("join_timeout_s", 0.0, "join_timeout_s: got 0.0, expected float > 0"),
        ("broadcast_timeout_s", float("inf"), "broadcast_timeout_s: got inf"),
        ("join_window_s", -1.0, "join_window_s: got -1.0, expected float >= 0"),
    ],
)
def test_senseless_values_are_refused(field: str, value: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        WeightsConfig(**{field: value})


def test_a_backend_that_cannot_be_had_is_refused_and_what_nobody_decided_is_gloo() -> None:
    """NCCL takes one rank per GPU, and who hosts the group does not know where the others are."""
    for device in ("cpu", "cuda"):
        assert choose_backend("auto", torch.device(device)) == "gloo"
        assert choose_backend("gloo", torch.device(device)) == "gloo"
    with pytest.raises(ValueError, match="set backend to gloo"):
        choose_backend("nccl", torch.device("cpu"))


def test_settings_and_roster_load_without_torch() -> None:
    code = "import sys, stillhouse.weights.config, stillhouse.weights.roster; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=PATIENCE_S).returncode == 0


def test_weights_go_over_a_network_in_plain_text_only_where_that_is_said() -> None:
    assert WeightsConfig().way == "collective" and WeightsConfig().makes_groups
    for transport in ("auto", "wire"):
        assert WeightsConfig(host="10.0.0.1", transport=transport).way == "wire"
    plain: dict[str, Any]
    for plain in ({"transport": "collective"}, {"backend": "nccl"}, {"transport": "mine:Transport"}):
        with pytest.raises(ValueError, match="allow_plain_network"):
            WeightsConfig(host="10.0.0.1", **plain)
        assert WeightsConfig(host="10.0.0.1", allow_plain_network=True, **plain).makes_groups
    assert WeightsConfig(host="10.0.0.1", allow_plain_network=True).way == "collective"


@pytest.mark.parametrize(("field", "value"), [("backend", "nccl"), ("verify", "reload")])
def test_what_no_process_group_can_do_is_refused(field: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{field} = {value} with transport = wire"):
        msgspec.convert({"transport": "wire", field: value}, WeightsConfig)


def test_auto_is_the_default_of_all_three() -> None:
    config = WeightsConfig()
    assert (config.dtype, config.staging, config.bucket_bytes) == ("auto", "auto", 0)


@pytest.mark.parametrize(
    ("args", "device", "checkpoint", "dtype"),
    [
        ((), "cuda", "bfloat16", "bfloat16"),
        ((), "cuda", "float32", "keep"),
        ((), "cpu", "bfloat16", "keep"),
        (("--dtype", "bfloat16"), "cpu", "float32", "bfloat16"),
        (("--dtype=half",), "cuda", "bfloat16", "float16"),
        (("--dtype", "float32"), "cuda", "bfloat16", "keep"),
        (("--dtype", "auto", "--tp-size", "2"), "cuda", "bfloat16", "bfloat16"),
        (("--tp-size", "2", "--dtype"), "cuda", "bfloat16", "keep"),
    ],
)
def test_a_servers_dtype_is_known_only_where_nothing_can_be_lost(
    args: tuple[str, ...], device: str, checkpoint: str, dtype: str
) -> None:
    assert server_dtype(args, device, checkpoint) == dtype


@pytest.mark.parametrize(
    ("asked", "sent"), [("auto", "bfloat16"), ("keep", "keep"), ("float32", "float32"), ("float16", "float16")]
)
def test_what_was_asked_for_is_sent(asked: PublishDtype, sent: str) -> None:
    assert sent_dtype(asked, "bfloat16") == sent


def test_buckets_are_larger_from_a_gpu_unless_their_size_was_said() -> None:
    assert [bucket_size(0, device) for device in ("cpu", "cuda")] == [64 << 20, 512 << 20]
    assert [bucket_size(4096, device) for device in ("cpu", "cuda")] == [4096, 4096]


@pytest.mark.parametrize(
    ("asked", "device", "backend", "place"),
    [
        ("auto", "cuda", "gloo", "host"),
        ("auto", "cuda", "nccl", "device"),
        ("host", "cuda", "nccl", "host"),
        ("device", "cuda", "gloo", "device"),
        ("auto", "cpu", "gloo", "device"),
        ("host", "cpu", "gloo", "device"),
        ("ipc", "cpu", "gloo", "device"),
        ("ipc", "cuda", "gloo", "host"),
    ],
)
def test_copies_lie_where_they_are_sent_from(
    asked: Staging | Literal["ipc"], device: str, backend: Literal["gloo", "nccl"], place: str
) -> None:
    config = WeightsConfig(transport="ipc") if asked == "ipc" else WeightsConfig(staging=asked)
    assert staged_in(config, device, backend) == place
