"""Weight files that are cut short or missing are found by their headers, before anything is started."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from stillhouse import builtin
from stillhouse.launch.checks.model_files import check_weights
from stillhouse.launch.checks.preflight import check
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.errors import ConfigError
from stillhouse.models.safetensors_header import INDEX_FILE


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(builtin.TEACHER_DIR, tmp_path / "model"))


def cut(by: int) -> Callable[[bytes], bytes]:
    return lambda whole: whole[:-by]


SPOILT: list[Callable[[bytes], bytes]] = [
    cut(1),
    lambda whole: whole[:5],
    lambda _whole: b"",
    lambda whole: whole + b"\0",
    lambda whole: whole[:8] + b"[" + whole[9:],
]


@pytest.mark.parametrize("spoil", SPOILT)
def test_a_file_that_is_not_whole_is_refused(model: Path, spoil: Callable[[bytes], bytes]) -> None:
    file = model / "model.safetensors"
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(ConfigError) as caught:
        check(build(RunConfig, {"models": {"teacher": str(model)}}))
    (mistake,) = caught.value.mistakes
    assert mistake.startswith(f"models.teacher: {file}: ") and "safetensors" in mistake
    assert mistake.endswith("copy or download it again")


def test_the_parameters_of_whole_files_are_counted(model: Path) -> None:
    with safe_open(model / "model.safetensors", framework="pt") as file:
        expected = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118 - not a dict
    found = check_weights("models.teacher", model)
    assert found.mistakes == [] and found.parameters == expected > 0


@pytest.mark.parametrize(
    ("index", "told"),
    [
        ({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}, "lacks 1 of the 2 files"),
        ({"weight_map": {"a": "model-1.safetensors"}}, "transformers reads the first, SGLang and vLLM the others"),
        ({}, "is not an index of safetensors files"),
        ({"weight_map": ["model.safetensors"]}, "is not an index of safetensors files"),
    ],
)
def test_files_that_the_index_names_must_be_there(model: Path, index: Any, told: str) -> None:
    (model / INDEX_FILE).write_text(json.dumps(index))
    (mistake,) = check_weights("models.student", model).mistakes
    assert told in mistake


def test_what_lies_beside_the_files_of_the_model_is_not_counted(model: Path) -> None:
    expected = check_weights("models.student", model).parameters
    shutil.copyfile(model / "model.safetensors", model / "optimizer.safetensors")
    assert check_weights("models.student", model) == ([], expected)
    shutil.move(model / "model.safetensors", model / "model-1.safetensors")
    (model / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    assert check_weights("models.student", model) == ([], expected)


def test_an_adapter_beside_whole_weights_is_refused(model: Path) -> None:
    (model / "adapter_config.json").write_text("{}")
    (mistake,) = check_weights("models.student", model).mistakes
    assert mistake.startswith("models.student: ") and "in place of those" in mistake


@pytest.mark.parametrize(
    ("dtype", "scaled", "says_how", "wrong"),
    [
        (torch.float8_e4m3fn, True, "", True),
        (torch.int8, False, "", True),
        (torch.float8_e4m3fn, False, "", False),  # numbers of eight bits, as they are
        (torch.float8_e4m3fn, True, "config.json", False),
        (torch.float8_e4m3fn, True, "hf_quant_config.json", False),
    ],
)
def test_codes_whose_scales_nobody_uses_are_refused(
    model: Path, dtype: torch.dtype, scaled: bool, says_how: str, wrong: bool
) -> None:
    scales = {"a.weight_scale": torch.ones(1)} if scaled else {}
    save_file({"a.weight": torch.ones(2, 2).to(dtype), **scales}, model / "model.safetensors")
    if says_how:
        (model / says_how).write_text('{"quantization_config": {}}')
    found = check_weights("models.teacher", model).mistakes
    assert [("holds 1 weights as codes of one byte (a.weight, ...)" in one) for one in found] == [True] * wrong
