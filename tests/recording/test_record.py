"""Recorded batches come back as they were; what is torn is left out, what is damaged or another's is refused."""

from __future__ import annotations

import io
import shutil
import tracemalloc
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.learner.worker import LearnerStart
from stillhouse.protocol.messages import WeightVersion
from stillhouse.recording.append_file import Unwritten
from stillhouse.recording.format import (
    HEAD,
    MAGIC,
    BatchRecord,
    ItemRecord,
    RecordedRollout,
    RecordError,
    decode_frames,
    encode_batch,
    encode_header,
    scan,
)
from stillhouse.recording.reader import Recording
from stillhouse.recording.writer import DEFAULT_NAME, BatchRecorder
from tests.learner.records import VOCABULARY, add, batch, header, record, rollout, same

BATCHES = [
    [rollout("a"), rollout("b", 40, teachers=("math", "style"))],
    [rollout("c", 0), rollout("d", teachers=())],
    [rollout("e", 200)],
]


def steps(path: Path) -> list[int]:
    with Recording(path) as recording:
        return [kept.record.version.step for kept in recording.batches]


def test_what_was_trained_comes_back_bit_for_bit(tmp_path: Path) -> None:
    with Recording(record(tmp_path / "r", BATCHES)) as recording:
        assert (recording.header, recording.torn_bytes, recording.abandoned, recording.missing) == (header(), 0, 0, 0)
        for kept, expected in zip(recording.batches, BATCHES, strict=True):
            got = recording.rollouts(kept)
            assert len(got) == len(expected) and all(map(same, got, expected))
            for index, one in enumerate(expected):
                assert same(recording.rollout(kept, index), one)
        first = recording.batches[0].record
        assert (first.batch_id, first.staleness, first.tasks_done) == (1, {1: 43}, (0,))
        assert not recording.rollouts(recording.batches[0])[0].arrays[0].flags.writeable


def test_frames_that_a_later_version_sends_are_carried_along(tmp_path: Path) -> None:
    plain = rollout("a")
    payload = np.frombuffer(b"any bytes", np.uint8)
    wide = RecordedRollout(plain.item, (*plain.arrays, payload, np.zeros((0, 4), np.float16)))
    data = encode_batch(1, WeightVersion(0, 0), [wide], staleness={}, tasks_done=())
    (tmp_path / "r").write_bytes(encode_header(header()) + data)
    with Recording(tmp_path / "r") as recording:
        assert same(recording.rollouts(recording.batches[0])[0], wide)


def test_what_was_mixed_in_is_told_from_what_the_buffer_gave(tmp_path: Path) -> None:
    recorder = BatchRecorder(tmp_path / "r", header(), Unwritten())
    add(recorder, *batch(0, [rollout("a")]), offline=[rollout("t")._replace(offline=True)])
    recorder.close()
    with Recording(tmp_path / "r") as recording:
        got = recording.rollouts(recording.batches[0])
    assert [(r.item.rollout_id, r.offline) for r in got] == [("a", False), ("t", True)]


def test_a_file_torn_anywhere_in_its_last_record_holds_all_before_it(tmp_path: Path) -> None:
    whole = record(tmp_path / "whole", [*BATCHES[:2], [rollout("e", 2)]]).read_bytes()
    start = len(record(tmp_path / "two", BATCHES[:2]).read_bytes())
    for cut in range(start, len(whole)):
        (tmp_path / "torn").write_bytes(whole[:cut])
        with Recording(tmp_path / "torn") as recording:
            assert (len(recording.batches), recording.torn_bytes) == (2, cut - start)
    damaged = bytearray(whole)  # complete, but not what was written: the power failed
    damaged[-1] ^= 1
    (tmp_path / "torn").write_bytes(damaged)
    assert steps(tmp_path / "torn") == [0, 1]


