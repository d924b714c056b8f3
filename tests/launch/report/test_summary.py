"""summary.json: its promised fields, where they come from, and what a broken ledger does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.processes.slots import Ending, RunOutcome
from stillhouse.launch.report.summary import Summary, add_teachers, write_summary
from stillhouse.launch.report.summary_table import print_summary
from stillhouse.launch.runfolder import RunFolder
from stillhouse.learner.checkpoints.files import CHECKPOINTS
from stillhouse.learner.evaluation.figures import MeasuredTeacher
from stillhouse.learner.reports.alarms import UNREWARDED, Alarm
from stillhouse.protocol.messages import (
    ForgottenPeers,
    Ledger,
    LedgerCounts,
    PeerView,
    Role,
    RolloutFailures,
    Snapshot,
    WeightVersion,
)

TOKENS = LedgerCounts(accepted=100, trained=60, masked={"stale": 7}, dropped={"run_ended": 33}, waiting=0, in_flight=0)
SOME = LedgerCounts(accepted=5, trained=5, masked={}, dropped={}, waiting=0, in_flight=0)
CONFIG = build(RunConfig, {"actors": 3, "teachers": 2, "buffer": {"max_staleness": 4}})


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    opened = RunFolder.open(tmp_path / "run", resume=False)
    yield opened
    opened.close()


def snapshot(tokens: LedgerCounts = TOKENS, step: int = 12) -> Snapshot:
    peers = (
        PeerView("actor", "actor-1", True, WeightVersion(0, 12), 0.0, {}, 0, 9, 1234),
        PeerView(
            "learner", "learner-0", True, None, 0.0, {"busy_fraction": 0.5, "wait_data_fraction": 0.25}, 0, 12, 60
        ),
    )
    return Snapshot(
        time_s=1.0,
        phase="finished",
        phase_reason="",
        version=WeightVersion(0, step),
        published=WeightVersion(0, step),
        ledger=Ledger(SOME, SOME, tokens, {"nan_logprob": 2}, SOME),
        queues={},
        staleness_hist={0: 40, 2: 20},
        max_staleness=4,
        peers=peers,
    )


def outcome(ending: Ending, last_seen: Snapshot | None = None) -> RunOutcome:
    exit_codes = {"buffer-0": [0], "learner-0": [0], "actor-0": [0], "actor-1": [-9, 0]}
    return RunOutcome(ending, 4.5, 61.0, 123456, last_seen, {"actor-1": 1}, exit_codes)


WELL = Ending(True, "all steps are made", 0)
COMPLETE = {"n_greedy": 8, "n_sampled": 16, "missing": 0, "failed": 0}
ACCOUNT: dict[str, Any] = {
    "steps": 12,
    "eval": [
        {"step": 0, "accuracy_greedy": 0.46, "accuracy_sampled": 0.25, "reverse_kl": 0.5, **COMPLETE},
        {"step": 12, "accuracy_greedy": 0.99, "accuracy_sampled": 0.8, "reverse_kl": 0.06, **COMPLETE},
    ],
    "learner": {"busy_fraction": 0.7, "wait_fraction": {"data": 0.2, "scoring": 0.1}},
    "versions_published": 13,
    "reverse_kl_first": 0.5,
    "reverse_kl_last": 0.06,
    "checkpoint": "checkpoints/step-12",
    "something_new": 1,
}


def leave(folder: RunFolder, final: Snapshot | None, account: dict[str, Any] | None) -> None:
    if final is not None:
        (folder.path / "ledger.json").write_bytes(msgspec.json.encode(final))
    if account is not None:
        (folder.path / "learner.json").write_text(json.dumps(account))


def written(folder: RunFolder) -> dict[str, Any]:
    return json.loads((folder.path / "summary.json").read_text())


def table(summary: Summary, folder: RunFolder) -> str:
    console = Console(width=300)
    with console.capture() as capture:
        print_summary(summary, folder, console)
    return " ".join(capture.get().split())


def test_the_promised_fields_are_there(folder: RunFolder) -> None:
    leave(folder, snapshot(), ACCOUNT)
    write_summary(CONFIG, folder, outcome(WELL))
    summary = written(folder)
    assert summary["steps"] == 12
    assert (summary["wall_s"], summary["ready_s"], summary["peak_memory_bytes"]) == (61.0, 4.5, 123456)
    assert summary["tokens"] == {
        "accepted": 100,
        "trained": 60,
        "masked": {"stale": 7},
        "dropped": {"run_ended": 33},
        "waiting": 0,
        "in_flight": 0,
        "balanced": True,
    }
    assert summary["staleness"] == {"max": 2, "mean": 40 / 60, "bound": 4}
    nothing = {"name": "", "reward_greedy": None, "reward_sampled": None, "at_k": {}, "tags": {}, "environments": {}}
    assert summary["eval"] == [{**nothing, **point} for point in ACCOUNT["eval"]]
    assert summary["learner"] == ACCOUNT["learner"]
    assert (summary["actors"], summary["teachers"], summary["versions_published"]) == (3, 2, 13)
    assert (summary["ok"], summary["exit_code"], summary["reason"]) == (True, 0, "all steps are made")


@pytest.mark.parametrize(("pools", "between"), [({}, 0.25), ({"a": {"count": 1}, "b": {"count": 1}}, None)])
def test_the_noise_of_grades_stands_beside_the_divergence(
    pools: dict[str, Any], between: float | None, folder: RunFolder
) -> None:
    """The loudest teacher's, and how far those of one model are apart; of several models that would mean nothing."""
    teachers = tuple(
        PeerView("teacher", f"teacher-{i}", True, None, 0.0, {"noise_nats": noise, "check_logprob": mean}, 0, 1, 1)
        for i, (noise, mean) in enumerate([(0.001, -2.0), (0.003, -2.25)])
    )
    seen = snapshot()
    leave(folder, msgspec.structs.replace(seen, peers=seen.peers + teachers), ACCOUNT)
    config = msgspec.structs.replace(CONFIG, pools=build(RunConfig, {"teachers": 2, "pools": pools}).pools)
    shown = table(write_summary(config, folder, outcome(WELL)), folder)
    assert written(folder)["teacher_noise"] == {"batch": 0.003, "teachers": between}
    assert "teacher noise 0.003 nats (change of a log-prob when scored in another batch)" in shown
    assert ("0.2 nats between teachers" in shown) == (between is not None)


