"""What the status says, computed from snapshots; and that both styles can say it."""

from __future__ import annotations

import math

import msgspec
import pytest
from rich.console import Console

from stillhouse.launch.join.joiner import JoinStatus
from stillhouse.launch.report.figures import (
    Announcements,
    Figures,
    Rates,
    RunView,
    SteadyLimit,
    clock,
    plural,
    short,
    staleness,
)
from stillhouse.launch.report.status import LineStatus, StatusView, TableStatus, line, make_status, table
from stillhouse.learner.reports.attribution import BoundVerdict
from stillhouse.protocol.messages import Ledger, LedgerCounts, PeerView, Role, RolloutFailures, Snapshot, WeightVersion

COUNTS = LedgerCounts(
    accepted=100, trained=60, masked={"stale": 7}, dropped={"actor_lost": 3}, waiting=20, in_flight=10
)


def peer(
    role: Role, index: int, tokens: int = 0, *, version: int | None = None, stats: dict[str, float] | None = None
) -> PeerView:
    return PeerView(
        role=role,
        name=f"{role}-{index}",
        alive=True,
        version=None if version is None else WeightVersion(0, version),
        silent_s=0.1,
        stats=stats or {},
        held=1,
        done_total=2,
        tokens_total=tokens,
    )


def snapshot(time_s: float, step: int, *peers: PeerView) -> Snapshot:
    return Snapshot(
        time_s=time_s,
        phase="running",
        phase_reason="",
        version=WeightVersion(0, step),
        published=WeightVersion(0, step),
        ledger=Ledger(COUNTS, COUNTS, COUNTS, {}, COUNTS),
        queues={"tasks_queued": 5, "tokens_unscored": 12_345},
        staleness_hist={0: 30, 1: 20, 3: 10},
        max_staleness=4,
        peers=peers,
    )


def view(snap: Snapshot | None, ending: str | None = None) -> RunView:
    workers = {"buffer-0": True, "learner-0": True, "actor-0": True, "actor-1": True, "teacher-0": True}
    return RunView(100.0, 65.0, 40, snap, workers, 1, 2**30, ending)


def drawn(figures: Figures) -> str:
    """The table, wide enough for all of it."""
    console = Console(width=600)
    with console.capture() as capture:
        console.print(table(figures))
    return capture.get()


def test_tokens_per_second_come_from_the_totals_of_two_moments() -> None:
    rates = Rates()
    rates.figures(view(snapshot(10.0, 10, peer("actor", 0, 1000), peer("actor", 1, 500), peer("learner", 0, 700))))
    figures = rates.figures(
        view(snapshot(20.0, 15, peer("actor", 0, 3000), peer("actor", 1, 1500), peer("learner", 0, 1700)))
    )
    assert figures.rate("actor") == 300.0
    assert figures.rate("learner") == 100.0


def test_the_same_snapshot_seen_twice_does_not_change_the_rates() -> None:
    rates = Rates()
    first = rates.figures(view(snapshot(10.0, 10, peer("learner", 0, 5))))
    again = rates.figures(view(snapshot(10.0, 10, peer("learner", 0, 5))))
    assert first.eta_s is None
    assert again.eta_s is None
    assert math.isnan(again.rate("learner"))


