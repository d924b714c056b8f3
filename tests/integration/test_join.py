"""Workers of other launchers come, work, leave and die while a run goes on."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from stillhouse.launch.join.target import JOIN_FILE, JoinCard, find_target
from stillhouse.protocol.keys import KEYS, make_keys
from tests.integration.conftest import Launched, alive
from tests.integration.joined import HOLDS, Join, Onlooker, held
from tests.patience import PATIENCE_S, Limit

Launch = Callable[..., Launched]


def with_foreign_keys(run_dir: Path, folder: Path) -> Path:
    """A folder to join: the right server, and pairs of a role each that this run does not know."""
    folder.mkdir()
    make_keys(folder / KEYS)
    for name in (f"{KEYS}/server.key", f"{KEYS}/learner.key", "config.yaml"):
        shutil.copy2(run_dir / name, folder / name)
    card = JoinCard(name="run", address=find_target(str(run_dir)).address)
    (folder / JOIN_FILE).write_bytes(msgspec.json.encode(card))
    return folder


def test_workers_join_contribute_leave_and_die_while_the_run_goes_on(
    launch: Launch, join: Join, tmp_path: Path
) -> None:
    run = launch(
        *("--actors=1", "--teachers=1", "--steps=100000", "--max-staleness=2", "--learner.eval_every=0", HOLDS),
        *(
            "--buffer.encrypt=on",
            "--weights.join_window_s=0.2",
            f"--weights.broadcast_timeout_s={PATIENCE_S}",
        ),
    )
    run.until(lambda: len(run.steps()) >= 2, "step 2")
    onlooker = Onlooker(run.run_dir)
    try:
        with held(run):
            guests = join(run.run_dir, "guests", "--actors=2", "--teachers=1")
            doomed = join(run.run_dir, "doomed", "--actors=1")
            stranger = join(with_foreign_keys(run.run_dir, tmp_path / "k"), "stranger", "--actors=1")
            assert stranger.process.wait(PATIENCE_S) == 2
            assert "does not know the key" in stranger.text()
            guests.until_there()
            assert not (guests.folder / KEYS).readlink().is_absolute()
            doomed.until_there()
            twice = join(run.run_dir, "guests", "--actors=1")
            assert twice.process.wait(PATIENCE_S) == 75 and "actor-guests-0 is in the run already" in twice.text()
        guests.until(lambda: onlooker.all_worked("guests", 3), "work of all who joined")
        doomed.until(lambda: onlooker.all_worked("doomed", 1), "work of the one that will be killed")

        family = psutil.Process(doomed.process.pid).children(recursive=True)
        doomed.process.kill()
        os.kill(guests.process.pid, signal.SIGINT)
        assert guests.process.wait(PATIENCE_S) == 130, guests.text()
        assert not any(peer.alive for peer in onlooker.peers("guests").values())
        left_at = len(run.steps())
        run.until(lambda: len(run.steps()) >= left_at + 3, "steps without them")
        limit = Limit()
        while alive(family) and not limit.passed:
            time.sleep(0.1)
        assert not alive(family)
    finally:
        onlooker.close()

    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait() == 130, run.text()
    summary = run.summary()
    assert summary["tokens"]["balanced"] and summary["ledger"]["rejected"]["wrong_key"] >= 1
    workers = {name: worker for name, worker in summary["workers"].items() if worker["joined"]}
    assert set(workers) == {"actor-guests-0", "actor-guests-1", "teacher-guests-0", "actor-doomed-0"}
    assert all(worker["tokens"] for worker in workers.values()), workers
    told = {name: worker["tokens"] for name, worker in guests.summary()["workers"].items()}
    assert told == {name: worker["tokens"] for name, worker in workers.items() if "guests" in name}
    assert "joined the run: " in run.text() and "left the run: " in run.text() and "3 actors (" in run.text()


def test_a_run_without_workers_waits_for_those_who_join_and_ends_with_them(launch: Launch, join: Join) -> None:
    run = launch("--actors=0", "--teachers=0", "--steps=3", "--learner.eval_every=0")
    run.until(lambda: (run.run_dir / "buffer.json").exists(), "a buffer")
    joined = join(run.run_dir, "all", "--actors=1", "--teachers=1")
    assert run.wait() == 0, run.text()
    assert joined.process.wait(PATIENCE_S) == 0, joined.text()
    summary = run.summary()
    assert summary["tokens"]["balanced"] and summary["steps"] == 3
    assert joined.summary()["ok"] and all(
        worker["exit_codes"] == [0] for worker in joined.summary()["workers"].values()
    )
    assert joined.summary()["workers"]["actor-all-0"]["tokens"] == summary["workers"]["actor-all-0"]["tokens"] > 0
