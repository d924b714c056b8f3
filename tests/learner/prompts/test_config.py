"""The task stream's settings: senseless ones are refused, pools are routed by tag."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from typing import Any

import pytest

from stillhouse.learner.prompts.config import MAX_EVAL_PROMPTS, TaskConfig
from tests.patience import PATIENCE_S


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"group_size": 0}, "group_size: got 0, expected int >= 1"),
        ({"max_new_tokens": 0}, "max_new_tokens: got 0, expected int >= 1"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens: got 0, expected int >= 1"),
        ({"top_k": -1}, "top_k: got -1, expected int >= 0"),
        ({"top_p": 0.0}, "top_p: got 0.0, expected float > 0 and <= 1"),
        ({"temperature": 0.0}, "temperature: got 0.0, expected float > 0"),
        ({"temperature": float("nan")}, "temperature: got nan, expected float > 0"),
        ({"eval_share": 1.0}, "eval_share: got 1.0, expected float >= 0 and < 1"),
        ({"eval_greedy": MAX_EVAL_PROMPTS + 1}, "eval_greedy: got 1000001, expected int >= 0 and <= 1000000"),
        ({"env": ""}, "env must name an environment"),
        ({"routes": {"": ()}}, "routes must name teacher pools"),
    ],
)
def test_senseless_values_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TaskConfig(**fields)


def test_pools_are_routed_by_tag_and_an_empty_list_takes_all() -> None:
    config = TaskConfig(routes={"general": (), "maths": ("algebra", "geometry"), "code": ("python",)})
    assert config.teachers_for("algebra") == ("general", "maths")
    assert config.teachers_for("python") == ("general", "code")
    assert config.teachers_for("") == ("general",)
    assert TaskConfig().teachers_for("anything") == ("default",)


def test_it_imports_without_torch() -> None:
    code = "import sys, stillhouse.learner.prompts.config; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mix": {"a": -1.0}}, "shares of at least 0"),
        ({"mix": {"a": math.nan}}, "shares of at least 0"),
        ({"mix": {"a": 0.0}}, "some tag a share above 0"),
        ({"templates": {"a": "Solve: "}}, "must contain {prompt}"),
    ],
)
def test_a_mix_or_a_template_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        TaskConfig(**fields)
