"""An audit finds each kind of fault, says where it is, and finds nothing in a run without one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stillhouse.protocol.messages import BatchItem, Settled, VersionSpan, WeightVersion
from stillhouse.recording.format import RecordedRollout, RecordHeader, encode_batch, encode_header, encode_resumed
from stillhouse.tools.audit import record, report
from stillhouse.tools.audit.record import AuditError, RecordedBatch, RecordFile, Resumed, Version
from stillhouse.tools.audit.run import audit, main
from tests.patience import PATIENCE_S
from tests.tools.audit.written import Written, batch, begin, group, item, resumed, trained

ROOT = Path(__file__).parents[3]


@pytest.fixture
def run(tmp_path: Path) -> Written:
    return Written(tmp_path)


def faults(run: Written) -> dict[str, int]:
    """Those that were found."""
    return {kind: fault.count for kind, fault in audit(run.path).faults.items() if fault.count}


def places(run: Written, kind: str) -> list[str]:
    return [str(place) for place in audit(run.path).faults[kind].places]


def steps(*tasks: int, first: int = 0, epoch: int = 0, **more: Any) -> list[bytes]:
    """A step for each task, whose group it trains whole."""
    return [
        batch((epoch, first + n), *group(task, by=(epoch, first + n), **more), settled=trained((task, 0), (task, 1)))
        for n, task in enumerate(tasks)
    ]


def test_a_run_without_a_fault_is_clean_and_its_figures_are_right(run: Written) -> None:
    run.record(*steps(0, 1, 2))
    run.metrics(("step", (0, 1), 8), ("step", (0, 2), 8), ("step", (0, 3), 8))
    run.checkpoint((0, 3), 4, outstanding={3: []})
    found = audit(run.path)
    assert found.clean and not found.notes
    assert (found.steps_kept, found.steps_abandoned, found.tokens, found.samples, found.stalest) == (3, 0, 24, 6, 0)
    assert (found.checkpoint, found.tasks, found.bound) == ("step_000003_epoch_0", 4, 1)


def test_what_an_abandoned_branch_trained_does_not_count(run: Written) -> None:
    """Step 2 of epoch 0 is made again by epoch 1, of the same and of other tasks."""
    run.record(*steps(0, 1, 2, 3), resumed((1, 2), (0, 2)), *steps(3, 2, first=2, epoch=1, attempt=1))
    run.checkpoint((0, 2), 2)
    run.checkpoint((0, 4), 9)  # abandoned, and the newest by step if it were not
    run.checkpoint((1, 4), 4)
    found = audit(run.path)
    assert found.clean, str(found)
    assert (found.steps_kept, found.steps_abandoned, found.epochs, found.checkpoint) == (4, 2, 2, "step_000004_epoch_1")


def test_one_rollout_trained_twice(run: Written) -> None:
    run.record(*steps(0, 1), batch((0, 2), item(0, 1, (4, 8), by=(0, 1)), settled=[]))
    assert faults(run) == {report.TWICE_ROLLOUT: 2, report.TWICE_SAMPLE: 2, report.SETTLED_WRONG: 1}
    assert places(run, report.TWICE_ROLLOUT) == [
        "step 0.2, batch 3, rollout train-0-1-0, task 0, sample 1, tokens [4, 6): 2 tokens, before at step 0"
    ]


def test_a_rollout_in_pieces_is_trained_once(run: Written) -> None:
    pieces = [batch((0, n), item(0, 0, (2 + 3 * n, 5 + 3 * n), by=(0, n)), settled=[]) for n in range(3)]
    run.record(*pieces, batch((0, 3), item(0, 1, (2, 4), by=(0, 3)), settled=trained((0, 0), (0, 1))))
    run.checkpoint((0, 4), 1)
    assert faults(run) == {}


def test_a_sample_begun_anew_and_kept(run: Written) -> None:
    """The same positions again are trained twice; other positions of another rollout are wrong, too."""
    run.record(
        batch((0, 0), *group(0)),
        batch((0, 1), item(0, 0, (3, 8), attempt=1, by=(0, 1)), item(0, 1, (6, 7), attempt=1, by=(0, 1))),
    )
    assert faults(run) == {report.TWICE_SAMPLE: 3, report.BEGUN_ANEW: 2}
    assert "rollout train-0-1-1" in places(run, report.BEGUN_ANEW)[1]


def test_a_token_over_the_bound(run: Written) -> None:
    run.record(*steps(0, 1), batch((0, 2), item(2, 0, (2, 9), spans=[((0, 0), 2, 5), ((0, 1), 5, 9)])))
    assert faults(run) == {report.OVER_BOUND: 3}
    (place,) = places(run, report.OVER_BOUND)
    assert "tokens [2, 5): sampled by version 0.0, 2 steps away; the bound is 1" in place


def test_the_distance_goes_down_one_branch_and_up_the_other(run: Written) -> None:
    """Epoch 1 left at 0.2, since a newer checkpoint could not be read; epoch 2 went on from that one, 0.4. From 1.3 to
    2.4 it is one step down and two up; from 0.4 it is none. By steps alone 1.3 would be one step away."""
    spans = [((0, 4), 2, 4), ((1, 3), 4, 9)]
    run.record(
        *steps(0, 1, 2, 3),
        resumed((1, 2), (0, 2)),
        *steps(8, 9, first=2, epoch=1),
        resumed((2, 4), (0, 4)),
        batch((2, 4), item(4, 0, (2, 9), spans=spans)),
    )
    run.config({"max_staleness": 2})
    assert faults(run) == {report.OVER_BOUND: 5}
    assert audit(run.path).stalest == 3


def test_a_parent_that_nobody_wrote_down_is_found_by_its_step(run: Written) -> None:
    run.record(
        *steps(0, 1, 2, 3), resumed((1, 2)), *steps(2, first=2, epoch=1), resumed((2, 4)), *steps(4, first=4, epoch=2)
    )
    found = audit(run.path)
    assert found.clean and (found.steps_kept, found.steps_abandoned) == (5, 1)
    assert found.notes[-1].endswith("1.2, 2.4; inferred by step")


def test_tokens_of_weights_that_were_never_made(run: Written) -> None:
    run.record(batch((0, 0), item(0, 0, (2, 5), by=(0, 7)), item(0, 1, (2, 9), spans=[((0, 0), 2, 4)])))
    assert faults(run) == {report.UNKNOWN_WEIGHTS: 8}


@pytest.mark.parametrize("said", [[], [resumed((1, 0), (0, 0))]])
def test_a_first_learner_that_died_before_it_recorded_anything(run: Written, said: list[bytes]) -> None:
    """The student, version 0.0, existed all the same, and so may its first step; nothing beyond is possible."""
    first = batch((1, 0), *group(0, by=(0, 0), attempt=1), settled=trained((0, 0), (0, 1)))
    second = batch((1, 1), *group(1, by=(0, 0), attempt=1), settled=trained((1, 0), (1, 1)))
    run.record(*said, first, second)
    found = audit(run.path)
    assert (faults(run), found.steps_kept, found.tokens, found.stalest) == ({}, 2, 16, 1)

    run.record(*said, first, batch((1, 1), item(1, 0, (2, 5), by=(0, 2)), item(1, 1, (2, 5), by=(2, 0))))
    assert faults(run)[report.UNKNOWN_WEIGHTS] == 6


def test_a_skipped_task_and_a_skipped_sample(run: Written) -> None:
    """Of task 1 only an abandoned step trained something; of task 2 one sample is neither settled nor open."""
    run.record(
        *steps(0, 1),
        resumed((1, 1), (0, 1)),
        batch((1, 1), item(2, 0, (2, 4), by=(1, 1)), settled=trained((2, 0))),
    )
    run.checkpoint((1, 2), 4, outstanding={3: []})
    assert faults(run) == {report.SKIPPED_TASKS: 1, report.SKIPPED_SAMPLES: 1}
    assert places(run, report.SKIPPED_TASKS) == ["task 1: trained at the abandoned step 0.1 only"]
    assert places(run, report.SKIPPED_SAMPLES) == ["task 2, sample 1: in no recorded step"]


def test_dropped_and_masked_by_name_is_not_skipped(run: Written) -> None:
    fates = [(0, 0, "dropped", "env_error"), (0, 1, "masked", "stale")]
    run.record(batch((0, 0), *group(1), settled=[*fates, *trained((1, 0), (1, 1))]))
    run.checkpoint((0, 1), 2)
    assert faults(run) == {}


def test_what_was_settled_after_the_checkpoint_must_be_open_in_it(run: Written) -> None:
    run.record(*steps(0, 1))
    run.checkpoint((0, 1), 2, outstanding={1: []})
    assert faults(run) == {}
    run.checkpoint((0, 2), 2, outstanding={1: [1]})  # a newer one, which does not know that sample 0 is settled
    assert faults(run) == {report.SETTLED_TWICE: 1}
    assert places(run, report.SETTLED_TWICE) == [
        "step 0.1, task 1, sample 0: settled at step 1, and open in the checkpoint of step 2"
    ]


def test_a_checkpoint_knows_what_is_settled_of_tasks_that_come_later(run: Written) -> None:
    run.record(batch((0, 0), *group(5), settled=trained((5, 0), (5, 1))))
    run.checkpoint((0, 1), 0, ahead={5: [0]})
    assert faults(run) == {report.SETTLED_WRONG: 1}
    assert "task 5, sample 1" in places(run, report.SETTLED_WRONG)[0]


def test_a_checkpoint_knows_which_samples_are_trained_in_part(run: Written) -> None:
    run.record(batch((0, 0), item(0, 0, (2, 5)), item(0, 1, (2, 4)), settled=trained((0, 1))))
    run.checkpoint((0, 1), 1, outstanding={0: [1]}, partial={(0, 0): 3})
    assert faults(run) == {}
    run.checkpoint((1, 1), 1, outstanding={0: [1]}, partial={(0, 0): 1})  # of an epoch that is not on the branch
    assert faults(run) == {}
    for n in (0, 1):
        run.checkpoint((0, 1), 1, outstanding={0: [1]}, partial={(0, 0): 1} if n else {})
        assert faults(run) == {report.SETTLED_WRONG: 1}
        assert f"3 tokens are trained, the checkpoint of step 1 says {n}" in places(run, report.SETTLED_WRONG)[0]


def test_a_sample_settled_twice(run: Written) -> None:
    again = (0, 1, "dropped", "run_ended")
    run.record(*steps(0), batch((0, 1), *group(1, by=(0, 1)), settled=[again, *trained((1, 0), (1, 1))]))
    assert faults(run) == {report.SETTLED_TWICE: 1}
    told = "dropped (run_ended), before at step 0 trained"
    assert places(run, report.SETTLED_TWICE) == [f"step 0.1, task 0, sample 1: {told}"]


def test_settled_as_trained_without_a_token_and_trained_after_it_was_settled(run: Written) -> None:
    run.record(
        batch((0, 0), item(0, 0, (2, 4)), settled=trained((0, 0), (0, 1))),
        batch((0, 1), item(0, 0, (4, 6), by=(0, 1)), settled=[]),
    )
    assert faults(run) == {report.SETTLED_WRONG: 2}


def test_a_step_that_was_not_recorded_and_one_recorded_twice(run: Written) -> None:
    one, two, three = steps(0, 1, 2)
    run.record(one, three, three)
    run.metrics(("step", (0, 4), 8))
    run.checkpoint((0, 4), 1)
    found = faults(run)
    assert (found[report.NOT_RECORDED], found[report.RECORDED_TWICE]) == (2, 1)
    assert places(run, report.NOT_RECORDED)[0].startswith("step 0.1: ")
    run.record(one, two, three)
    assert faults(run) == {report.NOT_RECORDED: 1}, "metrics.jsonl knows a step more"


def test_another_number_of_tokens_than_metrics_tells(run: Written) -> None:
    run.record(*steps(0, 1))
    run.metrics(("step", (0, 1), 8), ("step", (0, 2), 7))
    assert faults(run) == {report.OTHER_TOKENS: 1}


def test_a_rollout_that_was_left_out_is_not_trained(run: Written) -> None:
    left_out, fate = "train-0-1-0", [(0, 1, "masked", "non_finite")]
    run.record(batch((0, 0), *group(0), settled=[*trained((0, 0)), *fate], masked=[left_out]))
    run.metrics(("step", (0, 1), 4))
    run.checkpoint((0, 1), 1)
    assert faults(run) == {} and audit(run.path).tokens == 4
    run.metrics(("step", (0, 1), 8))
    assert faults(run) == {report.OTHER_TOKENS: 1}


def test_text_that_the_teacher_wrote_is_nobodys_sample(run: Written) -> None:
    mixed = item(0, 0, (2, 6), offline=True)
    run.record(batch((0, 0), *group(0), mixed), batch((0, 1), mixed, *group(1, by=(0, 1))))
    assert faults(run) == {} and audit(run.path).tokens == 16


def test_frames_that_are_not_compressed(run: Written) -> None:
    run.record(batch((0, 0), item(0, 0, (2, 4), (7, 9), squeezed=False), item(0, 1, (3, 4))))
    assert audit(run.path).tokens == 5


def test_a_damaged_checkpoint_is_not_used(run: Written) -> None:
    run.record(*steps(0, 1))
    run.checkpoint((0, 1), 1)
    damaged = run.checkpoint((0, 2), 9)
    (damaged / "trainer.json").write_bytes((damaged / "trainer.json").read_bytes().replace(b" 9", b" 8"))
    assert faults(run) == {} and audit(run.path).checkpoint == "step_000001_epoch_0"


def test_a_wider_bound_of_an_earlier_launch_holds(run: Written) -> None:
    run.record(*steps(0, 1), batch((0, 2), item(2, 0, (2, 9), by=(0, 1))))
    run.config({"max_staleness": 0})
    found = audit(run.path)
    assert found.clean and found.bound == 1 and "larger one" in found.notes[-1]


def test_the_end_of_a_killed_writer_is_left_out(run: Written) -> None:
    run.record(*steps(0, 1), steps(1, first=2)[0][:-3])
    found = audit(run.path)
    assert found.clean and found.tokens == 16 and "incomplete" in found.notes[0]


def test_nothing_to_count_is_said_so(run: Written, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def message(*arguments: str) -> str:
        assert main([str(run.path), *arguments]) == 2
        return capsys.readouterr().err

    assert "start a run with --record FILE" in message()  # no such file
    run.record()
    assert "has no batch" in message()
    one = steps(0)[0]
    run.record(one[:40] + b"?" + one[41:], one)
    assert "is damaged at byte" in message()
    run.file.write_bytes(b"something else altogether")
    assert "is not a record" in message()
    run.file.write_bytes(begin(format=2))
    assert "is not a record" in message()
    run.config({}, record_at="")
    assert "does not say buffer.max_staleness" in message()
    run.config({"max_staleness": 1}, record_at="")
    assert "was not recorded" in message()
    assert main([str(tmp_path)]) == main([]) == main([str(tmp_path / "nowhere")]) == main(["a", "b"]) == 2


def test_the_command_and_its_exit_codes(
    run: Written, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str]:
        return main(arguments), "".join(capsys.readouterr())

    run.record(*steps(0, 1))
    run.metrics(("step", (0, 1), 8), ("step", (0, 2), 8))
    code, said = call(str(run.path))
    assert code == 0 and said.rstrip().endswith("clean"), said
    run.record(*steps(0, 0))
    code, said = call(str(run.path))
    assert code == 4 and "rollout train-0-0-0, task 0, sample 0, tokens [2, 6): 4 tokens" in said, said
    moved = run.file.rename(tmp_path / "elsewhere")
    assert call(str(run.path))[0] == 2
    assert call(str(run.path), "--record", str(moved))[0] == 4
    assert call("--help")[0] == 0


def test_the_audit_loads_nothing_of_what_it_audits() -> None:
    """import-linter holds the arrows; this holds what is loaded."""
    look = (
        "import sys, stillhouse.tools.audit.run; "
        "print([m for m in sys.modules if m == 'torch' or m.startswith('stillhouse.') and m.split('.')[1] in "
        "('protocol', 'models', 'weights', 'engines', 'recording', 'replay', 'actors', 'teachers', 'buffer', "
        "'learner')])"
    )
    said = subprocess.run(
        [sys.executable, "-c", look], capture_output=True, text=True, timeout=PATIENCE_S, cwd=ROOT, check=True
    )
    assert said.stdout.strip() == "[]"


def test_what_a_learner_writes_is_read(tmp_path: Path) -> None:
    """The two formats are written down twice, on purpose; they must not part."""
    header = RecordHeader(
        format=1, run="a", vocab_fingerprint="", writer="student", config_digest="", config={"buffer": {}}
    )
    whole = BatchItem(
        rollout_id="train-3-1-0",
        task_id=3,
        sample_index=1,
        group_size=4,
        tag="",
        teachers=("default",),
        end=6,
        spans=(VersionSpan(WeightVersion(1, 7), 2, 6),),
        final=True,
        finish_reason="stop",
        reward=None,
        n_turns=1,
    )
    mask_T = np.array([0, 0, 1, 1, 0, 1], np.uint8)
    frames = (np.arange(6, dtype=np.int32), np.zeros(6, np.float32), mask_T, np.zeros((1, 6), np.float32))
    file = tmp_path / "a.record"
    file.write_bytes(
        encode_header(header)
        + encode_resumed(WeightVersion(1, 7), WeightVersion(0, 7))
        + encode_batch(
            5,
            WeightVersion(1, 7),
            [RecordedRollout(whole, frames)],
            staleness={0: 3},
            tasks_done=(3,),
            settled=(Settled(3, 1, "masked", "stale"),),
            masked=("train-3-2-0",),
        )
    )
    with RecordFile(file) as opened:
        _, went_on, last = list(opened.places())
        assert went_on.record == Resumed(Version(1, 7), Version(0, 7))
        found = opened.batch(last)
        assert isinstance(found, RecordedBatch) and (found.batch_id, found.version) == (5, Version(1, 7))
        assert found.settled == (record.Settled(3, 1, "masked", "stale"),)
        assert found.masked == ("train-3-2-0",)
        (read,) = found.items
        assert read.item.sample == (3, 1) and read.item.spans == ((Version(1, 7), 2, 6),)
        assert opened.runs(read, last.blob_at) == [(2, 4), (5, 6)]


def test_a_record_of_another_format_is_refused(run: Written) -> None:
    run.file.write_bytes(b"stillhouse batches\n" + begin(format=2))
    with pytest.raises(AuditError, match="has format 2, expected 1"):
        audit(run.path)
