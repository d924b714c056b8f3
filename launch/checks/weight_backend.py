"""By what weights go from the learner to the actors: NCCL where it can work, else gloo. A pure function.

NCCL refuses two ranks on one GPU ("Duplicate GPU detected", initTransportsRank in its init.cc) and ranks with different
versions ("Mismatched NCCL version detected", bootstrap.cc and init.cc), and it needs a GPU on every rank. gloo works
with all layouts, more slowly: weights go through host memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

Backend: TypeAlias = Literal["gloo", "nccl"]


class Member(NamedTuple):
    """The learner, or an actor (its server): what it contributes to the weight group."""

    who: str
    gpus: tuple[int, ...] | None
    """A rank on each; empty: on the CPU; None: not known, for somebody else started it."""
    nccl: str | None
    """Version that its interpreter loads; None: not known."""
    python: str
    """That interpreter. Those of one have the same NCCL, known or not."""


class Choice(NamedTuple):
    backend: Backend
    why: str


def choose_weight_backend(wanted: Literal["auto", "gloo", "nccl"], learner: Member, actors: Sequence[Member]) -> Choice:
    """Raises ValueError where NCCL is asked for and cannot work. What is merely not known speaks against it under
    `auto` only."""
    if wanted == "gloo":
        return Choice("gloo", "as configured")
    if impossible := next(_impossible(learner, actors), None):
        if wanted == "nccl":
            raise ValueError(f"weights.backend: got nccl, but {impossible}; use gloo or auto")
        return Choice("gloo", impossible)
    if wanted == "nccl":
        return Choice("nccl", "as configured")
    if unknown := next(_unknown(learner, actors), None):
        return Choice("gloo", unknown)
    return Choice("nccl", f"a GPU each, NCCL {learner.nccl or 'of one interpreter'}")


def _impossible(learner: Member, actors: Sequence[Member]) -> Iterator[str]:
    def named(member: Member) -> str:
        return "the learner" if member is learner else member.who

    holders: dict[int, str] = {}
    for member in (learner, *actors):
        if member.gpus == ():
            yield f"{named(member)} is on the CPU"
        for gpu in member.gpus or ():
            if gpu in holders:
                yield f"{holders[gpu]} and {named(member)} share GPU {gpu}, and NCCL takes one rank per GPU"
            holders[gpu] = named(member)
    for actor in actors:
        if actor.nccl and learner.nccl and actor.nccl != learner.nccl:
            yield (
                f"the learner has NCCL {learner.nccl} ({learner.python}) and {actor.who} {actor.nccl} "
                f"({actor.python}), and NCCL takes equal versions only"
            )


def _unknown(learner: Member, actors: Sequence[Member]) -> Iterator[str]:
    if not actors:
        yield "who joins may have no GPU of its own"
    for actor in actors:
        if actor.gpus is None:
            yield f"the GPU and the NCCL of {actor.who} are not known, as its server was started by others"
    for member in (learner, *actors):
        if member.nccl is None and any(actor.python != learner.python for actor in actors):
            yield f"no installed wheel says which NCCL {member.python} has, and it must be the same for all"
