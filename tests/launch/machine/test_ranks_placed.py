"""Where the ranks of a learner are put: against a table that was written by hand."""

from __future__ import annotations

import pytest

from stillhouse.launch.machine.gpus import LEARNER, NotEnoughGpus, Seat, Wanted, place


def learner(ranks: int, device: str = "cuda") -> list[Seat]:
    first = Seat(LEARNER, "learner.device", device)
    return [first, *(Seat(f"learner rank {rank}", "learner.ranks", device) for rank in range(1, ranks))]


ACTORS = [Seat(f"actor-{i}", "actor.torch.device", "cuda") for i in range(2)]


@pytest.mark.parametrize(
    ("n_gpus", "ranks", "device", "servers", "expected"),
    [
        (4, 2, "cuda", (), (0, 1)),
        (8, 4, "cuda", (0, 1), (2, 3, 4, 5)),
        (8, 4, "cuda", (1, 6), (2, 3, 4, 5)),
        (8, 2, "cuda:5", (), (5, 6)),
        (2, 2, "cpu", (), (None, None)),
        (0, 3, "cpu", (), (None, None, None)),
    ],
)
def test_ranks_are_on_gpus_in_a_row_which_no_server_has(
    n_gpus: int, ranks: int, device: str, servers: tuple[int, ...], expected: tuple[int | None, ...]
) -> None:
    wanted = [Wanted("teacher", len(servers), 1, servers)] if servers else []
    seats = place(n_gpus, learner(ranks, device), wanted).seats
    assert tuple(seats.values()) == expected


def test_embedded_actors_come_behind_the_ranks() -> None:
    seats = place(4, [*learner(2), *ACTORS], []).seats
    assert [seats[who] for who in ("learner", "learner rank 1", "actor-0", "actor-1")] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("n_gpus", "ranks", "device", "servers", "said"),
    [
        (2, 4, "cuda", (), "got 2 free GPUs, expected 4 in a row"),
        (8, 4, "cuda", (3,), None),
        (6, 4, "cuda", (2,), "got 5 free GPUs, expected 4 in a row"),
        (4, 2, "cuda:3", (), "got 4 visible GPUs and learner.device = cuda:3, expected 2 in a row"),
    ],
)
def test_too_few_gpus_for_the_ranks(
    n_gpus: int, ranks: int, device: str, servers: tuple[int, ...], said: str | None
) -> None:
    wanted = [Wanted("teacher", len(servers), 1, servers)] if servers else []
    if said is None:
        assert place(n_gpus, learner(ranks, device), wanted).seats["learner rank 3"] == 7
        return
    with pytest.raises(NotEnoughGpus, match=f"learner.ranks: {said}"):
        place(n_gpus, learner(ranks, device), wanted)
