"""What is sent, in which pieces and from where, where `weights.*` leaves it at auto."""

from __future__ import annotations

from typing import Literal

import pytest

from weights.config import PublishDtype, Staging, WeightsConfig
from weights.publish_choices import bucket_size, sent_dtype, server_dtype, staged_in


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
    ],
)
def test_copies_lie_where_they_are_sent_from(
    asked: Staging, device: str, backend: Literal["gloo", "nccl"], place: str
) -> None:
    assert staged_in(asked, device, backend) == place
