"""Where hosts meet before the learner's ranks start: numbers, late and missing hosts, and what ends a meeting."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stillhouse import builtin
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.workers import hosts
from stillhouse.launch.workers.hosts import CARD, FolderElsewhere, HostsMissing, Rendezvous, joined, led, read_card
from stillhouse.protocol.context import RoleContext
from tests.patience import PATIENCE_S, eventually

MODELS = {"student": str(builtin.STUDENT_DIR), "teacher": str(builtin.TEACHER_DIR)}


def context(folder: Path, *, n_hosts: int = 2, timeout_s: float = PATIENCE_S, name: str = "one") -> RoleContext[Any]:
    learner, launch = {"ranks": 2 * n_hosts, "hosts": n_hosts}, {"ready_timeout_s": timeout_s}
    config = build(RunConfig, {"models": MODELS, "learner": learner, "launch": launch})
    folder.mkdir(exist_ok=True)
    return RoleContext(
        role="learner",
        index=0,
        name="learner-0",
        incarnation=name,
        run_id="r",
        run_dir=folder,
        buffer_address="",
        resume=False,
        config=config,
    )


class Meeting:
    """Both sides in threads of this process."""

    def __init__(self) -> None:
        self.places: list[Rendezvous] = []
        self.errors: list[BaseException] = []
        self.over = [threading.Event() for _ in range(4)]
        self.threads: list[threading.Thread] = []

    def enter(self, meet: Callable[[], Any], over: int = 0) -> None:
        def run() -> None:
            try:
                with meet() as place:
                    self.places.append(place)
                    self.over[over].wait(PATIENCE_S)
            except BaseException as error:
                self.errors.append(error)

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()

    def end(self) -> None:
        for event in self.over:
            event.set()
        for thread in self.threads:
            thread.join(PATIENCE_S)


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    one = Meeting()
    yield one
    one.end()


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Signals that a meeting sent to its own process."""
    sent: list[int] = []

    def kill(_pid: int, number: int) -> None:
        sent.append(number)

    monkeypatch.setattr(hosts.os, "kill", kill)
    return sent


def test_hosts_get_a_place_each_in_any_order_of_coming(tmp_path: Path, meeting: Meeting, killed: list[int]) -> None:
    ctx = context(tmp_path, n_hosts=3)
    meeting.enter(lambda: joined(ctx, tmp_path))  # it comes before there is a run's learner
    meeting.enter(lambda: led(ctx))
    eventually(lambda: (card := read_card(tmp_path)) is not None and card.here == 2, "two hosts")
    assert not meeting.places, "host 0 waits for the third"
    meeting.enter(lambda: joined(ctx, tmp_path))
    eventually(lambda: len(meeting.places) == 3, "all three")
    assert sorted(place.node for place in meeting.places) == [0, 1, 2]
    assert len({(place.host, place.port, place.hosts, place.incarnation) for place in meeting.places}) == 1
    stores = {place.node: place.store for place in meeting.places}
    stores[1].set("said", "here")
    assert stores[2].get("said") == b"here", "they meet in one store"
    meeting.end()
    assert not meeting.errors and not killed


def test_a_run_without_the_other_hosts_says_how_many_came_and_how_they_join(tmp_path: Path) -> None:
    with pytest.raises(HostsMissing, match=r"1 of 2 hosts .*--learner-ranks 2"), led(context(tmp_path, timeout_s=0.5)):
        pytest.fail("there is one host")


def test_a_host_that_died_while_it_waited_is_not_counted(
    tmp_path: Path, meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "SILENT_S", 2.0)
    ctx = context(tmp_path, n_hosts=3)
    meeting.enter(lambda: led(ctx))
    eventually(lambda: read_card(tmp_path) is not None, "the card")
    hosts._number(ctx, tmp_path)  # pyright: ignore[reportPrivateUsage] - takes a number, and never beats
    eventually(lambda: (card := read_card(tmp_path)) is not None and card.here == 2, "it is counted at first")
    eventually(lambda: (card := read_card(tmp_path)) is not None and card.here == 1, "it is forgotten")
    for _ in range(2):
        meeting.enter(lambda: joined(ctx, tmp_path))
    eventually(lambda: len(meeting.places) == 3, "all three")


def test_a_host_that_fails_ends_the_launch_on_host_0(tmp_path: Path, meeting: Meeting, killed: list[int]) -> None:
    ctx = context(tmp_path)
    meeting.enter(lambda: led(ctx))

    def failing() -> None:
        with pytest.raises(RuntimeError, match="have died"), joined(ctx, tmp_path):
            raise RuntimeError("its ranks have died")

    thread = threading.Thread(target=failing)
    thread.start()
    eventually(lambda: killed == [signal.SIGTERM], "host 0 ends its ranks")
    thread.join(PATIENCE_S)
    assert meeting.places[0].lost == ["the ranks of host 1 have ended"]


def test_another_folder_of_the_same_name_is_refused_at_once(tmp_path: Path, meeting: Meeting) -> None:
    ctx, copy = context(tmp_path / "run"), tmp_path / "copy"
    meeting.enter(lambda: led(ctx))
    eventually(lambda: read_card(tmp_path / "run") is not None, "the card")
    card = read_card(tmp_path / "run")
    assert card is not None
    shutil.copytree(tmp_path / "run", copy)
    (copy / CARD).write_bytes(msgspec.json.encode(msgspec.structs.replace(card, folder=str(tmp_path / "elsewhere"))))
    began_s = time.monotonic()
    with pytest.raises(FolderElsewhere, match="is not there"), joined(ctx, copy):
        pytest.fail("rank 0's folder is not here")
    assert time.monotonic() - began_s < PATIENCE_S
    meeting.enter(lambda: joined(ctx, tmp_path / "run"))
    eventually(lambda: len(meeting.places) == 2, "the right folder will do")


def test_a_card_of_an_earlier_start_is_waited_out(tmp_path: Path, meeting: Meeting) -> None:
    old = context(tmp_path, timeout_s=0.3)
    with pytest.raises(HostsMissing), led(old):
        pytest.fail("there is one host")
    assert read_card(tmp_path) is not None, "it is still there"
    new = context(tmp_path, name="two")
    meeting.enter(lambda: joined(new, tmp_path))
    meeting.enter(lambda: led(new))
    eventually(lambda: len(meeting.places) == 2, "both")
    assert {place.incarnation for place in meeting.places} == {"two"}
