"""Weight snapshots: what is written is read back, and nothing else ever is."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from stillhouse.protocol.messages import WeightsRef, WeightVersion
from stillhouse.weights.errors import SnapshotRefused
from stillhouse.weights.manifest import ITEM_BYTES
from stillhouse.weights.snapshot import read_snapshot, snapshots, write_snapshot
from stillhouse.weights.snapshot_format import FILE_NAME
from tests.full_disk import fill, small_disk
from tests.power_cut import PowerCut

VERSION = WeightVersion(1, 7)


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "embed": torch.randn(50, 8, generator=generator),
        "half": torch.randn(3, 5, generator=generator).bfloat16(),
        "transposed": torch.randn(4, 6, generator=generator).t(),
        "steps": torch.tensor(3),
    }


def write(folder: Path, version: WeightVersion = VERSION, keep: int = 2) -> WeightsRef:
    return write_snapshot(folder, version, tensors().items(), keep=keep)


def test_a_full_disk_is_an_os_error_and_the_snapshot_before_stays(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 64 << 10) as disk:
        ref = write(disk)
        ballast = fill(disk)
        with pytest.raises(OSError, match="No space left on device"):
            write(disk, WeightVersion(1, 8))
        assert snapshots(disk) == [VERSION] and not list(disk.glob("*/.*"))
        ballast.unlink()
        assert dict(read_snapshot(ref)).keys() == tensors().keys()


def test_tensors_of_any_dtype_come_back_equal(tmp_path: Path) -> None:
    ref = write(tmp_path)
    got = dict(read_snapshot(ref))
    assert ref.version == VERSION
    assert got.keys() == tensors().keys()
    for name, sent in tensors().items():
        assert got[name].dtype == sent.dtype and torch.equal(got[name], sent), name


def test_the_newest_snapshots_stay_in_the_order_of_versions_not_of_names(tmp_path: Path) -> None:
    for version in (WeightVersion(0, 9), WeightVersion(0, 10), WeightVersion(0, 11), WeightVersion(1, 2)):
        write(tmp_path, version)
    assert snapshots(tmp_path) == [WeightVersion(0, 11), WeightVersion(1, 2)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.11", "1.2"]


def test_tensors_read_stay_valid_when_the_snapshot_is_deleted(tmp_path: Path) -> None:
    got = dict(read_snapshot(write(tmp_path, WeightVersion(0, 1), keep=1)))
    write(tmp_path, WeightVersion(0, 2), keep=1)
    assert snapshots(tmp_path) == [WeightVersion(0, 2)]
    assert torch.equal(got["embed"], tensors()["embed"])


@pytest.mark.parametrize("damage", ["flip", "truncate", "replace"])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    ref = write(tmp_path)
    path = Path(ref.path)
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    elif damage == "truncate":
        del data[-8:]
    else:
        data[:] = Path(write(tmp_path, WeightVersion(1, 8)).path).read_bytes()
    path.write_bytes(data)
    with pytest.raises(SnapshotRefused, match="sha256"):
        read_snapshot(ref)


def test_a_missing_file_and_one_of_another_version_are_refused(tmp_path: Path) -> None:
    ref = write(tmp_path)
    with pytest.raises(SnapshotRefused, match="No such file"):
        read_snapshot(msgspec.structs.replace(ref, path=str(tmp_path / "elsewhere")))
    with pytest.raises(SnapshotRefused, match=r"holds version 1\.7, expected 1\.8"):
        read_snapshot(msgspec.structs.replace(ref, version=WeightVersion(1, 8)))


def test_a_file_that_is_no_safetensors_is_refused_even_with_the_right_checksum(tmp_path: Path) -> None:
    path = tmp_path / "garbage"
    path.write_bytes(b"not a snapshot")
    with pytest.raises(SnapshotRefused, match="header"):
        read_snapshot(WeightsRef(VERSION, str(path), hashlib.sha256(b"not a snapshot").hexdigest()))


def test_a_write_that_fails_leaves_the_former_snapshot_and_no_partial_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = write(tmp_path)

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, WeightVersion(1, 8))
    monkeypatch.undo()
    assert snapshots(tmp_path) == [VERSION]
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [FILE_NAME]
    assert len(read_snapshot(ref)) == len(tensors())


def test_a_snapshot_that_was_written_survives_a_loss_of_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    power = PowerCut(monkeypatch)
    folder = tmp_path / "weights"
    for step in range(4):
        ref = write(folder, WeightVersion(1, step))
        left = tmp_path / f"left-{step}"
        power.copy(folder, left)
        assert max(snapshots(left)) == ref.version
        path = left / str(ref.version) / FILE_NAME
        assert dict(read_snapshot(msgspec.structs.replace(ref, path=str(path)))).keys() == tensors().keys()


@pytest.mark.parametrize("piece_bytes", [8, 100, 64 << 20])
def test_a_file_written_in_pieces_is_read_by_safetensors_with_every_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr("stillhouse.weights.snapshot.PIECE_BYTES", piece_bytes)
    values = torch.arange(12).view(3, 4) % 2
    named = {dtype: values.to(getattr(torch, dtype)) for dtype in ITEM_BYTES}
    named |= {"empty": torch.zeros(0, 7), "scalar": torch.tensor(5.0), "slice": torch.randn(6, 8)[:, 2:5]}
    ref = write_snapshot(tmp_path, VERSION, named.items(), keep=1)
    got = load_file(ref.path)
    assert got.keys() == named.keys()
    for name, sent in named.items():
        assert got[name].dtype == sent.dtype and got[name].shape == sent.shape
        assert (
            got[name].contiguous().view(-1).view(torch.uint8).tolist()
            == sent.contiguous().view(-1).view(torch.uint8).tolist()
        ), name
    assert dict(read_snapshot(ref)).keys() == named.keys()
