"""Assigns GPUs to servers and embedded roles, by pure functions over what is visible and what is asked for.

The learner comes first, with its ranks on GPUs in a row, then servers (each on GPUs of its own, because a server takes
nearly all of a GPU's memory),
then embedded teachers, then embedded actors, each on a free GPU while there is one. After that embedded roles share
GPUs: those without a server first, the learner's last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple, TypeAlias

LEARNER: Final = "learner"
RANK: Final = "learner rank "
"""Seats of the learner's further ranks: this and their number."""
ANY_GPU: Final = "cuda"
Groups: TypeAlias = tuple[tuple[int, ...], ...]
"""For each server of a role, its GPUs."""


class Wanted(NamedTuple):
    """The servers that one role needs."""

    role: str
    """`actor` or `teacher`."""
    n: int
    tp: int
    """GPUs per server."""
    gpus: tuple[int, ...] = ()
    """The user's choice, `tp` for each server in turn; empty: any that are free."""


class Seat(NamedTuple):
    """An embedded role, with its model in the worker's own process."""

    who: str
    """`learner`, `learner rank 1`, `teacher-0`, `actor-3`: the worker's name, but without a number for the learner."""
    key: str
    """Configuration key that sets the device."""
    device: str
    """cpu, cuda (any free GPU) or cuda:N."""


class Places(NamedTuple):
    """The assignment. GPUs are positions in the list of visible ones."""

    seats: dict[str, int | None]
    """Seat.who -> its GPU; None for the CPU."""
    servers: dict[str, Groups]
    """Wanted.role -> the GPUs of its servers."""

    @property
    def gpus(self) -> Counter[int]:
        """All that something is placed on, and on how many things."""
        of_servers = (gpu for groups in self.servers.values() for group in groups for gpu in group)
        return Counter([*(gpu for gpu in self.seats.values() if gpu is not None), *of_servers])


class NotEnoughGpus(ValueError):
    """The message says what is available, what was requested, and how to share."""


def place(n_visible: int, seats: Sequence[Seat], wanted: Sequence[Wanted]) -> Places:
    """`seats`: the learner, its further ranks, teachers, actors, in this order. Raises NotEnoughGpus for servers and
    ranks that do not fit, and ValueError for a chosen GPU that does not exist."""
    if n_visible == 1:  # all share it, as embedded engines do
        wanted = [item if item.gpus or item.tp > 1 else item._replace(gpus=(0,) * item.n) for item in wanted]
    ranks = [seat.who for seat in seats if seat.who.startswith(RANK)]
    others = [seat for seat in seats if seat.who not in ranks]
    named = {seat.who: _named_gpu(seat, n_visible) for seat in others if seat.device != ANY_GPU}
    chosen = {gpu for item in wanted for gpu in item.gpus}
    taken = {gpu for gpu in named.values() if gpu is not None}
    for seat in others:
        if seat.who == LEARNER:
            first = named.get(LEARNER) if LEARNER in named else _in_a_row(n_visible, 1 + len(ranks), chosen | taken)
            named[LEARNER] = first
            named |= {who: None if first is None else first + 1 + i for i, who in enumerate(ranks)}
            if first is not None:
                taken |= set(range(first, first + 1 + len(ranks)))
            if first is not None and first + len(ranks) >= n_visible > 0:
                raise NotEnoughGpus(_too_few_for_ranks(1 + len(ranks), n_visible, first))
    servers = assign_gpus(n_visible, sorted(taken), wanted)
    served = {gpu for groups in servers.values() for group in groups for gpu in group}
    placed: dict[str, int | None] = {}
    roles, members = (
        Counter[int](),
        Counter[int](),
    )  # per GPU: embedded roles, and weight group members
    for seat in sorted(seats, key=lambda seat: seat.who not in named):  # those with a fixed GPU first
        sends = seat.who == LEARNER or seat.who.startswith("actor")  # is in the weight group
        if seat.who in named:
            gpu = named[seat.who]
        else:
            first, senders = named.get(LEARNER), members if sends else Counter[int]()
            order = [(i in served, i == first, senders[i], roles[i], i) for i in range(n_visible)]
            gpu = min(order)[-1]
        placed[seat.who] = gpu
        if gpu is not None:
            roles[gpu] += 1
            members[gpu] += sends
    return Places({seat.who: placed[seat.who] for seat in seats}, servers)


def _in_a_row(n_visible: int, n: int, used: Collection[int]) -> int:
    """The first of `n` GPUs in a row that nobody uses. A learner of one rank may share the first one."""
    found = (gpu for gpu in range(n_visible - n + 1) if not {*range(gpu, gpu + n)} & {*used})
    first = next(found, None)
    if first is None and n > 1:
        raise NotEnoughGpus(_too_few_for_ranks(n, n_visible - len({*used}), None))
    return first or 0


def _too_few_for_ranks(ranks: int, n: int, first: int | None) -> str:
    there = f"{n} free GPUs" if first is None else f"{n} visible GPUs and learner.device = cuda:{first}"
    return (
        f"learner.ranks: got {there}, expected {ranks} in a row, one for each rank; use fewer ranks, or leave them "
        "GPUs that no server.gpus names"
    )


def _named_gpu(seat: Seat, n_visible: int) -> int | None:
    if seat.device == "cpu":
        return None
    index = seat.device.removeprefix("cuda:")
    if not index.isdecimal():
        raise ValueError(f"{seat.key}: got {seat.device!r}, expected auto, cpu, cuda or cuda:N")
    if int(index) >= n_visible:
        raise ValueError(
            f"{seat.key}: got {seat.device}, expected a number less than {n_visible}, the number of visible GPUs, "
            "which are counted from 0"
        )
    return int(index)


def assign_gpus(n_visible: int, taken: Sequence[int], wanted: Sequence[Wanted]) -> dict[str, Groups]:
    """Role -> the GPUs of each of its servers, as positions in the list of visible ones.

    `taken`: GPUs of the learner and of embedded engines, which get a server only if the user chose them for one.
    Explicit choices come first; the rest is handed out in the order of `wanted`. Raises NotEnoughGpus, and ValueError
    for choices that do not fit."""
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
            f"{key}: got GPU {max(item.gpus)}, expected less than {n_visible}, the number of visible GPUs, which are "
            "counted from 0, as in torch"
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
        f"share: --{open_[0].role}.server.gpus may name the learner's GPU, or one GPU several times"
    )
