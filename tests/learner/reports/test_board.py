"""What TensorBoard itself makes of a run's event files, asked over its HTTP API."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout  # pyright: ignore[reportAttributeAccessIssue]

from stillhouse.learner.reports.declared import DECLARED
from stillhouse.learner.reports.metrics import MetricsWriter
from stillhouse.protocol.messages import WeightVersion
from tests.learner.reports.test_metrics import evaluation, events, scalar_series, write_step
from tests.patience import PATIENCE_S, Limit

GROUPS = ["Learning", "Staleness", "Throughput", "Waits", "Teachers", "Environments"]


def write_run(folder: Path, *, lr: float, reward: float, ok: bool = True) -> None:
    with MetricsWriter(
        folder, settings={"learner.lr": lr, "learner.frozen": False, "models.student": "tiny"}
    ) as writer:
        for step in (1, 2):
            write_step(writer, step, reverse_kl=lr * step, entropy=0.5)
        writer.evaluation(evaluation(2, accuracy_sampled=reward))
        writer.ended(ok=ok)


def test_the_layout_has_six_groups_whose_tags_are_declared(tmp_path: Path) -> None:
    """Read back by TensorBoard, after a resume as well."""
    with MetricsWriter(tmp_path) as writer:
        write_step(writer, 1)
    with MetricsWriter(tmp_path, resume=WeightVersion(1, 1)) as writer:
        write_step(writer, 2)
    first, second = events(tmp_path).Tensors("custom_scalars__config__")
    assert first.tensor_proto == second.tensor_proto
    groups = Layout.FromString(first.tensor_proto.string_val[0]).category
    assert [group.title for group in groups] == GROUPS
    tags = [tag for group in groups for chart in group.chart for tag in chart.multiline.tag]
    assert all(tag.endswith("$") for tag in tags) and len(set(tags)) == len(tags)
    matched = {name for tag in tags for name in ("bound/cpu", "bound/speedup") if re.fullmatch(tag, name)}
    assert matched == {"bound/cpu"}
    for tag in ("staleness/mean", "staleness/max"):
        assert [step for step, _ in scalar_series(tmp_path, tag)] == [1, 2]


def test_a_resumed_run_keeps_its_name_on_the_board(tmp_path: Path) -> None:
    run = tmp_path / "first"
    write_run(run, lr=0.5, reward=1.0)
    moved = run.rename(tmp_path / "moved")
    with MetricsWriter(moved, resume=WeightVersion(1, 2)) as writer:
        write_step(writer, 3)
    assert [path.name for path in (moved / "tensorboard").iterdir()] == ["first"]


def test_the_first_value_of_each_tag_has_its_meaning_the_others_have_none(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        write_step(writer, 1, loss=0.5)
        write_step(writer, 2, loss=0.25)
    metadata = events(tmp_path).SummaryMetadata("train/loss")
    assert (metadata.display_name, metadata.summary_description) == ("loss", DECLARED["train/loss"].meaning)
    (file,) = (tmp_path / "tensorboard" / tmp_path.name).iterdir()
    assert file.read_bytes().count(DECLARED["train/loss"].meaning.encode()) == 1


class Board:
    """A real TensorBoard on loopback."""

    def __init__(self, address: str) -> None:
        self.address = address

    def get(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.address}/data/{path}", data, headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return json.loads(answer.read())


@contextmanager
def tensorboard(folder: Path) -> Generator[Board]:
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--host", "127.0.0.1", "--port", "0"]
    said = folder.with_suffix(".board")
    with said.open("wb") as output:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=output)
    try:
        limit = Limit(PATIENCE_S)
        while (found := re.search(r"http://127\.0\.0\.1:\d+", said.read_text())) is None:
            assert process.poll() is None and not limit.passed, said.read_text()
            time.sleep(0.1)
        yield Board(found[0])
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_tensorboard_shows_runs_apart_with_settings_results_charts_and_meanings(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    write_run(runs / "first", lr=0.25, reward=0.75)
    write_run(runs / "second", lr=0.5, reward=0.25, ok=False)
    names = ["first/tensorboard/first", "second/tensorboard/second"]
    with tensorboard(runs) as board:
        limit = Limit(PATIENCE_S)
        while sorted(board.get("runs")) != names:
            assert not limit.passed, board.get("runs")
            time.sleep(0.1)
        layout = board.get("plugin/custom_scalars/layout")
        assert [group["title"] for group in layout["category"]] == GROUPS
        tags = board.get("plugin/scalars/tags")[names[0]]
        assert tags["train/reverse_kl"]["displayName"] == "reverse kl, nats"
        assert "mean over the scored tokens" in tags["train/reverse_kl"]["description"]
        undescribed = [tag for tag, shown in tags.items() if not shown["description"]]
        assert undescribed == []
        experiment = board.get("plugin/hparams/experiment", {"experimentName": ""})
        columns = {column["name"]: column["type"] for column in experiment["hparamInfos"]}
        assert columns == {
            "learner.lr": "DATA_TYPE_FLOAT64",
            "learner.frozen": "DATA_TYPE_BOOL",
            "models.student": "DATA_TYPE_STRING",
        }
        asked = {
            "experimentName": "",
            "allowedStatuses": ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING"],
            "colParams": [{"hparam": "learner.lr"}, {"metric": {"tag": "eval/accuracy_sampled", "group": ""}}],
            "sliceSize": 10,
        }
        groups = board.get("plugin/hparams/session_groups", asked)["sessionGroups"]
        rows = {
            group["hparams"]["learner.lr"]: (
                group["sessions"][0]["status"],
                {value["name"]["tag"]: value["value"] for value in group["metricValues"]},
            )
            for group in groups
        }
        assert {lr: (status, values["eval/accuracy_sampled"]) for lr, (status, values) in rows.items()} == {
            0.25: ("STATUS_SUCCESS", 0.75),
            0.5: ("STATUS_FAILURE", 0.25),
        }
