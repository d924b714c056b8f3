"""Joining from a machine that has nothing but what `stillhouse invite` wrote."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from tests.hosts.conftest import hosts_or_skip
from tests.hosts.run_at_home import RunAtHome


def test_an_exported_folder_is_all_that_another_host_needs(tmp_path: Path) -> None:
    with ExitStack() as stack:
        network = stack.enter_context(hosts_or_skip("home", "guest", delay_ms=2.0))
        settings = ("--actors=0", "--teachers=0", "--steps=4", "--learner.eval_every=0")
        ours = RunAtHome(network, tmp_path, stack, *settings)
        guest = ours.join("guest", "--actors=2", "--teachers=1", to=ours.export())
        ours.expect_good_end(guest)
        workers = ours.run.summary()["workers"]
        assert all(workers[f"{name}-guest-0"]["tokens"] for name in ("actor", "teacher")), workers
