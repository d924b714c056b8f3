"""Which GPU each server and each embedded role runs on. Pure functions: what is visible and what is asked for in, an
assignment out.

The learner comes first, then servers (each on GPUs of its own, for a server takes nearly all of a GPU's memory), then
embedded teachers, then embedded actors, each on a free GPU while there is one. Embedded roles share GPUs when there are
more of them: first those without a server, the learner's last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

LEARNER: Final = "learner"
ANY_GPU: Final = "cuda"
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


class Seat(NamedTuple):
    """An embedded role: a model in the worker's own process."""

    who: str
    """`learner`, `teacher-0`, `actor-3`: as the worker is called, without the learner's number."""
    key: str
    """Of the configuration that says where."""
    device: str
    """cpu, cuda (any GPU that is free) or cuda:N."""


class Places(NamedTuple):
    """Positions in the list of visible GPUs."""

    seats: dict[str, int | None]
    """Seat.who -> its GPU; None: the CPU."""
    servers: dict[str, Groups]
    """Wanted.role -> the GPUs of each of its servers."""


class NotEnoughGpus(ValueError):
    """The message says what is there, what was asked for, and how to share."""


def place(n_visible: int, seats: Sequence[Seat], wanted: Sequence[Wanted]) -> Places:
    """`seats`: the learner, teachers, actors, in this order. Raises NotEnoughGpus for servers that do not fit, and
    ValueError for a choice of the user's that is not there."""
    named = {seat.who: _named_gpu(seat, n_visible) for seat in seats if seat.device != ANY_GPU}
    chosen = {gpu for item in wanted for gpu in item.gpus}
    taken = {gpu for gpu in named.values() if gpu is not None}
    for seat in seats:
        if seat.who == LEARNER and seat.device == ANY_GPU:
            free = (gpu for gpu in range(n_visible) if gpu not in chosen and gpu not in taken)
            named[LEARNER] = gpu = next(free, 0)
            taken.add(gpu)
    servers = assign_gpus(n_visible, sorted(taken), wanted)
    served = {gpu for groups in servers.values() for group in groups for gpu in group}
    placed: dict[str, int | None] = {}
    roles, members = Counter[int](), Counter[int]()  # on each GPU: all embedded roles, and members of the weight group
    for seat in sorted(seats, key=lambda seat: seat.who not in named):  # what is settled counts for the others
        sends = seat.who == LEARNER or seat.who.startswith("actor")  # it is in the weight group
        if seat.who in named:
            gpu = named[seat.who]
        else:
            first, others = named.get(LEARNER), members if sends else Counter[int]()
            order = [(i in served, i == first, others[i], roles[i], i) for i in range(n_visible)]
            gpu = min(order)[-1]
        placed[seat.who] = gpu
        if gpu is not None:
            roles[gpu] += 1
            members[gpu] += sends
    return Places({seat.who: placed[seat.who] for seat in seats}, servers)


def _named_gpu(seat: Seat, n_visible: int) -> int | None:
    if seat.device == "cpu":
        return None
    index = seat.device.removeprefix("cuda:")
    if not index.isdecimal():
        raise ValueError(f"{seat.key}: got {seat.device!r}, expected auto, cpu, cuda or cuda:N")
    if int(index) >= n_visible:
        raise ValueError(
            f"{seat.key}: got {seat.device}, expected a number less than {n_visible}, the number of visible GPUs; they "
            "are counted from 0"
        )
    return int(index)


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
    fit = " or ".join(f"{n_free // tp} with tp {tp}" for tp in sorted({item.tp for item in open_}))
    return (
        f"server.gpus: got {n_visible} visible GPUs, {n_free} of them free{why}, expected {asked}; SGLang servers that "
        f"fit there, actors' and teachers' together: {fit}. Start fewer (--actors, --teachers), or use the embedded "
        "engine, which shares GPUs (--actor.engine torch, --teacher.engine torch), or --device cpu, or let servers "
        f"share: --{open_[0].role}.server.gpus names one GPU several times, and "
        f"--{open_[0].role}.server.args=--mem-fraction-static,0.3 leaves room there for the others"
    )
