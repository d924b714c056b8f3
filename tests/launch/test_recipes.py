"""Each recipe is a valid configuration and is described in docs/recipes.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stillhouse import builtin
from stillhouse.launch.config.command_line import parse_arguments, resolve_config
from stillhouse.launch.config.consistency import check_consistency

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.toml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=[recipe.stem for recipe in RECIPES])
def test_a_recipe_loads_fits_and_says_what_it_is_for(recipe: Path) -> None:
    config = resolve_config(parse_arguments(["--config", str(recipe)]))  # unknown keys are refused
    assert check_consistency(config, None).mistakes == []
    comment = recipe.read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    assert len(comment) >= 2 and all(line.startswith("# ") for line in comment)


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