def test_the_end_is_predicted_from_the_third_step_on_however_long_a_step_is() -> None:
    """Steps of 30 s after a start of 100 s, looked at every second: more than the window of the rates."""
    rates, found = Rates(), dict[float, float | None]()
    for tick in range(0, 802, 2):
        now_s = tick / 2
        step = max(0, int((now_s - 70) // 30))  # the first is made at 100 s
        found[now_s] = rates.figures(view(snapshot(now_s, step, peer("learner", 0)))).eta_s
    assert all(found[now_s] is None for now_s in found if now_s < 160), "before the third step"
    for now_s in (160.0, 175.0, 250.0, 400.0):
        assert found[now_s] == pytest.approx(70 + 30 * 40 - now_s + 30 - 30, abs=1.0), now_s


def test_a_resume_and_a_restart_do_not_disturb_the_prediction() -> None:
    """The step that a run is resumed from was not made now."""
    rates = Rates()
    for now_s, step in ((0.0, 30), (60.0, 31), (62.0, 32), (64.0, 33)):
        found = rates.figures(view(snapshot(now_s, step, peer("learner", 0)))).eta_s
    assert found == pytest.approx(7 * 2.0)
    assert rates.figures(view(snapshot(70.0, 31, peer("learner", 0)))).eta_s is None, "the learner went back"


def test_one_is_singular() -> None:
    assert (plural(1, "step"), plural(2, "step"), plural(0, "actor"), plural(1200, "token")) == (
        *("1 step", "2 steps", "0 actors", "1,200 tokens"),
    )
    one = snapshot(1.0, 1, peer("actor", 0))
    assert "1 of 4 workers is connected" in line(Rates().figures(view(one)))
    assert "0 of 4 workers are connected" in line(Rates().figures(view(None)))


def test_old_moments_leave_the_window() -> None:
    rates = Rates()
    totals = [t if t < 50 else 50 + (t - 50) * 10 for t in range(100)]  # slow at first, then ten times as fast
    seen = [rates.figures(view(snapshot(float(t), t, peer("learner", 0, n)))) for t, n in enumerate(totals)]
    assert seen[-1].rate("learner") == pytest.approx(10.0)


def test_every_actors_weight_version_is_shown_and_lost_ones_are_marked() -> None:
    lost = msgspec.structs.replace(peer("actor", 1, version=9), alive=False)
    snap = snapshot(1.0, 12, peer("learner", 0), lost, peer("actor", 0, version=12))
    figures = Rates().figures(view(snap))
    assert figures.versions_listed == "0:12 1:9!"
    assert figures.versions_counted == "12 x1"


def test_workers_that_joined_are_counted_listed_by_their_names_and_forgotten_when_they_leave() -> None:
    here = msgspec.structs.replace(peer("actor", 0, version=11), name="actor-host-4f2a-0")
    left = msgspec.structs.replace(here, name="actor-other-0", alive=False)
    teacher = msgspec.structs.replace(peer("teacher", 0), name="teacher-host-4f2a-0")
    snap = snapshot(1.0, 12, peer("learner", 0), here, left, teacher, peer("actor", 0, version=12))
    figures = Rates().figures(view(snap))
    assert figures.versions_listed == "0:12 host-4f2a-0:11"
    assert figures.joined == "1 actor, 1 teacher" and "joined 1 actor, 1 teacher" in line(figures)
    assert Rates().figures(view(snapshot(1.0, 12, peer("learner", 0), left))).joined == ""


def test_workers_that_join_or_leave_are_reported_once_and_not_at_the_end_of_the_run() -> None:
    news = Announcements({"actor-0": True})
    joined = msgspec.structs.replace(peer("actor", 0), name="actor-x-0")
    gone = msgspec.structs.replace(joined, alive=False)
    assert list(news.take(snapshot(1.0, 1, peer("actor", 0), joined))) == ["1 actor joined the run: actor-x-0"]
    assert list(news.take(snapshot(2.0, 1, peer("actor", 0), joined))) == []
    over = msgspec.structs.replace(snapshot(3.0, 1, gone), phase="finished")
    assert list(news.take(over)) == []
    assert list(news.take(snapshot(3.0, 1, gone))) == ["1 actor left the run: actor-x-0"]


def test_staleness_is_a_mean_over_tokens_and_a_maximum() -> None:
    assert staleness({0: 30, 1: 20, 3: 10, 4: 0}) == (50 / 60, 3)
    assert staleness({}) == (0.0, 0)


def test_what_was_lost_is_listed_by_reason() -> None:
    assert Rates().figures(view(snapshot(1.0, 1))).lost == {"masked stale": 7, "dropped actor_lost": 3}


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (9999, "9999"), (12_345, "12.3k"), (2.5e6, "2.5M"), (math.nan, "-")]
)
def test_short_numbers(number: float, text: str) -> None:
    assert short(number) == text


@pytest.mark.parametrize(("seconds", "text"), [(5, "0:05"), (65.9, "1:05"), (3723, "1:02:03"), (None, "?")])
def test_clock(seconds: float | None, text: str) -> None:
    assert clock(seconds) == text


LEARNER = {
    "reverse_kl": 0.3125,
    "loss": 0.5,
    "eval_sampled": 0.25,
    "eval_greedy": 0.5,
    "busy_fraction": 0.6,
    "wait_scoring_fraction": 0.3,
    "wait_data_fraction": 0.1,
    "mean_length_mean": 31.5,
    "mean_truncated_share": 0.04,
    "mean_reward_mean": 0.75,
    "mean_reverse_kl_per_answer": 13.2,
}


