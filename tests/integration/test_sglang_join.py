"""An actor with an SGLang server of its own joins a run of such actors, takes the weights with them, and leaves."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import psutil
import pytest

from stillhouse.sglang_server.servers import DEFAULT_PYTHON
from tests.integration.conftest import Launched, alive
from tests.integration.joined import HOLDS, Join, Onlooker, held
from tests.integration.test_sglang_run import of_server
from tests.integration.test_whole_run import assert_balanced
from tests.patience import PATIENCE_S

pytestmark = [
    pytest.mark.skipif(not DEFAULT_PYTHON.exists(), reason="no .venv-sglang: make sglang-cpu"),
]
Launch = Callable[..., Launched]


def test_an_actor_on_a_server_joins_writes_under_new_weights_and_leaves(launch: Launch, join: Join) -> None:
    run = launch(
        *("--actor.engine=sglang", "--device=cpu", "--actors=1", "--teachers=1", "--max-staleness=2"),
        *("--steps=100000", "--learner.eval_every=0", "--weights.join_window_s=0.2", HOLDS),
    )
    run.until(lambda: len(run.steps()) >= 1, "a step")
    onlooker = Onlooker(run.run_dir)
    try:
        with held(run):
            guest = join(run.run_dir, "guest", "--actors=1")
            guest.until_there()
        processes = psutil.Process(guest.process.pid).children(recursive=True)
        assert len(of_server(processes)) >= 3, "a server, with scheduler and detokenizer"
        came_at = len(run.steps())

        def writes_under_new_weights() -> bool:
            (peer,) = onlooker.peers("guest").values()
            return peer.tokens_total > 0 and peer.version is not None and peer.version.step > came_at

        guest.until(writes_under_new_weights, "tokens of the guest, and weights of a later step")
        os.kill(guest.process.pid, signal.SIGINT)
        assert guest.process.wait(PATIENCE_S) == 130, guest.text()
        assert not alive(processes)
        (peer,) = onlooker.peers("guest").values()
        assert not peer.alive
        left_at = len(run.steps())
        run.until(lambda: len(run.steps()) >= left_at + 3, "steps without it")
    finally:
        onlooker.close()

    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait() == 130, run.text()
    summary = run.summary()
    assert_balanced(summary)
    assert summary["staleness"]["max"] <= 2
    worker = summary["workers"]["actor-guest-0"]
    assert worker["joined"] and worker["tokens"] == guest.summary()["workers"]["actor-guest-0"]["tokens"] > 0
    assert [summary["workers"][name]["restarts"] for name in ("learner-0", "teacher-0")] == [0, 0]
