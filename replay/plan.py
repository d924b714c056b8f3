"""The plan of a replay, kept in its folder: which batches it trains, and in which order. No torch.

A resumed replay gives the same result as an undisturbed one. So it must have the same batches in the same order and the
same configuration; only when checkpoints are written, and how many are kept, may change.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

import msgspec
import numpy as np

from stillhouse.launch.config.files import read_config
from stillhouse.launch.config.keys import keys_of
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import get
from stillhouse.launch.errors import ConfigError
from stillhouse.protocol.atomic_file import write_atomic
from stillhouse.recording.reader import Recording

Order: TypeAlias = Literal["recorded", "shuffled"]
ORDERS: Final[tuple[Order, ...]] = get_args(Order)

PLAN_FILE: Final = "replay_plan.json"
MAY_CHANGE: Final = ("learner.checkpoint_every", "learner.keep_checkpoints", "learner.stall_timeout_s")


class ReplayPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Content of replay_plan.json."""

    file: str
    recording: str
    """`Recording.digest`, because the file may have been moved."""
    run: str
    batches: int
    epochs: int
    order: Order

    @classmethod
    def of(cls, recording: Recording, *, epochs: int, order: Order) -> ReplayPlan:
        return cls(
            file=str(recording.path),
            recording=recording.digest,
            run=recording.header.run,
            batches=len(recording.batches),
            epochs=epochs,
            order=order,
        )

    def write(self, folder: Path) -> None:
        write_atomic(folder / PLAN_FILE, msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


def read_plan(folder: Path) -> ReplayPlan:
    """Read the plan of a replay. Raises ConfigError if the folder has none."""
    file = folder / PLAN_FILE
    if not file.is_file():
        raise ConfigError(
            f"--resume: {folder} holds no replay (no {PLAN_FILE} in it); expected the folder of one (--run-dir DIR). "
            "To resume a run, use stillhouse --resume"
        )
    try:
        return msgspec.json.decode(file.read_bytes(), type=ReplayPlan)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--resume: {file} is not a plan of this version: {error}") from error


def check_file(plan: ReplayPlan, recording: Recording) -> None:
    """Raise ConfigError if the file contains other batches than those with which the replay was started."""
    if recording.digest != plan.recording:
        raise ConfigError(
            f"--resume: got {recording.path} ({len(recording.batches)} batches of the run {recording.header.run}), "
            f"expected {plan.file} as it was then ({plan.batches} batches of the run {plan.run}), or a copy of it; "
            "nothing was changed"
        )


def check_asked(plan: ReplayPlan, *, epochs: int | None, order: Order | None) -> None:
    """Raise ConfigError if the command line asks for another order. None: not given."""
    pairs = {"epochs": (epochs, plan.epochs), "order": (order, plan.order)}
    mistakes = [
        f"--{name}: got {got}, expected {was}, as when the replay was started (or leave it out)"
        for name, (got, was) in pairs.items()
        if got not in (None, was)
    ]
    if mistakes:
        raise ConfigError(*mistakes)


def check_config(config: RunConfig, folder: Path) -> None:
    """Raise ConfigError with all keys that differ from the folder's config.yaml. Both have resolved paths."""
    if mistakes := list(_differences(config, read_config(folder / "config.yaml"))):
        raise ConfigError(
            *mistakes,
            f"--resume: {folder} must be resumed with the settings with which it was started, so that its "
            "result is the same; start another replay for other settings. Nothing was changed",
        )


def _differences(config: RunConfig, former: RunConfig) -> Iterator[str]:
    now, then = msgspec.to_builtins(config), msgspec.to_builtins(former)
    for key in keys_of(RunConfig):
        got, was = get(now, key.name), get(then, key.name)
        if got != was and key.name not in MAY_CHANGE:
            yield f"{key.name}: got {got!r}, expected {was!r}, as in its config.yaml"


def turns(n_batches: int, *, epochs: int, order: Order, seed: int) -> Iterator[tuple[int, int]]:
    """(epoch, index of a batch) of each step: every batch once per epoch. Shuffled: in a new order each time, which the
    seed determines."""
    for epoch in range(epochs):
        places = np.arange(n_batches)
        if order == "shuffled":
            np.random.default_rng([seed, epoch]).shuffle(places)
        yield from ((epoch, int(place)) for place in places)
