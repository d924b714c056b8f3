"""Members by name; and those written out in docs/objectives.md, installed as a package, work as they stand there."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from stillhouse.launch.config.tree import build
from stillhouse.launch.errors import ConfigError
from stillhouse.learner.objectives.config import ObjectiveConfig
from stillhouse.learner.objectives.losses import make_objective
from stillhouse.learner.objectives.options import Jsd
from stillhouse.learner.objectives.registry import (
    ADVANTAGES,
    AGGREGATIONS,
    DISTRIBUTION_DIVERGENCES,
    DIVERGENCE,
    DIVERGENCES,
    IMPORTANCE,
    LENGTH_PENALTIES,
    REJECTIONS,
    TOKEN_ADVANTAGES,
    TURN_ADVANTAGES,
    TURN_AGGREGATIONS,
    Group,
    find_member,
    known_members,
)
from stillhouse.learner.step.train_step import Trainer
from tests.learner.conftest import make_item, tiny_student
from tests.learner.settings import learner_config

PAGE = Path(__file__).parents[3] / "docs" / "objectives.md"
GROUPS = (
    *(ADVANTAGES, AGGREGATIONS, DISTRIBUTION_DIVERGENCES, DIVERGENCES, IMPORTANCE, LENGTH_PENALTIES, REJECTIONS),
    *(TOKEN_ADVANTAGES, TURN_ADVANTAGES, TURN_AGGREGATIONS),
)


@pytest.fixture
def installed_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's code and its entry points, as pip would have put them there."""
    text = PAGE.read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(code.splitlines()) < 20
    (tmp_path / "my_objectives.py").write_text(code, encoding="utf-8")
    (toml,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    metadata = tmp_path / "my_objectives-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-objectives\nVersion: 1.0\n")
    groups: dict[str, dict[str, str]] = tomllib.loads(toml)["project"]["entry-points"]
    lines = [f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in named.items()) for group, named in groups.items()]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, "my_objectives", raising=False)


@pytest.mark.parametrize("group", GROUPS, ids=[group.key for group in GROUPS])
def test_every_built_in_name_is_a_function_and_on_the_page(group: Group) -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name in group.built_in:
        assert callable(find_member(group, name)) and f"`{name}`" in page
    assert f"`{group.entry_points}`" in page


def test_the_pages_members_train_a_step(installed_page: None) -> None:
    config = learner_config(divergence="huber", advantage="sign_of_reward", coef=0.5)
    items = [make_item("a", [0, 1, 1], reward=3.0), make_item("b", [0, 1, 1, 1], reward=-0.2, task_id=1)]
    for train_item in items:
        train_item.teacher_ML[:] = -50.0  # so far off that the cost is at its bound
    metrics = Trainer(tiny_student(), config, total_steps=3).step(items)
    assert metrics.advantage_mean == pytest.approx((2 * (1 - 1.0) + 3 * (-1 - 1.0)) / 5)


def test_the_pages_options_reach_its_function(installed_page: None) -> None:
    def costs(divergence: object) -> list[float]:
        config = build(ObjectiveConfig, {"divergence": divergence})
        objective = make_objective(config, max_new_tokens=9)
        return objective.divergences.common.cost(torch.tensor([-1.0]), torch.tensor([-9.0])).tolist()

    assert costs("huber") == [2.0]
    assert costs({"name": "huber", "bound": 1.5}) == [1.5]
    options = DIVERGENCE.known()["huber"]
    module = importlib.import_module("my_objectives")
    assert options is module.Huber
    module.huber.options = module.Huber  # in place of the second entry
    assert costs("my_objectives:huber") == [2.0]
    assert costs({"name": "my_objectives:huber", "bound": 0.5, "kl_student": "behaviour"}) == [0.5]


@pytest.mark.parametrize(
    ("divergence", "message"),
    [
        ({"name": "huber", "bound": -1.0}, "divergence.bound: got -1.0 (float), expected float > 0"),
        (
            {"name": "k1", "bound": 1.0},
            "divergence.bound: k1 does not read it, expected one of its options: baseline, kl_student; bound is an "
            "option of huber",
        ),
        (
            {"name": "my_objectives:huber", "bound": 1.0},
            "divergence.bound: my_objectives:huber does not read it, expected one of its options: kl_student; bound is "
            "an option of huber",
        ),
    ],
)
def test_a_wrong_option_of_a_package_is_refused_as_a_built_in_one_is(
    installed_page: None, divergence: object, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(ObjectiveConfig, {"divergence": divergence})
    assert caught.value.mistakes == (message,)


def test_options_that_are_no_subclass_of_their_groups_base_are_refused(installed_page: None) -> None:
    module = importlib.import_module("my_objectives")
    module.huber.options = Jsd
    with pytest.raises(ValueError, match=r"its options are .*Jsd.*, expected a subclass of stillhouse.*Sampled"):
        DIVERGENCE.load(DIVERGENCE.make("my_objectives:huber"))


def test_package_cannot_take_a_built_in_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = tmp_path / "thief-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: thief\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[stillhouse.divergences]\nk1 = thief:k1\nown = thief:own\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert known_members(DIVERGENCES)["k1"] == DIVERGENCES.built_in["k1"]
    assert known_members(DIVERGENCES)["own"] == "thief:own"
    with pytest.raises(ValueError, match=r"divergence = 'own': cannot load 'thief:own': No module named 'thief'"):
        find_member(DIVERGENCES, "own")


def test_a_function_of_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As rewards and environments are; Python runs with -P, without that folder."""
    (tmp_path / "here_only.py").write_text("def cost(): ...\n")
    monkeypatch.chdir(tmp_path)
    assert find_member(DIVERGENCES, "here_only:cost").__name__ == "cost"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("k4", "divergence = 'k4'; did you mean 'k[123]'. expected one of .*k1, k2, k3.* 'stillhouse.divergences'"),
        ("no_such_module:f", "cannot load 'no_such_module:f': No module named"),
        ("math:no_such_name", "cannot load 'math:no_such_name'"),
        ("math:pi", "'math:pi' is a float, expected a function"),
    ],
)
def test_what_is_no_member_is_refused_and_said(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_member(DIVERGENCES, name)