def test_figures_by_tag_are_in_the_file_and_the_table(folder: RunFolder) -> None:
    def point(step: int, sampled: float, reverse_kl: float | None) -> dict[str, Any]:
        figures = {"accuracy_greedy": None, "accuracy_sampled": sampled, "reverse_kl": reverse_kl}
        sums = {**figures, "reward_greedy": None, "reward_sampled": 0.5, "n_greedy": 0, "n_sampled": 32}
        return {"step": step, "tags": {"sums": sums}, "environments": {"game": {**sums, "n_sampled": 16}}}

    points = [point(0, 0.25, 0.5), point(12, 0.75, 0.125)]
    points[1]["tags"]["new"] = {"accuracy_sampled": None, "n_sampled": 0}
    leave(folder, snapshot(), {**ACCOUNT, "eval": points})
    shown = table(write_summary(CONFIG, folder, outcome(WELL)), folder)
    assert written(folder)["eval"][0]["tags"]["sums"] == {**points[0]["tags"]["sums"], "at_k": {}}
    assert "of sums sampled (of 32) 0.250 -> 0.750, reverse KL 0.500 -> 0.125" in shown
    assert "in game sampled (of 16) 0.250 -> 0.750" in shown
    assert "of new nothing could be measured" in shown


def test_each_evaluation_set_has_its_row_and_its_own_points_and_those_of_launches_before(folder: RunFolder) -> None:
    """Step 20 is made again by the second launch."""

    def points(*steps: int) -> list[dict[str, Any]]:
        return [
            {"name": "hard", "step": step, "accuracy_sampled": step / 100, "n_sampled": 8, "at_k": {"pass_at_4": 0.5}}
            for step in steps
        ]

    leave(folder, None, {"steps": 20, "eval_sets": points(0, 10, 20), "eval": points(0, 20)})
    folder.close()
    resumed = RunFolder.open(folder.path, resume=True)
    leave(resumed, snapshot(), {"steps": 30, "eval_sets": points(20, 30), "eval": points(20, 30)})
    summary = write_summary(CONFIG, resumed, outcome(WELL))
    resumed.close()
    assert [point.step for point in summary.eval_sets] == [0, 10, 20, 30]
    assert [(point.step, point.accuracy_sampled) for point in summary.eval] == [(0, 0.0), (20, 0.2), (30, 0.3)]
    assert "on hard sampled (of 8) 0.000 -> 0.300, pass@4 0.500 -> 0.500" in table(summary, resumed)


