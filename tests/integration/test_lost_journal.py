"""The buffer is killed, and what it comes back to is not there or not readable: the run ends and says so, and goes on
from its last checkpoint."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from stillhouse.protocol.addresses import free_port
from tests.integration.conftest import Launched
from tests.integration.test_whole_run import assert_balanced

Launch = Callable[..., Launched]


def remove(journal: Path) -> None:
    shutil.rmtree(journal)


def damage(journal: Path) -> None:
    """In place: the buffer has the file mapped, and writes on until it is killed."""
    with (journal / "data.mdb").open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        for at in range(0, size, 4096):
            file.seek(at)
            file.write(os.urandom(64))


@pytest.mark.parametrize(
    ("lose", "with_learner", "told"),
    [(remove, True, "the journal is gone"), (damage, False, "the journal is damaged")],
    ids=["removed, and the learner killed with it", "damaged"],
)
def test_a_run_whose_journal_is_lost_ends_with_the_reason_and_can_be_resumed(
    launch: Launch, lose: Callable[[Path], None], with_learner: bool, told: str
) -> None:
    settings = (
        *("--actors=1", "--teachers=1", "--steps=8", "--max-staleness=2", "--learner.checkpoint_every=2"),
        *("--learner.eval_every=0", f"--buffer.bind=tcp://127.0.0.1:{free_port()}"),
    )
    run = launch(*settings)
    run.until(lambda: len(run.steps()) >= 3, "step 3")
    victims = [*run.workers("buffer"), *(run.workers("learner") if with_learner else ())]
    run.process.send_signal(signal.SIGSTOP)  # it starts the buffer again at once
    for victim in victims:
        victim.suspend()
    lose(run.run_dir / "journal")
    for victim in victims:
        victim.kill()
    run.process.send_signal(signal.SIGCONT)
    assert run.wait() == 1, run.text()
    reason = run.summary()["reason"]
    assert told in reason and "resume the run from its last checkpoint" in reason, reason

    resumed = launch(*settings, "--resume")
    assert resumed.wait() == 0, resumed.text()
    resumed.expect_clean_audit()
    summary = resumed.summary()
    assert_balanced(summary)
    assert summary["steps"] == 8 and summary["staleness"]["max"] <= 2
    kept = [row for row in resumed.steps() if row["epoch"] == resumed.steps()[-1]["epoch"]]
    assert [row["step"] for row in kept] == list(range(kept[0]["step"], 9)) and kept[0]["step"] % 2 == 1
