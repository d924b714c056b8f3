"""Known data sets of the hub, as copies on disk with rows of the same shape."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets.utils.logging import disable_progress_bar

from stillhouse.learner.prompts.data import open_prompts
from stillhouse.learner.prompts.known_sets import KNOWN_SETS, named_set
from stillhouse.learner.prompts.records import DataError
from tests.known_sets import CONFIGS, ROWS, write_known_set

PROMPTS: dict[str, tuple[str, str | None]] = {
    "HuggingFaceH4/MATH-500": ("Write $x$ if $2x = 1$.", "\\frac{1}{2}"),
    "HuggingFaceH4/aime_2024": ("What is $200 + 4$?", "204"),
    "Maxwell-Jia/AIME_2024": ("What is $30 + 3$?", "33"),
    "math-ai/aime25": ("What is $60 + 10$?", "70"),
    "yentinglin/aime_2025": ("What is $60 + 10$?", "70"),
    "openai/gsm8k": (ROWS["openai/gsm8k"][1]["question"], "1,000 - 18 = <<1000-18=982>>982\n#### 982"),
    "agentica-org/DeepScaleR-Preview-Dataset": ("Write $x$ if $2x = 1$.", "\\frac{1}{2}"),
    "google/IFEval": ("Write about rivers in at least 20 words. Do not use commas.", None),
    "open-r1/DAPO-Math-17k-Processed": ("What is 30 + 4?", "34"),
}


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disable_progress_bar()
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def test_each_known_set_has_rows_here() -> None:
    assert ROWS.keys() == KNOWN_SETS.keys() and PROMPTS.keys() == ROWS.keys() - {"BytedTsinghua-SIA/DAPO-Math-17k"}


@pytest.mark.parametrize("name", sorted(PROMPTS))
def test_a_known_set_is_read_by_its_name_alone(name: str, tmp_path: Path) -> None:
    record = open_prompts(f"hf:{write_known_set(name, tmp_path)}").read(0)
    assert (record.prompt, record.ground_truth) == PROMPTS[name]
    assert record.tag == KNOWN_SETS[name].tag
    split = named_set(f"hf:{name}")
    assert split is not None and (split.split, split.config) == (ROWS[name][0], CONFIGS.get(name))


def test_dapos_own_rows_are_turns_and_have_their_tag(tmp_path: Path) -> None:
    record = open_prompts(f"hf:{write_known_set('BytedTsinghua-SIA/DAPO-Math-17k', tmp_path)}").read(0)
    assert record.messages is not None and "What is 30 + 4?" in record.messages[0]["content"]
    assert (record.ground_truth, record.tag) == ("34", "math_dapo")


def test_a_name_may_say_another_split_and_configuration() -> None:
    assert named_set("hf:openai/gsm8k:train") == ("openai/gsm8k", "main", "train", KNOWN_SETS["openai/gsm8k"])
    assert named_set("hf:openai/gsm8k:socratic:train") == (
        *("openai/gsm8k", "socratic", "train"),
        KNOWN_SETS["openai/gsm8k"],
    )
    assert named_set("hf:nobody/nothing") == ("nobody/nothing", None, "train", None)
    assert named_set("openai/gsm8k") is None and named_set("hf:a:b:c:d") is None


def test_configured_columns_come_before_the_known_ones(tmp_path: Path) -> None:
    path = f"hf:{write_known_set('HuggingFaceH4/MATH-500', tmp_path)}"
    own = {"ground_truth": "solution", "hint": "subject"}
    record = open_prompts(path, columns=own).read(0)
    assert (record.prompt, record.hint) == (PROMPTS["HuggingFaceH4/MATH-500"][0], "Algebra")
    assert record.ground_truth is not None and record.ground_truth.startswith("Halve both sides")
    other_files = {"prompt": "question", "ground_truth": "answer"}  # what another file of the run needs
    record = open_prompts(path, columns=other_files).read(0)
    assert (record.prompt, record.ground_truth) == PROMPTS["HuggingFaceH4/MATH-500"]
    with pytest.raises(DataError, match=r"learner\.tasks\.columns\.hint: no column 'subjekt'; did you mean 'subject'"):
        open_prompts(path, columns={"hint": "subjekt"})