def test_gpu_hours_and_what_they_cost_are_those_of_all_launches(folder: RunFolder) -> None:
    """Each launch takes 61 s. The first has 4 GPUs at 36 an hour, the second was killed, the third has 2 at 72."""
    priced = [msgspec.structs.replace(CONFIG.launch, gpu_hour_price=price) for price in (36.0, 72.0)]
    first, third = (msgspec.structs.replace(CONFIG, launch=launch) for launch in priced)
    leave(folder, snapshot(), ACCOUNT)
    seconds = outcome(WELL).wall_s
    write_summary(first, folder, outcome(WELL), gpus=4)
    for _ in range(2):
        folder.close()
        folder = RunFolder.open(folder.path, resume=True)
    leave(folder, snapshot(), ACCOUNT)
    summary = write_summary(third, folder, outcome(WELL), gpus=2)
    folder.close()
    assert summary.gpu_hours == pytest.approx(6 * seconds / 3600)
    assert summary.gpu_cost == pytest.approx(seconds / 3600 * (4 * 36 + 2 * 72))
    assert f"GPU hours {6 * seconds / 3600:.2f} (2 GPUs), {summary.gpu_cost:.2f} by launch.gpu_hour_price" in table(
        summary, folder
    )
    assert "GPU hours" not in table(msgspec.structs.replace(summary, gpu_hours=0.0), folder)


def test_each_workers_part_is_there(folder: RunFolder) -> None:
    leave(folder, snapshot(), ACCOUNT)
    workers = write_summary(CONFIG, folder, outcome(WELL)).workers
    assert workers["actor-1"].tokens == 1234
    assert workers["actor-1"].restarts == 1
    assert workers["actor-1"].exit_codes == [-9, 0]
    assert workers["actor-0"].tokens == 0


def test_an_unbalanced_ledger_fails_a_run_that_ended_well(folder: RunFolder) -> None:
    leave(folder, snapshot(msgspec.structs.replace(TOKENS, accepted=101)), ACCOUNT)
    summary = write_summary(CONFIG, folder, outcome(WELL))
    assert (summary.ok, summary.exit_code, summary.tokens.balanced) == (False, 3, False)
    shown = table(summary, folder)
    assert "THE LEDGER DOES NOT BALANCE" in shown
    assert "tokens: 101 accepted, but 60 trained + 7 masked (stale) + 33 dropped (run_ended): off by +1" in shown


def test_one_unbalanced_unit_is_enough(folder: RunFolder) -> None:
    ledger = msgspec.structs.replace(snapshot().ledger, segments=msgspec.structs.replace(SOME, trained=4))
    leave(folder, msgspec.structs.replace(snapshot(), ledger=ledger), ACCOUNT)
    assert write_summary(CONFIG, folder, outcome(WELL)).exit_code == 3


def test_without_a_final_ledger_the_last_seen_one_stands_in(folder: RunFolder) -> None:
    summary = write_summary(CONFIG, folder, outcome(Ending(False, "buffer-0 died", 1), snapshot(step=7)))
    assert summary.ledger.source == "last_seen"
    assert (summary.steps, summary.exit_code) == (7, 1)
    assert summary.tokens.accepted == 100
    assert summary.learner.wait_fraction == {"data": 0.25}


def test_a_run_that_never_got_anywhere_has_a_summary_too(folder: RunFolder) -> None:
    summary = write_summary(CONFIG, folder, outcome(Ending(False, "stopped by SIGINT", 130)))
    assert summary.ledger.source == "none"
    assert (summary.steps, summary.exit_code, summary.tokens.accepted) == (0, 130, 0)
    assert written(folder)["eval"] == []


def test_a_good_end_without_a_final_ledger_is_not_believed(folder: RunFolder) -> None:
    leave(folder, None, ACCOUNT)
    assert write_summary(CONFIG, folder, outcome(WELL, snapshot())).exit_code == 1