@pytest.mark.parametrize("style", ["line", "table"])
def test_line_and_table_say_all_that_is_promised(style: str) -> None:
    rates = Rates()
    rates.figures(view(snapshot(1.0, 10, peer("learner", 0, 0), peer("actor", 0, 0, version=10))))
    figures = rates.figures(
        view(
            snapshot(2.0, 12, peer("learner", 0, 100, stats=LEARNER), peer("actor", 0, 200, version=12)),
            "stopped by SIGINT",
        )
    )
    text = line(figures) if style == "line" else drawn(figures)
    both = ("12/40", "200", "0.312", "reward 0.75", "length 31.5, 4% truncated")
    only_table = (
        "0.500",
        "sampled 0.25",
        "greedy 0.50",
        "busy 60%",
        "scoring 30%",
        "0.83",
        "unscored 12.3k",
        "masked stale 7",
        "13.20 per answer",
    )
    for said in (*both, "stopped by SIGINT", *(only_table if style == "table" else ())):
        assert said in text, said
    assert style == "table" or len(text) < 160


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ({"mean_reward_mean": 0.5, "mean_unrewarded_share": 0.25}, "reward 0.50 (25% have none)"),
        ({"mean_unrewarded_share": 1.0}, "reward none"),
    ],
)
def test_answers_without_a_reward_are_told(rewards: dict[str, float], said: str) -> None:
    stats = {"mean_length_mean": 31.5, **rewards}
    figures = Rates().figures(view(snapshot(1.0, 3, peer("learner", 0, 0, stats=stats))))
    assert said in line(figures) and said in drawn(figures)


def test_a_line_stays_short_whatever_there_is_to_say() -> None:
    stats = LEARNER | {f"alarm_since_{name}": 123456.0 for name in ("short", "reward", "entropy_low", "truncated")}
    stats |= {"checkpoints_failed_total": 9.0, "ema_failures_total": 9.0}
    seen = snapshot(1.0, 123456, peer("learner", 0, 10**9, stats=stats))
    worse = msgspec.structs.replace(seen, failures=failing().failures)
    text = line(Rates().figures(view(worse, "stopped " * 30)))
    assert len(text) < 160 and "ALARM short" in text and "step 123456" in text


def test_what_limits_a_run_does_not_flip() -> None:
    learner, data = (BoundVerdict(stage, {}, f"{stage}-bound 50%: more") for stage in ("learner", "data"))
    limit = SteadyLimit()
    shown = [limit.take(data if s % 4 == 3 else learner, float(s)) for s in range(60)]
    assert shown == [learner] * 60
    later = [limit.take(data, 60.0 + s) for s in range(20)]
    assert later == [learner] * 9 + [data] * 11, "it has lasted since 59 s"
    assert limit.take(None, 99.0) is data


def failing(n: int = 64, text: str = "actor-0: KeyError: 'tool' [red](at env.py:7 in step)") -> Snapshot:
    slow = RolloutFailures("env_timeout", 2, "actor-1: reset took longer", ("actor-1: reset took longer",))
    broken = RolloutFailures("env_error_KeyError", n, text, ("actor-0: KeyError: 'first'", text))
    return msgspec.structs.replace(snapshot(1.0, 0, peer("learner", 0)), failures=(slow, broken))


def test_rollouts_that_fail_are_seen_with_their_number_and_newest_cause() -> None:
    said = "66, newest env_error_KeyError: actor-0: KeyError: 'tool' [red](at env.py:7 in step)"
    figures = Rates().figures(view(failing()))
    assert f"| FAILED ROLLOUTS {said[:45]}... |" in line(figures)
    assert said in drawn(figures), "not taken for markup"
    assert "FAILED" not in line(Rates().figures(view(snapshot(1.0, 0, peer("learner", 0)))))


@pytest.mark.parametrize(
    ("gauge", "short_text", "long_text"),
    [
        ("checkpoints_failed_total", "CHECKPOINTS NOT WRITTEN 2", "2 could not be written"),
        ("ema_failures_total", "AVERAGES NOT SENT 2", "2 could not be sent to teachers"),
    ],
)
def test_what_the_learner_could_not_write_or_send_is_seen(gauge: str, short_text: str, long_text: str) -> None:
    for n_failed in (0.0, 2.0):
        learner = msgspec.structs.replace(peer("learner", 0), stats={gauge: n_failed, "step": 3.0})
        figures = Rates().figures(view(snapshot(1.0, 0, learner)))
        assert (short_text in line(figures)) == (long_text in drawn(figures)) == (n_failed > 0)


def test_the_first_failure_of_each_kind_is_an_event() -> None:
    news = Announcements({})
    assert list(news.take(snapshot(1.0, 0))) == []
    assert list(news.take(failing())) == [
        "a rollout failed (env_timeout): actor-1: reset took longer",
        "a rollout failed (env_error_KeyError): actor-0: KeyError: 'first'",
    ]
    assert list(news.take(failing(65, "actor-0: another text"))) == []


