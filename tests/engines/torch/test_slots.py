from __future__ import annotations

import numpy as np
import pytest

from stillhouse.engines.base import GenerationRequest
from stillhouse.engines.torch.slots import SlotTable, length_classes, row_windows
from stillhouse.protocol.messages import Sampling

CAPACITY = 600


def place(table: SlotTable, name: int, length: int) -> None:
    request = GenerationRequest(str(name), np.full(length, name, np.int32), Sampling(), 9, (name, name + 1))
    table.place(request, np.full(9, name / 1000))


@pytest.mark.parametrize("seed", range(30))
def test_arranging_closes_holes_and_sorts_classes_and_every_row_keeps_its_own(seed: int) -> None:
    random = np.random.default_rng(seed)
    table = SlotTable(17, CAPACITY)
    cache = np.full(17, -1)
    """What the KV cache would hold: the name of the request whose keys and values a slot has."""
    name = 0
    for _ in range(40):
        for running in [running for running in table.running if running is not None]:
            if random.random() < 0.3:
                table.release(running)
        while table.free and random.random() < 0.7:
            name += 1
            place(table, name, int(random.choice([5, 60, 70, 130, 300, 500])))
        for running in filter(None, table.running):
            cache[running.row] = int(running.request.request_id)
        sources, targets = table.arrange()
        cache[targets] = cache[sources]
        kinds = length_classes(table.length[: table.n_running])
        assert (np.diff(kinds) <= 0).all()
        for row in range(table.n_running):
            running = table.at(row)
            own = int(running.request.request_id)
            assert running.row == row and cache[row] == own
            assert table.length[row] == len(running.request.prompt_ids)
            assert set(table.past(running)) <= {own} and table.next_input[row] == own
            assert table.stop_ids[row].tolist() == [own, own + 1]
            assert table.uniforms[row, table.length[row]] == own / 1000
        assert not any(table.running[table.n_running :]) and table.in_use.sum() == table.n_running
        assert table.arrange() == ([], [])


def test_only_rows_out_of_place_move() -> None:
    table = SlotTable(8, CAPACITY)
    for name, length in enumerate((200, 200, 100, 100, 5, 5, 5), start=1):
        place(table, name, length)
    table.release(table.at(3))
    assert table.arrange() == ([6], [3])
    table.length[5] = 100
    assert set(zip(*table.arrange(), strict=True)) == {(5, 3), (3, 5)}


@pytest.mark.parametrize("seed", range(10))
def test_windows_cover_every_row_and_show_it_all_its_cells(seed: int) -> None:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, CAPACITY, 40)
    lengths = lengths[np.argsort(-length_classes(lengths), kind="stable")]
    windows = row_windows(lengths, CAPACITY)
    assert [window.start for window in windows] == [0, *(window.stop for window in windows[:-1])]
    assert windows[-1].stop == 40 and len(windows) > 1
    for start, stop, window in windows:
        assert lengths[start:stop].max() <= window <= CAPACITY


def test_a_block_that_would_save_little_joins_its_neighbour() -> None:
    assert len(row_windows(np.array([70, 60]), CAPACITY)) == 1
    assert len(row_windows(np.array([500] + [10] * 30), CAPACITY)) == 2
    assert row_windows(np.zeros(0, np.int64), CAPACITY)[0][:2] == (0, 0)
