"""Joins by an exported folder, over encrypted links with 50 ms and 1 % loss: cut off, killed, and their run resumed.
(What tests/chaos/test_hosts.py does more of goes by a proxy, over plain links.)"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import psutil

from stillhouse.launch.buffer_link import CONNECT_TIMEOUT_S
from tests.hosts.conftest import hosts_or_skip
from tests.hosts.run_at_home import HOME, RunAtHome

PEER_TIMEOUT_S: Final = 6.0
SETTINGS: Final = (
    *("--actors=0", "--teachers=0", "--learner.eval_every=0", "--learner.checkpoint_every=4", "--max-staleness=2"),
    *("--buffer.heartbeat_s=0.5", f"--buffer.peer_timeout_s={PEER_TIMEOUT_S:g}", "--weights.dtype=bfloat16"),
    *("--weights.rejoin_delay_s=1", "--buffer.max_attempts=50", "--buffer.max_score_attempts=50"),
)
WORKERS: Final = ("--actors=1", "--teachers=1")
LOOP: Final = 'until "$@"; do case $? in 1|75|137) sleep 1 ;; *) break ;; esac; done'
"""That of docs/hosts.md, which goes on after a SIGKILL as well."""


def test_joins_come_back_over_encrypted_links(tmp_path: Path) -> None:
    with ExitStack() as stack:
        network = stack.enter_context(hosts_or_skip(HOME, "far1", "far2", delay_ms=50.0, loss=0.01))
        ours = RunAtHome(network, tmp_path, stack, *SETTINGS, "--steps=100000")
        exported = ours.export()
        joins = [
            ours.join(host, *WORKERS, to=exported, before=network.command(host, ["sh", "-c", LOOP, "sh"]))
            for host in ("far1", "far2")
        ]
        run = ours.run
        run.until(lambda: len(run.steps()) >= 3, "the first steps")

        cuts = (("far1", 0.5 * PEER_TIMEOUT_S), ("far2", 1.5 * PEER_TIMEOUT_S), (HOME, 1.1 * CONNECT_TIMEOUT_S))
        for host, for_s in cuts:
            network.cut_off(host)
            time.sleep(for_s)
            network.connect(host)
            back_at = len(run.steps())
            run.until(lambda back_at=back_at: len(run.steps()) >= back_at + 3, f"steps after {host} was cut off")
        for join in joins:
            join.until_there(2)  # while nobody could reach home, they gave up, and the loop started them again

        (killed,) = psutil.Process(joins[0].process.pid).children()
        killed.kill()
        joins[0].until_there(3)
        run.kill()
        last = max(row["step"] for row in run.steps())
        ours.resume(f"--steps={last + 10}")
        ours.expect_good_end(*joins)
        ours.run.expect_clean_audit()
        summary = ours.run.summary()
        assert summary["steps"] == last + 10
        assert all(summary["workers"][f"{role}-far{n}-0"]["tokens"] for role in ("actor", "teacher") for n in (1, 2))
        said = "\n".join([ours.run.text(), *(join.text() for join in joins)])
        assert "not encrypted" not in said and "weights.transport wire" in said
