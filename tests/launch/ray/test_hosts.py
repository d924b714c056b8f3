"""The watch of Ray's hosts, with a cluster in which each host does what the test says; real Ray is in test_on_ray."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest

from stillhouse.launch.checks.preflight import replace
from stillhouse.launch.config.cluster import ClusterConfig, HostConfig, RoleHostsConfig
from stillhouse.launch.config.run import LaunchConfig, RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.errors import ConfigError, LaunchError
from stillhouse.launch.ray import hosts as hosts_module
from stillhouse.launch.ray.host import JoiningHost
from stillhouse.launch.ray.hosts import RayHosts
from stillhouse.launch.ray.run import hosts_on_ray, on_ray
from stillhouse.launch.topology import host_groups
from stillhouse.weights.config import WeightsConfig
from tests.full_disk import fill, small_disk
from tests.patience import eventually
from tests.sim.chaos.disk import BALLAST

ROOT = Path(__file__).parents[3]
CONFIG = RunConfig(
    actors=5,
    teachers=1,
    weights=WeightsConfig(allow_plain_network=True),
    cluster=ClusterConfig(actors=RoleHostsConfig(each=2)),
    launch=LaunchConfig(max_restarts=1, restart_backoff_s=0.0, shutdown_grace_s=0.5),
)


class RayError(Exception):
    pass


class ActorUnavailableError(RayError):
    pass


class Reference:
    """An answer of a host to come."""

    def __init__(self, host: FakeHost, answer: Callable[[], Any]) -> None:
        self.host, self.answer = host, answer


class Method:
    """`now`: it happens also if nobody asks for the answer."""

    def __init__(self, host: FakeHost, function: Callable[..., Any], *, now: bool = False) -> None:
        self._host, self._function, self._now = host, function, now

    def remote(self, *arguments: Any) -> Reference:
        if not self._now or self._host.hangs:
            return Reference(self._host, lambda: self._function(*arguments))
        done: Future[Any] = Future()
        try:
            done.set_result(self._function(*arguments))
        except RayError as error:
            done.set_exception(error)
        return Reference(self._host, done.result)


class FakeHost:
    def __init__(self, words: list[str]) -> None:
        self.words, self.code, self.dead, self.stopped, self.away = words, None, False, False, 0
        self.log = b"written there\n"
        self.last_words, self.lost_stops = "the node died\nmore", 0
        self.hangs = False
        """It answers nothing and does nothing."""
        self.node, self.look = Method(self, self._node), Method(self, self._look)
        self.stop, self.clean = Method(self, self._stop, now=True), Method(self, self._clean, now=True)

    def _node(self) -> str:
        return "10.0.0.9"

    def _look(self, offsets: Mapping[str, int]) -> tuple[int | None, dict[str, bytes]]:
        if self.away:
            self.away -= 1
            raise ActorUnavailableError
        if self.dead:
            raise RayError(self.last_words)
        rest = self.log[offsets.get("join.log", 0) :]
        return self.code, {"join.log": rest} if rest else {}

    def _stop(self) -> None:
        if self.lost_stops:
            self.lost_stops -= 1
            raise ActorUnavailableError
        self.stopped, self.code = True, 143

    def _clean(self) -> None:
        self.dead = True


class FakeCluster:
    """Also Ray's module: wait, get, kill."""

    def __init__(self) -> None:
        self.hosts: list[FakeHost] = []
        self.full = 100
        """Number of hosts after which there is no room for another one."""
        self.ray, self.exceptions = self, self
        self.RayError, self.ActorUnavailableError = RayError, ActorUnavailableError

    def place(self, host: HostConfig, files: Mapping[str, bytes], words: list[str]) -> FakeHost:
        assert files == {"join.json": b"{}"}
        self.hosts.append(FakeHost(words))
        return self.hosts[-1]

    def wait(self, references: list[Reference], timeout: float) -> tuple[list[Reference], list[Reference]]:
        waits = [one for one in references if one.host.hangs or one.host in self.hosts[self.full :]]
        return [one for one in references if one not in waits], waits

    def get(self, reference: Reference) -> Any:
        assert not reference.host.hangs, "a wait without end"
        return reference.answer()

    def kill(self, host: FakeHost) -> None:
        host.dead = True

    def free(self) -> str:
        return "nothing"

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts_module, "TICK_S", 0.05)


@pytest.fixture
def watched(tmp_path: Path) -> Generator[tuple[RayHosts, FakeCluster, Path]]:
    cluster = FakeCluster()
    hosts = RayHosts(cluster, CONFIG, tmp_path, host_groups(CONFIG)[1:], lambda: {"join.json": b"{}"})
    hosts.start()
    try:
        eventually(lambda: len(cluster.hosts) == 3, "three hosts")
        yield hosts, cluster, tmp_path
    finally:
        hosts.close()