def test_the_table_shows_before_and_after(folder: RunFolder) -> None:
    leave(folder, snapshot(), ACCOUNT)
    plain = write_summary(CONFIG, folder, outcome(WELL))
    assert not any(text in table(plain, folder) for text in ("teacher accuracy", "evaluation incomplete"))
    measured = {"default": MeasuredTeacher(accuracy_sampled=0.95, n_sampled=16)}
    text = table(add_teachers(plain, folder, measured), folder)
    assert written(folder)["teacher_accuracy"] == {"default": {"accuracy_sampled": 0.95, "n_sampled": 16}}
    for said in (
        "student accuracy, sampled 0.250 at step 0 -> 0.800 at step 12",
        "student accuracy, greedy 0.460 at step 0 -> 0.990 at step 12",
        "teacher accuracy, sampled 0.950 (of 16)",
        "reverse KL per token 0.500 -> 0.060",
        "12 optimizer steps in 1:01, all ready after 4.5 s",
        "100 accepted = 60 trained + 7 masked (stale) + 33 dropped (run_ended)",
        "ledger balanced",
        "checkpoints/step-12",
    ):
        assert said in text, said


def test_a_run_with_an_alarm_is_not_simply_finished_and_one_that_it_stopped_has_its_own_exit_code(
    folder: RunFolder,
) -> None:
    alarm = Alarm("short", "rollouts/length_mean", 97, 16.0, 3.6, 102)
    told = {
        "alarms": [msgspec.to_builtins(alarm)],
        "changes": {"rollouts/length_mean": [16.0, 2.2], UNREWARDED: [0.0, 0.5]},
    }
    leave(folder, snapshot(), ACCOUNT | told)
    shown = table(write_summary(CONFIG, folder, outcome(WELL)), folder)
    assert "run run: finished, but with 1 alarm: short" in shown
    assert "length 16.0 -> 2.2 tokens, without a reward 0% -> 50%" in shown
    assert "ALARM short answers get short: rollouts/length_mean 16 at the start, 3.6 at step 102; steps 97 to" in shown
    leave(folder, snapshot(), ACCOUNT | told | {"stopped_by_alarm": True})
    summary = write_summary(CONFIG, folder, outcome(Ending(False, "alarm short", 1)), first_step=80)
    assert (summary.exit_code, summary.state, summary.ok) == (5, "stopped", False)


def test_of_a_resumed_run_the_table_says_what_this_launch_did(folder: RunFolder) -> None:
    leave(folder, snapshot(), ACCOUNT | {"tokens_trained": 61})
    assert "took back" not in table(write_summary(CONFIG, folder, outcome(WELL)), folder), (
        "the buffer died before it said so"
    )
    leave(folder, snapshot(), ACCOUNT | {"tokens_trained": 45})
    shown = table(write_summary(CONFIG, folder, outcome(WELL), first_step=8), folder)
    assert "4 optimizer steps in 1:01 (this launch; 12 in all)" in shown
    assert "60.0% of the tokens written were trained, 15 of them by steps that a restart took back" in shown


def test_the_table_says_what_limited_the_run_and_what_its_time_went_to(folder: RunFolder) -> None:
    efficiency = {"efficiency/learner_bubble": 0.4, "efficiency/weight_pause_s": 0.0125}
    leave(folder, snapshot(), ACCOUNT | {"bound": "teacher-bound 40%: more", "efficiency": efficiency, "steps": 1})
    text = table(write_summary(CONFIG, folder, outcome(WELL)), folder)
    assert "limit teacher-bound 40%: more" in text and "1 optimizer step in 1:01" in text
    assert "the learner waited 40.0% of its time, engines stood still 12.5 ms per version" in text
    assert "goodput 60.0% of the tokens written were trained" in text
    leave(folder, snapshot(), ACCOUNT)
    assert "efficiency" not in table(write_summary(CONFIG, folder, outcome(WELL)), folder)


def test_workers_that_joined_are_counted_even_those_of_which_only_the_sum_is_known(folder: RunFolder) -> None:
    final = snapshot()
    guest = msgspec.structs.replace(final.peers[0], name="actor-guest-0", alive=False, tokens_total=66)
    forgotten: dict[Role, ForgottenPeers] = {"actor": ForgottenPeers(n=300, done_total=5, tokens_total=1000)}
    leave(folder, msgspec.structs.replace(final, peers=(*final.peers, guest), forgotten=forgotten), ACCOUNT)
    text = table(write_summary(CONFIG, folder, outcome(WELL)), folder)
    assert "joined 301 actors (1,066 tokens written)" in text
    assert written(folder)["forgotten"] == {"actor": {"n": 300, "done_total": 5, "tokens_total": 1000}}
    assert written(folder)["workers"]["actor-guest-0"]["tokens"] == 66