def test_damage_with_records_behind_it_is_an_error_and_says_where(tmp_path: Path) -> None:
    path = record(tmp_path / "r", BATCHES)
    start = len(encode_header(header()))
    for at in (start, start + HEAD.size - 1, start + HEAD.size, start + 300):
        damaged = bytearray(path.read_bytes())
        damaged[at] ^= 0xFF
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(RecordError, match=rf"damaged at byte {start}, .*truncate -s {start}"):
            Recording(tmp_path / "damaged")


def test_what_is_no_record_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "text").write_text('{"prompt": "1+1="}\n' * 10)
    with pytest.raises(RecordError, match="not a file of recorded batches"):
        Recording(tmp_path / "text")
    with pytest.raises(RecordError, match=r"no file .*learner\.record"):
        Recording(tmp_path / "nothing")
    (tmp_path / "empty").write_bytes(encode_header(header())[:-3])
    with pytest.raises(RecordError, match="within its header"):
        Recording(tmp_path / "empty")
    with pytest.raises(RecordError, match="contains no batch"):
        Recording(record(tmp_path / "begun", []))
    with pytest.raises(RecordError, match="format 99, this version reads 1"):
        Recording(record(tmp_path / "new", BATCHES, format=99))


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    with Recording(record(tmp_path / "r", BATCHES)) as recording:
        recording.expect_vocabulary(VOCABULARY)
        with pytest.raises(RecordError, match=r"another vocabulary .*abababababab, expected cdcdcdcdcdcd"):
            recording.expect_vocabulary("cd" * 32)


def test_numbers_only() -> None:
    """Python objects would be addresses in memory."""
    item = ItemRecord(rollout("a").item, False, (("|O", (1,)),), 0, 8, False)
    with pytest.raises(RecordError, match="plain numbers"):
        decode_frames(item, b"\0" * 8)


def test_a_record_unpacks_to_what_it_claims_and_claims_what_a_batch_can_have() -> None:
    item, zeros = rollout("a").item, zlib.compress(bytes(16 << 20), 1)
    tracemalloc.start()
    try:
        with pytest.raises(RecordError, match="more than 16 bytes"):
            decode_frames(ItemRecord(item, False, (("<i4", (4,)),), 0, len(zeros), True), zeros)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    for frames, said in ((("<i4", (1 << 40,)),), "no batch is larger"), ((("<i4", (-4,)), ("<i4", (8,))), "plain"):
        with pytest.raises(RecordError, match=said):
            decode_frames(ItemRecord(item, False, frames, 0, len(zeros), True), zeros)


@pytest.mark.parametrize(("claim", "said"), [((0, 9), "outside"), ((-1, 1), "outside"), ((0, 1), "claim")])
def test_a_batch_s_items_lie_inside_it(claim: tuple[int, int], said: str) -> None:
    frames = (("<i4", (250_000_000,)),)
    item = ItemRecord(rollout("a").item, False, frames, *claim, True)
    body = msgspec.msgpack.encode(BatchRecord(1, WeightVersion(0, 0), {}, (), (item,) * 3))
    head = HEAD.pack(2, len(body), 8, 0)[:-4]
    content = MAGIC + head + zlib.crc32(bytes(8), zlib.crc32(body, zlib.crc32(head))).to_bytes(4, "little") + body
    with pytest.raises(RecordError, match=said):
        list(scan(io.BytesIO(content + bytes(8)), len(content) + 8, "it"))


# ------------------------------------------------------------------------------------------------------- going on


def test_a_learner_that_goes_on_replaces_what_it_trains_again(tmp_path: Path) -> None:
    """Killed in the middle of a record after step 3, it goes on from the checkpoint of step 1."""
    path = record(tmp_path / "r", BATCHES)
    path.write_bytes(path.read_bytes()[:-5])
    again = BatchRecorder(path, header(config_digest="1"), Unwritten(), resume=WeightVersion(1, 1))
    assert steps(path) == [0]  # also when it makes no step at all
    add(again, *batch(1, [rollout("other")], epoch=1))
    add(again, *batch(2, [rollout("another")], epoch=1))
    again.close()
    with Recording(path) as recording:
        ids = [kept.record.items[0].item.rollout_id for kept in recording.batches]
        assert (ids, recording.abandoned, recording.missing) == (["a", "other", "another"], 1, 0)


