"""What is written can be read again: JSON lines by our reader, TensorBoard events by TensorBoard's own."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from stillhouse.learner.evaluation.evaluation import EvalSample, EvaluationResult
from stillhouse.learner.evaluation.figures import TagFigures
from stillhouse.learner.reports.figures import TokenRates
from stillhouse.learner.reports.metrics import MetricsWriter, newest_epoch, read_metrics
from stillhouse.learner.reports.wait_clock import WaitReport
from stillhouse.protocol.messages import Ledger, LedgerCounts, PeerView, Role, Snapshot, WeightVersion
from tests.declared_figures import undeclared
from tests.full_disk import fill, small_disk

WAITS = WaitReport(
    wall_s=2.0, busy_s=1.5, wait_s={"data": 0.25, "scoring": 0.25, "weights": 0.0, "eval": 0.0, "checkpoint": 0.0}
)
FIGURES = ("accuracy", "reward", "mean_length")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
NO_COUNTS = LedgerCounts(0, 0, {}, {}, 0, 0)


def peer(role: Role, name: str, tokens_total: int) -> PeerView:
    return PeerView(role, name, True, None, 0.0, {}, 0, 0, tokens_total)


def snapshot(time_s: float, *peers: PeerView) -> Snapshot:
    tokens = LedgerCounts(1000, 700, {"stale": 30}, {"actor_lost": 20}, 200, 50)
    return Snapshot(
        time_s=time_s,
        phase="running",
        phase_reason="",
        version=WeightVersion(0, 1),
        published=WeightVersion(0, 1),
        ledger=Ledger(NO_COUNTS, NO_COUNTS, tokens, {}, NO_COUNTS),
        queues={"tasks_queued": 3, "tokens_unscored": 17},
        staleness_hist={},
        max_staleness=4,
        peers=peers,
    )


def write_step(writer: MetricsWriter, step: int, *, at_s: float | None = None, **train: float) -> dict[str, Any]:
    return writer.step(
        step,
        train,
        staleness={0: 10, 2: 30},
        waits=WAITS,
        snapshot=snapshot(float(step) if at_s is None else at_s, peer("actor", "actor-0", 100 * step)),
        weights={"broadcast_s": 0.125},
        tasks_dropped={"prompt_too_long": 5},
    )


def evaluation(step: int, **fields: Any) -> EvaluationResult:
    figures: dict[str, Any] = {
        "accuracy_greedy": 0.75,
        "accuracy_sampled": 0.5,
        "reward_greedy": 0.75,
        "reward_sampled": 0.5,
        "reverse_kl": 0.1,
        "mean_length_greedy": 10.0,
        "mean_length_sampled": 11.0,
        "n_greedy": 4,
        "n_sampled": 4,
        "no_reward": 0,
        "failed": 1,
        "missing": 0,
        "duplicates": 0,
        "version_min": WeightVersion(0, step),
        "version_mean_step": float(step),
        **fields,
    }
    return EvaluationResult(step=step, **figures)


def events(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(
        str(folder / "tensorboard" / folder.name), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0}
    )
    accumulator.Reload()
    return accumulator


def scalar_series(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events(folder).Scalars(tag)]


def test_figures_of_tags_are_written_beside_those_of_all(tmp_path: Path) -> None:
    sums = TagFigures(accuracy_greedy=0.5, accuracy_sampled=0.25, reverse_kl=0.4, n_greedy=2, n_sampled=4)
    tags = {"sums": sums, "style": TagFigures(accuracy_sampled=0.75, n_greedy=0, n_sampled=4)}
    with MetricsWriter(tmp_path) as writer:
        row = writer.evaluation(evaluation(3, tags=tags))
        writer.evaluation(evaluation(6))
    assert row["eval/accuracy_sampled"] == 0.5 and "eval/tags" not in row
    told = {name: row[f"eval/sums/{name}"] for name in TagFigures.__struct_fields__ if name != "at_k"}
    assert {**told, "at_k": {}} == msgspec.to_builtins(tags["sums"])
    assert scalar_series(tmp_path, "eval/sums/reverse_kl") == [(3, pytest.approx(0.4))]
    assert row["eval/style/reverse_kl"] is None
    with pytest.raises(KeyError):
        scalar_series(tmp_path, "eval/style/reverse_kl")


def test_evaluations_of_one_step_on_several_sets_are_kept_apart(tmp_path: Path) -> None:
    sample = EvalSample("sampled", 7, "1+1=", "2", "2", 1.0, "stop", name="hard")
    with MetricsWriter(tmp_path) as writer:
        writer.evaluation(evaluation(3))
        hard = evaluation(3, name="hard", at_k={"avg_at_2": 0.25, "pass_at_2": 0.5}, reverse_kl=None, samples=(sample,))
        row = writer.evaluation(hard)
        writer.evaluation(evaluation(3, accuracy_greedy=1.0))
    assert (row["set"], row["eval/sets/hard/pass_at_2"], row["eval/sets/hard/reverse_kl"]) == ("hard", 0.5, None)
    assert undeclared(key for key in row if "/" in key or key == "set") == []
    assert scalar_series(tmp_path, "eval/sets/hard/avg_at_2") == [(3, 0.25)]
    named, own = read_metrics(tmp_path)
    assert (named["set"], own.get("set"), own["eval/accuracy_greedy"]) == ("hard", None, 1.0)
    assert json.loads((tmp_path / "samples.jsonl").read_text())["name"] == "hard"
    assert events(tmp_path).Tensors("eval/sets/hard/samples/text_summary")


# ------------------------------------------------------------------------------------------------ what a step writes


def test_a_step_writes_the_same_figures_to_both(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        write_step(writer, 1, loss=0.5, reverse_kl=0.25)
        row = write_step(writer, 2, loss=0.25, reverse_kl=0.125)
    (first, second) = read_metrics(tmp_path)
    assert second == row
    assert (first["kind"], first["step"], second["step"]) == ("step", 1, 2)
    expected = {
        "train/loss": 0.25,
        "train/reverse_kl": 0.125,
        "staleness/mean": 1.5,
        "staleness/max": 2,
        "time/step_s": 2.0,
        "time/busy_s": 1.5,
        "wait/scoring_s": 0.25,
        "wait/weights_s": 0.0,
        "rate/actor_tokens_per_s": 100.0,
        "rate/teacher_tokens_per_s": 0.0,
        "queue/tokens_unscored": 17,
        "tokens/accepted_total": 1000,
        "masked/stale_total": 30,
        "dropped/actor_lost_total": 20,
        "tasks/dropped_prompt_too_long_total": 5,
        "weights/broadcast_s": 0.125,
        "health/nonfinite_total": 0,
    }
    for tag, value in expected.items():
        assert second[tag] == value, tag
        assert scalar_series(tmp_path, tag)[-1] == (2, value), tag
    assert second["staleness"] == {"0": 10, "2": 30}


def test_the_staleness_histogram_has_one_bucket_per_distance(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        write_step(writer, 1)
        writer.step(2, {}, staleness={}, waits=WAITS, snapshot=snapshot(2.0), weights={}, tasks_dropped={})
    (event,) = events(tmp_path).Histograms("staleness/tokens")
    value = event.histogram_value
    assert (value.num, value.sum, value.min, value.max) == (40, 60, 0, 2)
    assert dict(zip(value.bucket_limit, value.bucket, strict=True)) == {0.5: 10, 1.5: 0, 2.5: 30}


def test_numbers_that_are_not_finite_are_written_as_such_and_counted(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        write_step(writer, 1, loss=math.nan, ratio_max=math.inf, reverse_kl=-math.inf)
        write_step(writer, 2, loss=1.0)
        writer.evaluation(evaluation(2, reverse_kl=math.nan))
    step, after, evaluated = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (step["train/loss"], step["train/ratio_max"], step["train/reverse_kl"]) == ("NaN", "Infinity", "-Infinity")
    assert [row["health/nonfinite_total"] for row in (step, after, evaluated)] == [3, 3, 4]
    assert evaluated["eval/reverse_kl"] == "NaN"
    assert [at for at, _ in scalar_series(tmp_path, "health/nonfinite_total")] == [1, 2], "no evaluation in between"
    (_, written), _ = scalar_series(tmp_path, "train/loss")
    assert math.isnan(written)


# ------------------------------------------------------------------------------------------------ evaluation


def test_an_evaluation_is_written_with_its_samples(tmp_path: Path) -> None:
    samples = (
        EvalSample("greedy", 7, "user\n1+2=", "#3\nend", "3", 1.0, "stop"),
        EvalSample("sampled", 8, "user\n2+2=", "é", None, None, "length"),
    )
    with MetricsWriter(tmp_path) as writer:
        writer.evaluation(evaluation(40, samples=samples, reward_sampled=None))
    (row,) = read_metrics(tmp_path)
    assert (row["kind"], row["step"], row["eval/accuracy_greedy"], row["eval/failed"]) == ("eval", 40, 0.75, 1)
    assert row["eval/reward_sampled"] is None
    assert row["eval/version_min"] == 40
    assert scalar_series(tmp_path, "eval/accuracy_sampled") == [(40, 0.5)]
    with pytest.raises(KeyError):
        scalar_series(tmp_path, "eval/reward_sampled")
    (text,) = events(tmp_path).Tensors("eval/samples/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert "**greedy** reward 1, expected '3', ended by stop\n\n    user\n    1+2=⟶#3\n    end" in shown
    assert "**sampled** no reward, ended by length" in shown
    first, second = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert (first["step"], first["completion"], second["completion"]) == (40, "#3\nend", "é")


# ------------------------------------------------------------------------------------------------ resume


def test_after_a_resume_the_abandoned_steps_stay_in_the_file_and_out_of_the_reading(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for step in (1, 2, 3, 4):
            write_step(writer, step, loss=float(step))
            writer.evaluation(evaluation(step))
    with MetricsWriter(tmp_path, resume=WeightVersion(1, 2)) as writer:
        writer.evaluation(evaluation(2, accuracy_greedy=1.0))
        write_step(writer, 3, loss=30.0)
    rows = [row for row in read_metrics(tmp_path) if row["kind"] == "step"]
    assert [(row["step"], row["train/loss"], row["epoch"]) for row in rows] == [(1, 1.0, 0), (2, 2.0, 0), (3, 30.0, 1)]
    evaluated = [row for row in read_metrics(tmp_path) if row["kind"] == "eval"]
    assert [(row["step"], row["eval/accuracy_greedy"]) for row in evaluated] == [(1, 0.75), (2, 1.0)]
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert kinds == ["step", "eval"] * 4 + ["resume", "eval", "step"]
    assert scalar_series(tmp_path, "train/loss") == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_a_line_torn_by_a_kill_is_cut_off_and_told(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        write_step(writer, 1)
    file = tmp_path / "metrics.jsonl"
    with file.open("a") as stream:
        stream.write('{"kind": "step", "st' + "x" * 100_000)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]
    with MetricsWriter(tmp_path, resume=WeightVersion(1, 1)) as writer:
        write_step(writer, 2)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    assert json.loads(file.read_text().splitlines()[1])["torn_bytes"] == 100_020
    file.write_text('{"kind": "st')
    with MetricsWriter(tmp_path, resume=WeightVersion(2, 0)) as writer:
        write_step(writer, 1)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]


@pytest.mark.parametrize(
    "garbage",
    [b"\0" * 300, b"{", b"[1, 2]", b'"step"', b'{"kind": "step"}', b"\xff\xfe", b'{"kind": 1, "step": 2, "epoch": 0}'],
)
def test_a_damaged_line_is_left_out_and_the_run_goes_on(
    tmp_path: Path, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with MetricsWriter(tmp_path) as writer:
        write_step(writer, 1)
        write_step(writer, 2)
    file = tmp_path / "metrics.jsonl"
    first, second = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first + garbage + b"\n" + second)
    assert newest_epoch(tmp_path) == 0
    with MetricsWriter(tmp_path, resume=WeightVersion(1, 2)) as writer:
        write_step(writer, 3)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]
    assert "1 damaged lines are left out, the first is line 2" in caplog.text


def test_a_new_run_does_not_write_into_the_metrics_of_another(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        write_step(writer, 1)
    with pytest.raises(FileExistsError, match="another run's metrics"):
        MetricsWriter(tmp_path)


# ------------------------------------------------------------------------------------------------ full disk


def test_a_full_disk_loses_rows_and_nothing_else(tmp_path: Path) -> None:
    """Steps 2 to 4 fall into the time without room: they are missed by both, counted, and the others are whole."""
    samples = (EvalSample("greedy", 7, "1+2=", "3" * 5000, "3", 1.0, "stop"),)
    with small_disk(tmp_path / "disk", 256 << 10) as disk:
        with MetricsWriter(disk) as writer:
            write_step(writer, 1, loss=1.0)
            ballast = fill(disk)
            short = dict.fromkeys((f"{name}_{half}" for name in FIGURES for half in ("greedy", "sampled")), 1)
            for _ in range(20):  # shorter than all that follow: they fill what is left of the last pages
                write_step(writer, 2, loss=2.0)
                writer.evaluation(evaluation(2, **short))
            before = writer.unwritten.rows_total
            write_step(writer, 3, loss=3.0)
            writer.evaluation(evaluation(3, samples=samples))
            write_step(writer, 4, loss=4.0)
            assert writer.unwritten.rows_total == before + 7  # metrics.jsonl and TensorBoard, and a sample
            ballast.unlink()
            row = write_step(writer, 5, loss=5.0)
            writer.evaluation(evaluation(5, samples=samples))
        rows = read_metrics(disk)
        assert [(row["kind"], row["step"]) for row in rows if row["step"] != 2] == [
            ("step", 1),
            ("step", 5),
            ("eval", 5),
        ]
        assert row["health/unwritten_rows_total"] == before + 7
        assert [value for value in scalar_series(disk, "train/loss") if value[0] != 2] == [(1, 1.0), (5, 5.0)]
        assert scalar_series(disk, "health/unwritten_rows_total")[-1] == (5, before + 7)
        (sample,) = (disk / "samples.jsonl").read_text().splitlines()
        assert json.loads(sample)["step"] == 5


def test_a_learner_that_goes_on_with_a_full_disk_says_so_in_the_file_before_its_first_row(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 64 << 10) as disk:
        with MetricsWriter(disk) as writer:
            for step in (1, 2, 3):
                write_step(writer, step, loss=float(step))
        ballast = fill(disk)
        size = (disk / "metrics.jsonl").stat().st_size
        with (disk / "metrics.jsonl").open("a") as stream:
            stream.write((" " * (-size % PAGE_BYTES))[1:] + "\n" * (size % PAGE_BYTES > 0))  # the rest of its page
        with MetricsWriter(disk, resume=WeightVersion(1, 1)) as writer:
            write_step(writer, 2, loss=20.0)
            ballast.unlink()
            write_step(writer, 3, loss=30.0)
        lines = [line for line in (disk / "metrics.jsonl").read_text().splitlines() if line.strip()]
        assert [(row["kind"], row["step"]) for row in map(json.loads, lines[3:])] == [("resume", 1), ("step", 3)]
        assert scalar_series(disk, "train/loss") == [(1, 1.0), (3, 30.0)]


# ------------------------------------------------------------------------------------------------ rates


def test_a_window_takes_the_mean_over_several_snapshots() -> None:
    rates = TokenRates(window_s=4.0)
    for time_s, tokens in ((0.0, 0), (2.0, 10), (4.0, 100), (6.0, 110), (8.0, 120)):
        rates.update(snapshot(time_s, peer("actor", "actor-0", tokens)))
    assert rates.tokens_per_s["actor"] == (120 - 100) / 4


def test_a_buffer_that_restarts_gives_no_negative_rate() -> None:
    rates = TokenRates()
    rates.update(snapshot(10.0, peer("actor", "actor-0", 100)))
    rates.update(snapshot(11.0, peer("actor", "actor-0", 5)))
    assert rates.tokens_per_s == {}
    rates.update(snapshot(12.0, peer("actor", "actor-0", 15)))
    assert rates.tokens_per_s["actor"] == 10.0
