"""The watch of Ray's hosts, with a cluster in which each host does what the test says; real Ray is in test_on_ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest

from stillhouse.launch.config.cluster import ClusterConfig, HostConfig, RoleHostsConfig
from stillhouse.launch.config.files import write_config
from stillhouse.launch.config.run import LaunchConfig, RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.errors import LaunchError
from stillhouse.launch.ray.autoscale import Decision
from stillhouse.launch.ray.host import JoiningHost
from stillhouse.launch.ray.hosts import RayHosts
from stillhouse.launch.ray.run import on_ray
from stillhouse.launch.ray.scale import main as scale
from stillhouse.launch.ray.wanted import Wanted, read_wanted, write_wanted
from stillhouse.launch.runfolder import RunFolder
from tests.patience import eventually

ROOT = Path(__file__).parents[3]
CONFIG = RunConfig(
    actors=5,
    teachers=1,
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
        self.node, self.news = Method(self, self._node), Method(self, self._news)
        self.stop, self.clean = Method(self, self._stop, now=True), Method(self, self._clean, now=True)

    def _node(self) -> str:
        return "10.0.0.9"

    def _news(self, offsets: Mapping[str, int]) -> tuple[int | None, dict[str, bytes]]:
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
        self.released: list[str] = []
        self.ray, self.exceptions = self, self
        self.RayError, self.ActorUnavailableError = RayError, ActorUnavailableError

    def place(
        self, name: str, host: HostConfig, files: Mapping[str, bytes], words: list[str], variables: Mapping[str, str]
    ) -> FakeHost:
        assert files == {"join.json": b"{}"}
        assert name in words, "the host's name is the prefix of its workers"
        self.hosts.append(FakeHost(words))
        return self.hosts[-1]

    def release(self, name: str) -> None:
        self.released.append(name)

    def wait(self, references: list[Reference], timeout: float) -> tuple[list[Reference], list[Reference]]:
        return [one for one in references if not one.host.hangs], [one for one in references if one.host.hangs]

    def get(self, reference: Reference) -> Any:
        assert not reference.host.hangs, "a wait without end"
        return reference.answer()

    def kill(self, host: FakeHost) -> None:
        host.dead = True

    def free(self) -> str:
        return "nothing"

    def close(self) -> None:
        pass


@pytest.fixture
def watched(tmp_path: Path) -> Generator[tuple[RayHosts, FakeCluster, Path]]:
    cluster = FakeCluster()
    hosts = RayHosts(cluster, CONFIG, tmp_path, Wanted(actors=5), lambda: {"join.json": b"{}"})
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
    config = build(RunConfig, {"learner": learner, "cluster": {"actors": {"each": 2}, "teachers": {"each": 1}}})
    hosts = RayHosts(FakeCluster(), config, tmp_path, Wanted(actors=5, teachers=1), dict)
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


@pytest.mark.parametrize(("code", "says"), [(1, "broke off"), (2, "FATAL")])
def test_the_exit_code_of_a_join_decides(watched: tuple[RayHosts, FakeCluster, Path], code: int, says: str) -> None:
    hosts, cluster, _ = watched
    cluster.hosts[1].code = code
    said: list[str] = []
    eventually(lambda: says in (said.append(texts(hosts)) or "".join(said)), says)
    if code == 1:
        eventually(lambda: len(cluster.hosts) == 4, "another place")


def test_the_numbers_can_change(watched: tuple[RayHosts, FakeCluster, Path]) -> None:
    _, cluster, run_dir = watched
    write_wanted(run_dir, Wanted(actors=2))
    eventually(lambda: [host.stopped for host in cluster.hosts] == [False, True, True], "two hosts to leave")
    write_wanted(run_dir, Wanted(actors=3))
    eventually(lambda: counts(cluster)[3:] == ["1"], "a host of one actor")
    eventually(lambda: sorted(cluster.released) == ["actors-1", "actors-2"], "both to give back what they had")


def test_decisions_are_obeyed_and_said_and_a_repeated_refusal_only_once(tmp_path: Path) -> None:
    refused = Decision("refused_most", Wanted(actors=7), "the limit is 7")
    decisions = [Decision("added_actors", Wanted(actors=7), "they are few"), refused, refused]
    decisions += [Decision("kept", Wanted(actors=7), "all is well"), refused]
    cluster = FakeCluster()
    hosts = RayHosts(
        cluster,
        CONFIG,
        tmp_path,
        Wanted(actors=5),
        lambda: {"join.json": b"{}"},
        decide=lambda _wanted, _now_s: decisions.pop(0) if decisions else None,
    )
    hosts.start()
    try:
        eventually(lambda: not decisions and len(cluster.hosts) == 4, "all decisions, and another host")
    finally:
        hosts.close()
    said = texts(hosts)
    assert read_wanted(tmp_path) == Wanted(actors=7)
    assert "autoscaling: added actors: they are few" in said
    assert said.count("autoscaling: refused most: the limit is 7") == 2, "once, and once more after another decision"
    assert "all is well" not in said
    counted = json.loads((tmp_path / "scaling.json").read_text())
    assert counted == {"added_actors": 1, "refused_most": 3, "kept": 1}, "each decision once"


def test_hosts_that_leave_at_the_end_are_not_placed_again(tmp_path: Path) -> None:
    cluster = FakeCluster()
    hosts = RayHosts(cluster, CONFIG, tmp_path, Wanted(actors=5), lambda: {"join.json": b"{}"})
    hosts.start()
    eventually(lambda: len(cluster.hosts) == 3, "three hosts")
    hosts.end()
    for host in cluster.hosts:
        host.code = 1
    hosts.close()
    assert len(cluster.hosts) == 3
    assert "broke off" not in texts(hosts)


def test_a_damaged_file_of_numbers_is_named(tmp_path: Path) -> None:
    assert read_wanted(tmp_path) is None
    (tmp_path / "hosts.json").write_text("{")
    with pytest.raises(LaunchError, match=r"hosts\.json"):
        read_wanted(tmp_path)


def test_scale_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        ([], "expected a RUN"),
        ([str(tmp_path)], "expected a RUN"),
        ([str(tmp_path), "--actors", "many"], "expected a number"),
        ([str(tmp_path), "--actors", "4"], "holds no run"),
    ):
        assert scale(words) == 2
        assert message in capsys.readouterr().err


def test_scale_leaves_a_worker_for_each_shard_of_the_buffer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = {"actors": {"each": 1}, "teachers": {"each": 1}}
    config = build(RunConfig, {"buffer": {"shards": 3}, "cluster": hosts})
    with RunFolder.open(tmp_path / "run", resume=False) as folder:
        write_config(config, folder.config_path)
        write_wanted(folder.path, Wanted(actors=4, teachers=4))
        assert scale([str(folder.path), "--actors", "3", "--teachers", "2"]) == 2
        assert "--teachers: got 2, expected at least buffer.shards = 3, or 0" in capsys.readouterr().err
        assert read_wanted(folder.path) == Wanted(actors=4, teachers=4)
        assert scale([str(folder.path), "--actors", "3", "--teachers", "0"]) == 0


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
