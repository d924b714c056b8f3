"""Three hosts that share no folder: the run with its learner's first rank and a store; actors and the second rank; a
teacher. What a host knows of the run is an exported folder that was copied to it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from tests.hosts.network import ROOT, Network, NotPermitted, environment, hosts
from tests.hosts.own_files import alone_on, names_in_bucket, seen_by
from tests.integration.conftest import Launched
from tests.patience import PATIENCE_S, RUN_PATIENCE_S, eventually
from tests.s3_server import BUCKET, environment_of, s3_server

PORT: Final = 5555
STEPS: Final = 12
SETTINGS: Final = (
    *(f"--steps={STEPS}", "--actors=0", "--teachers=0", "--learner.eval_every=0", "--learner.checkpoint_every=2"),
    *("--weights.transport=folder", "--weights.allow_plain_network=true", "--launch.silent_kill_s=600"),
)


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        with hosts(("home", "acting", "teaching"), delay_ms=2.0, loss=0.0) as made:
            yield made
    except NotPermitted as reason:
        pytest.skip(f"no network namespaces here: {reason}")


class Guest:
    """A join on a host that sees nothing but a copy of the exported folder."""

    def __init__(self, network: Network, host: str, files: Path, exported: Path, *arguments: str) -> None:
        self._output = files.with_name(f"{host}.out")
        self.folder = exported / "joined" / host
        before = alone_on(network, host, files, exported)
        join = [sys.executable, str(ROOT / "launch" / "cluster.py"), "join", str(exported), f"--name-prefix={host}"]
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [*before, *join, *arguments], stdout=output, stderr=subprocess.STDOUT, env=environment(), cwd=ROOT
            )

    def text(self) -> str:
        return self._output.read_text()

    def log(self, name: str) -> str:
        """What there is of it while the join lives."""
        file = seen_by(self.process.pid, self.folder / "logs" / f"{name}.log")
        return file.read_text() if file.exists() else ""

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(PATIENCE_S)


class Hosts:
    """The run at home, and what joins it."""

    def __init__(self, network: Network, folder: Path, stack: ExitStack, *arguments: str) -> None:
        self._network, self._stack = network, stack
        self.files = folder / "files"
        """Each host has its own folder under this path."""
        self.files.mkdir()
        address = network.address("home")
        here = (f"--buffer.bind=tcp://{address}:{PORT}", f"--weights.host={address}")
        self.run = Launched(self.files / "run", (*SETTINGS, *here, *arguments), network.command("home", []))
        stack.callback(self.run.kill)
        self.run.until((self.files / "run" / "buffer.json").exists, "a buffer that listens")
        self.exported = self.files / "exported"
        export = [sys.executable, str(ROOT / "launch" / "cluster.py"), "export", str(self.run.run_dir)]
        subprocess.run(
            network.command("home", [*export, str(self.exported)]), check=True, timeout=PATIENCE_S, capture_output=True
        )

    def join(self, host: str, *arguments: str) -> Guest:
        guest = Guest(self._network, host, self.files, self.exported, *arguments)
        self._stack.callback(guest.end)
        return guest


def test_a_run_of_hosts_that_share_no_folder(network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle the second rank is killed: all ranks go on from a checkpoint that its host knows from the store."""
    with ExitStack() as stack:
        server = stack.enter_context(s3_server(network.address("home"), command=tuple(network.command("home", []))))
        for name, value in environment_of(server.url).items():
            monkeypatch.setenv(name, value)
        ours = Hosts(network, tmp_path, stack, f"--store=s3://{BUCKET}/big", "--learner.ranks=2", "--learner.hosts=2")
        run = ours.run
        acting = ours.join("acting", "--actors=2", "--learner-ranks=1")
        teaching = ours.join("teaching", "--teachers=1")
        run.until(lambda: len(run.steps()) >= 5, "five steps", RUN_PATIENCE_S)
        for guest in (acting, teaching):
            assert seen_by(guest.process.pid, ours.exported).is_dir()
            assert not seen_by(guest.process.pid, run.run_dir).exists(), "the run's folder is not there"
        found = re.findall(r"learner-acting-0 rank 1 of 2 starts, pid (\d+)", acting.log("learner-acting-0"))
        os.kill(int(found[-1]), signal.SIGKILL)
        assert run.wait() == 0, run.text() + acting.text()
        for guest in (acting, teaching):
            assert guest.process.wait(PATIENCE_S) == 0, guest.text()
        summary = run.summary()
        assert summary["steps"] == STEPS and summary["tokens"]["balanced"], summary
        assert {row["epoch"] for row in run.steps()} == {0, 1}, "all ranks began a new epoch"
        workers = summary["workers"]
        assert all(workers[name]["tokens"] for name in ("actor-acting-0", "actor-acting-1", "teacher-teaching-0"))
        names = names_in_bucket(network, "home", server.url)
        assert f"big/checkpoints/step_{STEPS:06d}_epoch_1/manifest.json" in names
        assert not [name for name in names if "/rows/" in name], "rank 0 has fetched all rows"
        assert sum(name.startswith("big/weights/") for name in names) == 2, "old versions are deleted"
        run.expect_clean_audit()


def test_without_a_store_actors_that_do_not_see_the_folder_get_no_weights(network: Network, tmp_path: Path) -> None:
    """The hosts above are as separate as they claim: this one fails for want of the run's folder alone."""
    with ExitStack() as stack:
        ours = Hosts(network, tmp_path, stack)
        acting = ours.join("acting", "--actors=1")
        ours.join("teaching", "--teachers=1")
        refused = f"No such file or directory: '{ours.run.run_dir}/weights/"
        eventually(lambda: refused in acting.log("actor-acting-0"), lambda: acting.text(), RUN_PATIENCE_S)
