"""What belongs to which shard."""

from __future__ import annotations

import pytest

from stillhouse.protocol.shards.division import all_addresses, of_shard, shard_address, shard_of, task_of


def test_every_task_has_one_shard_and_its_rollouts_have_the_same() -> None:
    for n in (1, 2, 3, 4):
        owners = [shard_of(task, n) for task in range(12)]
        assert set(owners) == set(range(n))
        for task, owner in enumerate(owners):
            assert [task in of_shard(range(12), shard, n) for shard in range(n)].index(True) == owner
            assert shard_of(task_of(f"train-{task}-3-2001"), n) == owner


@pytest.mark.parametrize("text", ["", "train-1-2", "train-x-1-0", "train-1-2-3-4"])
def test_another_text_is_no_rollout_id(text: str) -> None:
    with pytest.raises(ValueError, match=r"no rollout id|invalid literal"):
        task_of(text)


def test_shards_listen_at_the_ports_that_follow() -> None:
    assert shard_address("tcp://[::1]:5555", 3) == "tcp://[::1]:5558"
    assert shard_address("tcp://h:5555", 0) == "tcp://h:5555"
    assert [shard_address(any_port, 2) for any_port in ("tcp://h:0", "tcp://h:*")] == ["tcp://h:0", "tcp://h:*"]
    assert all_addresses("tcp://h:1", 1) == "tcp://h:1"
    assert all_addresses("tcp://h:1", 3) == "tcp://h:1,tcp://h:2,tcp://h:3"
