"""Each recipe is a valid configuration and is described in docs/recipes.md."""

from __future__ import annotations

import json
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from datasets.utils.logging import disable_progress_bar
from transformers import PretrainedConfig, Qwen3_5Config, Qwen3Config, Qwen3MoeConfig

from stillhouse import builtin
from stillhouse.actors.rewards.checked import IFEVAL_MODULES
from stillhouse.launch.config.command_line import parse_arguments, resolve_config
from stillhouse.launch.config.consistency import check_consistency
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.run import main
from stillhouse.launch.stages.config import has_stages, read_stages
from tests.known_sets import write_known_set

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.toml"))


def configs(recipe: Path) -> list[RunConfig]:
    """That of the run, or of its stages in which the student writes."""
    line = parse_arguments(["--config", str(recipe)])
    if not has_stages(line):
        return [resolve_config(line)]
    return [stage.config for stage in read_stages(line) if not stage.own.text]


@pytest.mark.parametrize("recipe", RECIPES, ids=[recipe.stem for recipe in RECIPES])
def test_a_recipe_loads_fits_and_says_what_it_is_for(recipe: Path) -> None:
    for config in configs(recipe):  # unknown keys are refused
        assert check_consistency(config, None).mistakes == []
    comment = recipe.read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    assert len(comment) >= 2 and all(line.startswith("# ") for line in comment)


SHAPES = {  # hidden, intermediate, layers, heads: of the published config.json
    "Qwen3-0.6B": (1024, 3072, 28, 16),
    "Qwen3-1.7B": (2048, 6144, 28, 16),
    "Qwen3-4B": (2560, 9728, 36, 32),
    "Qwen3-8B": (4096, 12288, 36, 32),
    "Qwen3-32B": (5120, 25600, 64, 64),
    "Qwen3-30B-A3B": (2048, 6144, 48, 32),
}
OWN = {"personal/merged": "Qwen3-8B", "math-8b": "Qwen3-8B", "code-8b": "Qwen3-8B"}
"""Folders that recipes name, by their last parts, and the model that they are made of."""

ROW: dict[str, Any] = {
    "prompt": "1+1=",
    "ground_truth": "2",
    "tests": ["assert 1 + 1 == 2"],
    "task": {"prompt": "1+1=", "answer": "2"},
}


def published(name: str) -> PretrainedConfig:
    """The shape of a published model."""
    if name.startswith("Qwen3.5"):
        # 27B: scripts/models/qwen3.5-27B.sh of slime. 9B: the defaults of transformers.
        text = {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24}
        text |= {"num_key_value_heads": 4, "head_dim": 256, "linear_num_value_heads": 48}
        larger: dict[str, Any] = {"text_config": text, "vision_config": {"out_hidden_size": 5120}}
        more = larger if name == "Qwen3.5-27B" else {}
        return Qwen3_5Config(architectures=["Qwen3_5ForConditionalGeneration"], dtype="bfloat16", **more)
    hidden, intermediate, layers, heads = SHAPES[name.removesuffix("-Base")]
    common: dict[str, Any] = {
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "dtype": "bfloat16",
        "tie_word_embeddings": name.removesuffix("-Base") in ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B"),
    }
    if "A3B" not in name:
        return Qwen3Config(architectures=["Qwen3ForCausalLM"], num_key_value_heads=8, **common)
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    return Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], num_key_value_heads=4, **experts, **common)


def stand_in(name: str, folder: Path) -> str:
    """A folder with the model's config.json and the built-in tokenizer, without weights."""
    own = [model for path, model in OWN.items() if name.endswith(path)]
    there = folder / name.replace("/", "_")
    if not there.exists():
        shutil.copytree(builtin.STUDENT_DIR, there, ignore=shutil.ignore_patterns("*.safetensors"))
        published(own[0] if own else name.removeprefix("Qwen/")).save_pretrained(there)
    return str(there)


