"""Hosts by role: each worker is on one host, as many share it as was allowed, and what cannot be spread is refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from launch.config.run import RunConfig
from launch.config.tree import build
from launch.errors import ConfigError
from launch.render.hosts import host_groups

PRIVATE: dict[str, Any] = {"weights": {"allow_plain_network": True}}


def config(**keys: Any) -> RunConfig:
    return build(RunConfig, {**PRIVATE, **keys})


@pytest.mark.parametrize("each", range(1, 12))
@pytest.mark.parametrize("actors", [1, 2, 7, 32])
def test_each_worker_is_on_one_host_and_no_host_has_more_than_its_share(actors: int, each: int) -> None:
    run, group = host_groups(config(actors=actors, cluster={"actors": {"each": each}}))
    assert run.name == "run"
    assert group.name == "actors"
    assert sum(group.workers) == actors
    assert max(group.workers) <= each
    assert max(group.workers) - min(group.workers) <= 1
    assert all(first >= second for first, second in pairwise(group.workers))
    assert (len(group.workers) - 1) * each < actors, "one host fewer would have been enough"


def test_roles_without_hosts_of_their_own_are_beside_the_learner() -> None:
    assert [group.name for group in host_groups(config(actors=8, teachers=2))] == ["run"]
    assert [group.name for group in host_groups(config(actors=0, teachers=2, cluster={"actors": {"each": 4}}))] == [
        "run"
    ]


def test_further_hosts_of_the_learner_have_its_other_ranks() -> None:
    groups = host_groups(config(learner={"ranks": 16, "hosts": 4}, cluster={"learner": {"gpus": 4}}))
    assert [(group.name, group.workers, group.host.gpus) for group in groups] == [
        ("run", (4,), 4),
        ("ranks", (4, 4, 4), 4),
    ]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"weights": {"backend": "nccl"}}, r"weights\.backend: got nccl"),
        ({"weights": {}, "learner": {"ranks": 4, "hosts": 2}}, r"weights\.allow_plain_network: got false"),
        ({"actor": {"urls": ["http://127.0.0.1:1", "http://127.0.0.1:2"]}}, "cluster.actors.each"),
        ({"buffer": {"bind": "tcp://10.0.0.7:5555"}}, "buffer.bind"),
    ],
)
def test_what_cannot_be_spread_is_refused_by_name(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        host_groups(config(cluster={"actors": {"each": 1}}, **keys))


def test_pools_on_hosts_of_their_own_are_refused() -> None:
    pools = {"one": {"count": 1}, "two": {"count": 1}}
    with pytest.raises(ConfigError, match=r"cluster\.teachers\.each"):
        host_groups(config(teachers=2, pools=pools, cluster={"teachers": {"each": 1}}))


def test_teachers_alone_elsewhere_need_no_open_weights() -> None:
    groups = host_groups(build(RunConfig, {"teachers": 3, "cluster": {"teachers": {"each": 2}}}))
    assert [(group.name, group.workers) for group in groups] == [("run", (1,)), ("teachers", (2, 1))]
