"""One snapshot of all shards: sums, with nobody counted twice."""

from __future__ import annotations

from stillhouse.protocol import messages as m
from stillhouse.protocol.messages import PeerView, WeightVersion
from stillhouse.protocol.shards.snapshots import whole_snapshot
from tests.protocol.shards.snapshots import counts, snapshot


def peer(
    role: m.Role, name: str, *, alive: bool = True, silent_s: float = 0.0, done: int = 0, tokens: int = 0
) -> PeerView:
    return PeerView(role, name, alive, None, silent_s, {"at": silent_s}, 1, done, tokens)


def test_the_ledger_is_the_sum_in_every_unit_and_reason() -> None:
    parts = [
        snapshot(ledger=m.Ledger(counts(1), counts(2, 1), counts(3), {"nan_logprob": 1}, counts(4))),
        snapshot(ledger=m.Ledger(counts(10), counts(20), counts(30, 5), {"nan_logprob": 2, "key": 1}, counts(40))),
    ]
    whole = whole_snapshot(parts).ledger
    assert whole == m.Ledger(counts(11), counts(22, 1), counts(33, 5), {"nan_logprob": 3, "key": 1}, counts(44))
    assert whole.balanced
    off = snapshot(ledger=m.Ledger(counts(0), counts(0), m.LedgerCounts(1, 0, {}, {}, 0, 0), {}, counts(0)))
    assert not whole_snapshot([parts[0], off]).ledger.balanced, "what one shard has lost is not made up by another"


def test_queues_and_the_histogram_are_sums() -> None:
    parts = [
        snapshot(queues={"rollouts_live": 3}, staleness_hist={1: 5}),
        snapshot(queues={"rollouts_live": 4}, staleness_hist={0: 2, 1: 1}),
    ]
    whole = whole_snapshot(parts)
    assert whole.queues == {"rollouts_live": 7}
    assert whole.staleness_hist == {0: 2, 1: 6}


def test_batches_of_equal_rewards_are_as_large_as_those_of_one_buffer() -> None:
    """12 rollouts in batches of 8 are one batch, also where two shards count them in parts of 4."""
    for parts, whole in (((3, 0), 1), ((1, 2), 1), ((3, 1), 2), ((0, 1), 0), ((20, 0), 10)):
        together = whole_snapshot([snapshot(queues={"batches_equal_in_a_row": n}) for n in parts])
        assert together.queues == {"batches_equal_in_a_row": whole}


def test_shards_that_lack_what_others_have_are_counted() -> None:
    actor, gone = peer("actor", "a"), peer("actor", "b", alive=False)
    for peers, lacking in (
        (((actor,), (), (gone,)), {"shards_without_actors": 2}),
        (((actor, peer("teacher", "t")), (actor,)), {"shards_without_teachers": 1}),
        (((actor,), (actor, gone)), {}),
        (((), (gone,)), {}),
    ):
        assert whole_snapshot([snapshot(peers=one) for one in peers]).queues == lacking


def test_the_learner_is_one_peer_and_workers_are_those_of_all() -> None:
    first = snapshot(
        peers=(peer("learner", "l", silent_s=3.0, done=7, tokens=10), peer("actor", "a", done=1, tokens=2))
    )
    second = snapshot(
        peers=(peer("learner", "l", silent_s=1.0, done=7, tokens=20), peer("actor", "b", done=3, tokens=4))
    )
    found = {one.name: one for one in whole_snapshot([first, second]).peers}
    assert found.keys() == {"l", "a", "b"}
    assert found["l"] == PeerView("learner", "l", True, None, 1.0, {"at": 1.0}, 1, 7, 30), "a step is counted once"
    assert found["a"].done_total == 1 and found["b"].tokens_total == 4


def test_a_worker_that_one_shard_lost_and_another_has_is_alive() -> None:
    parts = [
        snapshot(peers=(peer("actor", "a", alive=False, done=2, tokens=5),)),
        snapshot(peers=(peer("actor", "a", silent_s=2.0, done=1, tokens=1),)),
    ]
    (found,) = whole_snapshot(parts).peers
    assert found.alive and found.silent_s == 2.0 and (found.done_total, found.tokens_total) == (3, 6)


def test_the_run_goes_on_while_a_shard_does_and_has_failed_when_one_has() -> None:
    running, finished = snapshot(), snapshot(phase="finished", phase_reason="done")
    failed = snapshot(phase="failed", phase_reason="SIGTERM")
    assert whole_snapshot([finished, running]).phase == "running"
    assert whole_snapshot([finished, failed, running]).phase_reason == "SIGTERM"
    assert whole_snapshot([finished, finished]).phase == "finished"


def test_versions_the_forgotten_and_failures_are_those_of_all() -> None:
    gone = {"actor": m.ForgottenPeers(1, 2, 3)}
    failures = [(m.RolloutFailures("env_error", n, f"newest {n}", (f"first {n}",)),) for n in (1, 2)]
    parts = [
        snapshot(version=WeightVersion(1, 4), forgotten=gone, failures=failures[0]),
        snapshot(version=WeightVersion(1, 5), forgotten=gone, failures=failures[1]),
        snapshot(published=WeightVersion(1, 6)),
    ]
    whole = whole_snapshot(parts)
    assert whole.version == WeightVersion(1, 5) and whole.published == WeightVersion(1, 6)
    assert whole.forgotten == {"actor": m.ForgottenPeers(2, 4, 6)}
    assert whole.failures == (m.RolloutFailures("env_error", 3, "newest 2", ("first 1",)),)
    assert whole_snapshot(parts[:1]) is parts[0], "one shard is the whole buffer"
