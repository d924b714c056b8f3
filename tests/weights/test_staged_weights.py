"""Copies for engines and for servers: equal to the originals, and laid so that they can be sent as they lie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from protocol.messages import WeightVersion
from weights.buckets import PackedLayout, manifest_of
from weights.members import EMBEDDED, Members
from weights.staged_weights import StagedWeights

V1 = WeightVersion(0, 1)
SERVERS = Members(kind="servers")


def originals() -> list[tuple[str, Tensor]]:
    return [("half", torch.randn(5).bfloat16()), ("full", torch.randn(3, 2)), ("count", torch.tensor(4))]


@pytest.mark.parametrize("members", [EMBEDDED, SERVERS])
def test_copies_are_equal_and_do_not_change_with_the_originals(members: Members) -> None:
    named = originals()
    staged = StagedWeights(members)
    staged.fill(V1, named)
    kept = [tensor.clone() for _, tensor in named]
    for _, tensor in named:
        tensor.zero_()
    assert [name for name, _ in staged.named] == ["half", "full", "count"]
    for (_, copy), tensor in zip(staged.named, kept, strict=True):
        assert copy.dtype == tensor.dtype and torch.equal(copy, tensor)


def test_for_servers_they_lie_in_buckets_of_whole_tensors() -> None:
    staged = StagedWeights(SERVERS, bucket_bytes=16)
    staged.fill(V1, originals())
    assert PackedLayout(manifest_of(staged.named), 16).run_of(staged.named) is not None


def test_floating_point_copies_are_cast_and_others_are_not() -> None:
    named = originals()
    staged = StagedWeights(SERVERS, dtype="float16")
    staged.fill(V1, named)
    assert [copy.dtype for _, copy in staged.named] == [torch.float16, torch.float16, torch.int64]
    assert torch.equal(staged.named[1][1], named[1][1].half())
