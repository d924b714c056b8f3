"""The declaration of one figure of the metrics. No torch."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, TypeAlias

Reduction: TypeAlias = Literal["mean", "sum", "max", "total", "last", "text", "histogram"]
"""How the number of a step is made: mean, sum or max over what its tag names; total: running sum of the run, up to this
step; last: the value at the step."""
NAMED = re.compile(r"<\w+>")
"""Part of a tag that is named by the run."""


class Figure(NamedTuple):
    """TensorBoard's texts and charts and the reference of all figures (scripts/site/figures.py) are made from it."""

    tag: str
    """Key in metrics.jsonl, TensorBoard and trackers. `<name>` stands for any part."""
    meaning: str
    unit: str = ""
    """In the title of its chart; empty: a plain number, or several units."""
    reduction: Reduction = "last"
    over: str = ""
    """For means of a step: the sum by which its sum is divided (`StepSums`)."""
    chart: tuple[str, str] | None = None
    """Group and title in TensorBoard's Custom Scalars tab; None: not there."""
    shown: str = ""
    """Regular expression of the tags in that chart; empty: all that `tag` stands for."""
    result: bool = False
    """Whether TensorBoard's table of runs (HParams) shows its newest value."""
    prometheus: str = ""
    """Name under which the newest value is served to Prometheus, too."""

    @property
    def pattern(self) -> str:
        """Regular expression of its tags."""
        return NAMED.sub(".+", re.sub(r"[.]", r"\\.", self.tag))