@pytest.mark.parametrize("n_bytes", [0, 5, 60])
def test_a_file_without_a_whole_header_is_begun(tmp_path: Path, n_bytes: int) -> None:
    path = tmp_path / "r"
    path.write_bytes(encode_header(header())[:n_bytes])
    recorder = BatchRecorder(path, header(), Unwritten(), resume=WeightVersion(1, 0))
    add(recorder, *batch(0, [rollout("a")], epoch=1))
    recorder.close()
    assert steps(path) == [0]


def test_only_the_own_runs_file_is_gone_on_with(tmp_path: Path) -> None:
    path = record(tmp_path / "r", BATCHES)
    before = path.read_bytes()
    with pytest.raises(RecordError, match="another run's batches"):
        BatchRecorder(path, header(), Unwritten())
    for ours in (header(run="two"), header(vocab_fingerprint="cd" * 32), header(writer="teacher")):
        with pytest.raises(RecordError, match=r"record of another run \((run|vocab_fingerprint|writer): got"):
            BatchRecorder(path, ours, Unwritten(), resume=WeightVersion(1, 1))
    assert path.read_bytes() == before


def test_a_run_that_was_copied_under_another_name_goes_on_in_its_own_file(tmp_path: Path) -> None:
    config = build(RunConfig, {"learner": {"record": "{run}"}})

    def record_in(folder: Path, resume: WeightVersion | None) -> None:
        ctx = SimpleNamespace(config=config, run_id="run-1a2b3c4d", run_dir=folder)
        start: Any = SimpleNamespace(ctx=ctx, fingerprint=VOCABULARY, stream=None)
        metrics: Any = SimpleNamespace(unwritten=Unwritten())
        recorder = LearnerStart.make_recorder(start, metrics, resume, WeightVersion(0, 0))
        assert recorder is not None
        recorder.close()

    (tmp_path / "run").mkdir()
    record_in(tmp_path / "run", None)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    record_in(tmp_path / "copy", WeightVersion(1, 0))
    sizes = [(tmp_path / name / "batches.record").stat().st_size for name in ("run", "copy")]
    assert 0 < sizes[0] < sizes[1]


def test_a_folder_means_a_file_in_it(tmp_path: Path) -> None:
    record(tmp_path, BATCHES)
    assert steps(tmp_path) == [0, 1, 2] and (tmp_path / DEFAULT_NAME).is_file()


# -------------------------------------------------------------------------------------------------------- no room


def test_the_file_grows_to_its_bound_and_what_comes_later_is_counted(tmp_path: Path) -> None:
    room = len(record(tmp_path / "two", BATCHES[:2]).read_bytes())
    recorder = BatchRecorder(tmp_path / "r", header(), Unwritten(), max_bytes=room)
    for step, rollouts in enumerate([*BATCHES, [rollout("small", 0)]]):
        add(recorder, *batch(step, rollouts))
    recorder.close()
    assert recorder.figures == {"record/batches_total": 2.0, "record/skipped_max_bytes_total": 2.0}
    assert steps(tmp_path / "r") == [0, 1]


def test_a_full_disk_costs_batches_and_not_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unwritten = Unwritten()
    recorder = BatchRecorder(tmp_path / "r", header(), unwritten)
    add(recorder, *batch(0, BATCHES[0]))
    with monkeypatch.context() as full:

        def no_room(*_: object) -> int:
            raise OSError(28, "No space left on device")

        full.setattr("stillhouse.recording.append_file.AppendFile._write", no_room)
        add(recorder, *batch(1, BATCHES[1]))
    add(recorder, *batch(2, BATCHES[2]))
    recorder.close()
    assert recorder.figures["record/skipped_unwritable_total"] == 1.0 == unwritten.rows_total
    with Recording(tmp_path / "r") as recording:
        assert ([k.record.version.step for k in recording.batches], recording.missing) == ([0, 2], 1)
