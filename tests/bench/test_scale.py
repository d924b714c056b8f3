"""Large simulated runs: the arithmetic of bench/scale.py and its parts, computed again slowly."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace as replace_struct

from bench import scale_processes
from bench.scale import bottleneck, main, options, row, scenarios, validity
from bench.scale_count import Figures, ShardFigures, TokenCount, ledger_faults
from bench.scale_hosts import wire_run
from bench.scale_limit import best_share, waits_s
from bench.scale_peers import Actor, Learner
from bench.scale_settings import PRESETS, Scenario
from bench.scale_virtual import VirtualRun, virtual_run
from stillhouse.protocol import messages as m
from stillhouse.protocol.messages import Batch, BatchItem, Ledger, LedgerCounts, Snapshot, VersionSpan, WeightVersion
from tests.patience import RUN_PATIENCE_S

SMALL = Scenario(
    actors=3,
    teachers=2,
    slots=4,
    batch_rollouts=12,
    group_size=2,
    mean_tokens=80.0,
    segment_tokens=16,
    steps=6,
    warm_up=2,
)


def v(step: int) -> WeightVersion:
    return WeightVersion(0, step)


def a_batch(step: int, *items: tuple[str, list[tuple[int, int, int]], list[int]]) -> tuple[Batch, list[np.ndarray]]:
    """Items: rollout, (version, start, end) spans, train mask."""
    made, arrays = list[BatchItem](), list[np.ndarray]()
    for rollout_id, spans, mask in items:
        n = len(mask)
        versions = tuple(VersionSpan(v(version), start, end) for version, start, end in spans)
        made.append(BatchItem(rollout_id, 0, 0, 1, "", ("default",), n, versions, False, None, None, 1))
        arrays += [
            np.zeros(n, np.int32),
            np.zeros(n, np.float32),
            np.array(mask, np.uint8),
            np.zeros((1, n), np.float32),
        ]
    none = LedgerCounts(0, 0, {}, {}, 0, 0)
    ledger = Ledger(none, none, none, {}, none)
    snapshot = Snapshot(0.0, "running", "", v(step), v(step), ledger, {}, {}, 1, ())
    return Batch(1, v(step), tuple(made), {}, (), snapshot), arrays


def test_staleness_is_counted_token_by_token_from_the_batch() -> None:
    count = TokenCount(bound=1)
    work = count.take(*a_batch(3, ("a", [(2, 2, 4), (3, 4, 6)], [0, 0, 1, 1, 1, 0]), ("b", [(3, 1, 3)], [0, 1, 1])))
    assert work == (5, 4)
    assert count.by_staleness == [Counter({0: 3, 1: 2})]
    assert not count.faults


def test_a_token_past_the_bound_is_a_fault() -> None:
    count = TokenCount(bound=1)
    count.take(*a_batch(3, ("a", [(1, 0, 1), (2, 1, 2)], [1, 1])))
    assert len(count.faults) == 1 and "{2: 1}, bound 1" in count.faults[0]


def test_a_token_trained_twice_is_a_fault_and_one_that_is_read_again_is_not() -> None:
    count = TokenCount(bound=1)
    count.take(*a_batch(0, ("a", [(0, 0, 3)], [1, 1, 0])))
    count.take(*a_batch(1, ("a", [(0, 0, 4)], [0, 0, 1, 1])))
    assert not count.faults
    count.take(*a_batch(1, ("a", [(0, 0, 4)], [0, 1, 0, 0])))
    assert count.faults == ["a: 1 tokens trained twice"]


def test_a_trained_token_without_a_version_is_a_fault() -> None:
    count = TokenCount(bound=1)
    count.take(*a_batch(0, ("a", [(0, 0, 1)], [1, 1])))
    assert count.faults == ["a: 1 tokens without a version"]


@pytest.mark.parametrize(("sigma", "cap"), [(1.2, 8.0), (0.5, 2.0), (1.2, 1.0)])
def test_the_mean_length_is_that_of_the_lengths_drawn(sigma: float, cap: float) -> None:
    scenario = Scenario(mean_tokens=1000.0, sigma=sigma, cap=cap)
    lengths = [scenario.length(seed) for seed in range(20_000)]
    assert max(lengths) <= cap * 1000
    assert scenario.mean_length == pytest.approx(sum(lengths) / len(lengths), rel=0.04)


def test_equal_lengths_where_sigma_is_zero() -> None:
    assert {Scenario(sigma=0.0).length(seed) for seed in range(9)} == {1000}
    assert Scenario(sigma=0.0).mean_length == 1000


def share_second_by_second(write_s: float, train_s: float, late_s: float, wait_s: float) -> float:
    """A bound of 1 in small steps of time, with a learner that waits `wait_s` before it looks for enough tokens. Tokens
    are counted in seconds of writing."""
    dt, now, version, formed, ended = 0.002, 0.0, 0, 0.0, 0.0
    held = dict[int, float]()  # seconds of writing by version
    newest, arrives, steps, first = 0, [(0.0, 0)], 0, 0.0
    training = False
    while steps < 60:
        now += dt
        while arrives and arrives[0][0] <= now:
            newest = arrives.pop(0)[1]
        held[newest] = held.get(newest, 0.0) + dt
        if training and now >= formed + train_s:
            training, ended, version = False, now, version + 1
            arrives.append((now + late_s, version))
            steps += 1
            if steps == 20:
                first = now
        if not training and now >= ended + wait_s:
            held = {age: n for age, n in held.items() if version - age <= 1}
            if sum(held.values()) >= write_s - dt / 2:
                held, training, formed = {}, True, now
    return 40 * max(write_s, train_s) / (now - first)


@pytest.mark.parametrize(
    ("write_s", "train_s", "late_s"), [(1.0, 1.0, 0.2), (1.0, 1.1, 0.3), (1.5, 1.0, 0.2), (1.0, 1.4, 0.2)]
)
def test_no_wait_is_better_than_the_one_of_the_formula(write_s: float, train_s: float, late_s: float) -> None:
    best = max(write_s, train_s) / (train_s + waits_s(write_s, train_s, late_s))
    tried = [share_second_by_second(write_s, train_s, late_s, wait_s) for wait_s in np.arange(0.0, 0.6, 0.05)]
    assert max(tried) == pytest.approx(best, abs=0.02)


def test_the_limit_at_bound_one_and_equal_rates_is_half_of_the_delay() -> None:
    scenario = Scenario(max_staleness=1, publish_s=2.0, teacher_tokens_per_s=1e9)
    step_s = scenario.step_tokens / scenario.learner_per_s
    assert best_share(scenario) == pytest.approx(step_s / (step_s + 1.0))
    assert best_share(replace(scenario, max_staleness=2)) == 1.0
    assert best_share(replace(scenario, max_staleness=0)) == pytest.approx(step_s / (2 * step_s + 2.0))


def test_a_model_of_half_the_size_is_scored_and_trained_twice_as_fast() -> None:
    small, large = PRESETS["7B on 8 GPUs"], PRESETS["32B on 64 GPUs"]
    assert small.teacher_tokens_per_s / large.teacher_tokens_per_s == pytest.approx(32 / 7)
    assert large.learner_per_s / small.learner_per_s == pytest.approx(8 * 7 / 32)


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_a_virtual_run_keeps_the_bound_and_counts_what_the_ledger_counts(bound: int) -> None:
    run = VirtualRun(replace(SMALL, max_staleness=bound))
    figures = run.run()
    assert not figures.count.faults and not figures.ledger_faults
    assert figures.count.staleness(0)[1] <= bound
    ledger = run.shards[0].snapshot(run.now_s).ledger
    assert figures.count.trained_tokens() == ledger.tokens.trained
    written = sum(actor.tokens_sent for actor in run.actors.values())
    assert written <= figures.busy_slot_s / run.scenario.token_s + 1e-6, "more tokens than busy slots can write"
    assert figures.busy_slot_s <= figures.seconds * 12


def test_at_bound_one_little_is_lost_between_two_batches() -> None:
    """With whole segments, and batches that leave as soon as they are full, it is a share of 0.91 and 5.6 % masked."""
    scenario = Scenario(
        actors=8,
        teachers=2,
        slots=8,
        actor_tokens_per_s=320.0,
        mean_tokens=200.0,
        segment_tokens=64,
        batch_rollouts=128,
        steps=24,
        warm_up=12,
    )
    cells = row(scenario, virtual_run(scenario))
    assert float(str(cells["share"])) > 0.95 and float(str(cells["masked"])) < 0.03, cells


def test_a_learner_slower_than_its_actors_wastes_little_of_what_they_write() -> None:
    """If always as many rollouts may be out as the bound allows, 25 % is masked, and tokens are 3.3 steps old."""
    scenario = Scenario(
        actors=4,
        teachers=2,
        slots=64,
        actor_tokens_per_s=2880.0,
        learner_tokens_per_s=6000.0,
        context_cost=1.0,
        mean_tokens=400.0,
        segment_tokens=64,
        batch_rollouts=64,
        max_staleness=4,
        steps=40,
        warm_up=28,
    )
    run = VirtualRun(scenario)
    figures = run.run()
    assert figures.masked_tokens < 0.12 * figures.accepted_tokens
    assert figures.count.staleness(scenario.warm_up)[0] < 2.7
    assert 64 <= run.shards[0].snapshot(run.now_s).queues["rollouts_allowed"] < 256
    assert sum(figures.count.waits_s[scenario.warm_up :]) < 1.0, "the learner has work"


@pytest.mark.parametrize("bound", [0, 2])
def test_shards_on_the_virtual_clock_share_tasks_batches_and_workers(bound: int) -> None:
    run = VirtualRun(replace(SMALL, actors=4, shards=2, max_staleness=bound))
    figures = run.run()
    assert not figures.count.faults and not figures.ledger_faults
    ledgers = [state.snapshot(run.now_s).ledger for state in run.shards]
    trained = [ledger.tokens.trained for ledger in ledgers]
    assert min(trained) > 0 and sum(trained) == figures.count.trained_tokens()
    assert trained == [figures.count.trained_by_shard[shard] for shard in range(2)]
    waits = zip(figures.count.shard_waits_s, figures.count.waits_s, strict=True)
    assert all(0 <= for_shard <= whole for for_shard, whole in waits)
    assert sum(figures.count.shard_waits_s) > 0, "two shards are never equally fast"


def a_ledger(accepted: int = 50, trained: int = 40, **gone: dict[str, int]) -> Ledger:
    none = LedgerCounts(0, 0, {}, {}, 0, 0)
    tokens = LedgerCounts(accepted, trained, gone.get("masked", {}), gone.get("dropped", {}), 0, 0)
    return Ledger(none, none, tokens, {}, none)


def test_a_ledger_that_only_agrees_with_itself_is_a_fault() -> None:
    right = a_ledger(masked={"stale": 7}, dropped={"run_ended": 3})
    assert right.balanced and not ledger_faults(right, sent_tokens=50, trained_tokens=40)
    lost = a_ledger(accepted=47, masked={"stale": 7})
    assert lost.balanced, "three tokens were never entered"
    assert ledger_faults(lost, sent_tokens=50, trained_tokens=40) == [
        "47 tokens accepted, expected 50",
        "47 tokens known, expected 50",
    ]
    twice = a_ledger(trained=43, masked={"stale": 7})
    assert twice.balanced
    assert ledger_faults(twice, sent_tokens=50, trained_tokens=40) == ["43 tokens trained, expected 40"]
    refused = replace_struct(right, rejected={"run_over": 2, "nan_logprob": 1})
    assert ledger_faults(refused, sent_tokens=50, trained_tokens=40) == ["refused: nan_logprob"]


def test_the_wait_for_the_slowest_shard_begins_when_another_has_sent_its_share_and_the_learner_waits() -> None:
    scenario = replace(SMALL, shards=2, max_staleness=1, actor_tokens_per_s=1.0, learner_tokens_per_s=1.0)
    learner = Learner(scenario, lambda message, arrays: None, lambda at_s, version: None)
    learner.start(0.0)
    learner.look(1.0, some_are_here=False)
    learner.look(2.0, some_are_here=True)
    learner.look(3.0, some_are_here=True)
    learner.take(5.0, *a_batch(0, ("train-0-0-0", [(0, 0, 4)], [1] * 4)))
    assert learner.count.shard_waits_s == [3.0] and learner.count.waits_s == [5.0]
    learner.look(6.0, some_are_here=True)  # the next batch, while this one is trained until 9.0
    learner.advance(9.0)
    learner.take(11.0, *a_batch(1, ("train-1-0-0", [(0, 0, 4)], [1] * 4)))
    assert learner.count.shard_waits_s[1] == 2.0, "from the end of the step on"
    learner.advance(15.0)
    learner.take(16.0, *a_batch(2, ("train-2-0-0", [(1, 0, 4)], [1] * 4)))
    assert learner.count.shard_waits_s[2] == 0.0, "all shares came at once"


def test_virtual_runs_of_the_same_scenario_are_the_same() -> None:
    first, again = virtual_run(SMALL), virtual_run(SMALL)
    assert first.count.ended_s == again.count.ended_s and first.count.by_staleness == again.count.by_staleness


def test_segments_have_the_length_that_is_asked_for_and_the_versions_that_sampled_them() -> None:
    scenario = replace(SMALL, actors=1, slots=1, sigma=0.0, mean_tokens=40.0)
    sent = list[tuple[object, tuple[int, ...]]]()

    actor = Actor(scenario, lambda message, arrays: sent.append((message, tuple(len(a) for a in arrays))))
    actor.start(0.0)
    ticket = m.Ticket("train-0-0-0", 0, 0, "train", m.Sampling(max_new_tokens=640), "single_turn", "", None, v(0))
    actor.take(0.0, m.Tickets((ticket,)), [np.arange(5, dtype=np.int32)])
    actor.weights(20.5 * scenario.token_s, v(1))
    actor.advance(40 * scenario.token_s)
    segments = [(one, sizes) for one, sizes in sent if isinstance(one, m.Segment)]
    assert [(one.start, one.end) for one, _ in segments] == [(0, 21), (21, 37), (37, 45)]
    assert [sizes for _, sizes in segments] == [(21,) * 3, (16,) * 3, (8,) * 3]
    assert segments[1][0].spans == (m.VersionSpan(v(0), 21, 26), m.VersionSpan(v(1), 26, 37))
    assert segments[2][0].final and actor.busy_slot_s == pytest.approx(40 * scenario.token_s)


def test_a_simulated_actor_sends_what_it_holds_when_it_is_asked_and_ends_its_segments_where_it_would_have() -> None:
    scenario = replace(SMALL, actors=1, slots=1, sigma=0.0, mean_tokens=40.0)
    sent = list[m.Message]()
    actor = Actor(scenario, lambda message, arrays: sent.append(message))
    actor.start(0.0)
    ticket = m.Ticket("train-0-0-0", 0, 0, "train", m.Sampling(max_new_tokens=640), "single_turn", "", None, v(0))
    actor.take(0.0, m.Tickets((ticket,)), [np.arange(5, dtype=np.int32)])
    for n_sampled in (1.5, 6.5, 6.8, 16.5, 30.5):
        actor.advance(n_sampled * scenario.token_s)
        actor.take(n_sampled * scenario.token_s, m.SegmentsWanted(), ())
    actor.advance(40 * scenario.token_s)
    ends = [one.end - 5 for one in sent if isinstance(one, m.Segment)]
    assert ends == [5, 16, 29, 32, 40], "all but the newest token; whole segments end at 16 and 32"


def test_a_refusal_is_an_error_but_not_after_the_end_of_the_run() -> None:
    actor = Actor(SMALL, lambda message, arrays: None)
    actor.take(0.0, m.CancelRollout("train-0-0-0", "run_ended"), ())
    actor.take(0.0, m.SegmentAck("train-0-0-0", 1, "rejected", "run_over"), ())
    with pytest.raises(RuntimeError, match="nan_logprob"):
        actor.take(0.0, m.SegmentAck("train-0-0-0", 1, "rejected", "nan_logprob"), ())


def some_figures(**changes: object) -> Figures:
    count = TokenCount(bound=1)
    for step in range(4):
        count.take(*a_batch(step, (f"r{step}", [(step, 0, 10)], [1] * 10)))
        count.waits_s.append(0.5)
        count.shard_waits_s.append(0.25)
        count.ended(2.0 * (step + 1))
    count.busy_s = 6.0
    plain = Figures(
        count,
        seconds=8.0,
        busy_slot_s=48.0,
        busy_teacher_s=4.0,
        masked_tokens=5,
        accepted_tokens=50,
        ledger_faults=[],
        messages=80,
        shards=(ShardFigures(0.2, 0.01, 50.0), ShardFigures(0.3, 0.005, 60.0)),
        measured_s=12.0,
        wall_s=16.0,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_the_cells_of_a_row() -> None:
    scenario = replace(SMALL, actors=2, teachers=1, slots=3, actor_tokens_per_s=2.5, warm_up=1, batch_rollouts=1)
    cells = row(scenario, some_figures())
    assert cells["share"] == pytest.approx(30 / 6.0 / 5.0)
    assert (cells["actors_busy"], cells["teachers_busy"], cells["learner_busy"]) == (1.0, 0.5, 0.75)
    assert cells["bottleneck"] == "actors"
    assert (cells["wait_s"], cells["step_s"], cells["masked"]) == (0.5, 2.0, 0.1)
    assert cells["shard_wait_s"] == 0.25
    # Three steps after the warm-up: 30 tokens in 6 simulated seconds, which took 12 s.
    assert cells["cpu_per_m"] == pytest.approx(0.5 / 30 * 1e6)
    assert cells["work_per_m"] == pytest.approx((0.5 - 0.015 * 12) / 30 * 1e6)
    assert cells["full_speed_per_m"] == pytest.approx((0.5 - 0.015 * 12 + 0.015 * 6) / 30 * 1e6)
    assert cells["busiest_per_m"] == pytest.approx(0.3 / 30 * 1e6)
    assert cells["busiest"] == pytest.approx(0.3 / 12)
    assert cells["busiest_full_speed"] == pytest.approx((0.3 - 0.005 * 12 + 0.005 * 6) / 6)
    assert cells["idle_ms_per_peer"] == pytest.approx(15 / 4)
    assert (cells["peak_mb"], cells["all_mb"]) == (60.0, 110.0)
    idle = row(scenario, some_figures(measured_s=24.0))  # 0.36 s of 0.5
    assert {str(idle[name]) for name in ("work_per_m", "full_speed_per_m", "busiest_full_speed")} == {"nan"}
    assert idle["cpu_per_m"] == cells["cpu_per_m"]
    assert cells["ledger"] == "balanced"
    assert row(scenario, some_figures(ledger_faults=["lost"]))["ledger"] == "NOT BALANCED"
    assert cells["messages_per_1000"] == 80 / 40 * 1000


def test_the_schedule_is_the_bottleneck_when_every_stage_waits() -> None:
    assert bottleneck({"actors": 0.9, "teachers": 0.5, "learner": 0.95}) == "schedule"
    assert bottleneck({"actors": 0.9, "teachers": 0.99, "learner": 0.95}) == "teachers"


def test_a_row_is_not_valid_where_the_machine_was_the_limit() -> None:
    assert validity(some_figures(), 2.0) == "yes"
    assert validity(some_figures(idle_share=0.01), 2.0) == "no: cores 99% busy"
    assert validity(some_figures(late_s=0.5), 2.0) == "no: a peer was 0.5 s late"


def test_the_command_prints_a_row_per_bound(capsys: pytest.CaptureFixture[str]) -> None:
    small = "--actors 2 --teachers 1 --slots 4 --batch-rollouts 8 --mean-tokens 60 --steps 4 --warm-up 2"
    assert main(["--virtual", "--max-staleness", "0", "2", *small.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("| 2 + 1 | 1 | 0 |") and lines[3].startswith("| 2 + 1 | 1 | 2 |")
    assert all("balanced" in line and "NOT" not in line for line in lines[2:])


def test_batches_grow_with_the_actors_of_the_rows() -> None:
    words = "--actors 2 8 --teachers 1 3 --batch-rollouts 10 --max-staleness 0 1"
    args = options().parse_args(words.split())
    rows = [(one.actors, one.teachers, one.max_staleness, one.batch_rollouts) for one in scenarios(args)]
    assert rows == [(2, 1, 0, 10), (2, 1, 1, 10), (8, 3, 0, 40), (8, 3, 1, 40)]
    with pytest.raises(SystemExit, match="2 numbers of teachers for 1"):
        scenarios(options().parse_args(["--actors", "2", "--teachers", "1", "3"]))
    assert [
        one.time_scale for one in scenarios(options().parse_args(["--actors", "2", "8", "--time-scale", "1", "4"]))
    ] == [1, 4]
    with pytest.raises(SystemExit, match="a multiple of --shards 4"):
        scenarios(options().parse_args(["--shards", "4", "--batch-rollouts", "10"]))
    with pytest.raises(SystemExit, match="an actor and a teacher for each"):
        scenarios(options().parse_args(["--shards", "4", "--teachers", "3"]))
    with pytest.raises(SystemExit, match="3 time scales for 2"):
        scenarios(options().parse_args(["--actors", "2", "8", "--time-scale", "1", "4", "8"]))


@pytest.mark.parametrize("shards", [1, 2])
def test_over_real_links_a_few_processes_do_the_same(
    tmp_path: Path, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale_processes, "IDLE_S", 0.5)
    scenario = replace(SMALL, actors=3, teachers=2, shards=shards, time_scale=0.05)
    figures = wire_run(scenario, tmp_path / "run", RUN_PATIENCE_S)
    assert not figures.count.faults and not figures.ledger_faults
    assert len(figures.count.ended_s) == scenario.steps
    assert len(figures.shards) == shards and figures.messages > 100
    assert all(one.cpu_s > 0 and 0 < one.idle_cpu < 1 and one.peak_mb > 10 for one in figures.shards)
    assert sum(figures.count.trained_by_shard.values()) == figures.count.trained_tokens()
    assert len(figures.count.trained_by_shard) == shards
    assert figures.count.staleness(0)[1] <= 1


def test_lengths_do_not_depend_on_the_order_in_which_they_are_drawn() -> None:
    scenario, seeds = Scenario(), list(range(50))
    before = {seed: scenario.length(seed) for seed in seeds}
    random.Random(1).shuffle(seeds)
    assert all(scenario.length(seed) == before[seed] for seed in seeds)
