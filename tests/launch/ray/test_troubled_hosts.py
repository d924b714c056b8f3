"""What must not end a run on Ray, nor undo what its user asked for: damaged numbers, a full disk, killed joins, lost
requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.ray import hosts as hosts_module
from stillhouse.launch.ray import keeper
from stillhouse.launch.ray.autoscale import Decision
from stillhouse.launch.ray.hosts import RayHosts
from stillhouse.launch.ray.scale import main as scale
from stillhouse.launch.ray.wanted import Wanted, write_wanted
from stillhouse.teachers.config import TeacherConfig
from tests.full_disk import fill, small_disk
from tests.launch.ray.test_hosts import CONFIG, FakeCluster, counts, texts
from tests.patience import eventually
from tests.sim.chaos.disk import BALLAST

Decide = Callable[[Wanted, float], Decision | None]


class Watch:
    """Three hosts of five actors, and all that was said of them."""

    def __init__(
        self, run_dir: Path, decide: Decide = lambda _wanted, _now_s: None, config: RunConfig = CONFIG
    ) -> None:
        self.cluster, self.run_dir = FakeCluster(), run_dir
        files = {"join.json": b"{}"}
        self._hosts = RayHosts(self.cluster, config, run_dir, Wanted(actors=5), lambda: files, decide=decide)
        self._said = ""

    def __enter__(self) -> Watch:
        self._hosts.start()
        eventually(lambda: len(self.cluster.hosts) == 3, "three hosts")
        return self

    def __exit__(self, *_: object) -> None:
        self._hosts.close()
        assert "FATAL" not in self.said, self.said

    @property
    def said(self) -> str:
        self._said += texts(self._hosts) + "\n"
        return self._said

    def until_said(self, text: str) -> None:
        eventually(lambda: text in self.said, lambda: f"{text!r}; said so far: {self._said}")

    @property
    def there(self) -> list[str]:
        """Numbers of workers of the hosts that are not leaving."""
        return sorted(host.words[1] for host in self.cluster.hosts if not host.dead and not host.stopped)

    @property
    def stopped(self) -> list[bool]:
        return [host.stopped for host in self.cluster.hosts]


@pytest.mark.parametrize("text", ['{"actors": ', '{"actors": -1}', '{"actors": 1000000000}'])
def test_numbers_that_cannot_be_read_change_nothing_until_they_can(tmp_path: Path, text: str) -> None:
    with Watch(tmp_path) as watch:
        (tmp_path / "hosts.json").write_text(text)
        watch.until_said("hosts.json")
        watch.cluster.hosts[0].log += b"and on\n"
        log = tmp_path / "joined" / "actors-0" / "logs" / "join.log"
        eventually(lambda: log.is_file() and log.read_bytes().endswith(b"and on\n"), "the watch to go on")
        assert not any(watch.stopped) and watch.said.count("hosts.json") == 1
        write_wanted(tmp_path, Wanted(actors=2))
        eventually(lambda: watch.stopped == [False, True, True], "the numbers that can be read")


def test_autoscaling_does_not_undo_what_the_user_has_just_written(tmp_path: Path) -> None:
    written = threading.Event()

    def one_more_teacher(wanted: Wanted, _now_s: float) -> Decision | None:
        if not written.is_set():
            write_wanted(tmp_path, Wanted(actors=2))  # the user, between two looks at the file
            written.set()
            return None
        if wanted.teachers:
            return None
        return Decision("added_teachers", msgspec.structs.replace(wanted, teachers=1), "teachers are short")

    with Watch(tmp_path, one_more_teacher) as watch:
        watch.until_said("teachers are short")
        eventually(lambda: watch.stopped == [False, True, True], "the actors that the user sent away")
        watch.until_said("2 actors and 1 teacher wanted")
    assert counted(tmp_path)["added_teachers"] == 1


def test_a_decision_on_numbers_that_the_user_changes_at_that_moment_is_overtaken_and_counted(tmp_path: Path) -> None:
    decided = threading.Event()

    def decide(wanted: Wanted, _now_s: float) -> Decision | None:
        if decided.is_set():
            return None
        decided.set()
        write_wanted(tmp_path, Wanted(actors=2))  # the user, after the numbers were read
        return Decision("added_actors", msgspec.structs.replace(wanted, actors=7), "actors are short")

    with Watch(tmp_path, decide) as watch:
        eventually(lambda: watch.stopped == [False, True, True], "the actors that the user sent away")
    assert "actors are short" not in watch.said
    assert counted(tmp_path)["overtaken"] == 1


@pytest.mark.parametrize("code", [-9, 143])
def test_a_join_that_is_killed_is_placed_again(tmp_path: Path, code: int) -> None:
    """By a node without memory, or by whoever looks after it. Nothing is wrong with the run."""
    with Watch(tmp_path) as watch:
        watch.cluster.hosts[1].code = code
        eventually(lambda: len(watch.cluster.hosts) == 4, "another place")
        watch.until_said("actors-1 (2 actors) broke off")


def test_a_host_that_is_lost_without_a_word_is_placed_again(tmp_path: Path) -> None:
    with Watch(tmp_path) as watch:
        watch.cluster.hosts[1].last_words = ""
        watch.cluster.hosts[1].dead = True
        eventually(lambda: len(watch.cluster.hosts) == 4, "another place")
        watch.until_said("actors-1 (2 actors) is lost (RayError)")


def test_a_request_to_leave_that_was_lost_with_a_link_is_made_again(tmp_path: Path) -> None:
    with Watch(tmp_path) as watch:
        watch.cluster.hosts[2].lost_stops = 2
        write_wanted(tmp_path, Wanted(actors=4))
        watch.until_said("actors-2 (1 actor) has left")
        assert watch.cluster.hosts[2].stopped and watch.cluster.hosts[2].lost_stops == 0


def test_a_full_disk_of_the_run_takes_the_logs_and_not_the_run(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk, Watch(disk) as watch:
        fill(disk)
        watch.cluster.hosts[0].log += b"lost" * 1000
        watch.until_said("logs of actors-0 (2 actors) cannot be written")
        watch.cluster.hosts[1].log += b"lost" * 1000
        watch.cluster.hosts[1].code = 1
        eventually(lambda: len(watch.cluster.hosts) == 4, "another place for a host whose last words cannot be kept")
        (disk / BALLAST).unlink()
        log = disk / "joined" / "actors-0" / "logs" / "join.log"
        eventually(lambda: log.read_bytes().endswith(b"lost" * 1000), "the log, once there is room")


def test_hosts_come_and_go_as_quickly_as_the_numbers_change(tmp_path: Path) -> None:
    with Watch(tmp_path) as watch:
        for actors in (0, 7, 1, 0, 3):
            write_wanted(tmp_path, Wanted(actors=actors))
        eventually(lambda: watch.there == ["1", "2"], "three actors")
        write_wanted(tmp_path, Wanted())
        eventually(lambda: all(watch.stopped), "none")
        write_wanted(tmp_path, Wanted(actors=1))
        eventually(lambda: counts(watch.cluster)[-1] == "1" and not watch.stopped[-1], "one again")


QUICK = msgspec.structs.replace(CONFIG, teacher=TeacherConfig(drain_s=0.1))


def test_a_host_that_hangs_while_it_leaves_is_killed_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "LEAVE_S", 0.5)
    with Watch(tmp_path, config=QUICK) as watch:
        watch.until_said("actors-2 (1 actor) on 10.0.0.9")
        watch.cluster.hosts[2].hangs = True
        write_wanted(tmp_path, Wanted(actors=4))
        watch.until_said("Ray: actors-2 (1 actor) was asked to leave 1 s ago and is still there; Ray kills it")
        eventually(lambda: watch.cluster.released == ["actors-2"], "what it had to be free")
        assert [host.dead for host in watch.cluster.hosts] == [False, False, True]
        write_wanted(tmp_path, Wanted(actors=5))
        eventually(lambda: len(watch.cluster.hosts) == 4, "another host of its name")
        assert counted(tmp_path) == {"hosts_killed": 1}


def test_a_host_whose_request_to_leave_is_lost_with_a_link_for_good_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "LEAVE_S", 0.5)
    with Watch(tmp_path, config=QUICK) as watch:
        watch.until_said("actors-2 (1 actor) on 10.0.0.9")
        watch.cluster.hosts[2].lost_stops = watch.cluster.hosts[2].away = 10**9
        write_wanted(tmp_path, Wanted(actors=4))
        watch.until_said("actors-2 (1 actor) was asked to leave")
        assert counted(tmp_path) == {"hosts_killed": 1}


def test_hosts_that_hang_at_the_end_of_the_run_are_killed_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_module, "END_S", 4.0)
    with Watch(tmp_path, config=QUICK) as watch:
        for name in ("actors-0", "actors-1", "actors-2"):
            watch.until_said(f"{name} (")
        for host in watch.cluster.hosts[:2]:
            host.hangs = True
    assert watch.said.count("did not leave at the end of the run and is still there; Ray kills it") == 2
    assert all(host.dead for host in watch.cluster.hosts)
    assert counted(tmp_path) == {"hosts_killed": 2}


def test_hosts_that_are_lost_are_counted_also_while_they_leave(tmp_path: Path) -> None:
    with Watch(tmp_path) as watch:
        watch.cluster.hosts[1].code = 1
        watch.until_said("broke off")
        watch.until_said("actors-2 (1 actor) on 10.0.0.9")
        watch.cluster.hosts[2].lost_stops, watch.cluster.hosts[2].dead = 1, True
        write_wanted(tmp_path, Wanted(actors=4))
        watch.until_said("actors-2 (1 actor) is lost (the node died) while it was leaving")
        assert counted(tmp_path) == {"hosts_lost": 2}


def test_counts_outlive_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk, Watch(disk) as watch:
        write_wanted(disk, Wanted(actors=4))
        watch.until_said("actors-2 (1 actor) has left")
        fill(disk)
        watch.cluster.hosts[1].code = 1
        watch.until_said("broke off")
        (disk / BALLAST).unlink()
        watch.cluster.hosts[0].code = 1
        watch.until_said("actors-0 (2 actors) broke off")
        assert counted(disk) == {"hosts_left": 1, "hosts_lost": 2}


def test_counts_go_on_after_a_restart_of_the_launcher(tmp_path: Path) -> None:
    for launch in (1, 2):
        with Watch(tmp_path) as watch:
            watch.cluster.hosts[0].code = 1
            watch.until_said("broke off")
        assert counted(tmp_path)["hosts_lost"] == launch


def counted(folder: Path) -> dict[str, int]:
    """The counts in the run's folder, which are written after it is said what happened."""
    eventually((folder / "scaling.json").exists, "a file of counts")
    return json.loads((folder / "scaling.json").read_text())


@pytest.mark.parametrize("number", ["-1", "1.5", "100000", "9" * 5000, "", "²"])
def test_scale_refuses_what_is_no_number_of_workers(
    tmp_path: Path, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scale([str(tmp_path), f"--actors={number}"]) == 2
    assert "expected a number of at most 5 digits" in capsys.readouterr().err