def test_the_table_says_when_an_accuracy_is_of_fewer_rollouts_than_asked_for(folder: RunFolder) -> None:
    first, last = ACCOUNT["eval"]
    leave(folder, snapshot(), ACCOUNT | {"eval": [first, {**last, "n_sampled": 11, "missing": 3, "failed": 2}]})
    text = table(write_summary(CONFIG, folder, outcome(WELL)), folder)
    assert (
        "evaluation incomplete step 12: the figures are of 8 greedy and 11 sampled rollouts, 24 were requested "
        "(3 missing, 2 failed)" in text
    )
    assert written(folder)["eval"][1]["n_sampled"] == 11


def test_a_launch_that_wrote_no_checkpoint_shows_the_newest_of_the_run(folder: RunFolder) -> None:
    leave(folder, snapshot(), {**ACCOUNT, "checkpoint": None})
    assert "checkpoint none" in table(write_summary(CONFIG, folder, outcome(WELL)), folder)
    for name, version in (
        ("step_000012", WeightVersion(0, 12)),
        ("step_000008_epoch_1", WeightVersion(1, 8)),
        ("step_000099", None),
    ):
        saved = folder.path / CHECKPOINTS / name
        saved.mkdir(parents=True)
        manifest = msgspec.json.encode({"format": 1, "version": version, "files": {}}) if version is not None else b"{"
        (saved / "manifest.json").write_bytes(manifest)
    summary = write_summary(CONFIG, folder, outcome(WELL))
    assert summary.checkpoint == f"{CHECKPOINTS}/step_000008_epoch_1"
    assert f"checkpoint {folder.path / CHECKPOINTS}/step_000008_epoch_1" in table(summary, folder)


def test_rollouts_that_failed_are_listed_with_a_few_of_their_texts(folder: RunFolder) -> None:
    text = "actor-0: KeyError: 'tool' [/x]"
    failures = (
        RolloutFailures("env_timeout", 2, "actor-1: reset took longer", ("actor-1: reset took longer",)),
        RolloutFailures("env_error_KeyError", 64, text, ("actor-0: KeyError: 'first'", text)),
    )
    leave(folder, msgspec.structs.replace(snapshot(), failures=failures), ACCOUNT)
    summary = write_summary(CONFIG, folder, outcome(WELL))
    failed = written(folder)["failed_rollouts"]
    assert failed["env_error_KeyError"] == {"n": 64, "newest": text, "examples": ["actor-0: KeyError: 'first'", text]}
    assert list(failed) == ["env_timeout", "env_error_KeyError"]
    assert f"2 env_timeout, 64 env_error_KeyError; newest {text}" in table(summary, folder)


def test_a_summary_that_cannot_be_written_is_shown_all_the_same(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    leave(folder, snapshot(), ACCOUNT)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stillhouse.launch.report.summary.write_atomic", full)
    monkeypatch.setattr("stillhouse.launch.runfolder.write_atomic", full)
    summary = write_summary(CONFIG, folder, outcome(WELL))
    folder.finish(summary.exit_code)
    assert summary.ok and "finished" in table(summary, folder)
    printed = capsys.readouterr().err
    for name in ("summary.json", "run.json"):
        assert f"{folder.path / name} could not be written: [Errno 28] No space left on device" in printed


@pytest.mark.parametrize(
    ("checkpoint", "note"),
    [
        ("step_000012", ""),
        ("step_000008_epoch_1", "(from step 8: the newest checkpoint)"),
        (None, "(from step 0: there is no checkpoint)"),
    ],
)
def test_a_run_that_was_stopped_says_how_to_go_on_and_from_where(
    folder: RunFolder, checkpoint: str | None, note: str
) -> None:
    leave(folder, snapshot(), {**ACCOUNT, "checkpoint": checkpoint and str(folder.path / CHECKPOINTS / checkpoint)})
    stopped = table(write_summary(CONFIG, folder, outcome(Ending(False, "stopped by Ctrl-C", 130))), folder)
    assert f"--resume --run-dir {folder.path} {note}".strip() in " ".join(stopped.split())
    assert "--resume" not in table(write_summary(CONFIG, folder, outcome(WELL)), folder)


def test_damaged_checkpoints_that_were_passed_over_are_named(folder: RunFolder) -> None:
    leave(folder, snapshot(), ACCOUNT)
    aside = folder.path / CHECKPOINTS / "damaged-step_000008"
    aside.mkdir(parents=True)
    summary = write_summary(CONFIG, folder, outcome(WELL))
    assert summary.checkpoints_damaged == (f"{CHECKPOINTS}/damaged-step_000008",)
    assert f"DAMAGED {aside} could not be read" in table(summary, folder)
