"""The real packages, without a network: what is written is read back with each package's own reader or messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stillhouse.learner.reports.trackers.feed import Trackers
from tests.patience import eventually

BLOCK_BYTES = 32768
SETTINGS = {"learner.lr": 0.5, "models.student": "tiny", "learner.frozen": False}


def track(name: str, folder: Path, steps: range, *, ok: bool | None = None) -> None:
    trackers = Trackers([name], folder, SETTINGS)
    for step in steps:
        trackers.add(step, {"train/loss": 1.0 / (step + 1), "teachers/a b:c/reverse_kl": 0.25})
    if ok is not None:
        trackers.ended(ok=ok)
    feed = trackers._feeds[0]  # pyright: ignore[reportPrivateUsage]
    eventually(lambda: feed.rows.empty() or feed.lost > 0, "the tracker to take all rows")
    trackers.close()
    feed.thread.join()
    assert feed.lost == 0


def test_mlflow_goes_on_in_the_same_run_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    pytest.importorskip("sqlalchemy")
    pytest.importorskip("alembic")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    track("mlflow", tmp_path, range(3))
    track("mlflow", tmp_path, range(2, 5), ok=True)
    client: Any = tracking.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/trackers/mlflow/mlflow.db")
    (experiment,) = [one for one in client.search_experiments() if one.name == "stillhouse"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == (tmp_path.name, "FINISHED")
    assert run.data.params == {key: str(value) for key, value in SETTINGS.items()}
    history = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "train/loss")}
    assert history == {step: pytest.approx(1.0 / (step + 1)) for step in range(5)}
    assert run.data.metrics["teachers/a b_c/reverse_kl"] == 0.25


def test_wandb_writes_offline_and_keeps_its_id_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    track("wandb", tmp_path, range(3))
    track("wandb", tmp_path, range(2, 5), ok=True)
    folder = tmp_path / "trackers" / "wandb"
    runs = sorted((folder / "wandb").glob("offline-run-*"))
    run_id = (folder / "id").read_text()
    assert len(runs) == 2 and all(run_id in run.name for run in runs)
    # Its core writes behind `finish`.
    eventually(lambda: all(len(records(run)["history"]) == 3 for run in runs), "wandb to write all rows")
    written = [records(run) for run in runs]
    places = [row["_step"] for one in written for row in one["history"]]
    assert places == [0, 1, 2, 3, 4, 5], "rows of one run, in wandb's own count, which must rise"
    losses = [[(row["step"], row["train/loss"]) for row in one["history"]] for one in written]
    assert losses == [[(s, pytest.approx(1 / (s + 1))) for s in steps] for steps in (range(3), range(2, 5))]
    for one in written:
        (started,) = one["run"]
        assert (started.run_id, started.display_name, started.project) == (run_id, tmp_path.name, "stillhouse")
        config = {item.key: json.loads(item.value_json) for item in started.config.update}
        assert config == config | SETTINGS
    assert not any(b"0123456789abcdef" in file.read_bytes() for file in folder.rglob("*") if file.is_file())


def records(folder: Path) -> dict[str, list[Any]]:
    """A run that wandb wrote, by its messages."""
    from wandb.proto import wandb_internal_pb2

    pb: Any = wandb_internal_pb2
    (file,) = folder.glob("*.wandb")
    found: dict[str, list[Any]] = {"history": [], "run": []}
    for message in messages(file.read_bytes()):
        record = pb.Record.FromString(message)
        match record.WhichOneof("record_type"):
            case "history":
                items = record.history.item
                found["history"].append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
            case "run":
                found["run"].append(record.run)
            case _:
                pass
    return found


def messages(data: bytes) -> Iterator[bytes]:
    """Those in wandb's file, for which it has no reader in Python: a log in the format of LevelDB behind a header of 7
    bytes. Before each part of a message are 4 bytes of checksum, 2 of length and 1 of kind (whole, first, middle,
    last). No part crosses the end of a block."""
    assert data[:4] == b":W&B"
    at, message = 7, b""
    while at + 7 <= len(data):
        if BLOCK_BYTES - at % BLOCK_BYTES < 7:
            at += BLOCK_BYTES - at % BLOCK_BYTES
            continue
        n, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if at + 7 + n > len(data):
            return  # it is still being written
        message += data[at + 7 : at + 7 + n]
        at += 7 + n
        if kind in (1, 4):
            yield message
            message = b""
