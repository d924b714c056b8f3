"""How long the learner waits for members that fetch a version over its one link, by a clock of the test's own."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import msgspec
import pytest

from stillhouse.weights.config import WeightsConfig
from stillhouse.weights.control import ControlHost, Request
from stillhouse.weights.control_messages import Want
from stillhouse.weights.deadlines import RoundLimits
from stillhouse.weights.errors import GroupBroken
from stillhouse.weights.roster import GroupSeat
from stillhouse.weights.transports import wire
from stillhouse.weights.transports.wire import WireChannel
from stillhouse.weights.wire import PIECE_BYTES

MEMBERS = 16
PIECES = 100
LINK_PIECES_S = 10.0
CONFIG = WeightsConfig(broadcast_timeout_s=30.0, slowest_bytes_per_s=LINK_PIECES_S * PIECE_BYTES)
LIMIT_OF_ONE_S = 30.0 + 2 * PIECES / LINK_PIECES_S


class Link:
    """Stands for the control channel: a link that carries `LINK_PIECES_S` pieces a second, shared by its members in
    turn. `until`: pieces after which a member falls silent."""

    def __init__(self, until: dict[int, int]) -> None:
        self.now_s = 0.0
        self.until = until
        self.had = dict.fromkeys(range(1, MEMBERS + 1), 0)

    def monotonic(self) -> float:
        return self.now_s

    def requests(self, wait_s: float) -> list[Request]:
        rank = min(self.wanting, key=lambda rank: self.had[rank], default=None)
        self.now_s += wait_s if rank is None else 1 / LINK_PIECES_S
        if rank is None:
            return []
        self.had[rank] += 1
        return [Request(b"%d" % rank, Want(1, rank, 1, self.had[rank] - 1, 1))]

    @property
    def wanting(self) -> list[int]:
        return [rank for rank, had in self.had.items() if had < min(PIECES, self.until.get(rank, PIECES))]

    def send_piece(self, *_: object) -> SimpleNamespace:
        return SimpleNamespace(done=True)

    def finished(self) -> set[int]:
        return {rank for rank, had in self.had.items() if had == PIECES}


def sent(monkeypatch: pytest.MonkeyPatch, until: dict[int, int], copies: int = MEMBERS) -> Link:
    limits = RoundLimits(CONFIG)
    limits.copies = copies
    link = Link(until)
    monkeypatch.setattr(wire, "time", link)
    n_bytes = PIECES * PIECE_BYTES
    channel = WireChannel(
        cast(ControlHost, link),
        tuple(GroupSeat(f"actor-{rank}", "1") for rank in range(1, MEMBERS + 1)),
        finished=link.finished,
        closing=lambda: False,
        others_s=limits.others_s,
    )
    layout: Any = SimpleNamespace(total_bytes=n_bytes)
    content: Any = SimpleNamespace(read=MagicMock())
    try:
        channel.send(1, layout, content, limits.limit_s("plain", n_bytes))
    finally:
        channel.close()
    return link


def test_members_that_share_the_link_have_the_time_for_all_their_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the limit of one copy, most would be left out: their link carries 16."""
    took_s = MEMBERS * PIECES / LINK_PIECES_S
    link = sent(monkeypatch, {})
    assert len(link.finished()) == MEMBERS and math.isclose(link.now_s, took_s, rel_tol=0.01)
    link = sent(monkeypatch, {}, copies=1)
    assert len(link.finished()) == 0 and LIMIT_OF_ONE_S < link.now_s < took_s


@pytest.mark.parametrize("after", [0, 40])
def test_members_that_fall_silent_are_waited_for_as_long_as_one_alone(
    monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Not as long as all together: the next version waits for them."""
    with pytest.raises(GroupBroken, match=r"actor-3, actor-7: no request and no answer for 50 s"):
        sent(monkeypatch, {3: after, 7: after})


def test_nobody_is_waited_for_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that has all and does not answer."""
    finished = Link.finished

    def without_5(link: Link) -> set[int]:
        return finished(link) - {5}

    monkeypatch.setattr(Link, "finished", without_5)
    link = sent(monkeypatch, {})
    assert math.isclose(link.now_s, LIMIT_OF_ONE_S + (MEMBERS - 1) * PIECES / LINK_PIECES_S, rel_tol=0.01)


def test_the_limit_is_that_of_one_copy_and_a_pass_for_each_other_one() -> None:
    config = msgspec.structs.replace(CONFIG, slowest_bytes_per_s=1e9)
    limits = RoundLimits(config)
    limits.copies = 32
    assert limits.limit_s("plain", 14_000_000_000) == 30.0 + (2 + 31) * 14.0
    assert limits.limit_s("reload", 14_000_000_000) == 30.0 + (6 + 31) * 14.0
    limits.took("plain", 1.0, 1.0)
    assert limits.limit_s("plain", 14_000_000_000) == 2 * (30.0 + 2 * 14.0) + 31 * 14.0


def test_a_member_that_reads_nothing_has_a_windows_pieces_in_memory_by_however_many_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It asks by another connection each time; what has left goes on, and so do the others."""
    given: list[tuple[int, SimpleNamespace]] = []

    def send_piece(request: Request, index: int, piece: object) -> SimpleNamespace:
        given.append((request.want.rank, SimpleNamespace(done=request.want.rank != 1)))
        return given[-1][1]

    asked = [Request(b"%d" % n, Want(1, 1, 1, 8 * (n % 12), 8)) for n in range(60)]
    asked.append(Request(b"other", Want(1, 2, 1, 0, 8)))
    turns = iter(range(10_000))

    def requests(_: float) -> list[Request]:
        now, clock.now_s = clock.now_s, clock.now_s + 1.0
        if next(turns) == 20:
            next(piece for rank, piece in given if rank == 1).done = True
        return asked if now == 0 else []

    clock = Link({})
    monkeypatch.setattr(wire, "time", clock)
    seats = (GroupSeat("actor-0", "1"), GroupSeat("actor-1", "1"))
    channel = WireChannel(
        cast(ControlHost, SimpleNamespace(requests=requests, send_piece=send_piece)),
        seats,
        finished=lambda: set[int](),
        closing=lambda: False,
        others_s=lambda _: 0.0,
    )
    layout: Any = SimpleNamespace(total_bytes=PIECES * PIECE_BYTES)
    channel.send(1, layout, cast(Any, SimpleNamespace(read=MagicMock())), 100.0)
    assert [rank for rank, _ in given].count(1) == wire.UNDER_WAY + 1
    assert [rank for rank, _ in given].count(2) == 8
