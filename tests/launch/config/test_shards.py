"""A buffer of several shards is refused where one of them would have nothing to do."""

from __future__ import annotations

from typing import Any

import pytest

from stillhouse import builtin
from stillhouse.launch.config.consistency import check_consistency
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.errors import ConfigError
from stillhouse.launch.topology import host_groups


def mistakes(**plain: Any) -> list[str]:
    found = check_consistency(build(RunConfig, plain), builtin.STUDENT_DIR).mistakes
    return [one for one in found if "shards" in one]


def test_two_shards_with_an_actor_and_a_teacher_each_are_fine() -> None:
    assert mistakes(buffer={"shards": 2, "batch_rollouts": 16}, actors=2, teachers=2) == []
    assert mistakes(buffer={"shards": 1, "batch_rollouts": 7}, actors=1, teachers=1) == []


@pytest.mark.parametrize(
    ("buffer", "group", "refused"),
    [
        ({"batch_rollouts": 9}, 1, "a multiple of buffer.shards"),
        ({"batch_rollouts": 12, "release": "rollout"}, 4, "a multiple of buffer.shards * learner.tasks.group_size"),
        ({"batch_rollouts": 12}, 4, ""),
        ({"batch_rollouts": 16, "release": "rollout"}, 4, ""),
    ],
)
def test_every_shard_fills_an_equal_part_of_a_batch(buffer: dict[str, Any], group: int, refused: str) -> None:
    given = {"shards": 2, **buffer}
    found = mistakes(buffer=given, actors=2, teachers=2, learner={"tasks": {"group_size": group}})
    assert len(found) == bool(refused) and all(refused in one and "buffer.batch_rollouts" in one for one in found)


def test_a_batch_that_no_message_holds_is_refused() -> None:
    (found,) = mistakes(buffer={"batch_rollouts": 8192}, actors=2, teachers=2)
    assert "got 8192 with buffer.shards = 1, expected at most 7710" in found and "buffer.shards = 2 or more" in found
    assert mistakes(buffer={"batch_rollouts": 8192, "shards": 2}, actors=2, teachers=2) == []


@pytest.mark.parametrize(
    ("port", "control", "said"),
    [
        (5555, 5556, "weights.control_port: got 5556, expected none of 5555 to 5557"),
        (5555, 5557, "weights.control_port"),
        (5555, 5558, ""),
        (5555, 0, ""),
        (0, 5556, ""),
        (65533, 0, ""),
        (65534, 0, "buffer.bind: got port 65534 with buffer.shards = 3, expected one of at most 65533"),
    ],
)
def test_the_ports_of_shards_are_free_of_others(port: int, control: int, said: str) -> None:
    buffer = {"shards": 3, "batch_rollouts": 12, "bind": f"tcp://10.0.0.1:{port}"}
    found = mistakes(buffer=buffer, actors=3, teachers=3, weights={"host": "10.0.0.1", "control_port": control})
    assert len(found) == bool(said) and all(said in one for one in found)


def test_shards_listen_at_ports() -> None:
    (told,) = mistakes(buffer={"shards": 2, "bind": "ipc:///tmp/buffer"}, actors=2, teachers=2)
    assert "got ipc:///tmp/buffer with buffer.shards = 2, expected tcp://HOST:PORT" in told


def test_every_shard_has_an_actor_and_a_teacher_of_each_pool() -> None:
    (actors,) = mistakes(buffer={"shards": 4}, actors=3, teachers=4)
    assert "actors = 3, expected at most 3" in actors
    (teachers,) = mistakes(buffer={"shards": 4}, actors=4, teachers=2)
    assert "teachers = 2" in teachers
    pools = {"a": {"count": 4, "model": "builtin"}, "b": {"count": 1, "model": "builtin"}}
    routes = {"a": ["*"], "b": ["*"]}
    found = mistakes(buffer={"shards": 4}, actors=4, teachers=5, pools=pools, learner={"tasks": {"routes": routes}})
    assert len(found) == 1 and "pools.b.count = 1" in found[0]


def test_workers_that_join_are_not_counted_beforehand() -> None:
    assert mistakes(buffer={"shards": 4}, actors=0, teachers=0, learner={"tasks": {"routes": {"default": ["*"]}}}) == []


def test_hosts_of_a_topology_have_workers_for_each_shard() -> None:
    hosts: dict[str, Any] = {"actors": {"each": 1}, "teachers": {"each": 1}}
    assert mistakes(buffer={"shards": 4}, actors=4, teachers=4, cluster=hosts) == []
    few = build(RunConfig, {"buffer": {"shards": 4}, "actors": 2, "teachers": 4, "cluster": hosts})
    with pytest.raises(ConfigError, match=r"buffer.shards: got 4 with actors = 2, expected at most 2"):
        host_groups(few)
    assert mistakes(buffer={"shards": 4}, actors=2, teachers=4, cluster=hosts) != []
