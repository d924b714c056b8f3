"""A run ends otherwise than well, and is resumed: those who joined it leave; started again, they join it again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import psutil

from stillhouse.protocol.addresses import free_port
from tests.integration.conftest import Launched
from tests.integration.joined import Join
from tests.patience import PATIENCE_S

Launch = Callable[..., Launched]
WITHOUT_WORKERS = ("--actors=0", "--teachers=0", "--learner.eval_every=0", "--learner.checkpoint_every=2")


def test_a_join_that_is_started_again_comes_back_with_every_resume_and_ends_with_the_run(
    launch: Launch, join: Join
) -> None:
    """What starts it again is the shell loop of docs/hosts.md, with a shorter pause."""
    settings = (*WITHOUT_WORKERS, f"--buffer.bind=tcp://127.0.0.1:{free_port()}")
    run = launch(*settings, "--steps=1000")
    run.until((run.run_dir / "buffer.json").exists, "a buffer")
    loop = 'until "$@"; do case $? in 1|75) sleep 1 ;; *) break ;; esac; done; echo "the loop is over"'
    joined = join(run.run_dir, "stayer", "--actors=1", "--teachers=1", command=("sh", "-c", loop, "sh"))
    joined.until(lambda: len(run.steps()) >= 3, "steps with those who joined")
    run.kill()  # its buffer dies with it, and says nothing

    resumed = launch(*settings, "--steps=1000", "--resume")
    joined.until(lambda: any(row["epoch"] == 1 for row in resumed.steps()), "steps of the second launch")
    joined.until_there(2)
    os.kill(resumed.process.pid, signal.SIGINT)
    assert resumed.wait() == 130
    joined.until(lambda: "is over (stopped" in joined.text(), "it is started while the run is away")

    last_step = max(row["step"] for row in resumed.steps())
    again = launch(*settings, f"--steps={last_step + 2}", "--resume")
    assert again.wait() == 0, again.text() + joined.text()
    assert joined.process.wait(PATIENCE_S) == 0, joined.text()
    assert joined.text().endswith("the loop is over\n")
    told, summary = joined.summary(), again.summary()
    assert told["ok"] and not told["broke_off"]
    assert summary["tokens"]["balanced"] and summary["steps"] == last_step + 2
    for name in ("actor-stayer-0", "teacher-stayer-0"):
        assert told["workers"][name]["exit_codes"][-1] == 0
        assert told["workers"][name]["tokens"] > 0 and summary["workers"][name]["tokens"] > 0


def test_a_join_leaves_with_its_run_and_has_nothing_to_do_at_one_that_finished(launch: Launch, join: Join) -> None:
    run = launch(*WITHOUT_WORKERS, "--steps=3")
    run.until((run.run_dir / "buffer.json").exists, "a buffer")
    leaver = join(run.run_dir, "leaver", "--teachers=1")
    leaver.until_there()
    family = psutil.Process(leaver.process.pid).children(recursive=True)
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait() == 130
    assert leaver.process.wait(PATIENCE_S) == 1, leaver.text()
    assert leaver.summary()["broke_off"]
    assert not psutil.wait_procs(family, PATIENCE_S)[1]
    late = join(run.run_dir, "late", "--teachers=1")
    assert late.process.wait(PATIENCE_S) == 75 and "is over (stopped, exit code 130)" in late.text()
    (run.run_dir / "run.json").write_text((run.run_dir / "run.json").read_text().replace('"stopped"', '"finished"'))
    late = join(run.run_dir, "later", "--teachers=1")
    assert late.process.wait(PATIENCE_S) == 0 and "is over (finished" in late.text()
