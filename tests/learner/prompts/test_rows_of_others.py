"""Rows as other projects write them, and data sets by name: what becomes of them, and what is wrong is named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar

from stillhouse.actors.config import EnvConfig
from stillhouse.launch.checks.prompt_files import absolute_prompts, check_prompts
from stillhouse.learner.prompts.config import TaskConfig
from stillhouse.learner.prompts.data import open_prompts
from stillhouse.learner.prompts.records import DataError
from stillhouse.learner.prompts.tasks import load_prompts
from tests.patience import PATIENCE_S

Write = Callable[[Sequence[dict[str, Any]]], Path]
TURNS = [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1="}]
ROLL: list[dict[str, Any]] = [
    {
        "id": "0",
        "tag": None,
        "domain": "math_rule",
        "prompt": "shown elsewhere",
        "messages": json.dumps(TURNS),
        "ground_truth": "2",
    },
    {
        "id": "1",
        "domain": "math_rule",
        "prompt": "x",
        "messages": json.dumps(TURNS),
        "tag": "deepmath",
        "ground_truth": "",
    },
]
VERL: list[dict[str, Any]] = [
    {
        "data_source": "openai/gsm8k",
        "prompt": TURNS,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {"split": "train", "index": 0},
    }
]


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disable_progress_bar()
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def written(rows: list[dict[str, Any]], folder: Path, write_rows: Write) -> list[Path]:
    """The same rows in two formats."""
    pq.write_table(pa.Table.from_pylist(rows), folder / "p.parquet")
    return [write_rows(rows), folder / "p.parquet"]


def test_rows_of_roll(tmp_path: Path, write_rows: Write) -> None:
    for path in written(ROLL, tmp_path, write_rows):
        first, second = (open_prompts(str(path)).read(row) for row in range(2))
        assert (first.prompt, first.messages, first.tag, first.ground_truth) == (None, tuple(TURNS), "math_rule", "2")
        assert (second.tag, second.ground_truth) == ("deepmath", "")
        columns = msgspec.json.decode(first.columns)
        assert columns["messages"] == TURNS and columns["prompt"] == "shown elsewhere" and columns["id"] == "0"


def test_rows_of_verl(tmp_path: Path, write_rows: Write) -> None:
    for path in written(VERL, tmp_path, write_rows):
        record = open_prompts(str(path)).read(0)
        assert (record.prompt, record.messages) == (None, tuple(TURNS))
        assert (record.tag, record.ground_truth) == ("openai/gsm8k", "72")
        assert msgspec.json.decode(record.columns) == {**VERL[0], "messages": TURNS}


def test_own_fields_come_before_those_of_others(write_rows: Write) -> None:
    other = {"domain": "d", "data_source": "s", "reward_model": {"ground_truth": "r"}}
    rows: list[dict[str, Any]] = [
        {"prompt": "a", **other, "tag": "t", "env": "e", "ground_truth": "g"},
        {"prompt": "a", **other, "env": "e"},
        {"prompt": "a", **other},
        {"prompt": "a", "domain": 5, "data_source": "s", "reward_model": "rule"},
    ]
    source = open_prompts(str(write_rows(rows)))
    found = [(record.tag, record.ground_truth) for record in map(source.read, range(4))]
    assert found == [("t", "g"), ("e", "r"), ("d", "r"), ("s", None)]


ENVIRONMENTS = {"single_turn": EnvConfig(name="single_turn")}
ASKED: list[dict[str, Any]] = [{"question": f"{i}+1=", "answer": i + 1, "prompt_id": i} for i in range(6)]
COLUMNS = {"prompt": "question", "ground_truth": "answer"}


def test_columns_of_other_names_are_read_from_every_format(tmp_path: Path, write_rows: Write) -> None:
    (tmp_path / "folder").mkdir()
    pq.write_table(pa.Table.from_pylist(ASKED), tmp_path / "folder" / "train.parquet")
    Dataset.from_list(ASKED).save_to_disk(str(tmp_path / "saved"))
    paths = [str(write_rows(ASKED)), str(tmp_path / "folder"), str(tmp_path / "saved"), f"hf:{tmp_path / 'folder'}"]
    for path in paths:
        assert check_prompts("p", path, ENVIRONMENTS, COLUMNS) == [], path
        config = TaskConfig(prompts=path, eval_prompts=path, columns=COLUMNS)
        prompts = load_prompts(config)
        record = prompts.source.read(5)
        assert (record.prompt, record.ground_truth, prompts.evaluation[5].prompt) == ("5+1=", "6", "5+1="), path
        assert msgspec.json.decode(record.columns) == {"prompt": "5+1=", "ground_truth": 6, "prompt_id": 5}, path
        wrong = {"prompt": "qestion"}
        message = "learner.tasks.columns.prompt: no column 'qestion'; did you mean 'question'"
        with pytest.raises(DataError, match=message):
            open_prompts(path, columns=wrong)
        assert message in check_prompts("p", path, ENVIRONMENTS, wrong)[0], path


def test_a_data_set_by_name_has_splits_and_configurations(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    for split, n in (("train", 5), ("test", 2)):
        folder.mkdir(exist_ok=True)
        lines = [json.dumps({"prompt": f"{split}{i}", "tag": None}) for i in range(n)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    train, test = open_prompts(f"hf:{folder}"), open_prompts(f"hf:{folder}:default:test")
    assert [len(train), len(test)] == [5, 2] and test.read(1).prompt == "test1"
    assert open_prompts(f"hf:{folder}:train").fingerprint == train.fingerprint != test.fingerprint
    with pytest.raises(DataError, match=r"hf:.*:dev: datasets cannot load it: ValueError: Unknown split \"dev\""):
        open_prompts(f"hf:{folder}:dev")
    with pytest.raises(DataError, match="expected hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT"):
        open_prompts(f"hf:{folder}:a:b:c")


def test_a_name_that_cannot_be_loaded_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (mistake,) = check_prompts("learner.tasks.prompts", "hf:nobody/nothing:train", ENVIRONMENTS)
    assert mistake.startswith("learner.tasks.prompts: hf:nobody/nothing:train: datasets cannot load it: ")
    assert "\n" not in mistake


def test_a_local_data_set_is_found_from_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "set").mkdir()
    monkeypatch.chdir(tmp_path)
    assert absolute_prompts("hf:set:train") == f"hf:{tmp_path / 'set'}:train"
    assert absolute_prompts("hf:openai/gsm8k:main:train") == "hf:openai/gsm8k:main:train"
    assert absolute_prompts("p.jsonl") == str(tmp_path / "p.jsonl") and absolute_prompts("") == ""


def test_without_the_library_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['datasets'] = None\n"
        "from stillhouse.learner.prompts.data import open_prompts, DataError\n"
        "try: open_prompts('hf:openai/gsm8k:main:train')\n"
        "except DataError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout == (
        "hf:openai/gsm8k:main:train is a name of a data set; reading it needs: pip install -e '.[data]'\n"
    )
