"""Each declared figure exists, and boards and the reference show its declaration."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import get_args

from stillhouse.learner.reports.declared import DECLARED, GROUPS, meaning_of, title_of
from stillhouse.learner.reports.figure import Reduction

ROOT = Path(__file__).parents[3]
WRITERS = ("learner", "weights", "buffer", "recording", "actors", "teachers", "engines", "protocol")
"""Packages whose code names the figures."""
ENDINGS = r"(^|_)(per_rollout|per_item|mean|lost_total|total|s|tokens_per_s)$"


def test_declarations_are_complete_and_the_reference_has_them_all() -> None:
    for one in DECLARED.values():
        assert one.meaning and one.reduction in get_args(Reduction), one
        assert one.chart is None or one.chart[0] in GROUPS, one
    page: str = runpy.run_path(str(ROOT / "scripts" / "site" / "figures.py"))["page"]()
    assert re.findall(r"^\| `([^`]+)` \| .+ \| .* \| (?:\w+) \|$", page, re.MULTILINE) == list(DECLARED)


def test_each_declared_figure_is_named_in_the_code_that_writes_figures() -> None:
    files = [file for name in WRITERS for file in (ROOT / name).rglob("*.py")]
    code = "\n".join(file.read_text() for file in files)
    words = set(re.findall(r"[A-Za-z0-9_]+", code))

    def named(tag: str) -> bool:
        """Each fixed part of it, without an ending that the code puts behind several names."""
        parts = [re.sub(ENDINGS, "", part.strip("_")) for part in re.split(r"<\w+>|/", tag)]
        return all(part in words or any(word.startswith(f"{part}_") for word in words) for part in parts if part)

    assert [tag for tag in DECLARED if not named(tag)] == []
    assert not named("train/reverse_kll") and not named("teachers/squeezed_s")


def test_a_name_of_the_run_does_not_hide_the_meaning_of_a_figure() -> None:
    assert meaning_of("train/reverse_kl") == DECLARED["train/reverse_kl"].meaning
    assert meaning_of("teachers/math/reverse_kl") == DECLARED["teachers/<pool>/reverse_kl"].meaning
    assert meaning_of("eval/sets/hard/pass_at_8") == DECLARED["eval/sets/<set>/<name>"].meaning
    assert meaning_of("weights/ema_step") == DECLARED["weights/ema_<name>"].meaning != meaning_of("weights/broadcast_s")
    assert meaning_of("new/figure") == ""


def test_titles_say_the_unit() -> None:
    assert title_of("time/step_s") == "step, seconds"
    assert title_of("rate/actor_tokens_per_s") == "actor, tokens per second"
    assert title_of("masked/stale_total") == "stale, total"
    assert title_of("teachers/math/reverse_kl") == "math: reverse kl, nats"