def test_many_reasons_for_lost_tokens_do_not_fill_the_line() -> None:
    dropped = {f"env_error_Error{i}": i + 1 for i in range(200)}
    tokens = LedgerCounts(accepted=20_100, trained=0, masked={}, dropped=dropped, waiting=0, in_flight=0)
    many = msgspec.structs.replace(
        snapshot(1.0, 3, peer("learner", 0)), ledger=Ledger(COUNTS, COUNTS, tokens, {}, COUNTS)
    )
    (text,) = [row for row in drawn(Rates().figures(view(many))).splitlines() if row.startswith("lost")]
    text = text.strip()
    assert "dropped env_error_Error199 200, dropped env_error_Error198 199" in text
    assert "194 other reasons 18.9k tokens" in text and len(text) < 600


def test_teachers_that_are_held_back_and_hedges_are_seen() -> None:
    teacher = msgspec.structs.replace(peer("teacher", 1), held_back="leaving")
    usual_snapshot = snapshot(1.0, 3, peer("learner", 0, 5), peer("teacher", 0))
    worse = snapshot(1.0, 3, peer("learner", 0, 5), teacher)
    queues = {"hedges_sent_total": 5, "hedges_won_total": 3, "leases_wasted_hedge_late_total": 1}
    worse = msgspec.structs.replace(worse, queues={**queues, "leases_wasted_original_late_total": 3})
    usual = line(Rates().figures(view(usual_snapshot)))
    assert "held back" not in usual and "hedges" not in usual
    figures = Rates().figures(view(worse))
    assert "held back: teacher-1: leaving" in line(figures) and "hedges sent 5 won 3 wasted 1" in line(figures)
    assert "sent 5 won 3 wasted 1" in drawn(figures) and "teacher-1: leaving" in drawn(figures)


@pytest.mark.parametrize(("n", "said"), [(1, "1 batch of"), (7, "7 batches of")])
def test_batches_of_equal_rewards_in_a_row_are_seen(n: int, said: str) -> None:
    calm = snapshot(1.0, 3, peer("learner", 0, 5))
    for queues, shown in (({}, False), ({"batches_equal_in_a_row": 0}, False), ({"batches_equal_in_a_row": n}, True)):
        figures = Rates().figures(view(msgspec.structs.replace(calm, queues=queues)))
        expected = f"{said} rollouts in a row dropped"
        assert (f"EQUAL REWARDS: {expected} | step 3" in line(figures)) == (expected in drawn(figures)) == shown


def test_before_the_learner_is_there_the_status_says_who_is() -> None:
    assert "starting: 1 of 4 workers" in line(Rates().figures(view(snapshot(1.0, 0, peer("actor", 0)))))
    assert "starting: 0 of 4 workers" in line(Rates().figures(view(None)))


def test_lines_come_at_the_asked_interval(capsys: pytest.CaptureFixture[str]) -> None:
    status = LineStatus(every_s=10.0)
    status._shown_s = 0.0  # pyright: ignore[reportPrivateUsage] - the clock starts with the object
    for now_s in (5.0, 10.0, 15.0, 20.0):
        status.show(view(None)._replace(now_s=now_s))
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_auto_is_plain_where_stdout_is_no_terminal() -> None:
    assert type(make_status("auto", 5.0)) is LineStatus
    assert type(make_status("rich", 5.0)) is TableStatus
    assert type(make_status("off", 5.0)) is StatusView


def test_the_table_can_be_entered_fed_and_left(capsys: pytest.CaptureFixture[str]) -> None:
    with make_status("rich", 5.0) as status:
        status.say("actor-0 [died] of something")
        status.show(view(snapshot(1.0, 1, peer("learner", 0))))
    assert "actor-0 [died] of something" in capsys.readouterr().out


def test_those_who_joined_show_their_own_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    workers = {"actor-p-0": True, "actor-p-1": False, "teacher-p-0": True}
    ours = [msgspec.structs.replace(peer("actor", 0, 1500, version=9), name="actor-p-0")]
    seen = RunView(100.0, 65.0, 40, snapshot(10.0, 10, peer("actor", 0, 9_999, version=8), *ours), workers, 2)
    status = JoinStatus(5.0, now_s=97.0)
    status.show(seen)
    assert capsys.readouterr().out == "", "not yet"
    status.show(seen._replace(now_s=102.0, servers=2, servers_up=1))
    status.show(seen._replace(now_s=103.0))
    assert capsys.readouterr().out == (
        "[1:05] step 10/40 | actors 1 of 2 run, 1 connected, tokens written 1500 | "
        "teachers 1 of 1 run, 0 connected, tokens scored 0 | weights 0.9 x1 | restarts 2 | "
        "1 of 2 inference servers answer\n"
    )
    JoinStatus(None, now_s=0.0).show(seen)
    assert capsys.readouterr().out == ""