def replaced(config: RunConfig, folder: Path) -> list[str]:
    """Flags that put stand-ins in the place of a recipe's models and prompts."""
    models = {"models.student": config.models.student}
    models |= {f"pools.{name}.model": pool.model for name, pool in config.pools.items()}
    if not config.pools:
        models["models.teacher"] = config.models.teacher
    flags = [f"--{key}={stand_in(model, folder)}" for key, model in models.items()]
    # As where SGLang is in the same environment: one of its own has another NCCL, and weights go by gloo.
    flags += [f"--{role}.server.python={sys.executable}" for role in ("actor", "teacher")]
    tasks, rows = config.learner.tasks, folder / "rows.jsonl"
    tags = list(tasks.mix) or [""]
    rows.write_text("".join(json.dumps(ROW | ({"tag": tag} if tag else {})) + "\n" for tag in tags))
    files = {"learner.tasks.prompts": tasks.prompts, "learner.tasks.eval_prompts": tasks.eval_prompts}
    files |= {f"learner.eval_sets.{name}.prompts": one.prompts for name, one in config.learner.eval_sets.items()}
    named = {path for path in files.values() if path.startswith("hf:")}
    if not all(find_spec(module) for module in IFEVAL_MODULES):
        named -= {"hf:google/IFEval"}  # its reward could not be made
    for path in named:
        write_known_set(path.removeprefix("hf:"), folder)  # found by its name in the working folder
    return flags + [f"--{key}={rows}" for key, path in files.items() if path not in named]


FOR_GPUS = [recipe for recipe in RECIPES if "HAS NOT BEEN RUN HERE" in recipe.read_text(encoding="utf-8")]


@pytest.mark.parametrize("recipe", FOR_GPUS, ids=[recipe.stem for recipe in FOR_GPUS])
def test_a_recipe_for_gpus_is_planned_as_its_comment_says(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disable_progress_bar()
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    comment = recipe.read_text(encoding="utf-8").split("\n\n")[0]
    gpus = re.findall(r"`--check --gpus (\S+)`", comment)
    quoted = re.findall(r"GPU \d+: about [\d.]+ of \d+ GiB", comment)
    assert len(gpus) == 1 and quoted
    flags = replaced(configs(recipe)[0], tmp_path)
    (tmp_path / "chat.jsonl").write_text(json.dumps({"prompt": "1+1=", "response": "2"}) + "\n")
    (tmp_path / "documents.jsonl").write_text(json.dumps({"text": "1+1=2"}) + "\n")
    monkeypatch.chdir(tmp_path)
    assert main(["--config", str(recipe), *flags, "--check", "--gpus", gpus[0]]) == 0
    printed = capsys.readouterr().out
    assert "prompts are fine; nothing was started" in printed
    assert [line for line in quoted if line not in printed] == []
    assert "dropped:" not in printed


def test_the_page_names_recipes_that_exist() -> None:
    rows = re.findall(
        r"^\| \[`(\w+)`\]\(\.\./examples/recipes/(\w+)\.toml\)", (ROOT / "docs/recipes.md").read_text(), re.M
    )
    assert rows and {file for _, file in rows} <= {recipe.stem for recipe in RECIPES}
    assert all(name == file for name, file in rows)


def test_the_demo_compares_distributions_on_as_many_prompts_as_rollouts() -> None:
    """What was measured to teach the built-in student fastest (docs/decisions/objective-defaults.md)."""
    config = resolve_config(parse_arguments(["--config", str(ROOT / "examples" / "demo.toml")]))
    findings = check_consistency(config, builtin.STUDENT_DIR)
    assert (findings.mistakes, findings.warnings) == ([], [])
    assert (config.learner.objective.divergence.name, config.teacher.payload, config.teacher.top_k) == (
        "reverse_kl",
        "hidden",
        0,
    )
    assert (config.learner.lr, config.learner.updates_per_batch) == (7e-4, 2)
    assert config.buffer.batch_rollouts // config.learner.tasks.group_size == 64
    assert config.buffer.max_staleness == 1 and config.steps == 100
