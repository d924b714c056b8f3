"""Hosts by role: each worker is on one host, as many share it as was allowed, and what cannot be spread is refused."""

from __future__ import annotations

from typing import Any

import pytest

from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.errors import ConfigError
from stillhouse.launch.topology import beside_the_learner, flags_of_the_run, host_groups, workers_text

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
    assert min(group.workers) >= 1
    assert (len(group.workers) - 1) * each < actors, "one host fewer would have been enough"


def test_roles_without_hosts_of_their_own_are_beside_the_learner() -> None:
    assert [group.name for group in host_groups(config(actors=8, teachers=2))] == ["run"]
    assert [group.name for group in host_groups(config(actors=0, teachers=2, cluster={"actors": {"each": 4}}))] == [
        "run"
    ]


def test_the_run_itself_has_no_workers_of_roles_with_hosts() -> None:
    run = beside_the_learner(config(actors=5, teachers=1, cluster={"actors": {"each": 2}}))
    assert (run.actors, run.teachers) == (0, 1)


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
        (
            {"cluster": {"teachers": {"each": 1}}, "learner": {"objective": {"coef": 0.0, "advantage": "grpo"}}},
            r"teachers: got 1 on hosts of their own, but nothing",
        ),
    ],
)
def test_what_cannot_be_spread_is_refused_by_name(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        host_groups(config(**{"cluster": {"actors": {"each": 1}}, **keys}))


POOLS = {"math": {"count": 3}, "style": {"count": 1}}


def test_each_pool_has_hosts_of_its_own_and_the_run_keeps_none_of_their_teachers() -> None:
    spread = config(actors=2, teachers=4, pools=POOLS, cluster={"teachers": {"each": 2}, "actors": {"each": 1}})
    groups = host_groups(spread)
    assert [(group.label, group.flag, group.workers) for group in groups[1:]] == [
        ("teachers-math", "--pool math --teachers", (2, 1)),
        ("teachers-style", "--pool style --teachers", (1,)),
        ("actors", "--actors", (1, 1)),
    ]
    assert flags_of_the_run(groups) == " --actors 0 --pools.math.count 0 --pools.style.count 0"
    run = beside_the_learner(spread)
    assert (run.teachers, {name: pool.count for name, pool in run.pools.items()}) == (0, {"math": 0, "style": 0})
    beside = config(teachers=4, pools=POOLS, cluster={"actors": {"each": 1}})
    assert beside_the_learner(beside).pools == beside.pools


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"pools": {"math": {"urls": ["http://127.0.0.1:1"]}}, "teachers": 1}, "expected 0 with urls of teachers"),
        ({"pools": {"Of Math": {}}, "teachers": 1}, "pools.Of Math: expected a name of at most 30 small letters"),
    ],
)
def test_pools_that_cannot_be_spread_are_refused_by_name(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        host_groups(config(cluster={"teachers": {"each": 1}}, **keys))


def test_teachers_alone_elsewhere_need_no_open_weights() -> None:
    groups = host_groups(build(RunConfig, {"teachers": 3, "cluster": {"teachers": {"each": 2}}}))
    assert [(group.name, group.workers) for group in groups] == [("run", (1,)), ("teachers", (2, 1))]


def test_the_headline_counts_the_workers_on_other_hosts_and_never_says_that_there_are_none() -> None:
    both: dict[str, Any] = {"actors": {"each": 2}, "teachers": {"each": 2}}
    ray = "5 actors and 1 teacher on 4 hosts of Ray"
    asked = config(actors=5, teachers=1, cluster=both)
    assert workers_text(beside_the_learner(asked), ray) == ray
    assert workers_text(beside_the_learner(asked), "") == "actors and teachers that join from other hosts"
    half = beside_the_learner(config(actors=5, teachers=1, cluster={"actors": {"each": 2}}))
    assert workers_text(half, "5 actors on 3 hosts of Ray") == "1 teacher, 5 actors on 3 hosts of Ray"
    assert workers_text(half, "") == "1 teacher, actors that join from other hosts"
    assert workers_text(config(actors=0, teachers=2), "") == "0 actors, 2 teachers", "on one machine, that is so"
