"""The findings of an audit: the number of faults of each kind, and the places of the first ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from stillhouse.tools.audit.record import Version

MAX_PLACES: Final = 5
"""Places to list per kind of fault; further ones are only counted."""
TWICE_ROLLOUT: Final = "tokens trained twice, in one rollout"
TWICE_SAMPLE: Final = "tokens trained twice, in one sample"
BEGUN_ANEW: Final = "samples trained from two rollouts"
OVER_BOUND: Final = "tokens over the bound"
UNKNOWN_WEIGHTS: Final = "tokens of unknown weights"
SKIPPED_TASKS: Final = "tasks skipped"
SKIPPED_SAMPLES: Final = "samples skipped"
SETTLED_TWICE: Final = "samples settled twice"
SETTLED_WRONG: Final = "samples settled wrongly"
EQUAL_GROUPS: Final = "groups of equal rewards trained"
TRUNCATED: Final = "tokens of truncated rollouts"
NOT_RECORDED: Final = "steps not in the record"
RECORDED_TWICE: Final = "steps recorded twice"
OTHER_TOKENS: Final = "steps with a different token count"
KINDS: Final[Mapping[str, str]] = {
    TWICE_ROLLOUT: "a position of a rollout is trained in two kept steps",
    TWICE_SAMPLE: "a position of a task's sample is trained in two kept steps, by any rollout",
    BEGUN_ANEW: "a sample was restarted, and tokens of both rollouts are kept",
    OVER_BOUND: "more than max_staleness steps between the weights that sampled a token and those it trained",
    UNKNOWN_WEIGHTS: "a trained token whose recorded version never existed",
    SKIPPED_TASKS: "a task before the checkpoint's next one that is not open, and of which nothing is settled",
    SKIPPED_SAMPLES: "a sample of such a task that is neither settled nor open",
    SETTLED_TWICE: "a sample is settled in two kept steps, or is settled and open",
    SETTLED_WRONG: "trained after it was settled, settled as trained without a token, dropped for equal rewards and "
    "trained, or not as the checkpoint has it",
    EQUAL_GROUPS: "with buffer.dynamic_sampling, a group in a batch of which no two rewards differ",
    TRUNCATED: "with buffer.mask_truncated, trained tokens of a rollout that ended at the length limit",
    NOT_RECORDED: "a kept step without a batch in the record: what it trained cannot be counted",
    RECORDED_TWICE: "two batches of the record made the same version",
    OTHER_TOKENS: "metrics.jsonl and the record have different numbers of trained tokens",
}


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a fault. Fields that do not apply are None."""

    step: Version | None = None
    """The version that the batch was trained against."""
    batch: int | None = None
    rollout: str | None = None
    task: int | None = None
    sample: int | None = None
    tokens: tuple[int, int] | None = None
    """[start, end) in the rollout."""
    detail: str = ""

    def __str__(self) -> str:
        parts = {
            "step": self.step,
            "batch": self.batch,
            "rollout": self.rollout,
            "task": self.task,
            "sample": self.sample,
            "tokens": self.tokens and f"[{self.tokens[0]}, {self.tokens[1]})",
        }
        place = ", ".join(f"{name} {value}" for name, value in parts.items() if value is not None)
        return f"{place}: {self.detail}" if place and self.detail else place or self.detail


class Fault(msgspec.Struct):
    """One kind of fault."""

    count: int = 0
    """Number of tokens, samples, tasks or steps, depending on the kind."""
    places: list[Where] = []
    """The first MAX_PLACES."""


class Faults:
    """Collects the faults by kind."""

    def __init__(self) -> None:
        self.by_kind: dict[str, Fault] = {kind: Fault() for kind in KINDS}

    def add(self, kind: str, where: Where, count: int = 1) -> None:
        fault = self.by_kind[kind]
        fault.count += count
        if len(fault.places) < MAX_PLACES:
            fault.places.append(where)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of an audit, and the faults."""

    run: str
    record: str
    steps_kept: int
    steps_abandoned: int
    epochs: int
    tokens: int
    """Tokens trained in kept steps."""
    samples: int
    """Samples with tokens trained in kept steps."""
    fates: dict[str, int]
    """Samples that the kept steps settled, by fate and reason."""
    bound: int
    """max_staleness."""
    stalest: int
    """Largest distance of a trained token, in steps."""
    checkpoint: str
    """Checkpoint up to which tasks were followed; empty: there is none on the kept branch."""
    tasks: int
    """Tasks before that checkpoint's next one."""
    faults: dict[str, Fault]
    notes: tuple[str, ...]
    """Limits of the count."""

    @property
    def clean(self) -> bool:
        return not any(fault.count for fault in self.faults.values())

    def __str__(self) -> str:
        lines = [
            f"record      {self.record}",
            f"steps       {self.steps_kept:,} kept, {self.steps_abandoned:,} abandoned, in {self.epochs} epochs",
            f"tokens      {self.tokens:,} trained, of {self.samples:,} samples; "
            f"the stalest {self.stalest} steps old, bound {self.bound}",
            f"settled     {', '.join(f'{n:,} {fate}' for fate, n in sorted(self.fates.items())) or 'nothing'}",
            f"tasks       {self.tasks:,} before the next one of {self.checkpoint}" if self.checkpoint else
            "tasks       not followed: the kept branch has no checkpoint",
            "",
        ]  # fmt: skip
        width = max(len(kind) for kind in self.faults)
        lines += [f"{kind:<{width}}  {fault.count:,}" for kind, fault in self.faults.items()]
        for kind, fault in self.faults.items():
            if fault.count:
                lines += ["", f"{kind} ({KINDS[kind]}), the first {len(fault.places)} places:"]
                lines += [f"  {place}" for place in fault.places]
        lines += ["", *(f"note: {note}" for note in self.notes)] if self.notes else []
        return "\n".join([*lines, "", "clean" if self.clean else "WRONG"])
