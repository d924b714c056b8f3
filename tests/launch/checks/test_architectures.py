"""What no run can start with is refused from the files alone, before any process, and by its true cause."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from torch import Tensor

from stillhouse import builtin
from stillhouse.launch.checks import architectures as checks
from stillhouse.launch.checks.preflight import check
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.errors import ConfigError

Change = Callable[[Path], None]


def _ids_past_the_embedding(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    while tokenizer.get_vocab_size() <= 320:
        tokenizer.add_special_tokens([AddedToken(f"<x{tokenizer.get_vocab_size()}>", special=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))


def _in_json(file: str, **changes: Any) -> Change:
    def change(folder: Path) -> None:
        said = json.loads((folder / file).read_text(encoding="utf-8"))
        (folder / file).write_text(json.dumps(said | changes), encoding="utf-8")

    return change


def _in_weights(change: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]) -> Change:
    def made(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        save_file(dict(change(weights)), folder / "model.safetensors", metadata={"format": "pt"})

    return made


def _not_finite(value: float, dtype: torch.dtype) -> Change:
    def change(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        name = "model.layers.0.mlp.up_proj.weight"
        wrong = weights[name].to(dtype)
        wrong[-1, -1] = value
        return {**weights, name: wrong}

    return _in_weights(change)


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0], "original_max_position_embeddings": 8}
REFUSED: dict[str, tuple[Change, str]] = {
    "ids past the embedding": (_ids_past_the_embedding, r"has the id 320 .*past the 320 rows of the embedding"),
    "a newer tokenizer": (
        _in_json("tokenizer.json", pre_tokenizer={"type": "ByteLevelOfTomorrow"}),
        r"tokenizer\.json does not load: .*written by a newer release of tokenizers",
    ),
    "NaN": (_not_finite(float("nan"), torch.float32), r"1 tensors have NaN .*layers\.0\.mlp\.up_proj"),
    "infinity": (_not_finite(float("-inf"), torch.bfloat16), r"1 tensors have NaN or infinity"),
    "sees what follows": (_in_json("config.json", is_causal=False), "configured as bidirectional"),
    "no causal LM": (_in_json("config.json", model_type="bert", architectures=["BertModel"]), "BertModel"),
    "longrope": (_in_json("config.json", rope_parameters=LONGROPE), "rope_type 'longrope'"),
}


def _student(tmp_path: Path, change: Change = lambda _folder: None) -> Path:
    folder = tmp_path / "student"
    shutil.copytree(builtin.STUDENT_DIR, folder)
    change(folder)
    return folder


def _config(student: Path) -> RunConfig:
    return build(RunConfig, {"models": {"student": str(student)}})


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_before_a_start_by_its_true_cause(tmp_path: Path, name: str) -> None:
    """`check` is what a start and --check both ask first."""
    change, expected = REFUSED[name]
    with pytest.raises(ConfigError, match=f"models.student: .*{expected}"):
        check(_config(_student(tmp_path, change)))


def test_usual_models_are_not_looked_up_in_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(config: RunConfig) -> None:
        raise AssertionError(config)

    monkeypatch.setattr(checks, "architectures", never)
    assert not list(checks.refusals(check(_config(_student(tmp_path))).config))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_a_head_beside_a_tied_embedding_is_refused_where_a_server_would_not_see_it(
    tmp_path: Path, tied: bool, factor: float
) -> None:
    head = _in_weights(lambda weights: {**weights, "lm_head.weight": weights["model.embed_tokens.weight"] * factor})
    student = _student(tmp_path, head)
    _in_json("config.json", tie_word_embeddings=tied)(student)
    served = build(
        RunConfig,
        {"models": {"student": str(student), "teacher": str(builtin.TEACHER_DIR)}, "actor": {"engine": "sglang"}},
    )
    found = [mistake for mistake in checks.refusals(served) if "output head" in mistake]
    assert len(found) == (tied and factor != 1.0) and all("models.student" in one and "lm_head" in one for one in found)
    embedded = build(RunConfig, {"models": {"student": str(student), "teacher": str(builtin.TEACHER_DIR)}})
    assert not list(checks.refusals(embedded))
