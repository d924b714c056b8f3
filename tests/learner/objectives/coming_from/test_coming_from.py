"""The settings in docs/coming-from.md have the gradient of the other trainer's loss: each TOML block of the page is
read, the comments on top as the other trainer's settings and the rest as ours."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Final, NamedTuple

import pytest
import torch
from torch import Tensor

from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from tests.learner.objectives.coming_from.batch import Batch, Given, our_gradient
from tests.learner.objectives.coming_from.formulas import FORMULAS

PAGE: Final = Path(__file__).parents[4] / "docs" / "coming-from.md"
BLOCK: Final = re.compile(r"^```TOML\n# (?P<name>[\w-]+)\n(?P<theirs>(?:#   [^\n]+\n)*)(?P<ours>.*?)^```", re.M | re.S)
IN_FLOAT32: Final = [name for name in FORMULAS if name.endswith("distillation") and name[:3] in ("trl", "nem", "rol")]
"""Divergences between distributions: what a teacher sends is float32."""
TOLERANCE: Final = {"trl-grpo": 1e-3} | dict.fromkeys(IN_FLOAT32, 1e-6)
"""Relative difference of gradients that the page tells; else 1e-9. TRL adds more to a standard deviation."""


class Mapping(NamedTuple):
    name: str
    theirs: Given
    ours: RunConfig


def _mappings() -> list[Mapping]:
    found: list[Mapping] = []
    for block in BLOCK.finditer(PAGE.read_text(encoding="utf-8")):
        theirs = tomllib.loads(block["theirs"].replace("#   ", ""))
        found.append(Mapping(block["name"], _flat(theirs), build(RunConfig, tomllib.loads(block["ours"]))))
    return found


def _flat(table: Given, prefix: str = "") -> Given:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    flat: Given = {}
    for name, value in table.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


MAPPINGS: Final = _mappings()


def _gradients(mapping: Mapping, *, later: bool) -> tuple[Tensor, Tensor]:
    """Theirs and ours."""
    batch = Batch(later=later, max_new_tokens=mapping.ours.learner.tasks.max_new_tokens)
    given = dict(mapping.theirs)
    loss = FORMULAS[mapping.name](given, batch)
    assert not given, f"the formula of {mapping.name} does not read these settings"
    (theirs_NV,) = torch.autograd.grad(loss, batch.student_NV)
    return theirs_NV, our_gradient(mapping.ours, batch)


@pytest.mark.parametrize("later", [False, True], ids=["first update", "later update"])
@pytest.mark.parametrize("mapping", MAPPINGS, ids=[f"{one.name} {i}" for i, one in enumerate(MAPPINGS)])
def test_our_gradient_is_that_of_their_loss(mapping: Mapping, later: bool) -> None:
    if later and mapping.ours.learner.updates_per_batch == 1:
        pytest.skip("the page gives these settings for one update per batch")
    theirs_NV, ours_NV = _gradients(mapping, later=later)
    if mapping.name == "tinker":
        ours_NV = ours_NV * Batch(later, 1).n_tokens  # a sum in place of a mean, as the page says
    assert float(theirs_NV.norm()) > 1e-3
    error = float((ours_NV - theirs_NV).norm() / theirs_NV.norm())
    assert error < TOLERANCE.get(mapping.name, 1e-9)


def test_every_formula_is_on_the_page_and_every_block_has_one() -> None:
    assert {one.name for one in MAPPINGS} == set(FORMULAS)
    assert len(MAPPINGS) == PAGE.read_text(encoding="utf-8").count("```TOML")


def test_the_batch_has_tokens_and_rollouts_on_both_sides_of_the_bounds() -> None:
    """Without them no clip, cap or mask would be seen."""
    for later in (False, True):
        rollouts = Batch(later, 1).rollouts
        off_N = torch.cat([one.start - one.mu for one in rollouts]).exp()
        assert bool((off_N > 2.0).any()) and bool((off_N < 0.5).any())
        means = [float((one.start - one.mu).mean().exp()) for one in rollouts]
        assert any(0.8 < one < 1.25 for one in means) and any(not 0.8 < one < 1.25 for one in means)
