"""Three hosts that share no folder: the run with its learner, actors, a teacher. What a host knows of the run is an
exported folder that was copied to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from tests.hosts.conftest import hosts_or_skip
from tests.hosts.network import Network
from tests.hosts.own_files import alone_on, seen_by
from tests.hosts.run_at_home import RunAtHome
from tests.integration.joined import Joined
from tests.patience import RUN_PATIENCE_S

STEPS: Final = 12
SETTINGS: Final = (
    *(f"--steps={STEPS}", "--actors=0", "--teachers=0", "--learner.eval_every=0", "--learner.checkpoint_every=2"),
    "--launch.silent_kill_s=600",
)


@pytest.fixture
def network() -> Iterator[Network]:
    with hosts_or_skip("home", "acting", "teaching", delay_ms=2.0) as made:
        yield made


class Hosts:
    """The run at home, and joins on hosts that see of its files nothing but a copy of the exported folder."""

    def __init__(self, network: Network, folder: Path, stack: ExitStack, *arguments: str) -> None:
        self._network = network
        self._files = folder / "files"
        """Each host has its own folder under this path."""
        self._files.mkdir()
        self._ours = RunAtHome(network, self._files, stack, *SETTINGS, *arguments)
        self.run = self._ours.run
        self.exported = self._ours.export()
        self.expect_good_end = self._ours.expect_good_end

    def join(self, host: str, *arguments: str) -> Joined:
        before = alone_on(self._network, host, self._files, self.exported)
        return self._ours.join(host, *arguments, to=self.exported, before=before)


def test_a_run_of_hosts_that_share_no_folder(network: Network, tmp_path: Path) -> None:
    """Weights come by wire."""
    with ExitStack() as stack:
        ours = Hosts(network, tmp_path, stack, "--weights.transport=wire")
        run = ours.run
        acting = ours.join("acting", "--actors=2")
        teaching = ours.join("teaching", "--teachers=1")
        run.until(lambda: len(run.steps()) >= 5, "five steps", RUN_PATIENCE_S)
        for guest in (acting, teaching):
            assert seen_by(guest.process.pid, ours.exported).is_dir()
            assert not seen_by(guest.process.pid, run.run_dir).exists(), "the run's folder is not there"
        ours.expect_good_end(acting, teaching)
        summary = run.summary()
        assert summary["steps"] == STEPS, summary
        workers = summary["workers"]
        assert all(workers[name]["tokens"] for name in ("actor-acting-0", "actor-acting-1", "teacher-teaching-0"))
        run.expect_clean_audit()