def texts(hosts: RayHosts) -> str:
    found: list[str] = []
    while not hosts.notices.empty():
        notice = hosts.notices.get()
        found.append(f"{'FATAL ' * notice.fatal}{notice.text}")
    return "\n".join(found)


def counts(cluster: FakeCluster) -> list[str]:
    return [host.words[1] for host in cluster.hosts]


def test_each_host_gets_its_share_and_its_log_comes_home(watched: tuple[RayHosts, FakeCluster, Path]) -> None:
    hosts, cluster, run_dir = watched
    assert counts(cluster) == ["2", "2", "1"]
    cpus = CONFIG.cluster.actors.cpus
    planned = [host.words[host.words.index("--launch.threads_per_worker") + 1] for host in cluster.hosts]
    assert planned == [str(max(1, cpus // workers)) for workers in (2, 2, 1)]
    log = run_dir / "joined" / "actors-1" / "logs" / "join.log"
    eventually(lambda: log.is_file() and log.read_bytes() == b"written there\n", "the log")
    assert "actors-2 (1 actor) on 10.0.0.9" in texts(hosts)


def test_the_headline_has_what_is_asked_of_ray(tmp_path: Path) -> None:
    learner: dict[str, Any] = {"ranks": 4, "hosts": 2}
    counts = {"actors": 5, "teachers": 1, "weights": {"allow_plain_network": True}}
    config = build(
        RunConfig, {**counts, "learner": learner, "cluster": {"actors": {"each": 2}, "teachers": {"each": 1}}}
    )
    hosts = RayHosts(FakeCluster(), config, tmp_path, host_groups(config)[1:], dict)
    assert hosts.said_of_all() == "5 actors, 1 teacher, 2 further ranks on 5 hosts of Ray"


def test_a_lost_host_is_placed_again_until_its_budget_is_spent(watched: tuple[RayHosts, FakeCluster, Path]) -> None:
    hosts, cluster, _ = watched
    cluster.hosts[0].dead = True
    eventually(lambda: len(cluster.hosts) == 4, "another place")
    assert "actors-0 (2 actors) is lost (the node died); it is placed again" in texts(hosts)
    said: list[str] = []
    cluster.hosts[3].dead = True
    eventually(lambda: "FATAL" in (said.append(texts(hosts)) or "".join(said)), "the end of the budget")
    assert len(cluster.hosts) == 4


def test_a_host_that_cannot_be_reached_for_a_while_is_not_replaced(
    watched: tuple[RayHosts, FakeCluster, Path],
) -> None:
    hosts, cluster, run_dir = watched
    cluster.hosts[0].away = 2
    eventually(lambda: cluster.hosts[0].away == 0, "two failed questions")
    cluster.hosts[0].log += b"and back\n"
    log = run_dir / "joined" / "actors-0" / "logs" / "join.log"
    eventually(lambda: log.is_file() and log.read_bytes().endswith(b"and back\n"), "the log")
    assert len(cluster.hosts) == 3
    assert "lost" not in texts(hosts)


@pytest.mark.parametrize(("code", "says"), [(1, "broke off"), (-9, "broke off"), (143, "broke off"), (2, "FATAL")])
def test_the_exit_code_of_a_join_decides(watched: tuple[RayHosts, FakeCluster, Path], code: int, says: str) -> None:
    hosts, cluster, _ = watched
    cluster.hosts[1].code = code
    said: list[str] = []
    eventually(lambda: says in (said.append(texts(hosts)) or "".join(said)), says)
    if code != 2:
        eventually(lambda: len(cluster.hosts) == 4, "another place")


def test_hosts_that_leave_at_the_end_are_not_placed_again(tmp_path: Path) -> None:
    cluster = FakeCluster()
    hosts = RayHosts(cluster, CONFIG, tmp_path, host_groups(CONFIG)[1:], lambda: {"join.json": b"{}"})
    hosts.start()
    eventually(lambda: len(cluster.hosts) == 3, "three hosts")
    hosts.end()
    for host in cluster.hosts:
        host.code = 1
    hosts.close()
    assert len(cluster.hosts) == 3
    assert "broke off" not in texts(hosts)


def test_hosts_that_hang_at_the_end_of_the_run_are_killed(
    watched: tuple[RayHosts, FakeCluster, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_module, "END_S", 6.0)
    hosts, cluster, _ = watched
    said: list[str] = []
    eventually(lambda: (said.append(texts(hosts)) or "".join(said)).count("on 10.0.0.9") == 3, "three hosts")
    cluster.hosts[0].hangs = True
    cluster.hosts[1].lost_stops, cluster.hosts[1].away = 1, 20  # also when it is asked to stop
    hosts.close()
    assert texts(hosts).count("did not leave at the end of the run and is still there; Ray kills it") == 1
    assert all(host.dead for host in cluster.hosts) and cluster.hosts[1].stopped, "it was asked again"


def test_a_host_that_never_found_room_ends_the_run_and_one_that_lost_its_room_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_module, "SAY_WAITS_S", 0.5)
    config = replace(CONFIG, launch=replace(CONFIG.launch, ready_timeout_s=2.0))
    cluster = FakeCluster()
    hosts = RayHosts(cluster, config, tmp_path, host_groups(config)[1:], lambda: {"join.json": b"{}"})
    cluster.full = 2
    hosts.start()
    try:
        said: list[str] = []

        def until(text: str) -> None:
            def is_said() -> bool:
                said.append(texts(hosts))
                return text in "".join(said)

            eventually(is_said, text)

        until("Ray: actors-2 (1 actor) waits for a node with 8 CPUs, 0 GPUs and 32 GiB; free are nothing")
        cluster.hosts[0].dead = True
        until("actors-0 (2 actors) waits for a node")
        until("FATAL Ray: actors-2 (1 actor) waited 2 s (launch.ready_timeout_s) for a node with 8 CPUs")
        assert "actors-0 (2 actors) waited" not in "".join(said)
    finally:
        hosts.close()


def test_a_full_disk_of_the_run_takes_the_logs_and_not_the_run(tmp_path: Path) -> None:
    cluster = FakeCluster()
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        hosts = RayHosts(cluster, CONFIG, disk, host_groups(CONFIG)[1:], lambda: {"join.json": b"{}"})
        hosts.start()
        eventually(lambda: len(cluster.hosts) == 3, "three hosts")
        fill(disk)
        cluster.hosts[0].log += b"lost" * 1000
        said: list[str] = []
        full = "logs of actors-0 (2 actors) cannot be written"
        eventually(lambda: full in (said.append(texts(hosts)) or "".join(said)), full)
        cluster.hosts[1].log += b"lost" * 1000
        cluster.hosts[1].code = 1
        eventually(lambda: len(cluster.hosts) == 4, "another place for a host whose last words cannot be kept")
        (disk / BALLAST).unlink()
        log = disk / "joined" / "actors-0" / "logs" / "join.log"
        eventually(lambda: log.read_bytes().endswith(b"lost" * 1000), "the log, once there is room")
        hosts.close()


def test_without_a_host_beside_the_runs_own_nothing_is_asked_of_ray() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.actors\.each = 0.*set `each`"):
        hosts_on_ray(RunConfig(), one_machine=True)


def no_spec(_name: str) -> None:
    return None


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr("importlib.util.find_spec", no_spec)
    with pytest.raises(LaunchError, match=r"-e '\.\[ray\]'"), on_ray(CONFIG, None):
        pass


def test_ray_is_imported_only_when_it_is_chosen() -> None:
    code = "import stillhouse.launch.run, stillhouse.launch.ray.run, sys; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


KILLED = """
import sys, time
from pathlib import Path
from stillhouse.launch.ray.host import JoiningHost
host = JoiningHost({"keys/joiner.key_secret": b"secret"}, ["--help"], "10.0.0.9")  # else its folder goes with it
print("made", flush=True)
time.sleep(1000)
"""


def test_a_killed_host_leaves_no_folder_with_keys(tmp_path: Path) -> None:
    host = subprocess.Popen(
        [sys.executable, "-c", KILLED], cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE
    )
    assert host.stdout is not None
    assert host.stdout.readline() == b"made\n"
    assert [file.read_text() for file in tmp_path.rglob("joiner.key_secret")] == ["secret"]
    host.kill()
    host.wait()
    host.stdout.close()
    eventually(lambda: not list(tmp_path.glob("stillhouse-*")), "the folder to be removed")


def test_a_host_that_is_cleaned_leaves_no_folder_and_no_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    host = JoiningHost({"join.json": b"{}"}, ["--help"], "10.0.0.9")
    (folder,) = tmp_path.iterdir()
    host.clean()
    assert not folder.exists()
    eventually(lambda: not _shells(folder), "the shell to end")


def _shells(folder: Path) -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if str(folder) in (process.info["cmdline"] or [])]
