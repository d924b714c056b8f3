"""The meanings that TensorBoard shows are those of docs/metrics.md, and each is the meaning of a figure that exists."""

from __future__ import annotations

import re
from pathlib import Path

from stillhouse.learner.reports.tags import TAGS, meaning_of, title_of
from tests.metrics_page import PAGE

ROOT = Path(__file__).parents[3]
WRITERS = ("learner", "weights", "buffer", "recording", "actors", "teachers", "engines", "protocol")
"""Packages whose code names the figures."""
ENDINGS = r"(^|_)(per_rollout|per_item|mean|lost_total|total|s|tokens_per_s)$"


def rows_of_the_page() -> dict[str, str]:
    """Tag -> meaning, without links in brackets. Keys of metrics.jsonl that are no tag have no slash."""
    rows = re.findall(r"^\| `([^`]+/[^`]+)`(?:, `set`)? \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return {tag: re.sub(r" \(\[[^]]*\]\([^)]*\)\)", "", meaning) for tag, meaning in rows}


def test_the_page_and_tensorboard_say_the_same() -> None:
    assert rows_of_the_page() == TAGS


def test_each_documented_figure_is_named_in_the_code_that_writes_figures() -> None:
    files = [file for name in WRITERS for file in (ROOT / name).rglob("*.py") if file.name != "tags.py"]
    code = "\n".join(file.read_text() for file in files)
    words = set(re.findall(r"[A-Za-z0-9_]+", code))

    def named(tag: str) -> bool:
        """Each fixed part of it, without an ending that the code puts behind several names."""
        parts = [re.sub(ENDINGS, "", part.strip("_")) for part in re.split(r"<\w+>|/", tag)]
        return all(part in words or any(word.startswith(f"{part}_") for word in words) for part in parts if part)

    assert [tag for tag in TAGS if not named(tag)] == []
    assert not named("train/reverse_kll") and not named("teachers/squeezed_s")


def test_a_name_of_the_run_does_not_hide_the_meaning_of_a_figure() -> None:
    assert meaning_of("train/reverse_kl") == TAGS["train/reverse_kl"]
    assert meaning_of("teachers/math/reverse_kl") == TAGS["teachers/<pool>/reverse_kl"]
    assert meaning_of("eval/sets/hard/pass_at_8") == TAGS["eval/sets/<set>/<name>"]
    assert meaning_of("weights/ema_step") == TAGS["weights/ema_<name>"] != meaning_of("weights/broadcast_s")
    assert meaning_of("new/figure") == ""


def test_titles_say_the_unit() -> None:
    assert title_of("time/step_s") == "step, seconds"
    assert title_of("rate/actor_tokens_per_s") == "actor, tokens per second"
    assert title_of("masked/stale_total") == "stale, total"
    assert title_of("teachers/math/reverse_kl") == "math: reverse kl"
