"""Which GPU each server runs on. A pure function: what is visible and what is asked for in, an assignment out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

Groups: TypeAlias = tuple[tuple[int, ...], ...]
"""GPUs of each server of a role."""


class Wanted(NamedTuple):
    """The servers of one role."""

    role: str
    """`actor` or `teacher`."""
    n: int
    tp: int
    """GPUs per server."""
    gpus: tuple[int, ...] = ()
    """Chosen by the user, `tp` for each server in turn; empty: any that are left over."""


class NotEnoughGpus(ValueError):
    """The message says what is there, what was asked for, and how to share."""


def assign_gpus(n_visible: int, taken: Sequence[int], wanted: Sequence[Wanted]) -> dict[str, Groups]:
    """Role -> the GPUs of each of its servers, as positions 0.. in the list of visible ones.

    `taken`: those that learner and embedded engines are on; others get a server only where the user says so. Explicit
    choices come first, then the rest is handed out in the order of `wanted`. Raises NotEnoughGpus for too few, and
    ValueError for choices that do not fit."""
    chosen = {item.role: _explicit(item, n_visible) for item in wanted if item.gpus}
    used = {gpu for groups in chosen.values() for group in groups for gpu in group}
    free = [gpu for gpu in range(n_visible) if gpu not in used and gpu not in taken]
    open_ = [item for item in wanted if not item.gpus]
    needed = sum(item.n * item.tp for item in open_)
    if needed > len(free):
        raise NotEnoughGpus(_too_few(n_visible, sorted({*taken} - used), sorted(used), open_, len(free)))
    left = iter(free)
    for item in open_:
        chosen[item.role] = tuple(tuple(next(left) for _ in range(item.tp)) for _ in range(item.n))
    return chosen


def _explicit(item: Wanted, n_visible: int) -> Groups:
    key = f"{item.role}.server.gpus"
    if len(item.gpus) != item.n * item.tp:
        raise ValueError(
            f"{key}: got {len(item.gpus)} GPUs, expected {item.n * item.tp}: {item.tp} for each of {item.n} servers; "
            "the same one may be named several times"
        )
    if max(item.gpus) >= n_visible:
        raise ValueError(
            f"{key}: got GPU {max(item.gpus)}, expected less than {n_visible}, the number of visible GPUs; they are "
            "counted from 0, as torch does"
        )
    groups = tuple(item.gpus[i * item.tp : (i + 1) * item.tp] for i in range(item.n))
    for group in groups:
        if len(set(group)) != len(group):
            raise ValueError(f"{key}: got {list(group)} for one server, expected {item.tp} different GPUs")
    return groups


def _too_few(n_visible: int, taken: list[int], used: list[int], open_: Sequence[Wanted], n_free: int) -> str:
    asked = ", ".join(f"{item.n * item.tp} for {item.n} {item.role} servers (tp {item.tp})" for item in open_)
    spoken_for = [f"{len(taken)} has the learner or an embedded engine" for _ in taken[:1]]
    spoken_for += [f"{len(used)} are named by server.gpus" for _ in used[:1]]
    why = f" ({', '.join(spoken_for)})" if spoken_for else ""
    gpus = ",".join(["0"] * (open_[0].n * open_[0].tp))
    return (
        f"server.gpus: got {n_visible} visible GPUs, {n_free} of them free{why}, expected {asked}; start fewer, use "
        f"--device cpu, or share: --{open_[0].role}.server.gpus {gpus} puts them on GPU 0, and "
        f"--{open_[0].role}.server.args=--mem-fraction-static,0.3 leaves room there for the others"
    )
